"""Label lists of different lengths as one padded tensor, the format that every loss and metric accepts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def pad_labels(labels: Iterable[Iterable[int] | Tensor], *, ignore_index: int = -100) -> Tensor:
    """Pad lists of class indices to a tensor that losses and metrics accept as `target`.

        >>> torchlml.pad_labels([[1, 2], [3], []])
        tensor([[   1,    2],
                [   3, -100],
                [-100, -100]])

    Args:
        labels: the class indices of each sample, as lists or 1-d tensors of integers. A sample may have none.
        ignore_index: the padding value; pass the same value to the loss or metric.

    Returns:
        An int64 tensor (number of samples, length of the longest list) with at least one column, on the CPU
        or on the device of the tensors.
    """
    rows = [_row(row, i) for i, row in enumerate(labels)]
    if not rows:
        return torch.full((0, 1), ignore_index)
    padded = pad_sequence(rows, batch_first=True, padding_value=ignore_index)
    # A target without columns would not be recognized as lists of labels.
    return padded if padded.shape[1] else padded.new_full((len(rows), 1), ignore_index)


def _row(row: Any, number: int) -> Tensor:
    name = f"`labels[{number}]`"
    if not isinstance(row, Tensor):
        if isinstance(row, str) or not isinstance(row, Iterable):
            raise TypeError(f"{name} must be a list or a tensor of class indices, but it is {row!r}.")
        row = list(row)
        try:
            row = torch.tensor(row) if row else torch.empty(0, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"{name} must contain class indices, but it is {row!r}.") from None
    if row.dim() != 1:
        raise ValueError(f"{name} must be a flat list of class indices, but its shape is {tuple(row.shape)}.")
    if row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
        raise TypeError(f"{name} must contain integers, but its dtype is {row.dtype}.")
    if row.numel() and int(row.min()) < 0:
        raise ValueError(f"{name} must contain nonnegative class indices, but it contains {int(row.min())}.")
    indices: Tensor = row.long()
    return indices
