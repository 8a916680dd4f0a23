"""The LML loss of canonical rows, with an explicit derivative by operators.

The operators `loss_forward` and `loss_backward` process all rows at once and store nothing of the size of the
logits in between.
"""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import torch
from torch import Tensor

from torchlml._arguments import Bound, Canonical
from torchlml._autograd import operators
from torchlml._autograd.rule import LOG_LML, Rule
from torchlml._reductions import (
    Reduction,
    mean_divisor,
    reduce_losses,
)
from torchlml._rows import rows_of, work_dtype
from torchlml._targets import Labels


def lml_loss(
    c: Canonical,
    labels: Labels,
    divisor: Tensor | None,
    reduction: Reduction,
    bound: Bound,
    *,
    overwrite: bool = False,
) -> Tensor:
    """Compute the reduced loss; the loss of each row is first divided by `divisor`.

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
    """Compute one loss per row from all of log y, to support a `bound`, label weights and every transform."""
    # Half precision becomes float32 here and is rounded once, at the end.
    x = c.x.to(work_dtype(c.x.dtype))
    if not labels.in_every_row:
        # A row without labels contributes nothing, even if it contains a NaN.
        x = torch.where(rows_of(x, c.offsets).broadcast(labels.has_label), x, 0)
    log_y = LOG_LML[bound](x, c.k, c.mask, c.offsets)
    if labels.listed is not None:
        log_y = log_y.gather(-1, labels.listed.clamp(min=0))
    is_label = labels.found
    if labels.weight is not None:
        log_y, is_label = log_y * labels.weight, is_label & (labels.weight != 0)
    return -labels.rows.sum(torch.where(is_label, log_y, 0))


def _rule(reduction: Reduction, complete: bool, overwrite: bool) -> Rule:
    """The rule for one reduction; with `complete`, every row has a label."""

    def forward(x: Tensor, *rest: Any) -> tuple[Tensor, tuple[Any, ...]]:
        """The loss in the dtype of x, and (nu, the divisor of each row, or None for a known number)."""
        *arguments, divisor = rest
        losses, nu = operators.loss_forward(x, *arguments)
        if divisor is not None:
            losses = torch.stack([losses[0] / divisor, losses[1]])
        if reduction == "none":
            return losses[0].to(x.dtype), (nu, divisor)
        if reduction == "sum":
            return losses[0].sum().to(x.dtype), (nu, divisor)
        if complete:
            return (losses[0].sum() / mean_divisor(losses.shape[1])).to(x.dtype), (nu, divisor)
        loss, labeled = losses.sum(1)
        count = mean_divisor(labeled)
        return (loss / count).to(x.dtype), (nu, count if divisor is None else count * divisor)

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
