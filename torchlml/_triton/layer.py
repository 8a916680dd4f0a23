"""Kernels for y, log y, nu and their derivatives. Each program reads one row once and keeps it on chip.

If a row is longer than its block, its first block stays on chip, and the rest is streamed once per step. With
z = x + nu, w = sigmoid(z) * sigmoid(-z) and p = w / sum(w), an incoming gradient g of each result gives

    y:      dx = w * (g - dk),           dk = sum(p * g)
    log y:  dx = a - p * sum(a),         dk = sum(a) / sum(w),    a = g * sigmoid(-z)
    nu:     dx = -g * p,                 dk = g / sum(w)

To be accurate even if every w underflows, sums of w are multiplied by e^nearest, where `nearest` is the
smallest |z| in the row.
"""
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchlml._triton import Launch, stride_of
from torchlml._triton.row import LENGTH, locate_part, probability, read, solve_row, write

OF_Y, OF_LOG_Y, OF_NU = 0, 1, 2
_OF_Y, _OF_LOG_Y, _OF_NU = tl.constexpr(OF_Y), tl.constexpr(OF_LOG_Y), tl.constexpr(OF_NU)


@triton.jit
def forward_kernel(
    x_ptr, k_ptr, mask_ptr, offsets_ptr, y_ptr, nu_ptr, rows, n, size, k_stride,
    BLOCK: tl.constexpr, LOOP: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Compute nu for row program_id(0) and, if `y_ptr` is given, y or log y."""
    _, where, x, hi, lo, share = solve_row(
        x_ptr, k_ptr, mask_ptr, offsets_ptr, nu_ptr, rows, n, size, k_stride, BLOCK, LOOP
    )
    if y_ptr is not None:
        write(y_ptr, probability(x, hi, lo, share, LOG), where, 0, BLOCK)
        if LOOP:
            for at in range(BLOCK, where[LENGTH], BLOCK):
                block = read(where, at, BLOCK)
                write(y_ptr, probability(block, hi, lo, share, LOG), where, at, BLOCK)


@triton.jit
def read_gradient(grad_ptr, x, where, first, BLOCK: tl.constexpr, OF: tl.constexpr):
    """Read the incoming gradient for a block. At absent entries it is 0, even if the stored value is NaN."""
    _, _, start, length = where
    if OF == _OF_NU:
        g = tl.zeros([BLOCK], tl.float32)
    else:
        i = first + tl.arange(0, BLOCK)
        g = tl.load(grad_ptr + start + i, mask=i < length, other=0.0).to(tl.float32)
        g = tl.where(x == float("-inf"), 0.0, g)
    return g


@triton.jit
def slope_block(x, g, hi, lo, OF: tl.constexpr):
    """Return (nearest, sum(w), sum(w * g) or sum(a)) for a block. Sums of w are multiplied by e^nearest."""
    z = (x + hi) + lo
    live = tl.abs(x) < float("inf")
    distance = tl.where(live, tl.abs(z), float("inf"))
    nearest = tl.minimum(tl.min(distance, 0), 3.0e38)
    e = tl.exp(-distance)
    other = 1.0 / (1.0 + e)
    w = tl.exp(nearest - distance) * other * other
    slope = tl.sum(w, 0).to(tl.float64)
    if OF == _OF_LOG_Y:
        dot = tl.sum(tl.where(live, g * tl.where(z > 0, e, 1.0) * other, 0.0), 0).to(tl.float64)
    else:
        dot = tl.sum(tl.where(live, w * g, 0.0), 0).to(tl.float64)
    return nearest, slope, dot


@triton.jit
def slope(
    x, g, where, grad_ptr, first, stride, hi, lo, BLOCK: tl.constexpr, LOOP: tl.constexpr, OF: tl.constexpr
):
    """Combine the results of `slope_block` for the block `x`, which is on chip, and for all later blocks."""
    nearest, slope, dot = slope_block(x, g, hi, lo, OF)
    if LOOP:
        for at in range(first, where[LENGTH], stride):
            block = read(where, at, BLOCK)
            g_ = read_gradient(grad_ptr, block, where, at, BLOCK, OF)
            nearest_, slope_, dot_ = slope_block(block, g_, hi, lo, OF)
            nearer = tl.minimum(nearest, nearest_)
            old, new = tl.exp(nearer - nearest), tl.exp(nearer - nearest_)
            nearest, slope = nearer, slope * old + slope_ * new
            if OF == _OF_LOG_Y:
                dot = dot + dot_
            else:
                dot = dot * old + dot_ * new
    return nearest, slope, dot


@triton.jit
def gradient_of_k(nearest, slope, dot, hi, given, OF: tl.constexpr):
    """Compute dk for a row from its sums. If nu is not finite, dk is 0 or NaN."""
    if OF == _OF_NU:
        dk = given / slope.to(tl.float32)
    else:
        dk = dot.to(tl.float32) / slope.to(tl.float32)
    dk = dk.to(tl.float64)
    if OF != _OF_Y:
        dk = tl.where(dk == 0, 0.0, dk * tl.exp(nearest.to(tl.float64)))
    dk = tl.where((slope > 0) & (tl.abs(hi) < float("inf")), dk, 0.0)
    return tl.where(hi != hi, float("nan"), dk)


@triton.jit
def write_dk(
    dk_ptr, row, grad_ptr, where, y_ptr, hi, nearest, slope, dot, given, BLOCK: tl.constexpr, OF: tl.constexpr
):
    """Write dk for a row. If p > k entries are +inf, each gets y = k/p, which does not depend on x."""
    dk = gradient_of_k(nearest, slope, dot, hi, given, OF)
    if OF != _OF_NU:
        _, _, start, length = where
        total = tl.zeros([], tl.float64)
        count = tl.zeros([], tl.int32)
        # The loop is empty for rows in which nu is not -inf.
        for at in range(0, tl.where(hi == float("-inf"), length, 0), BLOCK):
            x = read(where, at, BLOCK)
            g = read_gradient(grad_ptr, x, where, at, BLOCK, OF)
            i = at + tl.arange(0, BLOCK)
            y = tl.load(y_ptr + start + i, mask=i < length, other=0.0).to(tl.float32)
            if OF == _OF_LOG_Y:
                tied = (x == float("inf")) & (y < 0) & (y > float("-inf"))
                g *= tl.exp(-y)
            else:
                tied = (x == float("inf")) & (y > 0) & (y < 1)
            total += tl.sum(tl.where(tied, g, 0.0), 0)
            count += tl.sum(tied.to(tl.int32), 0)
        dk += (total.to(tl.float32) / tl.maximum(count, 1).to(tl.float32)).to(tl.float64)
    tl.store(dk_ptr + row, dk)


@triton.jit
def gradient(x, g, hi, lo, nearest, slope, dot, given, OF: tl.constexpr):
    """Compute dx for a block."""
    z = (x + hi) + lo
    # True for the finite entries of rows with a finite nu.
    live = tl.abs(x) < tl.where(tl.abs(hi) < float("inf"), float("inf"), 0.0)
    distance = tl.abs(z)
    e = tl.exp(-distance)
    other = 1.0 / (1.0 + e)
    if OF == _OF_Y:
        dx = e * other * other * (g - dot.to(tl.float32) / slope.to(tl.float32))
    else:
        share = tl.exp(nearest - distance) * other * other / slope.to(tl.float32)
        if OF == _OF_LOG_Y:
            dx = g * tl.where(z > 0, e, 1.0) * other - share * dot.to(tl.float32)
        else:
            dx = -share * given
    dx = tl.where(live, dx, 0.0)
    return tl.where(hi != hi, float("nan"), dx)


@triton.jit
def backward_kernel(
    grad_ptr, x_ptr, y_ptr, nu_ptr, mask_ptr, offsets_ptr, dx_ptr, dk_ptr, rows, n, size,
    BLOCK: tl.constexpr, LOOP: tl.constexpr, OF: tl.constexpr,
):  # fmt: skip
    """Compute dx and dk for row program_id(0)."""
    row, _, where, hi, lo = locate_part(x_ptr, mask_ptr, offsets_ptr, nu_ptr, rows, n, size)
    x = read(where, 0, BLOCK)
    g = read_gradient(grad_ptr, x, where, 0, BLOCK, OF)
    nearest, total, dot = slope(x, g, where, grad_ptr, BLOCK, BLOCK, hi, lo, BLOCK, LOOP, OF)
    given = 0.0
    if OF == _OF_NU:
        given = tl.load(grad_ptr + row).to(tl.float32)
    write_dk(dk_ptr, row, grad_ptr, where, y_ptr, hi, nearest, total, dot, given, BLOCK, OF)
    write(dx_ptr, gradient(x, g, hi, lo, nearest, total, dot, given, OF), where, 0, BLOCK)
    if LOOP:
        for at in range(BLOCK, where[LENGTH], BLOCK):
            block = read(where, at, BLOCK)
            g_ = read_gradient(grad_ptr, block, where, at, BLOCK, OF)
            write(dx_ptr, gradient(block, g_, hi, lo, nearest, total, dot, given, OF), where, at, BLOCK)


def launch_forward(to: Launch, k: Tensor, y: Tensor | None, log: bool) -> None:
    """Fill `nu`. Unless `y` is None, also fill `y` with y or log y."""
    with torch.cuda.device_of(to.x):
        forward_kernel[to.sizes[:1]](
            to.x, k, to.mask, to.offsets, y, to.nu, *to.sizes, stride_of(k),
            LOOP=to.plan.loop, LOG=log, **to.block,
        )  # fmt: skip


def launch_backward(to: Launch, grad: Tensor, y: Tensor | None, dx: Tensor, dk: Tensor, of: int) -> None:
    """Fill `dx` and `dk` with the derivatives of y, log y or nu, as selected by `of`."""
    with torch.cuda.device_of(to.x):
        backward_kernel[to.sizes[:1]](
            grad, to.x, y, to.nu, to.mask, to.offsets, dx, dk, *to.sizes, LOOP=to.plan.loop, OF=of, **to.block
        )
