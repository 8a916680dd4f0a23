"""Kernels for the LML loss and its derivatives: one program per row, which solves the row on chip.

Let c be the weight of a label, A = sum(c * (1 - y)) over the labels of a row, w = y * (1 - y), and
p = w / sum(w). With an incoming gradient g,

    loss = -sum(c * log(y)),    dx_i = g * (A * p_i - c_i * (1 - y_i)),    dk = -g * A / sum(w).

dk and the first term of dx are the derivatives of nu with respect to k and x, multiplied by -g * A. If there
are only a few very long rows, each row is split among several programs, as in `split.py`, and every program
reads its own blocks and labels. Otherwise, one program processes each row, with `split` = 0 and SPLITS = 1.

Labels are lists of positions in the row, read LABELS at a time, or, with LABELS = 0, one bool per entry.
`labels` is (labels_ptr, starts_ptr, weight_ptr, per_row), and `where` describes a row as in `row.py`. The
functions that read labels and compute sums over them are device functions, which are inlined into the
kernels.
"""
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchlml._triton import Launch, stride_of
from torchlml._triton import split as triton_split
from torchlml._triton.layer import _OF_NU, gradient, gradient_of_k, slope
from torchlml._triton.row import LENGTH, leave, locate_part, probability, read, solve_row, write

# The number of labels that are read at once, unless every row has a single label.
_LABELS = 32


class Labels(NamedTuple):
    """The labels in the form that the kernels take; see `_torch/fast.py`."""

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
    """Return (first, count, base): the start and length of a row's list of labels, and their offset.

    A label minus `base` is a position in the row.
    """
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
    """Return (entries, c, is_label, place, exists) for LABELS labels; entries outside the row are NaN."""
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
    """Return the label weight c and is_label for each entry of a block."""
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
    """Return c * (1 - y) for each entry, or 0 if the entry or nu is infinite."""
    z = (x + hi) + lo
    e = tl.exp(-tl.abs(z))
    share = tl.where(z > 0, e, 1.0) / (1.0 + e)
    moved = tl.where((c != 0) & (tl.abs(x) != float("inf")), c * share, 0.0)
    return tl.where(tl.abs(hi) == float("inf"), 0.0, moved)


@triton.jit
def label_block(x, c, is_label, hi, lo, share):
    """Return (loss, sum(c * (1 - y)), sum of c at +inf, number of labels, number with nonzero weight)."""
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
    """Sum `label_block` over the labels that a program reads; `x` is its first block, already on chip."""
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


@triton.jit
def write_dk(dk_ptr, k_ptr, k_stride, row, where, g, given, hi, nearest, total, tied, BLOCK: tl.constexpr):
    """Write dk for a row. If p > k entries are +inf, their log y is log(k/p), with derivative 1/k."""
    dk = gradient_of_k(nearest, total, total, hi, given, _OF_NU)
    k = tl.load(k_ptr + row * k_stride)
    p = tl.zeros([], tl.int32)
    # The loop is empty unless nu is -inf and a label is at an entry of +inf.
    for at in range(0, tl.where((hi == float("-inf")) & (tied != 0), where[LENGTH], 0), BLOCK):
        p += tl.sum((read(where, at, BLOCK) == float("inf")).to(tl.int32), 0)
    of_tied = -g * tied.to(tl.float32) / tl.maximum(k.to(tl.float32), 1e-37)
    tl.store(dk_ptr + row, dk + tl.where((k > 0) & (k < p), of_tied, 0.0).to(tl.float64))


@triton.jit
def write_gradient(
    x, dx_ptr, where, labels, row, split, g, given, hi, lo, nearest, total,
    BLOCK: tl.constexpr, LOOP: tl.constexpr, SPLITS: tl.constexpr, LABELS: tl.constexpr,
):  # fmt: skip
    """Write dx for the blocks of a program; `x` is the first of them, which is already on chip."""
    dx = gradient(x, x, hi, lo, nearest, total, total, given, _OF_NU)
    if LABELS == 0:
        c, _ = read_observed(where, labels, split * BLOCK, BLOCK)
        dx -= g * own(x, c, hi, lo)
    write(dx_ptr, dx, where, split * BLOCK, BLOCK)
    if LOOP:
        for at in range((split + SPLITS) * BLOCK, where[LENGTH], SPLITS * BLOCK):
            block = read(where, at, BLOCK)
            dx = gradient(block, block, hi, lo, nearest, total, total, given, _OF_NU)
            if LABELS == 0:
                c, _ = read_observed(where, labels, at, BLOCK)
                dx -= g * own(block, c, hi, lo)
            write(dx_ptr, dx, where, at, BLOCK)
    if LABELS > 0:
        # The gradients of labels overwrite values that other threads of this program have just written.
        tl.debug_barrier()
        listed = find_labels(row, where, labels)
        for at in range(0, listed[1], LABELS):
            entries, c, _, place, exists = read_listed(where, labels, listed, at, LABELS)
            there = gradient(entries, entries, hi, lo, nearest, total, total, given, _OF_NU)
            there -= g * own(entries, c, hi, lo)
            mine = exists & ((place // BLOCK) % SPLITS == split)
            tl.store(dx_ptr + where[2] + place, there.to(dx_ptr.dtype.element_ty), mask=mine)


@triton.jit
def loss_forward_kernel(
    x_ptr, k_ptr, mask_ptr, offsets_ptr, labels_ptr, starts_ptr, weight_ptr, loss_ptr, nu_ptr,
    rows, n, size, k_stride, per_row,
    BLOCK: tl.constexpr, LOOP: tl.constexpr, LABELS: tl.constexpr,
):  # fmt: skip
    """Compute nu and the loss for row program_id(0), and whether the row has a label."""
    row, where, x, hi, lo, share = solve_row(
        x_ptr, k_ptr, mask_ptr, offsets_ptr, nu_ptr, rows, n, size, k_stride, BLOCK, LOOP
    )
    labels = (labels_ptr, starts_ptr, weight_ptr, per_row)
    loss, _, _, found, _ = label_sums(x, where, labels, row, 0, hi, lo, share, BLOCK, LOOP, 1, LABELS)
    tl.store(loss_ptr + row, loss.to(tl.float32))
    tl.store(loss_ptr + rows + row, (found > 0).to(tl.float32))


@triton.jit
def loss_backward_kernel(
    grad_ptr, x_ptr, k_ptr, nu_ptr, mask_ptr, offsets_ptr, labels_ptr, starts_ptr, weight_ptr, dx_ptr, dk_ptr,
    rows, n, size, k_stride, grad_stride, per_row,
    BLOCK: tl.constexpr, LOOP: tl.constexpr, LABELS: tl.constexpr,
):  # fmt: skip
    """Compute dx and dk for row program_id(0)."""
    row, _, where, hi, lo = locate_part(x_ptr, mask_ptr, offsets_ptr, nu_ptr, rows, n, size)
    x = read(where, 0, BLOCK)
    nearest, total, _ = slope(x, x, where, grad_ptr, BLOCK, BLOCK, hi, lo, BLOCK, LOOP, _OF_NU)
    labels = (labels_ptr, starts_ptr, weight_ptr, per_row)
    _, push, tied, _, weighted = label_sums(x, where, labels, row, 0, hi, lo, 1.0, BLOCK, LOOP, 1, LABELS)
    # If all labels of a row have weight 0, the gradient must be 0. An infinite nu has this effect.
    hi = tl.where(weighted > 0, hi, float("-inf"))
    g = tl.load(grad_ptr + row * grad_stride)
    given = -g * push.to(tl.float32)
    # Write dk first or last, depending on LOOP: the other order spills registers on sm_80 or sm_90.
    if LOOP:
        write_dk(dk_ptr, k_ptr, k_stride, row, where, g, given, hi, nearest, total, tied, BLOCK)
    write_gradient(x, dx_ptr, where, labels, row, 0, g, given, hi, lo, nearest, total, BLOCK, LOOP, 1, LABELS)
    if not LOOP:
        write_dk(dk_ptr, k_ptr, k_stride, row, where, g, given, hi, nearest, total, tied, BLOCK)


@triton.jit
def split_loss_kernel(
    x_ptr, mask_ptr, offsets_ptr, labels_ptr, starts_ptr, weight_ptr, state_ptr, nu_ptr, parts_ptr,
    rows, n, size, per_row,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, LABELS: tl.constexpr,
):  # fmt: skip
    """Compute the contribution of program (row, split) to the loss of its row."""
    row, split, where, hi, lo = locate_part(x_ptr, mask_ptr, offsets_ptr, nu_ptr, rows, n, size)
    share = tl.load(state_ptr + row * WIDTH + 5)
    x = read(where, split * BLOCK, BLOCK)
    labels = (labels_ptr, starts_ptr, weight_ptr, per_row)
    loss, _, _, found, _ = label_sums(
        x, where, labels, row, split, hi, lo, share, BLOCK, True, SPLITS, LABELS
    )
    leave(parts_ptr + (row * SPLITS + split) * WIDTH, (loss, found))


@triton.jit
def add_loss_kernel(parts_ptr, loss_ptr, rows, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum the contributions of all programs to the loss of a row."""
    row = tl.program_id(0)
    part = parts_ptr + (row * SPLITS + tl.arange(0, SPLITS)) * WIDTH
    tl.store(loss_ptr + row, tl.sum(tl.load(part), 0).to(tl.float32))
    tl.store(loss_ptr + rows + row, (tl.sum(tl.load(part + 1), 0) > 0).to(tl.float32))


@triton.jit
def split_slope_kernel(
    x_ptr, nu_ptr, mask_ptr, offsets_ptr, labels_ptr, starts_ptr, weight_ptr, parts_ptr,
    rows, n, size, per_row,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, LABELS: tl.constexpr,
):  # fmt: skip
    """Compute the contribution of program (row, split) to the sums that the derivatives need."""
    row, split, where, hi, lo = locate_part(x_ptr, mask_ptr, offsets_ptr, nu_ptr, rows, n, size)
    x = read(where, split * BLOCK, BLOCK)
    labels = (labels_ptr, starts_ptr, weight_ptr, per_row)
    _, push, tied, _, weighted = label_sums(
        x, where, labels, row, split, hi, lo, 1.0, BLOCK, True, SPLITS, LABELS
    )
    first, stride = (split + SPLITS) * BLOCK, SPLITS * BLOCK
    nearest, total, _ = slope(x, x, where, x_ptr, first, stride, hi, lo, BLOCK, True, _OF_NU)
    leave(parts_ptr + (row * SPLITS + split) * WIDTH, (nearest, total, push, tied, weighted))


@triton.jit
def split_gradient_kernel(
    grad_ptr, x_ptr, k_ptr, nu_ptr, mask_ptr, offsets_ptr, labels_ptr, starts_ptr, weight_ptr, parts_ptr,
    dx_ptr, dk_ptr, rows, n, size, k_stride, grad_stride, per_row,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, LABELS: tl.constexpr,
):  # fmt: skip
    """Compute dx and dk. Every program adds up the few partial sums of its row, and the first writes dk."""
    row, split, where, hi, lo = locate_part(x_ptr, mask_ptr, offsets_ptr, nu_ptr, rows, n, size)
    g = tl.load(grad_ptr + row * grad_stride)
    part = parts_ptr + (row * SPLITS + tl.arange(0, SPLITS)) * WIDTH
    nearests = tl.load(part).to(tl.float32)
    nearest = tl.min(nearests, 0)
    total = tl.sum(tl.load(part + 1) * tl.exp(nearest - nearests), 0)
    push, tied = tl.sum(tl.load(part + 2), 0), tl.sum(tl.load(part + 3), 0)
    # As in `loss_backward_kernel`, the gradient is 0 if all labels have weight 0.
    hi = tl.where(tl.sum(tl.load(part + 4), 0) > 0, hi, float("-inf"))
    given = -g * push.to(tl.float32)
    if split == 0:
        write_dk(dk_ptr, k_ptr, k_stride, row, where, g, given, hi, nearest, total, tied, BLOCK)
    x = read(where, split * BLOCK, BLOCK)
    labels = (labels_ptr, starts_ptr, weight_ptr, per_row)
    write_gradient(
        x, dx_ptr, where, labels, row, split, g, given, hi, lo, nearest, total, BLOCK, True, SPLITS, LABELS
    )


def launch_forward(to: Launch, k: Tensor, labels: Labels, loss: Tensor) -> None:
    """Fill `nu` and `loss` (2, R)."""
    rows, n, size = to.sizes
    with torch.cuda.device_of(to.x):
        if to.plan.splits == 1:
            loss_forward_kernel[(rows,)](
                to.x, k, to.mask, to.offsets, *labels, loss, to.nu, rows, n, size, stride_of(k),
                labels.per_row, LOOP=to.plan.loop, LABELS=labels.block, **to.block,
            )  # fmt: skip
            return
        state, parts, split = triton_split.solve(to, k), triton_split.new_parts(to), triton_split.parts_of(to)
        split_loss_kernel[(rows, to.plan.splits)](
            to.x, to.mask, to.offsets, *labels, state, to.nu, parts, rows, n, size, labels.per_row,
            LABELS=labels.block, **split, **to.block,
        )  # fmt: skip
        add_loss_kernel[(rows,)](parts, loss, rows, **split, num_warps=1)


def launch_backward(to: Launch, grad: Tensor, k: Tensor, labels: Labels, dx: Tensor, dk: Tensor) -> None:
    """Fill `dx` and `dk`, given one gradient per row or a single gradient for all rows."""
    rows, n, size = to.sizes
    settings = {"LABELS": labels.block, **to.block}
    before = (grad, to.x, k, to.nu, to.mask, to.offsets, *labels)
    after = (rows, n, size, stride_of(k), stride_of(grad), labels.per_row)
    with torch.cuda.device_of(to.x):
        if to.plan.splits == 1:
            loss_backward_kernel[(rows,)](*before, dx, dk, *after, LOOP=to.plan.loop, **settings)
            return
        parts, grid = triton_split.new_parts(to), (rows, to.plan.splits)
        settings |= triton_split.parts_of(to)
        split_slope_kernel[grid](
            to.x, to.nu, to.mask, to.offsets, *labels, parts, rows, n, size, labels.per_row, **settings
        )
        split_gradient_kernel[grid](*before, parts, dx, dk, *after, **settings)
