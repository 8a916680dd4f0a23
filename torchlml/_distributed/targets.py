"""Targets of rows whose labels are sharded across processes.

Class indices number the labels of all processes and are the same tensor on each of them. A multi-hot contains
the columns for the labels of this process.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchlml._arguments import Canonical
from torchlml._distributed.group import LabelGroup, LabelSplit, fingerprint
from torchlml._rows import DenseRows
from torchlml._targets import check_weight, is_multi_hot, read_labels, read_target_rows


class OwnLabels(NamedTuple):
    """The observed labels of this process: their rows, their columns in its logits, and their weights."""

    row: Tensor
    place: Tensor
    weight: Tensor


class ShardedTarget(NamedTuple):
    """A validated target: (R, L) int64 with unique labels and negative padding, or a multi-hot (R, n)."""

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
        """Whether each row has a label on any process: one round for a multi-hot."""
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
