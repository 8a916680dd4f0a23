"""From one loss per row to what the caller asked for, and the module that remembers the arguments."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchlml.losses.targets import Labels, LogitRows, may_look

REDUCTIONS = ("mean", "sum", "none")


def check_reduction(reduction: str) -> None:
    """Refuse a `reduction` that is none of the three."""
    if reduction not in REDUCTIONS:
        raise ValueError(f'`reduction` must be "mean", "sum" or "none", but it is {reduction!r}.')


def reduce(loss: Tensor, labels: Labels, reduction: str, rows: LogitRows) -> Tensor:
    """Reduce one loss per row, which is 0 for the rows without a label, and round once to the logits' dtype.

    The mean is over the rows that have a label. Without any such row it is 0, with a gradient of 0, where
    `F.cross_entropy` gives NaN: a batch of images without a single relation must not poison a training run.
    """
    if reduction == "mean":
        loss = loss.sum() / labelled_rows(labels, rows)
    elif reduction == "sum":
        loss = loss.sum()
    else:
        loss = loss.reshape(rows.shape)
    return loss.to(rows.x.dtype)


def labelled_rows(labels: Labels, rows: LogitRows) -> int | Tensor:
    """How many rows have a label, and 1 if none has: what a mean divides by."""
    if labels.complete:
        return max(1, rows.number)
    count = labels.has_label.sum()
    return max(1, int(count)) if may_look(count) else count.clamp(min=1)


def reduce_single(loss: Tensor, labels: Labels, reduction: str, rows: LogitRows) -> Tensor:
    """The same for a loss (R, 1), not yet weighted, that means nothing where there is no label."""
    if not labels.complete:
        loss = torch.where(labels.has_label.unsqueeze(-1), loss, 0)
    if labels.weight is not None:
        loss = loss * labels.weight
    return reduce(loss.squeeze(-1), labels, reduction, rows)


class TopKLoss(nn.Module):
    """What the modules of all losses have in common; `weight` is a buffer, so it follows `.to()`."""

    weight: Tensor | None

    def __init__(self, k: float | Tensor, weight: Tensor | None, ignore_index: int, reduction: str) -> None:
        super().__init__()
        check_reduction(reduction)
        self.k = k
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction

    def extra_repr(self) -> str:
        settings = [f"k={self.k}"]
        if self.weight is not None:
            settings.append(f"weight=<{self.weight.numel()} classes>")
        if self.ignore_index != -100:
            settings.append(f"ignore_index={self.ignore_index}")
        return ", ".join([*settings, f"reduction={self.reduction!r}"])
