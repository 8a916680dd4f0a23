"""Rows of a dense matrix or of a packed (ragged) vector, behind one small interface.

The solvers are written once, in terms of "a sum over each row" and "a row's number beside each of its
entries"; what a row is stands here.
"""

from __future__ import annotations

import torch
from torch import Tensor


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype the arithmetic runs in: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype of k and of sums over a row: float64, but for Apple's GPUs, which have none."""
    return torch.float32 if device.type == "mps" else torch.float64


class DenseRows:
    """The rows of an (R, n) matrix."""

    def __init__(self, x: Tensor) -> None:
        self.count, self.length = x.shape
        self.wide = wide_dtype(x.device)

    def sum(self, t: Tensor) -> Tensor:
        if self.count == 1:
            # torch splits the sum of a single row over its threads; of two rows it does not. The same bits
            # for every number of threads, and for a row alone or in a batch, are worth the second copy.
            return t.expand(2, -1).sum(-1, dtype=self.wide)[:1]
        return t.sum(-1, dtype=self.wide)

    def max(self, t: Tensor) -> Tensor:
        return t.amax(-1) if self.length else t.new_full((self.count,), -torch.inf)

    def spread(self, per_row: Tensor) -> Tensor:
        """The number of each row, shaped to broadcast against the entries."""
        return per_row.unsqueeze(-1)

    def largest(self, x: Tensor, rank: Tensor) -> Tensor:
        """The `rank`-th largest entry of each row (past its end the last); `rank` is 0-d or one per row."""
        rank = rank.clamp(1, self.length)
        if rank.dim() == 0:
            # topk selects faster than kthvalue does, and fastest from the nearer end.
            top = int(rank)
            if 2 * top <= self.length:
                return x.topk(top, sorted=False).values.amin(-1)
            return x.topk(self.length + 1 - top, largest=False, sorted=False).values.amax(-1)
        return x.sort(-1, descending=True).values.gather(-1, rank.unsqueeze(-1) - 1).squeeze(-1)


class RaggedRows:
    """The rows x[offsets[i]:offsets[i + 1]] of a vector."""

    def __init__(self, x: Tensor, offsets: Tensor) -> None:
        self.offsets = offsets
        self.count = offsets.numel() - 1
        self.wide = wide_dtype(x.device)
        self.index = row_index(offsets, x.numel())

    def sum(self, t: Tensor) -> Tensor:
        # Unlike index_add, segment_reduce adds in a fixed order on every device.
        return torch.segment_reduce(t.to(self.wide), "sum", offsets=self.offsets, initial=0, unsafe=True)

    def max(self, t: Tensor) -> Tensor:
        return torch.segment_reduce(t, "max", offsets=self.offsets, initial=-torch.inf, unsafe=True)

    def spread(self, per_row: Tensor) -> Tensor:
        return per_row[self.index]

    def largest(self, x: Tensor, rank: Tensor) -> Tensor:
        by_value = x.argsort(descending=True)
        by_row = by_value[self.index[by_value].argsort(stable=True)]
        place = torch.minimum(self.offsets[:-1] + rank.clamp(min=1), self.offsets[1:]) - 1
        return x[by_row[place.clamp(min=0)]]


Rows = DenseRows | RaggedRows


def rows_of(x: Tensor, offsets: Tensor | None) -> Rows:
    """The rows that `x` holds: those of a matrix, or those the `offsets` cut from a vector."""
    return DenseRows(x) if offsets is None else RaggedRows(x, offsets)


def row_index(offsets: Tensor, size: int) -> Tensor:
    """The row of each of `size` packed entries."""
    rows = torch.arange(offsets.numel() - 1, device=offsets.device)
    # Giving the size keeps the shape known, to the compiler and to a GPU that need not be waited for.
    return rows.repeat_interleave(offsets.diff(), output_size=size)
