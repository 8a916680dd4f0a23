"""Mathematical limits: k = 0, k = n, infinities, masks, short jagged rows, NaN, and empty tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

import torchlml
from tests.support import truth
from tests.support.special_rows import DENSE, INF, NAN, ORDINARY, SPECIAL, Special, gradient_of_k

each = pytest.mark.parametrize("row", DENSE, ids=lambda row: row.name)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
each_dual = pytest.mark.parametrize("dual", [torchlml.lml_dual, torchlml.lml_bracketing])


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-11, torch.float32: 1e-6, torch.bfloat16: 2.0**-9}[dtype]


def mask_of(row: Special) -> torch.Tensor | None:
    return None if row.mask is None else torch.tensor(row.mask)


def check(got: torch.Tensor, expected: list[float] | float, dtype: torch.dtype, limit: float = 0.0) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64)
    limit = limit or tolerance(dtype)
    torch.testing.assert_close(got.double(), wanted, rtol=limit, atol=limit, equal_nan=True)


@each
def test_the_table_agrees_with_the_reference(row: Special) -> None:
    check(torch.from_numpy(truth.projection(row.x, row.k, row.mask)), row.y, torch.float64)


@each
@each_dtype
def test_values(row: Special, dtype: torch.dtype) -> None:
    x, mask = torch.tensor(row.x, dtype=dtype), mask_of(row)
    y = torchlml.lml(x, row.k, mask=mask)
    check(y, row.y, dtype)
    exact = torch.tensor([value in (0, 1) for value in row.y])
    assert torch.equal(y[exact].double(), torch.tensor(row.y, dtype=torch.float64)[exact])
    logs = [NAN if math.isnan(value) else math.log(value) if value else -INF for value in row.y]
    check(torchlml.log_lml(x, row.k, mask=mask), logs, dtype)
    check(torchlml.lml_dual(x, row.k, mask=mask), row.nu, dtype)
    check(torchlml.lml_bracketing(x, row.k, mask=mask), row.nu, dtype)


@each_dtype
@each_dual
def test_values_of_jagged_batches(dtype: torch.dtype, dual: Callable[..., torch.Tensor]) -> None:
    rows = [ORDINARY, *[row for special in SPECIAL for row in (special, ORDINARY)]]
    offsets = torch.tensor([0, *np.cumsum([len(row.x) for row in rows])])
    x = torch.tensor([value for row in rows for value in row.x], dtype=dtype)
    mask = torch.tensor([value for row in rows for value in row.mask or [True] * len(row.x)])
    k = torch.tensor([row.k for row in rows], dtype=torch.float64)
    y = torchlml.lml(x, k, mask=mask, offsets=offsets).split([len(row.x) for row in rows])
    nu = dual(x, k, mask=mask, offsets=offsets)
    alone = torchlml.lml(torch.tensor(ORDINARY.x, dtype=dtype), ORDINARY.k)
    assert nu.shape == (len(rows),)
    for i, row in enumerate(rows):
        if row is ORDINARY:
            check(y[i], alone.tolist(), dtype)
        else:
            check(y[i], row.y, dtype)
            check(nu[i], row.nu, dtype)


@pytest.mark.parametrize("name", ["lml", "log_lml", "lml_dual"])
@pytest.mark.parametrize("ragged", [False, True])
@each
@each_dtype
def test_gradients(row: Special, dtype: torch.dtype, ragged: bool, name: str) -> None:
    x = torch.tensor(row.x, dtype=dtype, requires_grad=True)
    k = torch.tensor(float(row.k), dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, len(row.x)]) if ragged else None
    out = getattr(torchlml, name)(x, k.expand(1) if ragged else k, mask=mask_of(row), offsets=offsets)
    # Unavailable entries also receive an upstream gradient. It must be ignored, not multiplied by log 0.
    g = [1.0 + i for i in range(len(row.x))]
    upstream = torch.tensor(g if name != "lml_dual" else 2.0, dtype=dtype).expand(out.shape)
    out.backward(upstream)
    assert x.grad is not None
    assert k.grad is not None
    if math.isnan(row.nu):
        assert bool(x.grad.isnan().all()) or name == "lml_dual"
        return
    if math.isinf(row.nu):
        check(x.grad, [0.0] * len(row.x), dtype)
        dk = (
            gradient_of_k(row, g)
            * {"lml": 1.0, "log_lml": len([v for v in row.x if v == INF]) / (row.k or 1), "lml_dual": 0}[name]
        )
    else:
        solved = truth.solve(row.x, row.k, row.mask)
        if name == "lml_dual":
            dx, dk = solved.dual_gradient(2.0)
        else:
            dx, dk = getattr(solved, f"{name}_gradient")(np.array(g))
        check(x.grad, dx.tolist(), dtype, 4 * len(g) * tolerance(dtype))
    check(k.grad, dk, dtype, 4 * len(g) * tolerance(dtype))


@pytest.mark.parametrize("name", ["lml", "log_lml"])
@each_dtype
def test_nan_does_not_affect_other_rows(name: str, dtype: torch.dtype) -> None:
    clean = torch.randn(4, 50, dtype=torch.float64).to(dtype)
    dirty = clean.clone()
    dirty[1, 7] = NAN
    results = []
    for x in (clean, dirty):
        x.requires_grad_()
        y = getattr(torchlml, name)(x, 3)
        (y * torch.arange(50)).sum().backward()
        results.append((y.detach(), x.grad))
    others = [0, 2, 3]
    for a, b in zip(*results, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a[others], b[others])
        assert bool(b[1].isnan().all())


@each_dual
@pytest.mark.parametrize("name", ["lml", "log_lml"])
def test_empty_tensors(name: str, dual: Callable[..., torch.Tensor]) -> None:
    function = getattr(torchlml, name)
    for shape, k in [((3, 0), 0), ((0, 5), 2), ((0, 0), 0), ((2, 0, 4), 1.5), ((0,), 0)]:
        x = torch.empty(shape, requires_grad=True)
        out = function(x, k)
        assert out.shape == x.shape
        out.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert dual(x, k).shape == x.shape[:-1]
    values = torch.empty(0)
    assert function(values, 1, offsets=torch.tensor([0])).shape == (0,)
    assert function(values, 1, offsets=torch.tensor([0, 0, 0])).shape == (0,)
    assert dual(values, 1, offsets=torch.tensor([0])).shape == (0,)
    assert dual(values, 1, offsets=torch.tensor([0, 0])).tolist() == [INF]
