"""The LML loss with an explicit backward pass, and the reductions shared by all losses.

The arguments are in the canonical form that `_arguments.py` produces. The operators `loss_forward` and
`loss_backward` process all rows at once, and save no intermediate tensor as large as the logits for the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from torchlml._arguments import Bound, Canonical, check_bound, readable
from torchlml._autograd import operators
from torchlml._autograd.rule import LOG_LML, Rule
from torchlml._rows import rows_of, work_dtype
from torchlml._targets import Labels

Reduction = Literal["mean", "sum", "none"]
LabelReduction = Literal["sum", "mean"]


def check_reduction(reduction: str, label_reduction: str = "sum") -> None:
    """Raise unless `reduction` and `label_reduction` are among the accepted values."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'`reduction` must be "mean", "sum" or "none", but it is {reduction!r}.')
    if label_reduction not in ("sum", "mean"):
        raise ValueError(f'`label_reduction` must be "sum" or "mean", but it is {label_reduction!r}.')


class LossSettings(NamedTuple):
    """The settings of the LML loss that do not depend on the batch."""

    ignore_index: int
    reduction: Reduction
    label_reduction: LabelReduction
    bound: Bound

    def check(self) -> None:
        """Raise unless all settings are among the accepted values."""
        check_reduction(self.reduction, self.label_reduction)
        check_bound(self.bound)


def mean_divisor(labeled: int | Tensor) -> int | Tensor:
    """Return the divisor of a mean over `labeled` rows: their number, or 1 if there are none.

    The mean over a batch without labeled rows is therefore 0, with a zero gradient. `F.cross_entropy` returns
    NaN instead, which would break a training run.
    """
    return max(1, labeled) if isinstance(labeled, int) else labeled.clamp(min=1)


def reduce(losses: Tensor, labeled: int | Tensor, reduction: Reduction) -> Tensor:
    """Reduce the losses of all rows. `labeled` is the number of rows with labels; other rows have loss 0."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / mean_divisor(labeled) if reduction == "mean" else total


def check_labeled_k(k: Tensor, bound: Bound, labeled: Callable[[], Tensor]) -> None:
    """Raise if k is 0 in a row that has a label, because y would be 0 and the loss infinite.

    `labeled` computes whether each row has a label. It is called only if some k is 0, which is rare.
    """
    if bound == "at_least" or not readable(k) or bool((k.detach() > 0).all()):
        return
    has_label = labeled()
    if readable(has_label) and bool((has_label & ~(k.detach() > 0)).any()):
        raise ValueError(
            "`k` must be positive in every row that has a label, but some of these rows have k = 0."
        )


def label_divisor(labels: Labels, label_reduction: LabelReduction) -> Tensor | None:
    """Return the divisor of each row's loss: its number of labels for "mean", None (no divisor) for "sum"."""
    if label_reduction == "sum" or labels.complete:  # a complete list has one label in each row
        return None
    return labels.per_row.clamp(min=1)


def reduce_losses(
    losses: Tensor, labels: Labels, divisor: Tensor | None, reduction: Reduction, c: Canonical
) -> Tensor:
    """Reduce the losses (R,) of canonical rows, and round the result to the dtype of the logits."""
    if divisor is not None:
        losses = losses / divisor
    result = reduce(losses, _labeled_rows(labels, losses) if reduction == "mean" else 1, reduction)
    return (c.restore_rows(result) if reduction == "none" else result).to(c.x.dtype)


def _labeled_rows(labels: Labels, losses: Tensor) -> int | Tensor:
    if labels.complete:
        return losses.shape[0]
    count = labels.has_label.sum()
    return int(count) if readable(count) else count


def lml_loss(
    c: Canonical,
    labels: Labels,
    divisor: Tensor | None,
    reduction: Reduction,
    bound: Bound,
    *,
    overwrite: bool = False,
) -> Tensor:
    """Compute the LML loss of each row, divide it by the row's `divisor`, and reduce the losses.

    With `overwrite`, the backward pass may replace the logits with their gradient.
    """
    if bound != "exactly" or (labels.weight is not None and labels.weight.requires_grad):
        return reduce_losses(_through_log_lml(c, labels, bound), labels, divisor, reduction, c)
    observed = labels.observed if labels.listed is None else labels.listed
    assert observed is not None
    weight = None if labels.weight is None else labels.weight.contiguous()
    rule = _RULES[reduction, labels.complete, overwrite]
    loss = rule(c.x, c.k, c.mask, c.offsets, observed.contiguous(), labels.starts, weight, divisor)
    return c.restore_rows(loss) if reduction == "none" else loss


def _through_log_lml(c: Canonical, labels: Labels, bound: Bound = "exactly") -> Tensor:
    """Compute one loss per row from the full log y.

    This supports bounds, label weights that require a gradient, and all transforms.
    """
    # Half-precision logits are processed in float32, and the loss is rounded once, at the end.
    x = c.x.to(work_dtype(c.x.dtype))
    if not labels.in_every_row:
        # A row without labels contributes nothing, even if it contains a NaN.
        x = torch.where(rows_of(x, c.offsets).broadcast(labels.has_label), x, 0)
    log_y = LOG_LML[bound](x, c.k, c.mask, c.offsets)
    if labels.listed is not None:
        log_y = log_y.gather(-1, labels.listed.clamp(min=0))
    is_label = labels.found
    if labels.weight is not None:
        is_label = is_label & (labels.weight != 0)
    # Set the other entries to 0 before the product, because 0 times the -inf of a masked entry is NaN.
    log_y = torch.where(is_label, log_y, 0)
    return -labels.rows.sum(log_y if labels.weight is None else log_y * labels.weight)


def _rule(reduction: Reduction, complete: bool, overwrite: bool) -> Rule:
    """Return the rule for one reduction; `complete` means that every row has exactly one label."""

    def forward(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Any]:
        """Return (loss, nu, divisor). The loss has the dtype of x.

        The backward pass divides the incoming gradient by the divisor. The divisor is None if it is 1, or if
        it is the number of rows, which `backward` knows.
        """
        *arguments, divisor = rest
        losses, nu = operators.loss_forward(x, *arguments)
        if divisor is not None:
            losses = torch.stack([losses[0] / divisor, losses[1]])
        if reduction == "none":
            return losses[0].to(x.dtype), nu, divisor
        if reduction == "sum":
            return losses[0].sum().to(x.dtype), nu, divisor
        if complete:
            return (losses[0].sum() / mean_divisor(losses.shape[1])).to(x.dtype), nu, divisor
        loss, labeled = losses.sum(1)
        count = mean_divisor(labeled)
        return (loss / count).to(x.dtype), nu, count if divisor is None else count * divisor

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
        return reduce_losses(_through_log_lml(c, labels), labels, divisor, reduction, c)

    return Rule(forward, backward, differentiable)


_RULES = {key: _rule(*key) for key in product(get_args(Reduction), (False, True), (False, True))}
