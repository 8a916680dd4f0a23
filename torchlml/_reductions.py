"""Reductions of the losses: from one number per row to the requested result."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from torchlml._arguments import Bound, Canonical, check_bound, readable
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
    """The divisor of a mean over `labeled` rows: their number, or 1 if there are none.

    Without any labeled row the mean is therefore 0 with a zero gradient, whereas `F.cross_entropy` returns
    NaN. A batch of images without a single relation must not break a training run.
    """
    return max(1, labeled) if isinstance(labeled, int) else labeled.clamp(min=1)


def reduce(losses: Tensor, labeled: int | Tensor, reduction: Reduction) -> Tensor:
    """Reduce one loss per row, which is 0 for rows without labels; a mean is over the `labeled` rows."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / mean_divisor(labeled) if reduction == "mean" else total


def check_labeled_k(k: Tensor, has_label: Tensor) -> None:
    """Raise if k is 0 in a row that has a label: y is 0 there, and the loss would be infinite."""
    if readable(has_label) and bool((has_label & ~(k.detach() > 0)).any()):
        raise ValueError("`k` must be positive in every row that has a label, but it is 0 in one of them.")


def has_zero(k: Tensor, bound: Bound) -> bool:
    """Whether some k is 0 and y may be 0, so that labels must be checked; False if k cannot be read."""
    return bound != "at_least" and readable(k) and not bool((k.detach() > 0).all())


def label_divisor(labels: Labels, label_reduction: LabelReduction) -> Tensor | None:
    """The divisor of the loss of each row: its number of labels for "mean", None (no division) for "sum"."""
    if label_reduction == "sum" or labels.complete:  # a complete list has one label in each row
        return None
    return labels.per_row.clamp(min=1)


def reduce_losses(
    losses: Tensor, labels: Labels, divisor: Tensor | None, reduction: Reduction, c: Canonical
) -> Tensor:
    """Reduce the losses (R,) of canonical rows, and round once, to the dtype of the logits."""
    if divisor is not None:
        losses = losses / divisor
    result = reduce(losses, _labeled_rows(labels, losses) if reduction == "mean" else 1, reduction)
    return (c.restore_rows(result) if reduction == "none" else result).to(c.x.dtype)


def _labeled_rows(labels: Labels, losses: Tensor) -> int | Tensor:
    if labels.complete:
        return losses.shape[0]
    count = labels.has_label.sum()
    return int(count) if readable(count) else count
