"""nu, y and log y, one program to a row: the row is read once and solved on chip.

A row longer than its block keeps its first block on chip and streams the others, once per step.
"""
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchlml._kernels.cuda.plan import Plan
from torchlml._kernels.cuda.triton_row import begin, iterate, locate, probability, read, survey, write


@triton.jit
def forward_kernel(
    x_ptr,
    k_ptr,
    mask_ptr,
    offsets_ptr,
    y_ptr,
    nu_ptr,
    rows,
    n,
    size,
    k_stride,
    BLOCK: tl.constexpr,
    LOOP: tl.constexpr,
    LOG: tl.constexpr,
):
    """nu of row program_id(0); with `y_ptr` also its y or log y."""
    row = tl.program_id(0)
    start, length = locate(row, offsets_ptr, n, size)
    k = tl.load(k_ptr + row * k_stride)
    x = read(x_ptr, mask_ptr, start, 0, length, BLOCK)
    # Few or many of the row? The start is nearer on that side.
    side = tl.where(2 * k <= length, 1.0, -1.0)
    undefined, m, p, top, bottom, total = survey(
        x, x_ptr, mask_ptr, start, BLOCK, length, BLOCK, side, BLOCK, LOOP
    )
    hi, lo, lower, upper, number, share = begin(k, undefined, m, p, top, bottom, total, side)
    hi, lo = iterate(x, x_ptr, mask_ptr, start, BLOCK, length, k, hi, lo, lower, upper, number, BLOCK, LOOP)
    tl.store(nu_ptr + row, hi)
    tl.store(nu_ptr + rows + row, lo)
    if y_ptr is not None:
        write(y_ptr, probability(x, hi, lo, share, LOG), start, 0, length, BLOCK)
        if LOOP:
            for at in range(BLOCK, length, BLOCK):
                block = read(x_ptr, mask_ptr, start, at, length, BLOCK)
                write(y_ptr, probability(block, hi, lo, share, LOG), start, at, length, BLOCK)


def launch(
    plan: Plan,
    x: Tensor,
    k: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    y: Tensor | None,
    nu: Tensor,
    log: bool,
) -> None:
    """Fill `nu` (2, R) and, unless None, `y` with y or log y."""
    rows = nu.shape[1]
    with torch.cuda.device_of(x):
        forward_kernel[(rows,)](
            x,
            k,
            mask,
            offsets,
            y,
            nu,
            rows,
            x.shape[-1],
            x.numel(),
            k.stride(0) if k.dim() else 0,
            BLOCK=plan.block,
            LOOP=plan.loop,
            LOG=log,
            num_warps=plan.warps,
        )
