"""Test problems and tolerances for the compiled kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchlml._cpu import loader

INF, NAN = float("inf"), float("nan")
SOURCES = Path("torchlml/_cpu/csrc")
needs_kernel = pytest.mark.skipif(not loader.loaded(), reason="the compiled kernel is not in use")


def problem(dtype: torch.dtype, form: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return a batch of ordinary and special rows, as operator arguments (x, k, mask, offsets)."""
    generator = torch.Generator().manual_seed(0)
    n = 37  # not a multiple of any vector length
    x = torch.randn(24, n, generator=generator, dtype=torch.float64) * torch.logspace(-2, 2, 24)[:, None]
    x[3], x[4], x[5] = 1.0, torch.arange(n) * 30.0, x[5] + 1e4
    x[6, 2], x[7, :3], x[8, 5], x[9, 1:9], x[10, 3] = NAN, INF, -INF, INF, INF
    k = torch.randint(1, n, (24,), generator=generator).double()
    k[9], k[10], k[11], k[12], k[13], k[14] = 3.5, 1.0, 0.0, n, 0.25, n - 1e-6
    mask = torch.rand(24, n, generator=generator) < 0.7 if "mask" in form else None
    if form == "shared k":
        k = torch.tensor(5.0, dtype=torch.float64)
    if "packed" not in form:
        return x.to(dtype), k, mask, None
    lengths = torch.randint(0, 80, (24,), generator=generator)
    lengths[5], lengths[9] = 0, 1
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    values = torch.randn(int(offsets[-1]), generator=generator, dtype=torch.float64) * 4
    packed_mask = torch.rand(values.shape, generator=generator) < 0.7 if mask is not None else None
    return values.to(dtype), torch.minimum(k, lengths.double()), packed_mask, offsets


FORMS = ("dense", "shared k", "dense mask", "packed", "packed mask")
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    limit = TOLERANCE[dtype] * factor
    torch.testing.assert_close(got.double(), want.double(), rtol=limit, atol=limit, equal_nan=True)
