"""The limits of the mathematics: k = 0, k = m, infinities, masks, short packed rows, NaN, empty tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import torchlml
from tests.support import truth

INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Special:
    """A row, what its limit is (written by hand), its threshold and the gradient for k of `sum(g y)`."""

    name: str
    x: list[float]
    k: float
    y: list[float]
    nu: float
    mask: list[bool] | None = None
    short: bool = False  # k exceeds the length, which only a packed row may do


SPECIAL = [
    Special("k = 0", [1.0, -2.0, 0.5], 0, [0, 0, 0], -INF),
    Special("k = 0 with +inf", [1.0, INF, 0.5], 0, [0, 0, 0], -INF),
    Special("k = n", [1.0, -2.0, 0.5], 3, [1, 1, 1], INF),
    Special("k = n with +inf", [1.0, INF, 0.5], 3, [1, 1, 1], INF),
    Special("one entry, k = 1", [-7.0], 1, [1], INF),
    Special("one entry, k = 0", [-7.0], 0, [0], -INF),
    Special("-inf leaves m = k", [1.0, -INF, 0.5], 2, [1, 0, 1], INF),
    Special("-inf leaves m < k", [1.0, -INF, -INF], 2, [1, 0, 0], INF),
    Special("-inf leaves m < fractional k", [1.0, -INF, -INF], 1.5, [1, 0, 0], INF),
    Special("only -inf", [-INF, -INF], 1, [0, 0], INF),
    Special("only -inf, k = 0", [-INF, -INF], 0, [0, 0], -INF),
    Special("-inf and a tie", [2.0, 2.0, -INF, 2.0, 2.0], 1, [0.25, 0.25, 0, 0.25, 0.25], -2 - math.log(3)),
    Special("mask leaves m = k", [1.0, 3.0, 0.5], 2, [1, 0, 1], INF, [True, False, True]),
    Special("mask leaves m < k", [1.0, 3.0, 0.5], 2, [0, 0, 1], INF, [False, False, True]),
    Special("everything masked", [1.0, 3.0, 0.5], 2, [0, 0, 0], INF, [False] * 3),
    Special("everything masked, k = 0", [1.0, 3.0, 0.5], 0, [0, 0, 0], -INF, [False] * 3),
    Special("mask and -inf together", [1.0, -INF, 0.5, 4.0], 2, [1, 0, 1, 0], INF, [True, True, True, False]),
    Special("mask hides +inf", [0.0, INF, 0.0], 1, [0.5, 0, 0.5], 0, [True, False, True]),
    Special("mask hides NaN", [0.0, NAN, 0.0], 1, [0.5, 0, 0.5], 0, [True, False, True]),
    Special("mask hides NaN, k = m", [0.0, NAN, 0.0], 2, [1, 0, 1], INF, [True, False, True]),
    Special("p = 1 < k", [0.0, INF, 0.0], 2, [0.5, 1, 0.5], 0),
    Special(
        "p = 1 < fractional k", [INF, 1.0, 1.0, 1.0, 1.0], 1.8, [1, 0.2, 0.2, 0.2, 0.2], -1 - math.log(4)
    ),
    Special("p = k", [0.0, INF, 3.0, INF], 2, [0, 1, 0, 1], -INF),
    Special("p > k", [0.0, INF, 3.0, INF, INF], 2, [0, 2 / 3, 0, 2 / 3, 2 / 3], -INF),
    Special("p > fractional k", [0.0, INF, INF], 0.5, [0, 0.25, 0.25], -INF),
    Special("only +inf", [INF, INF, INF, INF], 1, [0.25] * 4, -INF),
    Special("+inf and -inf, p < k", [INF, -INF, 2.0, 2.0], 2, [1, 0, 0.5, 0.5], -2),
    Special("+inf and -inf, p > k", [INF, -INF, 2.0, INF], 1, [0.5, 0, 0, 0.5], -INF),
    Special("+inf and -inf, m = k", [INF, -INF, 2.0], 2, [1, 0, 1], INF),
    Special("NaN", [0.0, NAN, 1.0], 1, [NAN] * 3, NAN),
    Special("NaN, k = 0", [0.0, NAN, 1.0], 0, [NAN] * 3, NAN),
    Special("NaN, k = n", [0.0, NAN, 1.0], 3, [NAN] * 3, NAN),
    Special("NaN beside +inf", [INF, NAN, 1.0], 1, [NAN] * 3, NAN),
    Special("NaN beside a masked entry", [0.0, NAN, 1.0], 1, [NAN] * 3, NAN, [True, True, False]),
    Special("packed row as long as k", [1.0, 5.0], 2, [1, 1], INF),
    Special("packed row shorter than k", [1.0, 5.0], 3, [1, 1], INF, short=True),
    Special("packed row shorter than k, with NaN", [1.0, NAN], 3, [NAN, NAN], NAN, short=True),
    Special("empty packed row", [], 3, [], INF, short=True),
    Special("empty packed row, k = 0", [], 0, [], -INF, short=True),
    Special("an ordinary neighbour", [0.3, -1.0, 2.0, 0.0], 1.5, [], NAN),
]
ORDINARY = SPECIAL.pop()
DENSE = [row for row in SPECIAL if not row.short]
each = pytest.mark.parametrize("row", DENSE, ids=lambda row: row.name)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
each_dual = pytest.mark.parametrize("dual", [torchlml.lml_dual, torchlml.lml_bracketing])


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-11, torch.float32: 1e-6, torch.bfloat16: 2.0**-9}[dtype]


def mask_of(row: Special) -> torch.Tensor | None:
    return None if row.mask is None else torch.tensor(row.mask)


def gradient_of_k(row: Special, g: list[float]) -> float:
    """Only where +inf entries share k does a change of k change a special row: each takes 1/p of it."""
    above = [gi for xi, gi in zip(row.x, g, strict=True) if xi == INF]
    return sum(above) / len(above) if row.nu == -INF and len(above) > row.k > 0 else 0.0


def check(got: torch.Tensor, expected: list[float] | float, dtype: torch.dtype, limit: float = 0.0) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64)
    limit = limit or tolerance(dtype)
    torch.testing.assert_close(got.double(), wanted, rtol=limit, atol=limit, equal_nan=True)


@each
def test_the_table_agrees_with_the_limits(row: Special) -> None:
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
def test_values_of_packed_rows(dtype: torch.dtype, dual: Callable[..., torch.Tensor]) -> None:
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
    # entries that are not available get a gradient too: it must be ignored, not multiplied by log 0
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
def test_nan_does_not_touch_other_rows(name: str, dtype: torch.dtype) -> None:
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
