"""The LML loss: maximum likelihood of the observed labels under a projection that chooses exactly k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchlml._core import operators
from torchlml._core.arguments import Canonical, check_k
from torchlml._core.bounds import Bound, check_bound, log_lml
from torchlml._core.paths import (
    differentiate_again,
    gradient_of_k,
    is_plain,
    needs_no_graph,
    wants_graph,
)
from torchlml._core.rows import row_index, work_dtype
from torchlml.losses.reduction import TopKLoss, check_reduction, reduce
from torchlml.losses.targets import Labels, LogitRows, read_labels, read_logits


def lml_loss(
    logits: Tensor,
    target: Tensor,
    k: float | Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    bound: Bound = "exactly",
) -> Tensor:
    """The loss that makes the k predictions of a model recall the labels that were observed.

        loss = torchlml.lml_loss(logits, target, k=5)                # one label, or a padded list, per row
        loss = torchlml.lml_loss(scores, relations, k=20, offsets=off)   # images with any numbers of edges

    Args:
        logits: (..., n), or flat values with `offsets`.
        target: class indices (...), padded lists of class indices (..., L), or a bool or floating multi-hot
            of the logits' shape, whose floats are label weights. With `offsets`: a flat multi-hot, or
            positions into the values.
        k: how many labels are predicted, as in `torchlml.lml`: a number or one per row; differentiable.
        weight: one weight per class, for the labels of that class.
        ignore_index: the class index that means "no label".
        reduction: "mean" over the rows that have a label (0 if there are none), "sum" or "none".
        mask: bool, broadcasts to the logits; False entries cannot be chosen, and no label may point at one.
        offsets: int64 row boundaries of a ragged batch, as in `torchlml.lml`.
        bound: "exactly", or "at_most" or "at_least" k labels are predicted, as in `torchlml.lml`.

    Returns:
        The loss in the dtype of the logits (float32 under autocast), a scalar or one number per row.

    For observed labels Y the loss of a row is `-sum_{j in Y} log y_j`, `y = lml(logits, k)`. Unlike
    `F.cross_entropy`, the mean with a `weight` divides by the number of rows and not by the sum of weights.
    The gradient, `A w_i / sum w - (1 - y_i) [i in Y]` with w = y (1 - y) and A = sum_{j in Y} (1 - y_j),
    keeps its size however far a label is behind.
    """
    check_reduction(reduction)
    check_bound(bound)
    rows = read_logits(logits, mask, offsets)
    unlimited = mask is not None or offsets is not None or bound == "at_most"
    most = None if unlimited else logits.shape[-1]
    k = check_k(k, rows.shape, most, logits.device)
    labels = read_labels(rows, target, weight, ignore_index)
    weighted = labels.weight is not None and labels.weight.requires_grad
    if bound == "exactly" and is_plain() and not weighted:
        return _fused(rows, k, labels, reduction)
    return reduce(_through_log_lml(rows, k, labels, bound), labels, reduction, rows)


class LMLLoss(TopKLoss):
    """The module of `lml_loss`: `LMLLoss(k=5)(logits, target)`."""

    def __init__(
        self,
        k: float | Tensor,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        bound: Bound = "exactly",
    ) -> None:
        super().__init__(k, weight, ignore_index, reduction)
        check_bound(bound)
        self.bound = bound

    def forward(
        self, logits: Tensor, target: Tensor, mask: Tensor | None = None, offsets: Tensor | None = None
    ) -> Tensor:
        """One loss; the arguments are those of `lml_loss`."""
        return lml_loss(
            logits,
            target,
            self.k,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            mask=mask,
            offsets=offsets,
            bound=self.bound,
        )

    def extra_repr(self) -> str:
        settings = super().extra_repr()
        return settings if self.bound == "exactly" else f"{settings}, bound={self.bound!r}"


def _through_log_lml(rows: LogitRows, k: Tensor, labels: Labels, bound: Bound = "exactly") -> Tensor:
    """One loss per row from all of log y: for a `bound`, for label weights and every transform of PyTorch."""
    # Half precision is float32 from here on, and rounded once at the end.
    x, offsets = rows.x.to(work_dtype(rows.x.dtype)), rows.offsets
    if not labels.in_every_row:
        # A row without labels counts for nothing, even if it holds a NaN.
        row = None if offsets is None else row_index(offsets, x.shape[0])
        x = torch.where(_spread(labels.has_label, row), x, 0)
    log_y = log_lml(Canonical(x, k, rows.mask, offsets, None), None, bound)
    is_label = labels.observed
    if labels.listed is not None:
        log_y, is_label = log_y.gather(-1, labels.listed.clamp(min=0)), labels.listed >= 0
    assert is_label is not None
    if labels.weight is not None:
        log_y, is_label = log_y * labels.weight, is_label & (labels.weight != 0)
    return -_sum(torch.where(is_label, log_y, 0), labels.row, rows.number)


def _fused(rows: LogitRows, k: Tensor, labels: Labels, reduction: str) -> Tensor:
    """The reduced loss by one operator, and its gradient by another: nothing of the size of x between."""
    observed = labels.observed if labels.listed is None else labels.listed
    assert observed is not None
    weight = None if labels.weight is None else labels.weight.contiguous()
    arguments = (rows.x, k, rows.mask, rows.offsets, observed.contiguous(), labels.starts, weight)
    if needs_no_graph(rows.x, k):
        loss, _, _ = _forward(*arguments, reduction, labels.complete)
    else:
        loss = _Loss.apply(*arguments, reduction, labels.complete)
    return loss.reshape(rows.shape) if reduction == "none" and len(rows.shape) != 1 else loss


def _forward(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor | int]:
    """(the reduced loss in the dtype of x, nu, the number that a mean is over).

    A mean is over the rows that have a label, and 0 without any, as `reduction.reduce` says.
    """
    *arguments, reduction, complete = rest
    losses, nu = operators.loss_forward(x, *arguments)
    count: Tensor | int = 1
    if reduction == "none":
        loss = losses[0]
    elif reduction == "sum":
        loss = losses[0].sum()
    elif complete:
        count = max(1, losses.shape[1])
        loss = losses[0].sum() / count
    else:
        loss, labelled = losses.sum(1)
        count = labelled.clamp(min=1)
        loss = loss / count
    return loss.to(x.dtype), nu, count


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        loss, nu, count = _forward(*arguments)
        *tensors, ctx.reduction, ctx.complete = arguments
        ctx.count = count
        ctx.save_for_backward(*tensors, nu)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, k, mask, offsets, observed, starts, weight, nu = ctx.saved_tensors
        rest = (None,) * 7
        if wants_graph():
            hot = observed.dtype == torch.bool
            listed, several = (None, observed) if hot else (observed, None)
            labels = Labels(listed, starts, several, weight, offsets, ctx.complete)

            def loss(x: Tensor, k: Tensor) -> Tensor:
                rows = LogitRows(x, mask, offsets, nu.shape[1:])
                return reduce(_through_log_lml(rows, k, labels), labels, ctx.reduction, rows)

            return (*differentiate_again(loss, grad, x, k), *rest)
        grad = grad.to(nu.dtype)
        if ctx.reduction == "mean":
            grad = grad / ctx.count
        dx, dk = operators.loss_backward(grad.contiguous(), x, k, nu, mask, offsets, observed, starts, weight)
        return (dx, gradient_of_k(dk, k), *rest)


def _spread(per_row: Tensor, row: Tensor | None) -> Tensor:
    """The number of each row beside its labels or entries."""
    return per_row.unsqueeze(-1) if row is None else per_row[row]


def _sum(t: Tensor, row: Tensor | None, count: int) -> Tensor:
    """The sum over the labels or entries of each row."""
    return t.sum(-1) if row is None else t.new_zeros(count).index_add(0, row, t)
