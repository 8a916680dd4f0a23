"""The LML loss and its derivatives, one program to a row: the row is solved on chip, and its labels are read.

With c for what a label counts, A = sum c (1 - y) over the labels of a row, and p = w / sum w,

    loss = -sum c log y,    dx_i = g (A p_i - c_i (1 - y_i)),    dk = -g A / sum w.

The first part of dx and dk are those of nu for a gradient of -g A. Of few, very long rows every program reads
the blocks and labels that are its own, as in `triton_split.py`; a program alone is split 0 of 1.
"""
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchlml._kernels.cuda import triton_split
from torchlml._kernels.cuda.plan import Launch, stride_of
from torchlml._kernels.cuda.triton_labels import (
    Labels,
    find_labels,
    label_sums,
    own,
    read_listed,
    read_observed,
)
from torchlml._kernels.cuda.triton_layer import _OF_NU, gradient, gradient_of_k, slope
from torchlml._kernels.cuda.triton_row import locate, locate_part, read, solve_row, write


@triton.jit
def tied_gradient(x_ptr, mask_ptr, start, length, k, g, hi, tied, BLOCK: tl.constexpr):
    """dk of a row in which p > k entries of +inf get k/p each: log(k/p) has the derivative 1/k."""
    p = tl.zeros([], tl.int32)
    # For any other row the loop is empty.
    for at in range(0, tl.where((hi == float("-inf")) & (tied != 0), length, 0), BLOCK):
        x = read(x_ptr, mask_ptr, start, at, length, BLOCK)
        p += tl.sum((x == float("inf")).to(tl.int32), 0)
    dk = -g * tied.to(tl.float32) / tl.maximum(k.to(tl.float32), 1e-37)
    return tl.where((k > 0) & (k < p), dk, 0.0).to(tl.float64)


@triton.jit
def write_gradient(
    x, x_ptr, mask_ptr, labels_ptr, starts_ptr, weight_ptr, dx_ptr, row, split, start, length, per_row,
    g, given, hi, lo, nearest, total,
    BLOCK: tl.constexpr, LOOP: tl.constexpr, SPLITS: tl.constexpr, LABELS: tl.constexpr,
):  # fmt: skip
    """dx of the blocks that are a program's own; `x` is the one on chip."""
    dx = gradient(x, x, hi, lo, nearest, total, total, given, _OF_NU)
    if LABELS == 0:
        c, _ = read_observed(labels_ptr, weight_ptr, start, split * BLOCK, length, BLOCK)
        dx -= g * own(x, c, hi, lo)
    write(dx_ptr, dx, start, split * BLOCK, length, BLOCK)
    if LOOP:
        for at in range((split + SPLITS) * BLOCK, length, SPLITS * BLOCK):
            block = read(x_ptr, mask_ptr, start, at, length, BLOCK)
            dx = gradient(block, block, hi, lo, nearest, total, total, given, _OF_NU)
            if LABELS == 0:
                c, _ = read_observed(labels_ptr, weight_ptr, start, at, length, BLOCK)
                dx -= g * own(block, c, hi, lo)
            write(dx_ptr, dx, start, at, length, BLOCK)
    if LABELS > 0:
        # Labels are written over what other threads of this program have just written.
        tl.debug_barrier()
        first, count, base = find_labels(row, starts_ptr, start, per_row)
        for at in range(0, count, LABELS):
            entries, c, _, place, exists = read_listed(
                x_ptr, mask_ptr, labels_ptr, weight_ptr, start, length, first, at, count, base, LABELS
            )
            there = gradient(entries, entries, hi, lo, nearest, total, total, given, _OF_NU)
            there -= g * own(entries, c, hi, lo)
            mine = exists & ((place // BLOCK) % SPLITS == split)
            tl.store(dx_ptr + start + place, there.to(dx_ptr.dtype.element_ty), mask=mine)


@triton.jit
def loss_forward_kernel(
    x_ptr, k_ptr, mask_ptr, offsets_ptr, labels_ptr, starts_ptr, weight_ptr, loss_ptr, nu_ptr,
    rows, n, size, k_stride, per_row,
    BLOCK: tl.constexpr, LOOP: tl.constexpr, LABELS: tl.constexpr,
):  # fmt: skip
    """nu and the loss of row program_id(0), and whether it has a label."""
    row, start, length, x, hi, lo, share = solve_row(
        x_ptr, k_ptr, mask_ptr, offsets_ptr, nu_ptr, rows, n, size, k_stride, BLOCK, LOOP
    )
    loss, _, _, found, _ = label_sums(
        x, x_ptr, mask_ptr, labels_ptr, starts_ptr, weight_ptr, row, 0, start, length, per_row, hi, lo, share,
        BLOCK, LOOP, 1, LABELS,
    )  # fmt: skip
    tl.store(loss_ptr + row, loss.to(tl.float32))
    tl.store(loss_ptr + rows + row, (found > 0).to(tl.float32))


@triton.jit
def loss_backward_kernel(
    grad_ptr, x_ptr, k_ptr, nu_ptr, mask_ptr, offsets_ptr, labels_ptr, starts_ptr, weight_ptr, dx_ptr, dk_ptr,
    rows, n, size, k_stride, grad_stride, per_row,
    BLOCK: tl.constexpr, LOOP: tl.constexpr, LABELS: tl.constexpr,
):  # fmt: skip
    """dx and dk of row program_id(0)."""
    row = tl.program_id(0)
    start, length = locate(row, offsets_ptr, n, size)
    hi, lo = tl.load(nu_ptr + row), tl.load(nu_ptr + rows + row)
    x = read(x_ptr, mask_ptr, start, 0, length, BLOCK)
    nearest, total, _ = slope(
        x, x, x_ptr, mask_ptr, grad_ptr, start, BLOCK, length, BLOCK, hi, lo, BLOCK, LOOP, _OF_NU
    )
    _, push, tied, _, felt = label_sums(
        x, x_ptr, mask_ptr, labels_ptr, starts_ptr, weight_ptr, row, 0, start, length, per_row, hi, lo, 1.0,
        BLOCK, LOOP, 1, LABELS,
    )  # fmt: skip
    # A row in which no label counts gets no gradient: that of an infinite nu is 0.
    hi = tl.where(felt > 0, hi, float("-inf"))
    g = tl.load(grad_ptr + row * grad_stride)
    given = -g * push.to(tl.float32)
    # dk comes first or last: in the other order registers are spilled on sm_80 or sm_90.
    if LOOP:
        dk = gradient_of_k(nearest, total, total, hi, given, _OF_NU)
        k = tl.load(k_ptr + row * k_stride)
        tl.store(dk_ptr + row, dk + tied_gradient(x_ptr, mask_ptr, start, length, k, g, hi, tied, BLOCK))
    write_gradient(
        x, x_ptr, mask_ptr, labels_ptr, starts_ptr, weight_ptr, dx_ptr, row, 0, start, length, per_row,
        g, given, hi, lo, nearest, total, BLOCK, LOOP, 1, LABELS,
    )  # fmt: skip
    if not LOOP:
        dk = gradient_of_k(nearest, total, total, hi, given, _OF_NU)
        k = tl.load(k_ptr + row * k_stride)
        tl.store(dk_ptr + row, dk + tied_gradient(x_ptr, mask_ptr, start, length, k, g, hi, tied, BLOCK))


@triton.jit
def split_loss_kernel(
    x_ptr, mask_ptr, offsets_ptr, labels_ptr, starts_ptr, weight_ptr, state_ptr, nu_ptr, parts_ptr,
    rows, n, size, per_row,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, LABELS: tl.constexpr,
):  # fmt: skip
    """The part of program (row, split) in the loss of its row."""
    row, split, start, length, hi, lo = locate_part(offsets_ptr, nu_ptr, rows, n, size)
    share = tl.load(state_ptr + row * WIDTH + 5)
    x = read(x_ptr, mask_ptr, start, split * BLOCK, length, BLOCK)
    loss, _, _, found, _ = label_sums(
        x, x_ptr, mask_ptr, labels_ptr, starts_ptr, weight_ptr, row, split, start, length, per_row,
        hi, lo, share, BLOCK, True, SPLITS, LABELS,
    )  # fmt: skip
    part = parts_ptr + (row * SPLITS + split) * WIDTH
    tl.store(part, loss)
    tl.store(part + 1, found.to(tl.float64))


@triton.jit
def add_loss_kernel(parts_ptr, loss_ptr, rows, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    """The loss of a row from its parts."""
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
    """The sums of program (row, split) that the derivatives need."""
    row, split, start, length, hi, lo = locate_part(offsets_ptr, nu_ptr, rows, n, size)
    x = read(x_ptr, mask_ptr, start, split * BLOCK, length, BLOCK)
    _, push, tied, _, felt = label_sums(
        x, x_ptr, mask_ptr, labels_ptr, starts_ptr, weight_ptr, row, split, start, length, per_row,
        hi, lo, 1.0, BLOCK, True, SPLITS, LABELS,
    )  # fmt: skip
    first, stride = (split + SPLITS) * BLOCK, SPLITS * BLOCK
    nearest, total, _ = slope(
        x, x, x_ptr, mask_ptr, x_ptr, start, first, length, stride, hi, lo, BLOCK, True, _OF_NU
    )
    part = parts_ptr + (row * SPLITS + split) * WIDTH
    tl.store(part, nearest.to(tl.float64))
    tl.store(part + 1, total)
    tl.store(part + 2, push)
    tl.store(part + 3, tied)
    tl.store(part + 4, felt.to(tl.float64))


@triton.jit
def split_gradient_kernel(
    grad_ptr, x_ptr, k_ptr, nu_ptr, mask_ptr, offsets_ptr, labels_ptr, starts_ptr, weight_ptr, parts_ptr,
    dx_ptr, dk_ptr, rows, n, size, k_stride, grad_stride, per_row,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, LABELS: tl.constexpr,
):  # fmt: skip
    """Every program adds up the parts of its row itself, which is little; the first one writes dk."""
    row, split, start, length, hi, lo = locate_part(offsets_ptr, nu_ptr, rows, n, size)
    k, g = tl.load(k_ptr + row * k_stride), tl.load(grad_ptr + row * grad_stride)
    part = parts_ptr + (row * SPLITS + tl.arange(0, SPLITS)) * WIDTH
    nearests = tl.load(part).to(tl.float32)
    nearest = tl.min(nearests, 0)
    total = tl.sum(tl.load(part + 1) * tl.exp(nearest - nearests), 0)
    push, tied = tl.sum(tl.load(part + 2), 0), tl.sum(tl.load(part + 3), 0)
    # As above: no gradient where no label counts.
    hi = tl.where(tl.sum(tl.load(part + 4), 0) > 0, hi, float("-inf"))
    given = -g * push.to(tl.float32)
    if split == 0:
        dk = gradient_of_k(nearest, total, total, hi, given, _OF_NU)
        tl.store(dk_ptr + row, dk + tied_gradient(x_ptr, mask_ptr, start, length, k, g, hi, tied, BLOCK))
    x = read(x_ptr, mask_ptr, start, split * BLOCK, length, BLOCK)
    write_gradient(
        x, x_ptr, mask_ptr, labels_ptr, starts_ptr, weight_ptr, dx_ptr, row, split, start, length, per_row,
        g, given, hi, lo, nearest, total, BLOCK, True, SPLITS, LABELS,
    )  # fmt: skip


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
    """Fill `dx` and `dk` for the gradient of each row's loss, or one for all."""
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
