"""The LML loss: maximum likelihood of the observed labels under a projection that chooses exactly k."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import torch
from torch import Tensor

from torchlml._arguments import Bound, Canonical, canonical, check_bound
from torchlml._autograd import inequality as bounds
from torchlml._autograd import operators
from torchlml._autograd.rule import Rule
from torchlml._distributed import is_spread
from torchlml._rows import rows_of, work_dtype
from torchlml.losses.base import Reduction, TopKLoss, check_labelled_k, check_reduction, reduce, row_divisor
from torchlml.losses.targets import LabelReduction, Labels, read_labels


def lml_loss(
    logits: Tensor,
    target: Tensor,
    k: float | Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_reduction: LabelReduction = "sum",
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    bound: Bound = "exactly",
    group: Any = None,
) -> Tensor:
    """The loss that makes the k predictions of a model recall the labels that were observed.

        >>> logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
        >>> torchlml.lml_loss(logits, torch.tensor([1]), k=2)  # -log of lml(logits, 2)[0, 1]
        tensor(0.4741)
        >>> torchlml.lml_loss(logits, torch.tensor([[0, 1, -100]]), k=2)  # a padded list of labels
        tensor(0.6755)

    Args:
        logits: (..., n), or flat values with `offsets`, or a nested tensor of the layout `torch.jagged`.
        target: class indices (...), lists of class indices (..., L) padded with `ignore_index`, or a bool or
            floating multi-hot of the logits' shape, whose floats are label weights. With `offsets`: a flat
            multi-hot, or positions into the values. For ragged nested logits: a nested multi-hot, or the
            labels counted within each row, as (B,), padded (B, L) or nested lists. Integers in the logits'
            own shape are refused, since they could be either: give `target.bool()`, or a list that is one
            wider.
        k: how many labels are predicted, as in `torchlml.lml`: a number or one per row; differentiable.
            In a row that has a label, k = 0 raises a ValueError on the CPU. On other devices, where the check
            would synchronize, the loss is infinite.
        weight: one weight per class, for the labels of that class.
        ignore_index: the class index that means "no label".
        reduction: "mean" over the rows that have a label (0 if there are none), "sum" or "none".
        label_reduction: the loss of a row is the "sum" over its labels, or their "mean", so that rows with
            many labels do not outweigh the others. Weights do not change what the mean divides by.
        mask: bool, broadcasts to the logits; False entries cannot be chosen, and no label may point at one.
        offsets: int64 row boundaries of a ragged batch, as in `torchlml.lml`.
        bound: "exactly", or "at_most" or "at_least" k labels are predicted, as in `torchlml.lml`.
        group: the processes among which the labels are split, as in `torchlml.lml`. Class indices count the
            labels of all processes; `weight`, `mask` and a multi-hot are those of this process's labels.
            Every process gets the same loss, and the gradient of its own logits.

    Returns:
        The loss in the dtype of the logits (float32 under autocast), a scalar or one number per row.

    For observed labels Y the loss of a row is `-sum_{j in Y} log y_j`, `y = lml(logits, k)`. Unlike
    `F.cross_entropy`, the mean with a `weight` divides by the number of rows and not by the sum of weights.
    The gradient, `A w_i / sum w - (1 - y_i) [i in Y]` with w = y (1 - y) and A = sum_{j in Y} (1 - y_j),
    keeps its size however far a label is behind.
    """
    if is_spread(logits, group):
        from torchlml._distributed.calls import spread_lml_loss

        return spread_lml_loss(
            logits, target, k, weight, ignore_index, reduction, label_reduction, mask, offsets, bound, group
        )
    check_reduction(reduction, label_reduction)
    check_bound(bound)
    c = canonical(logits, k, -1, mask, offsets, any_k=bound == "at_most", name="logits", nested=True)
    labels = read_labels(c, target, weight, ignore_index)
    check_labelled_k(c.k, lambda: labels.has_label, bound)
    return reduced_loss(c, labels, row_divisor(labels, label_reduction), reduction, bound)


def reduced_loss(
    c: Canonical,
    labels: Labels,
    divisor: Tensor | None,
    reduction: Reduction,
    bound: Bound,
    *,
    overwrite: bool = False,
) -> Tensor:
    """The loss of arguments that have been read; that of each row is divided by the `divisor`.

    With `overwrite` the logits are needed no more: a backward pass may put their gradient in their place.
    """
    if bound != "exactly" or (labels.weight is not None and labels.weight.requires_grad):
        return reduce(_through_log_lml(c, labels, bound), labels, divisor, reduction, c)
    observed = labels.observed if labels.listed is None else labels.listed
    assert observed is not None
    weight = None if labels.weight is None else labels.weight.contiguous()
    rule = _RULES[reduction, labels.complete, overwrite]
    loss = rule(c.x, c.k, c.mask, c.offsets, observed.contiguous(), labels.starts, weight, divisor)
    return c.restore_rows(loss) if reduction == "none" else loss


class LMLLoss(TopKLoss):
    """The module of `lml_loss`, with its arguments.

    >>> torchlml.LMLLoss(k=2)(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([1]))
    tensor(0.4741)
    """

    function = staticmethod(lml_loss)

    def __init__(
        self,
        k: float | Tensor,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_reduction: LabelReduction = "sum",
        bound: Bound = "exactly",
    ) -> None:
        check_bound(bound)
        super().__init__(k, weight, ignore_index, reduction, label_reduction=label_reduction, bound=bound)


def _through_log_lml(c: Canonical, labels: Labels, bound: Bound = "exactly") -> Tensor:
    """One loss per row from all of log y: for a `bound`, for label weights and every transform of PyTorch."""
    # Half precision is float32 from here on, and rounded once at the end.
    x = c.x.to(work_dtype(c.x.dtype))
    if not labels.in_every_row:
        # A row without labels counts for nothing, even if it holds a NaN.
        x = torch.where(rows_of(x, c.offsets).spread(labels.has_label), x, 0)
    log_y = bounds.log_lml(c._replace(x=x), None, bound)
    if labels.listed is not None:
        log_y = log_y.gather(-1, labels.listed.clamp(min=0))
    is_label = labels.found
    if labels.weight is not None:
        log_y, is_label = log_y * labels.weight, is_label & (labels.weight != 0)
    return -labels.rows.sum(torch.where(is_label, log_y, 0))


def _rule(reduction: Reduction, complete: bool, overwrite: bool) -> Rule:
    """The reduced loss by one operator, and its gradient by another: nothing of the size of x between."""

    def forward(x: Tensor, *rest: Any) -> tuple[Tensor, tuple[Any, ...]]:
        """The loss in the dtype of x; nu, and what the loss of each row was divided by, None for a number.

        A mean is over the rows that have a label, and 0 without any, as `reduce` says.
        """
        *arguments, divisor = rest
        losses, nu = operators.loss_forward(x, *arguments)
        if divisor is not None:
            losses = torch.stack([losses[0] / divisor, losses[1]])
        total = divisor
        if reduction == "none":
            loss = losses[0]
        elif reduction == "sum":
            loss = losses[0].sum()
        elif complete:
            loss = losses[0].sum() / max(1, losses.shape[1])
        else:
            loss, labelled = losses.sum(1)
            count = labelled.clamp(min=1)
            loss, total = loss / count, count if divisor is None else count * divisor
        return loss.to(x.dtype), (nu, total)

    def backward(grad: Tensor, x: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        mask, offsets, *labels, _, nu, total = rest
        grad = grad.to(nu.dtype)
        if total is not None:
            grad = grad / total
        elif reduction == "mean" and nu.shape[1] > 1:
            grad = grad / nu.shape[1]
        known = (k, nu, mask, offsets, *labels)
        if not overwrite:
            return operators.loss_backward(grad.contiguous(), x, *known)
        dx = x.detach()
        return dx, operators.loss_backward_in_place(grad.contiguous(), dx, *known)

    def differentiable(x: Tensor, k: Tensor, *rest: Any) -> Tensor:
        mask, offsets, observed, starts, weight, divisor = rest
        hot = observed.dtype == torch.bool
        listed, several = (None, observed) if hot else (observed, None)
        labels = Labels(listed, starts, several, weight, offsets, complete)
        c = Canonical(x, k, mask, offsets, None)
        return reduce(_through_log_lml(c, labels), labels, divisor, reduction, c)

    return Rule(forward, backward, differentiable)


_RULES = {key: _rule(*key) for key in product(get_args(Reduction), (False, True), (False, True))}
