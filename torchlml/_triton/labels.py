"""The labels of a row in the kernels of the loss: reading them, and sums over them.

Labels are lists of positions in the row, read LABELS at a time, or, with LABELS = 0, one bool per entry.
`labels` is (labels_ptr, starts_ptr, weight_ptr, per_row), and `where` is the row as in `row.py`. These are
device functions, inlined into the kernels of `loss.py`.
"""
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchlml._triton.row import LENGTH, probability, read

# Lists up to this length are read at once, and a single label needs no list.
_LABELS = 32


class Labels(NamedTuple):
    """The labels in the form that the kernels take; see `_torch/loss.py`."""

    labels: Tensor
    starts: Tensor | None
    weight: Tensor | None

    @property
    def block(self) -> int:
        """The number of labels that are read at once; 0 for one bool per entry."""
        if self.labels.dtype == torch.bool:
            return 0
        return 1 if self.labels.dim() == 2 and self.labels.shape[1] == 1 else _LABELS

    @property
    def per_row(self) -> int:
        return self.labels.shape[-1]


@triton.jit
def find_labels(row, where, labels):
    """(first, count, base): the list of a row, and the offset between a label and its position in the row."""
    _, starts_ptr, _, per_row = labels
    _, _, start, _ = where
    if starts_ptr is None:
        first = row.to(tl.int64) * per_row
        count = per_row
        base = start * 0
    else:
        first = tl.minimum(tl.maximum(tl.load(starts_ptr + row), 0), per_row)
        count = (tl.minimum(tl.load(starts_ptr + row + 1), per_row) - first).to(tl.int32)
        base = start
    return first, count, base


@triton.jit
def read_listed(where, labels, listed, at, LABELS: tl.constexpr):
    """(entries, c, is_label, place, exists) of some labels; entries of labels outside the row are NaN."""
    x_ptr, mask_ptr, start, length = where
    labels_ptr, _, weight_ptr, _ = labels
    first, count, base = listed
    j = at + tl.arange(0, LABELS)
    label = tl.load(labels_ptr + first + j, mask=j < count, other=-1)
    is_label = label >= 0
    exists = is_label & (label >= base) & (label < base + length)
    place = (label - base).to(tl.int32)
    x = tl.load(x_ptr + start + place, mask=exists, other=float("nan")).to(tl.float32)
    if mask_ptr is not None:
        available = tl.load(mask_ptr + start + place, mask=exists, other=1) != 0
        x = tl.where(available, x, float("-inf"))
    c = is_label.to(tl.float32)
    if weight_ptr is not None:
        c = tl.load(weight_ptr + first + j, mask=is_label, other=0.0)
    return x, c, is_label, place, exists


@triton.jit
def read_observed(where, labels, at, BLOCK: tl.constexpr):
    """(c, is_label) for each entry of a block."""
    _, _, start, length = where
    labels_ptr, _, weight_ptr, _ = labels
    i = at + tl.arange(0, BLOCK)
    is_label = tl.load(labels_ptr + start + i, mask=i < length, other=0) != 0
    c = is_label.to(tl.float32)
    if weight_ptr is not None:
        c = tl.load(weight_ptr + start + i, mask=is_label, other=0.0)
    return c, is_label


@triton.jit
def own(x, c, hi, lo):
    """c (1 - y), or 0 if the entry or nu is infinite."""
    z = (x + hi) + lo
    e = tl.exp(-tl.abs(z))
    share = tl.where(z > 0, e, 1.0) / (1.0 + e)
    moved = tl.where((c != 0) & (tl.abs(x) != float("inf")), c * share, 0.0)
    return tl.where(tl.abs(hi) == float("inf"), 0.0, moved)


@triton.jit
def label_block(x, c, is_label, hi, lo, share):
    """(loss, sum c (1 - y), sum of c at +inf, number of labels, number with weight) of some labels."""
    counts = c != 0
    loss = tl.sum(tl.where(counts, -c * probability(x, hi, lo, share, True), 0.0), 0).to(tl.float64)
    push = tl.sum(own(x, c, hi, lo), 0).to(tl.float64)
    tied = tl.sum(tl.where(x == float("inf"), c, 0.0), 0).to(tl.float64)
    return loss, push, tied, tl.sum(is_label.to(tl.int32), 0), tl.sum(counts.to(tl.int32), 0)


@triton.jit
def label_sums(
    x, where, labels, row, split, hi, lo, share,
    BLOCK: tl.constexpr, LOOP: tl.constexpr, SPLITS: tl.constexpr, LABELS: tl.constexpr,
):  # fmt: skip
    """`label_block` of all labels that belong to a program; `x` is its block on chip."""
    if LABELS == 0:
        c, is_label = read_observed(where, labels, split * BLOCK, BLOCK)
        loss, push, tied, found, weighted = label_block(x, c, is_label, hi, lo, share)
        if LOOP:
            for at in range((split + SPLITS) * BLOCK, where[LENGTH], SPLITS * BLOCK):
                block = read(where, at, BLOCK)
                c, is_label = read_observed(where, labels, at, BLOCK)
                loss_, push_, tied_, found_, weighted_ = label_block(block, c, is_label, hi, lo, share)
                loss, push, tied = loss + loss_, push + push_, tied + tied_
                found, weighted = found + found_, weighted + weighted_
    else:
        listed = find_labels(row, where, labels)
        loss, push, tied = tl.zeros([], tl.float64), tl.zeros([], tl.float64), tl.zeros([], tl.float64)
        found, weighted = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
        for at in range(split * LABELS, listed[1], SPLITS * LABELS):
            entries, c, is_label, _, _ = read_listed(where, labels, listed, at, LABELS)
            loss_, push_, tied_, found_, weighted_ = label_block(entries, c, is_label, hi, lo, share)
            loss, push, tied = loss + loss_, push + push_, tied + tied_
            found, weighted = found + found_, weighted + weighted_
    return loss, push, tied, found, weighted
