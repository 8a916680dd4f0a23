"""The LML loss: maximum likelihood of the observed labels under a projection that chooses exactly k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchlml import differentiable
from torchlml.arguments import _check_k
from torchlml.autograd import _plain, _wants_graph
from torchlml.losses import lml_operators
from torchlml.losses.reduction import TopKLoss, check_reduction, reduce
from torchlml.losses.targets import Labels, LogitRows, read_labels, read_logits
from torchlml.rows import row_index, work_dtype


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

    Returns:
        The loss in the dtype of the logits (float32 under autocast), a scalar or one number per row.

    For observed labels Y the loss of a row is `-sum_{j in Y} log y_j`, `y = lml(logits, k)`. Unlike
    `F.cross_entropy`, the mean with a `weight` divides by the number of rows and not by the sum of weights.
    The gradient, `A w_i / sum w - (1 - y_i) [i in Y]` with w = y (1 - y) and A = sum_{j in Y} (1 - y_j),
    keeps its size however far a label is behind.
    """
    check_reduction(reduction)
    rows = read_logits(logits, mask, offsets)
    most = None if mask is not None or offsets is not None else logits.shape[-1]
    k = _check_k(k, rows.shape, most, logits.device)
    labels = read_labels(rows, target, weight, ignore_index)
    label_weights = _label_weights(labels, rows)
    arguments = (rows.x, k, labels.classes, label_weights, rows.mask, rows.offsets)
    if _plain() and (label_weights is None or not label_weights.requires_grad):
        loss = _Loss.apply(*arguments)
    else:
        loss = _differentiable(*arguments)
    return reduce(loss, labels, reduction, rows)


class LMLLoss(TopKLoss):
    """The module of `lml_loss`: `LMLLoss(k=5)(logits, target)`."""

    def __init__(
        self,
        k: float | Tensor,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(k, weight, ignore_index, reduction)

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
        )


def _label_weights(labels: Labels, rows: LogitRows) -> Tensor | None:
    """What the operators take: a multi-hot is its weights, a list needs none."""
    if labels.observed is None or labels.weight is not None:
        return None if labels.weight is None else labels.weight.contiguous()
    return labels.observed.to(work_dtype(rows.x.dtype))


class _Loss(torch.autograd.Function):
    """One loss per row, by the operators."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        k: Tensor,
        labels: Tensor | None,
        label_weights: Tensor | None,
        mask: Tensor | None,
        offsets: Tensor | None,
    ) -> Tensor:
        loss, nu, stats = lml_operators.forward(x, k, labels, label_weights, mask, offsets)
        ctx.save_for_backward(x, k, nu, stats, labels, label_weights, mask, offsets)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, k, nu, stats, *labelled = ctx.saved_tensors
        if _wants_graph():
            return (*_differentiable_backward(grad, x, k, *labelled), None, None, None, None)
        dx = lml_operators.backward(grad.contiguous(), x, nu, stats, *labelled)
        dk = None
        if k.requires_grad:
            total, slope = stats.to(k.dtype)
            dk = torch.where(total == 0, 0, -grad * total * torch.exp(-slope))
            dk = dk.sum() if k.dim() == 0 else dk
        return dx, dk, None, None, None, None


def _differentiable_backward(
    grad: Tensor, x: Tensor, k: Tensor, *labelled: Tensor | None
) -> tuple[Tensor | None, ...]:
    loss = _differentiable(x, k, *labelled)
    wanted = [t for t in (x, k) if t.requires_grad]
    found = iter(torch.autograd.grad(loss, wanted, grad, create_graph=True))
    return tuple(next(found) if t.requires_grad else None for t in (x, k))


def _differentiable(
    x: Tensor,
    k: Tensor,
    labels: Tensor | None,
    label_weights: Tensor | None,
    mask: Tensor | None,
    offsets: Tensor | None,
) -> Tensor:
    """The same loss in ordinary operations, for every transform of PyTorch."""
    x = x.to(work_dtype(x.dtype))
    if labels is not None:
        chosen = labels >= 0
        # A row without labels counts for nothing, even if it holds a NaN.
        x = torch.where(chosen.any(-1, keepdim=True), x, 0)
        log_y = differentiable.log_lml(x, k, mask, offsets).gather(-1, labels.clamp(min=0))
        loss = torch.where(chosen, -log_y, 0)
        return (loss if label_weights is None else torch.where(chosen, label_weights * loss, 0)).sum(-1)
    assert label_weights is not None
    chosen = label_weights != 0
    row = None if offsets is None else row_index(offsets, x.shape[0])
    count = x.shape[0] if offsets is None else offsets.shape[0] - 1

    def total(t: Tensor) -> Tensor:
        return (
            t.sum(-1)
            if row is None
            else torch.zeros(count, dtype=t.dtype, device=t.device).index_add(0, row, t)
        )

    has_label = total(chosen.to(x.dtype)) > 0
    x = torch.where(has_label.unsqueeze(-1) if row is None else has_label[row], x, 0)
    log_y = differentiable.log_lml(x, k, mask, offsets)
    return total(torch.where(chosen, -label_weights * torch.where(chosen, log_y, 0), 0))
