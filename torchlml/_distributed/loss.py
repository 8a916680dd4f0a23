"""The losses and the ranking for the metrics, for calls with a `group` or with DTensors.

As in `projection.py`, each function unwraps the local parts of DTensors, checks that all processes pass
matching arguments, computes the result and wraps it.

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

from torchlml._arguments import Canonical, autocasts, canonical, check_k
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
from torchlml._autograd.rule import gradient_of_k
from torchlml._distributed.dtensor import Layout, read_layout, read_linear_layout
from torchlml._distributed.group import Group, LabelGroup, LabelSplit, agreement, fingerprint, label_group
from torchlml._distributed.projection import SolvedPart, check_first_derivative
from torchlml._distributed.solve import FiniteLabels, Solution, prepare, solve
from torchlml._rows import DenseRows, Rows, rows_of, work_dtype
from torchlml._targets import check_weight, is_multi_hot, read_labels, read_target_rows


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
    """Compute `lml_loss` with a `group` or with DTensors.

    For DTensors, the loss is a DTensor, with one number per row or reduced over the rows of all processes.
    """
    layout: Layout | None = None
    if isinstance(logits, DTensor):
        layout = read_layout(logits, -1, group, "logits")
        logits, target, k = logits.to_local(), layout.target(target), layout.rows.local(k)
        weight, mask, processes = layout.per_label(weight), layout.entries.local(mask), layout.group
    else:
        processes = label_group(group)
    if processes is None:
        settings.check()
        any_k = settings.bound == "at_most"
        c = canonical(logits, k, -1, mask, offsets, any_k=any_k, name="logits", sharded=True)
        c = c._replace(x=c.x.to(work_dtype(c.x.dtype)))
        labels = read_labels(c, target, weight, settings.ignore_index)
        check_labeled_k(c.k, settings.bound, lambda: labels.has_label)
        divisor = label_divisor(labels, settings.label_reduction)
        losses, number = rule.lml_loss(c, labels, divisor, "none", settings.bound), labels.per_row
    else:
        with agreement(processes, logits) as agreed:
            settings.check()
            c = canonical(logits, k, -1, mask, offsets, any_k=True, name="logits", sharded=True)
            same = _matching(settings) | check_target(c, target, weight, settings.ignore_index)
            (*rows, n), masked = logits.shape, mask is not None
            agreed.tell("lml_loss", c.x, k, settings.bound, rows=rows, labels=n, masked=masked, same=same)
        split = agreed.split(k, settings.bound)
        observed = read_target(c, target, weight, settings.ignore_index, split)
        losses, number = row_losses(c.x, c.k, c.mask, observed.own(), split)
        # k and the number of labels are the same on all processes, so all of them take the same branch.
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
    """Compute `linear_lml_loss` with a `group` or with DTensors."""
    if not isinstance(given.linear_weight, DTensor) and not isinstance(given.input, DTensor):
        return _linear(given, label_group(group))
    layout = read_linear_layout(given.input, given.linear_weight, group)
    settings = given.settings
    settings.check()
    target, reduction = layout.target(given.target), settings.reduction
    # For a mean over sharded rows, divide the sum by the number of labeled rows on all processes.
    mean_of_shards = layout.shards_rows and reduction == "mean"
    local = LinearLMLArguments(
        layout.local(given.input, layout.rows.placements),
        layout.per_label(given.linear_weight),
        layout.per_label(given.linear_bias),
        target,
        layout.rows.local(given.k),
        layout.per_label(given.weight),
        settings._replace(reduction="sum") if mean_of_shards else settings,
        given.memory_limit,
    )
    result = _linear(local, layout.group)
    if not isinstance(given.input, DTensor):
        return result
    if reduction == "none":
        return layout.rows.wrap(result)
    return layout.reduce_sum(result, _has_label(target, settings, layout) if mean_of_shards else None)


def _linear(given: LinearLMLArguments, group: LabelGroup | None) -> Tensor:
    """Compute `linear_lml_loss` from local tensors, with or without a group."""
    if group is None:
        return chunked_linear.linear_lml_loss(given)
    input, linear_weight, linear_bias, target, k, weight, settings, memory_limit = given
    with agreement(group, input) as agreed:
        settings.check()
        check_linear(input, linear_weight, linear_bias, memory_limit)
        n = linear_weight.shape[0]
        c = logits_like(input, n)
        wide_k = check_k(k, input.shape[:-1], None, input.device, "input")
        same = _matching(settings) | {"memory_limit": memory_limit, "in_features": input.shape[-1]}
        # The gradient of the input is summed over all processes if it is requested.
        same |= {"gradient requirement for the input": torch.is_grad_enabled() and input.requires_grad}
        # Under autocast, the logits have the autocast dtype.
        device = input.device.type
        same |= {"autocast": str(torch.get_autocast_dtype(device)) if autocasts(device) else "off"}
        same |= check_target(c, target, weight, settings.ignore_index)
        agreed.tell("linear_lml_loss", input, k, settings.bound, rows=input.shape[:-1], labels=n, same=same)
    split = agreed.split(k, settings.bound)
    observed = read_target(c, target, weight, settings.ignore_index, split)
    # `has_label` may communicate. k is the same on all processes, so either all or none of them call it.
    check_labeled_k(wide_k, settings.bound, observed.has_label)
    mean = settings.reduction == "mean"
    chunked = ChunkedLoss(
        _ShardedRowLoss(observed, settings.label_reduction == "mean"),
        observed.has_label() if mean else observed.rows[:0],
        settings.reduction,
        memory_limit,
        labels=max(split.labels),
        sum_over_group=split.group.all_reduce,
    )
    return chunked(input, linear_weight, linear_bias, wide_k)


@dataclass(frozen=True)
class _ShardedRowLoss:
    """The LML loss as a `RowLoss` for `chunked_linear`, with a few rounds of communication per chunk."""

    target: ShardedTarget
    mean_over_labels: bool

    def __call__(self, logits: Tensor, k: Tensor, rows: slice, overwrite: bool) -> Tensor:
        own = self.target.own(rows)
        losses, number = row_losses(logits.contiguous(), k, None, own, self.target.split)
        return losses / number.clamp(min=1) if self.mean_over_labels else losses


def _has_label(target: Tensor, settings: LossSettings, layout: Layout) -> Tensor:
    """Whether each local row has a label on any of the processes that its labels are sharded across."""
    multi_hot = is_multi_hot(target)
    found = target != 0 if multi_hot else target != settings.ignore_index
    found = found.any(-1) if found.dim() > len(layout.rows.shape) else found
    if multi_hot and layout.group is not None:
        return layout.group.sum(found.long()) > 0
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
        mask, processes = layout.entries.local(mask), layout.group
    else:
        processes = label_group(group)
    if processes is None:
        c = canonical(preds, 1, -1, mask, offsets, any_k=True, name="preds", sharded=True)
        if check is not None:
            check(c)
        labels = read_labels(c._replace(mask=None), target, None, ignore_index)
        return c, rows_of(c.x, None, differentiable=True), labels.multi_hot(c.x)
    with agreement(processes, preds) as agreed:
        c = canonical(preds, 1, -1, mask, offsets, any_k=True, name="preds", sharded=True)
        if check is not None:
            check(c)
        same, (*rows, n), k = check_target(c, target, None, ignore_index), preds.shape, torch.tensor(ks)
        agreed.tell(function, c.x, k, "exactly", rows=rows, labels=n, masked=True, same=same)
    split = agreed.split(k, "exactly")
    own = read_target(c, target, None, ignore_index, split).own()
    observed = torch.zeros_like(c.x, dtype=torch.bool)
    observed[own.row, own.place] = True
    return c, ShardedRows(c.x, split.group, split.total), observed


def _matching(settings: LossSettings) -> dict[str, Any]:
    return {"reduction": settings.reduction, "label_reduction": settings.label_reduction}


class ShardedTarget(NamedTuple):
    """A validated target: (R, L) int64 with unique labels and negative padding, or multi-hot (R, n)."""

    rows: Tensor
    weight: Tensor | None  # one number per class of this process
    split: LabelSplit

    def own(self, some: slice = slice(None)) -> OwnLabels:
        """Return the observed labels of this process in the rows `some`."""
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
        """Whether each row has a label on any process. Multi-hot targets need one round of communication."""
        if self.rows.dtype == torch.int64:
            return (self.rows >= 0).any(-1)
        return self.split.group.sum((self.rows != 0).any(-1).long()) > 0


def check_target(c: Canonical, target: Tensor, weight: Tensor | None, ignore_index: int) -> dict[str, Any]:
    """Check the target as far as one process can. Return the properties that must match on all processes.

    `c` describes the logits of this process.
    """
    if any(isinstance(t, Tensor) and t.requires_grad for t in (weight, target)):
        raise ValueError(
            "`weight` and `target` must not require a gradient if the labels are sharded across processes, "
            "but one of them does."
        )
    if isinstance(target, Tensor) and target.dtype in (torch.int64, torch.uint8):
        if weight is not None:
            check_weight(c, weight)
        return {"target": fingerprint(target), "ignore_index": ignore_index}
    read_target_rows(c, target, weight, ignore_index)
    return {"target dtype": str(target.dtype)}


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


class OwnLabels(NamedTuple):
    """The observed labels of this process: their rows, their columns in its logits, and their weights."""

    row: Tensor
    place: Tensor
    weight: Tensor


def row_losses(x: Tensor, k: Tensor, mask: Tensor | None, labels: OwnLabels, split: LabelSplit) -> Tensor:
    """Return the loss and the number of labels for each row, as (2, R), identical on every process."""
    return _Loss.apply(x, k, mask, *labels, split)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        k: Tensor,
        mask: Tensor | None,
        row: Tensor,
        place: Tensor,
        weight: Tensor,
        split: LabelSplit,
    ) -> Tensor:
        values = prepare(x, mask)
        count = x.shape[0]
        entry = values[row, place].double()
        weight = weight.double()
        counts = weight != 0
        finite = counts & entry.isfinite()
        labels = FiniteLabels(row[finite], entry[finite], weight[finite])
        # The loss of a label at an infinite entry depends only on the row: it is 0, infinite, or log(p/k) if
        # the row has p > k entries of +inf.
        behind_mask = torch.zeros_like(counts) if mask is None else ~mask[row, place]
        kinds = (
            torch.ones_like(counts),
            finite,
            counts & (entry == -torch.inf),
            entry.isnan() & counts,
            behind_mask,
        )
        numbers = [*kinds, torch.where(entry == torch.inf, weight, 0)]
        marks = torch.zeros(count, len(numbers), dtype=torch.float64, device=x.device)
        marks.index_add_(0, row, torch.stack([number.double() for number in numbers], -1))
        solution = solve(values, k, split, labels, marks)
        any_label, of_finite, of_absent, of_nan, hidden, of_infinite = solution.marks.unbind(-1)
        if bool(hidden.any()):
            raise ValueError(
                "`target` has a label where `mask` is False, but a label must be a class that may be chosen."
            )
        hi = solution.nu[0].double()
        share = solution.share.double()
        at_infinite = torch.where(of_infinite == 0, 0, -of_infinite * share.log())
        finite_part = torch.where(hi == -torch.inf, torch.inf, torch.where(hi == torch.inf, 0, solution.loss))
        loss = torch.where(of_finite > 0, finite_part, 0) + at_infinite
        loss = torch.where(of_absent > 0, torch.inf, loss)
        counted = of_finite + of_absent + (of_infinite != 0) + of_nan > 0
        loss = torch.where(counted, torch.where(hi.isnan(), torch.nan, loss), 0)
        change = torch.where(hi.isfinite() & counted, solution.change, 0)
        ctx.save_for_backward(x, k, mask, row, place, weight, of_infinite, change, counted, *solution)
        return torch.stack([loss, any_label]).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        x, k, mask, row, place, weight, of_infinite, change, counted, *solution = ctx.saved_tensors
        local = SolvedPart(x, mask, Solution(*solution))
        s, g = local.solution, grad[0].double()
        dx = local.shares_of_slope() * (g * change).to(local.values.dtype).unsqueeze(-1)
        own = torch.where(local.live[row, place], weight * torch.sigmoid(-local.z[row, place].double()), 0)
        dx.index_put_((row, place), -(g[row] * own).to(dx.dtype), accumulate=True)
        dk = torch.where(s.nu[0].isinf() | (change == 0), 0, -g * change / s.log_slope.exp())
        # If a row has p > k entries of +inf, their log y is log(k/p), with derivative 1/k.
        follows_k = (s.share > 0) & (s.share < 1) & (of_infinite != 0)
        dk = torch.where(follows_k, -g * of_infinite / k, dk)
        dx, dk = local.finish(dx, dk, x)
        # A row without a label of nonzero weight has a zero gradient, even if it contains a NaN.
        dx = torch.where(counted.unsqueeze(-1), dx, 0)
        dk = torch.where(counted, dk, 0)
        return (dx, gradient_of_k(dk, k), *(None,) * 5)


class ShardedRows(DenseRows):
    """Rows whose columns are sharded across processes.

    `sum` and `top` cover all columns and take one and two rounds of communication, respectively.
    """

    def __init__(self, x: Tensor, group: LabelGroup, total: int) -> None:
        super().__init__(x, differentiable=True)
        self.longest = total
        self._group = group

    def sum(self, t: Tensor) -> Tensor:
        """Sum over each row; for a bool tensor, count the True entries."""
        return self._group.sum(t.sum(-1))

    def top(self, x: Tensor, count: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's `count` largest entries in descending order, and `values` at their positions."""
        largest, found = super().top(x, count, values.to(self.wide))
        largest, place = self._all_columns(largest).topk(count)
        return largest, self._all_columns(found).gather(-1, place)

    def _all_columns(self, own: Tensor) -> Tensor:
        """Gather the columns of all processes, in order."""
        return self._group.gather(own.contiguous()).movedim(0, 1).flatten(1)
