"""The functions of the library with a `group` or with DTensors.

Each function unwraps the local parts of DTensors, checks that all processes pass matching arguments, computes
and wraps the result. A DTensor whose labels are not sharded needs no group: its rows are computed locally.

Class indices in targets refer to the labels of all processes, and every process passes the same tensor. A
multi-hot target contains only the columns for the labels of this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchlml._arguments import Bound, Canonical, canonical, check_bound, check_k
from torchlml._autograd import chunked_linear
from torchlml._autograd import loss as rule
from torchlml._autograd.chunked_linear import (
    ChunkedLoss,
    LinearLMLArguments,
    check_linear,
    logits_like,
    not_compiled,
)
from torchlml._autograd.loss import LossSettings, check_labeled_k, label_divisor, reduce
from torchlml._autograd.rule import LML, LML_DUAL, LOG_LML
from torchlml._distributed import autograd
from torchlml._distributed.autograd import OwnLabels
from torchlml._distributed.dtensor import Layout, read_layout, read_linear_layout
from torchlml._distributed.group import Agreement, Group, LabelGroup, LabelSplit, fingerprint, label_group
from torchlml._rows import DenseRows, Rows, rows_of, work_dtype
from torchlml._targets import check_weight, is_multi_hot, read_labels, read_target_rows

_LOCAL = {"lml": LML, "log_lml": LOG_LML, "lml_dual": LML_DUAL}


@not_compiled
def project(
    name: str,
    x: Tensor,
    k: float | Tensor,
    dim: int,
    mask: Tensor | None,
    offsets: Tensor | None,
    bound: Bound,
    group: Group | None,
) -> Tensor:
    """Compute `lml`, `log_lml` or `lml_dual`, by name."""
    layout: Layout | None = None
    if isinstance(x, DTensor):
        layout = read_layout(x, dim, group)
        x, k, mask, group = x.to_local(), layout.per_row(k), layout.entries(mask), layout.group
    if group is None:
        _check_no_offsets(offsets)
        c = canonical(x, k, dim, mask, None, any_k=check_bound(bound) == "at_most")
        result = _LOCAL[name][bound](c.x, c.k, c.mask, None)
    else:
        with Agreement(group, x) as agreement:
            _check_no_offsets(offsets)
            check_bound(bound)
            c = canonical(x, k, dim, mask, None, any_k=True)
            labels, masked = c.x.shape[-1], mask is not None
            agreement.tell(name, x, k, bound, rows=c.row_shape, labels=labels, masked=masked)
        result = autograd.Project.apply(autograd.FORMULAS[name], c.x, c.k, c.mask, agreement.split)
    if name == "lml_dual":
        result = c.restore_rows(result)
        return result if layout is None else layout.wrap_rows(result)
    result = c.restore(result, dim)
    return result if layout is None else layout.wrap(result)


@not_compiled
def lml_loss(
    logits: Tensor,
    target: Tensor,
    k: float | Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    offsets: Tensor | None,
    settings: LossSettings,
    group: Group | None,
) -> Tensor:
    """Compute `lml_loss`.

    The loss of DTensors is a DTensor: one number per row, or reduced over the rows of all processes.
    """
    layout: Layout | None = None
    if isinstance(logits, DTensor):
        layout = read_layout(logits, -1, group, "logits")
        logits, target, k = logits.to_local(), layout.target(target), layout.per_row(k)
        weight, mask, group = layout.per_label(weight), layout.entries(mask), layout.group
    if group is None:
        _check_no_offsets(offsets)
        settings.check()
        c = canonical(logits, k, -1, mask, None, any_k=settings.bound == "at_most", name="logits")
        c = c._replace(x=c.x.to(work_dtype(c.x.dtype)))
        labels = read_labels(c, target, weight, settings.ignore_index)
        check_labeled_k(c.k, settings.bound, lambda: labels.has_label)
        divisor = label_divisor(labels, settings.label_reduction)
        losses, number = rule.lml_loss(c, labels, divisor, "none", settings.bound), labels.per_row
    else:
        with Agreement(group, logits) as agreement:
            _check_no_offsets(offsets)
            settings.check()
            c = canonical(logits, k, -1, mask, None, any_k=True, name="logits")
            same = _matching(settings) | check_target(c, target, weight, settings.ignore_index)
            n, masked = c.x.shape[-1], mask is not None
            agreement.tell(
                "lml_loss", logits, k, settings.bound, rows=c.row_shape, labels=n, masked=masked, same=same
            )
        observed = read_target(c, target, weight, settings.ignore_index, agreement.split)
        losses, number = autograd.row_losses(c.x, c.k, c.mask, observed.own(), agreement.split)
        # k and the number of labels are the same on all processes, so all take the same branch.
        check_labeled_k(c.k, settings.bound, lambda: number > 0)
        if settings.label_reduction == "mean":
            losses = losses / number.clamp(min=1)
    losses, has_label = losses.reshape(c.row_shape), number.reshape(c.row_shape) > 0
    if layout is None:
        result = reduce(losses, has_label.sum(), settings.reduction)
    else:
        result = layout.reduce(losses, has_label, settings.reduction)
    half = logits.dtype in (torch.bfloat16, torch.float16)
    return result if half and torch.is_autocast_enabled(logits.device.type) else result.to(logits.dtype)


def linear_lml_loss(given: LinearLMLArguments, group: Group | None) -> Tensor:
    """Compute `linear_lml_loss`."""
    if not isinstance(given.linear_weight, DTensor) and not isinstance(given.input, DTensor):
        return _linear(given, group)
    layout = read_linear_layout(given.input, given.linear_weight, group)
    settings = given.settings
    settings.check()
    target, reduction = layout.target(given.target), settings.reduction
    # The mean over sharded rows divides by their number on all processes, after the sum.
    mean_of_shards = layout.shards_rows and reduction == "mean"
    local = LinearLMLArguments(
        layout.local(given.input, layout.row_placements),
        layout.per_label(given.linear_weight),
        layout.per_label(given.linear_bias),
        target,
        layout.per_row(given.k),
        layout.per_label(given.weight),
        settings._replace(reduction="sum") if mean_of_shards else settings,
        given.memory_limit,
    )
    result = _linear(local, layout.group)
    if not isinstance(given.input, DTensor):
        return result
    if reduction == "none":
        return layout.wrap_rows(result)
    return layout.reduce_sum(result, _has_label(target, settings, layout) if mean_of_shards else None)


def _linear(given: LinearLMLArguments, group: Group | None) -> Tensor:
    """Compute the loss of local tensors."""
    if group is None:
        return chunked_linear.linear_lml_loss(given)
    input, linear_weight, linear_bias, target, k, weight, settings, memory_limit = given
    with Agreement(group, input) as agreement:
        settings.check()
        check_linear(input, linear_weight, linear_bias, memory_limit)
        n = linear_weight.shape[0]
        c = logits_like(input, n)
        wide_k = check_k(k, input.shape[:-1], None, input.device, "input")
        same = _matching(settings) | {"memory_limit": memory_limit, "in_features": input.shape[-1]}
        # The gradient of the input is summed over all processes if it is requested.
        same |= {"gradient of the input": torch.is_grad_enabled() and input.requires_grad}
        same |= check_target(c, target, weight, settings.ignore_index)
        agreement.tell("linear_lml_loss", input, k, settings.bound, rows=c.row_shape, labels=n, same=same)
    observed = read_target(c, target, weight, settings.ignore_index, agreement.split)
    # k is the same on all processes, so either all or none of them take part in the round of `has_label`.
    check_labeled_k(wide_k, settings.bound, observed.has_label)
    mean = settings.reduction == "mean"
    chunked = ChunkedLoss(
        _ShardedRowLoss(observed, settings.label_reduction == "mean"),
        observed.has_label() if mean else observed.rows[:0],
        settings.reduction,
        memory_limit,
        labels=max(agreement.split.labels),
        sum_over_group=agreement.group.all_reduce,
    )
    return chunked(input, linear_weight, linear_bias, wide_k)


@dataclass(frozen=True)
class _ShardedRowLoss:
    """The LML loss as a row loss of `chunked_linear`, with a few communication rounds per chunk."""

    target: ShardedTarget
    mean_over_labels: bool

    def __call__(self, logits: Tensor, k: Tensor, rows: slice, overwrite: bool) -> Tensor:
        own = self.target.own(rows)
        losses, number = autograd.row_losses(logits.contiguous(), k, None, own, self.target.split)
        return losses / number.clamp(min=1) if self.mean_over_labels else losses


def _has_label(target: Tensor, settings: LossSettings, layout: Layout) -> Tensor:
    """Whether each local row has a label, on any process that shares its labels."""
    multi_hot = is_multi_hot(target)
    found = target != 0 if multi_hot else target != settings.ignore_index
    found = found.any(-1) if found.dim() > len(layout.row_shape) else found
    if multi_hot and layout.group is not None:
        return label_group(layout.group).sum(found.long()) > 0
    return found


def rank(
    function: str,
    preds: Tensor,
    target: Tensor,
    ks: Sequence[int],
    ignore_index: int,
    mask: Tensor | None,
    offsets: Tensor | None,
    group: Group | None,
    check: Callable[[Canonical], None] | None,
) -> tuple[Canonical, Rows, Tensor]:
    """Return the local scores of a metric, their rows, and whether each score belongs to an observed label.

    `check` validates the other arguments of the metric. If it raises on one process, all processes raise.
    """
    if isinstance(preds, DTensor):
        layout = read_layout(preds, -1, group, "preds")
        preds, target = preds.to_local(), layout.target(target)
        mask, group = layout.entries(mask), layout.group
    if group is None:
        _check_no_offsets(offsets)
        c = canonical(preds, 1, -1, mask, None, any_k=True, name="preds")
        if check is not None:
            check(c)
        labels = read_labels(c._replace(mask=None), target, None, ignore_index)
        return c, rows_of(c.x, None, differentiable=True), labels.multi_hot(c.x)
    with Agreement(group, preds) as agreement:
        _check_no_offsets(offsets)
        c = canonical(preds, 1, -1, mask, None, any_k=True, name="preds")
        if check is not None:
            check(c)
        same, n = check_target(c, target, None, ignore_index), c.x.shape[-1]
        agreement.tell(
            function, preds, torch.tensor(ks), "exactly", rows=c.row_shape, labels=n, masked=True, same=same
        )
    own = read_target(c, target, None, ignore_index, agreement.split).own()
    observed = torch.zeros_like(c.x, dtype=torch.bool)
    observed[own.row, own.place] = True
    return c, ShardedRows(c.x, agreement.group, agreement.split.total), observed


def _matching(settings: LossSettings) -> dict[str, Any]:
    return {"reduction": settings.reduction, "label_reduction": settings.label_reduction}


def _check_no_offsets(offsets: Tensor | None) -> None:
    if offsets is not None:
        raise ValueError("`offsets` must be None if rows are sharded across processes; pass dense rows.")


class ShardedTarget(NamedTuple):
    """A validated target: (R, L) int64 with unique labels and negative padding, or multi-hot (R, n)."""

    rows: Tensor
    weight: Tensor | None  # one per class of this process
    split: LabelSplit

    def own(self, some: slice = slice(None)) -> OwnLabels:
        """Return the labels of some rows that belong to this process."""
        rows, start = self.rows[some], self.split.start
        if rows.dtype == torch.int64:
            end = start + self.split.labels[self.split.group.rank]
            row, column = ((rows >= start) & (rows < end)).nonzero().unbind(-1)
            place = rows[row, column] - start
            counts = torch.ones_like(row, dtype=torch.float64)
        else:
            row, place = rows.nonzero().unbind(-1)
            counts = rows[row, place].double()
        weight = counts if self.weight is None else counts * self.weight.double()[place]
        return OwnLabels(row, place, weight)

    def has_label(self) -> Tensor:
        """Whether each row has a label on any process: one round for a multi-hot target."""
        if self.rows.dtype == torch.int64:
            return (self.rows >= 0).any(-1)
        return self.split.group.sum((self.rows != 0).any(-1).long()) > 0


def check_target(c: Canonical, target: Tensor, weight: Tensor | None, ignore_index: int) -> dict[str, Any]:
    """Check the target as far as one process can; return the properties that must match on all processes.

    `c` describes the logits of this process.
    """
    if any(isinstance(t, Tensor) and t.requires_grad for t in (weight, target)):
        raise ValueError(
            "`weight` and `target` must not require a gradient if the labels are sharded across processes."
        )
    if isinstance(target, Tensor) and target.dtype in (torch.int64, torch.uint8):
        if weight is not None:
            check_weight(c, weight)
        return {"target": fingerprint(target), "ignore_index": ignore_index}
    read_target_rows(c, target, weight, ignore_index)
    return {"kind of target": str(target.dtype)}


def read_target(
    c: Canonical, target: Tensor, weight: Tensor | None, ignore_index: int, split: LabelSplit
) -> ShardedTarget:
    """Read a validated target. Invalid class indices raise the same error on every process."""
    if is_multi_hot(target):
        return ShardedTarget(target.reshape(c.x.shape[0], target.shape[-1]), weight, split)
    everything = c._replace(
        x=c.x.detach().new_zeros(()).expand(c.x.shape[0], split.total),
        mask=None,
        outer=torch.Size([*c.row_shape, split.total]),
    )
    labels = read_labels(everything, target, None, ignore_index)
    assert labels.listed is not None
    return ShardedTarget(labels.listed, weight, split)


class ShardedRows(DenseRows):
    """Rows of which this process has some columns; `sum` and `top` cover all columns, in 1–2 rounds."""

    def __init__(self, x: Tensor, group: LabelGroup, total: int) -> None:
        super().__init__(x, differentiable=True)
        self.longest = total
        self._group = group

    def sum(self, t: Tensor) -> Tensor:
        """Sum over each row; for a bool tensor, count the True entries."""
        return self._group.sum(t.sum(-1))

    def top(self, x: Tensor, count: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the `count` largest entries of each row, descending, and the `values` at their positions."""
        largest, found = super().top(x, count, values.to(self.wide))
        largest, place = self._all_columns(largest).topk(count)
        return largest, self._all_columns(found).gather(-1, place)

    def _all_columns(self, own: Tensor) -> Tensor:
        """Gather the columns of all processes, in order."""
        return self._group.gather(own.contiguous()).movedim(0, 1).flatten(1)
