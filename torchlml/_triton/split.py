"""Kernels for a few very long rows: several programs share each row, and a small kernel sums their results.

Program (row, split) reads every `splits`-th block of its row. Each pass over the rows takes two launches. The
first stores each program's sums in memory. The second, with a single program per row, adds these sums in a
fixed order and updates nu. The number of launches is fixed, so the host does not synchronize with the device.
Converged rows are not read again, and a row that has not converged after `_STEPS` steps is finished by a
single program.
"""
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchlml._triton import Launch, stride_of
from torchlml._triton.layer import _OF_LOG_Y, _OF_NU, gradient, read_gradient, slope, write_dk
from torchlml._triton.row import (
    LENGTH,
    MAX_STEPS,
    begin,
    evaluate,
    iterate,
    leave,
    locate,
    locate_part,
    move,
    probability,
    read,
    shrink,
    survey,
    write,
)

# Rows of typical logits take six steps. Another step costs two launches, but finishing a row with a single
# program costs much more.
_STEPS = 9
WIDTH = 8  # the number of values stored per program, and per row


@triton.jit
def survey_kernel(
    x_ptr, k_ptr, mask_ptr, offsets_ptr, parts_ptr, n, size, k_stride,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute the statistics for the blocks of program (row, split)."""
    row, split = tl.program_id(0), tl.program_id(1)
    where = locate(row, x_ptr, mask_ptr, offsets_ptr, n, size)
    side = tl.where(2 * tl.load(k_ptr + row * k_stride) <= where[LENGTH], 1.0, -1.0)
    first, stride = split * BLOCK, SPLITS * BLOCK
    found = survey(read(where, first, BLOCK), where, first + stride, stride, side, BLOCK, True)
    leave(parts_ptr + (row * SPLITS + split) * WIDTH, found)


@triton.jit
def begin_kernel(
    k_ptr, offsets_ptr, parts_ptr, state_ptr, n, size, k_stride, SPLITS: tl.constexpr, WIDTH: tl.constexpr
):
    """Compute the initial state of a row from the statistics of its programs."""
    row = tl.program_id(0)
    _, _, _, length = locate(row, None, None, offsets_ptr, n, size)
    k = tl.load(k_ptr + row * k_stride)
    side = tl.where(2 * k <= length, 1.0, -1.0)
    part = parts_ptr + (row * SPLITS + tl.arange(0, SPLITS)) * WIDTH
    undefined = tl.sum(tl.load(part), 0)
    m, p = tl.sum(tl.load(part + 1), 0), tl.sum(tl.load(part + 2), 0)
    tops = tl.load(part + 3).to(tl.float32)
    top = tl.max(tops, 0)
    bottom = tl.min(tl.load(part + 4).to(tl.float32), 0)
    total = tl.sum(tl.load(part + 5) * shrink(tops, top), 0)
    state = begin(k, (undefined, m, p, top, bottom, total), side)
    leave(state_ptr + row * WIDTH, state)


@triton.jit
def kept(state_ptr, row, WIDTH: tl.constexpr):
    """Return the stored state of a row: (hi, lo, lower, upper, number)."""
    state = state_ptr + row * WIDTH
    hi, lo, number = tl.load(state), tl.load(state + 1), tl.load(state + 4).to(tl.int32)
    return hi, lo, tl.load(state + 2), tl.load(state + 3), number


@triton.jit
def evaluate_kernel(
    x_ptr, mask_ptr, offsets_ptr, state_ptr, parts_ptr, n, size,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute the contribution of program (row, split) to sum(y) - k. Converged rows are not read."""
    row, split = tl.program_id(0), tl.program_id(1)
    _, _, start, length = locate(row, x_ptr, mask_ptr, offsets_ptr, n, size)
    hi, lo, _, _, number = kept(state_ptr, row, WIDTH)
    length = tl.where(number < MAX_STEPS, length, 0)
    first, stride = split * BLOCK, SPLITS * BLOCK
    where = (x_ptr, mask_ptr, start, length)
    found = evaluate(read(where, first, BLOCK), where, first + stride, stride, hi, lo, BLOCK, True)
    leave(parts_ptr + (row * SPLITS + split) * WIDTH, found)


@triton.jit
def move_kernel(k_ptr, state_ptr, parts_ptr, k_stride, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    """Update nu for a row, using the sums from its programs."""
    row = tl.program_id(0)
    hi, lo, lower, upper, number = kept(state_ptr, row, WIDTH)
    if number < MAX_STEPS:
        part = parts_ptr + (row * SPLITS + tl.arange(0, SPLITS)) * WIDTH
        count = tl.sum(tl.load(part), 0)
        belows, aboves = tl.load(part + 1).to(tl.float32), tl.load(part + 2).to(tl.float32)
        below, above = tl.min(belows, 0), tl.min(aboves, 0)
        fall, rise = tl.exp(below - belows), tl.exp(above - aboves)
        p, q = tl.sum(tl.load(part + 3) * fall, 0), tl.sum(tl.load(part + 4) * rise, 0)
        dp, dq = tl.sum(tl.load(part + 5) * fall, 0), tl.sum(tl.load(part + 6) * rise, 0)
        k = tl.load(k_ptr + row * k_stride)
        found = (count, below, above, p, q, dp.to(tl.float32), dq.to(tl.float32))
        moved = move(k, hi, lo, lower, upper, number, found)
        leave(state_ptr + row * WIDTH, moved)


@triton.jit
def finish_kernel(
    x_ptr, k_ptr, mask_ptr, offsets_ptr, state_ptr, nu_ptr, rows, n, size, k_stride,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Iterate until nu has converged, unless it already has, and store it."""
    row = tl.program_id(0)
    where = locate(row, x_ptr, mask_ptr, offsets_ptr, n, size)
    hi, lo, lower, upper, number = kept(state_ptr, row, WIDTH)
    x = read(where, 0, BLOCK)
    k = tl.load(k_ptr + row * k_stride)
    hi, lo = iterate(x, where, k, hi, lo, lower, upper, number, BLOCK, True)
    tl.store(nu_ptr + row, hi)
    tl.store(nu_ptr + rows + row, lo)


@triton.jit
def write_kernel(
    x_ptr, mask_ptr, offsets_ptr, state_ptr, nu_ptr, y_ptr, rows, n, size,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Write y or log y for the blocks of program (row, split)."""
    row, split, where, hi, lo = locate_part(x_ptr, mask_ptr, offsets_ptr, nu_ptr, rows, n, size)
    share = tl.load(state_ptr + row * WIDTH + 5)
    for at in range(split * BLOCK, where[LENGTH], SPLITS * BLOCK):
        write(y_ptr, probability(read(where, at, BLOCK), hi, lo, share, LOG), where, at, BLOCK)


@triton.jit
def slope_kernel(
    grad_ptr, x_ptr, nu_ptr, mask_ptr, offsets_ptr, parts_ptr, rows, n, size,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, OF: tl.constexpr,
):  # fmt: skip
    """Compute the contribution of program (row, split) to the sums that the derivatives need."""
    row, split, where, hi, lo = locate_part(x_ptr, mask_ptr, offsets_ptr, nu_ptr, rows, n, size)
    first, stride = split * BLOCK, SPLITS * BLOCK
    x = read(where, first, BLOCK)
    g = read_gradient(grad_ptr, x, where, first, BLOCK, OF)
    found = slope(x, g, where, grad_ptr, first + stride, stride, hi, lo, BLOCK, True, OF)
    leave(parts_ptr + (row * SPLITS + split) * WIDTH, found)


@triton.jit
def gradient_kernel(
    grad_ptr, x_ptr, y_ptr, nu_ptr, mask_ptr, offsets_ptr, parts_ptr, dx_ptr, dk_ptr, rows, n, size,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, OF: tl.constexpr,
):  # fmt: skip
    """Compute dx and dk. Every program adds up the few partial sums of its row, and the first writes dk."""
    row, split, where, hi, lo = locate_part(x_ptr, mask_ptr, offsets_ptr, nu_ptr, rows, n, size)
    part = parts_ptr + (row * SPLITS + tl.arange(0, SPLITS)) * WIDTH
    nearests = tl.load(part).to(tl.float32)
    nearest = tl.min(nearests, 0)
    nearer = tl.exp(nearest - nearests)
    total, dots = tl.sum(tl.load(part + 1) * nearer, 0), tl.load(part + 2)
    if OF != _OF_LOG_Y:
        dots = dots * nearer
    dot = tl.sum(dots, 0)
    given = 0.0
    if OF == _OF_NU:
        given = tl.load(grad_ptr + row).to(tl.float32)
    if split == 0:
        write_dk(dk_ptr, row, grad_ptr, where, y_ptr, hi, nearest, total, dot, given, BLOCK, OF)
    for at in range(split * BLOCK, where[LENGTH], SPLITS * BLOCK):
        x = read(where, at, BLOCK)
        g = read_gradient(grad_ptr, x, where, at, BLOCK, OF)
        write(dx_ptr, gradient(x, g, hi, lo, nearest, total, dot, given, OF), where, at, BLOCK)


def solve(to: Launch, k: Tensor) -> Tensor:
    """Fill `nu`, and return the state of each row. The sixth value in a state is y at +inf entries."""
    rows, n, size = to.sizes
    x, mask, offsets, k_stride = to.x, to.mask, to.offsets, stride_of(k)
    parts, split = new_parts(to), parts_of(to)
    state = x.new_empty((rows, WIDTH), dtype=torch.float32)
    each, shared = (rows,), (rows, to.plan.splits)
    with torch.cuda.device_of(x):
        survey_kernel[shared](x, k, mask, offsets, parts, n, size, k_stride, **split, **to.block)
        begin_kernel[each](k, offsets, parts, state, n, size, k_stride, **split, num_warps=1)
        for _ in range(_STEPS):
            evaluate_kernel[shared](x, mask, offsets, state, parts, n, size, **split, **to.block)
            move_kernel[each](k, state, parts, k_stride, **split, num_warps=1)
        finish_kernel[each](
            x, k, mask, offsets, state, to.nu, rows, n, size, k_stride, WIDTH=WIDTH, **to.block
        )
    return state


def new_parts(to: Launch) -> Tensor:
    """Allocate memory for the partial results of every program."""
    return to.x.new_empty((to.sizes[0], to.plan.splits, WIDTH), dtype=torch.float64)


def parts_of(to: Launch) -> dict[str, int]:
    """Return the launch settings for a kernel that writes or reads partial results."""
    return {"SPLITS": to.plan.splits, "WIDTH": WIDTH}


def launch_forward(to: Launch, k: Tensor, y: Tensor | None, log: bool) -> None:
    """Like `layer.launch_forward`, for rows that are split among several programs."""
    state = solve(to, k)
    if y is None:
        return
    with torch.cuda.device_of(to.x):
        write_kernel[(to.sizes[0], to.plan.splits)](
            to.x, to.mask, to.offsets, state, to.nu, y, *to.sizes, LOG=log, **parts_of(to), **to.block
        )


def launch_backward(to: Launch, grad: Tensor, y: Tensor | None, dx: Tensor, dk: Tensor, of: int) -> None:
    """Like `layer.launch_backward`, for rows that are split among several programs."""
    parts, shared = new_parts(to), (to.sizes[0], to.plan.splits)
    rows, settings = (to.mask, to.offsets, parts), {**parts_of(to), **to.block, "OF": of}
    with torch.cuda.device_of(to.x):
        slope_kernel[shared](grad, to.x, to.nu, *rows, *to.sizes, **settings)
        gradient_kernel[shared](grad, to.x, y, to.nu, *rows, dx, dk, *to.sizes, **settings)
