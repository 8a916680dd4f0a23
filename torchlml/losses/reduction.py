"""From one loss per row to what the caller asked for."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchlml._core.arguments import Canonical, readable
from torchlml.losses.targets import LabelReduction, Labels

Reduction = Literal["mean", "sum", "none"]


def check_reduction(reduction: str, label_reduction: str = "sum") -> None:
    """Refuse a `reduction` that is none of the three, a `label_reduction` that is none of the two."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'`reduction` must be "mean", "sum" or "none", but it is {reduction!r}.')
    if label_reduction not in ("sum", "mean"):
        raise ValueError(f'`label_reduction` must be "sum" or "mean", but it is {label_reduction!r}.')


def row_divisor(labels: Labels, label_reduction: LabelReduction) -> Tensor | None:
    """What the sum over the labels of each row is divided by; None for nothing."""
    if label_reduction == "sum" or labels.complete:  # a complete list has one label in each row
        return None
    return labels.per_row.clamp(min=1)


def reduce(
    loss: Tensor, labels: Labels, divisor: Tensor | None, reduction: Reduction, c: Canonical
) -> Tensor:
    """Reduce one loss per row, which is 0 for the rows without a label, and round once to the logits' dtype.

    The mean is over the rows that have a label. Without any such row it is 0, with a gradient of 0, where
    `F.cross_entropy` gives NaN: a batch of images without a single relation must not poison a training run.
    """
    if divisor is not None:
        loss = loss / divisor
    if reduction == "mean":
        loss = loss.sum() / _labelled_rows(labels, loss.shape[0])
    elif reduction == "sum":
        loss = loss.sum()
    else:
        loss = c.restore_rows(loss)
    return loss.to(c.x.dtype)


def _labelled_rows(labels: Labels, rows: int) -> int | Tensor:
    """How many rows have a label, and 1 if none has: what a mean divides by."""
    if labels.complete:
        return max(1, rows)
    count = labels.has_label.sum()
    return max(1, int(count)) if readable(count) else count.clamp(min=1)


def reduce_single(loss: Tensor, labels: Labels, reduction: Reduction, c: Canonical) -> Tensor:
    """The same for a loss (R, 1), not yet weighted, that means nothing where there is no label."""
    if not labels.complete:
        loss = torch.where(labels.has_label.unsqueeze(-1), loss, 0)
    if labels.weight is not None:
        loss = loss * labels.weight
    return reduce(loss.squeeze(-1), labels, None, reduction, c)
