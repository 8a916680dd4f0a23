"""nu, y and log y, one program to a row: the row is read once and solved on chip.

A row longer than its block keeps its first block on chip and streams the others, once per step.
"""
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchlml._kernels.cuda.plan import Launch, stride_of
from torchlml._kernels.cuda.triton_row import probability, read, solve_row, write


@triton.jit
def forward_kernel(
    x_ptr, k_ptr, mask_ptr, offsets_ptr, y_ptr, nu_ptr, rows, n, size, k_stride,
    BLOCK: tl.constexpr, LOOP: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """nu of row program_id(0); with `y_ptr` also its y or log y."""
    _, start, length, x, hi, lo, share = solve_row(
        x_ptr, k_ptr, mask_ptr, offsets_ptr, nu_ptr, rows, n, size, k_stride, BLOCK, LOOP
    )
    if y_ptr is not None:
        write(y_ptr, probability(x, hi, lo, share, LOG), start, 0, length, BLOCK)
        if LOOP:
            for at in range(BLOCK, length, BLOCK):
                block = read(x_ptr, mask_ptr, start, at, length, BLOCK)
                write(y_ptr, probability(block, hi, lo, share, LOG), start, at, length, BLOCK)


def launch(to: Launch, k: Tensor, y: Tensor | None, log: bool) -> None:
    """Fill `nu` and, unless None, `y` with y or log y."""
    rows, n, size = to.sizes
    with torch.cuda.device_of(to.x):
        forward_kernel[(rows,)](
            to.x, k, to.mask, to.offsets, y, to.nu, rows, n, size, stride_of(k),
            LOOP=to.plan.loop, LOG=log, **to.block,
        )  # fmt: skip
