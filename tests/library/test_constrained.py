"""Constrained softmax and sparsemax: the functions that they generalize, limits, and difficult rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import torchlml
from tests.support.related import ACCURACY, Member, each_constrained, each_dtype

INF, NAN = math.inf, math.nan


@each_dtype
def test_softmax_and_sparsemax_are_special_cases(dtype: torch.dtype) -> None:
    x = (torch.randn(20, 50, dtype=torch.float64) * 3).to(dtype)
    close: dict[str, Any] = {"rtol": 0, "atol": ACCURACY[dtype][0] / 10}
    torch.testing.assert_close(torchlml.constrained_softmax(x, 1), x.softmax(-1), **close)
    # The accuracy is guaranteed for entries up to 1, so entries up to 7.5 are scaled down.
    seven = torchlml.constrained_softmax(x, 7.5, upper=INF).double() / 7.5
    torch.testing.assert_close(seven, x.double().softmax(-1), **close)
    # Sparsemax from its definition: the threshold of the largest consistent support.
    ordered = x.double().sort(-1, descending=True).values
    places = torch.arange(1, 51, dtype=torch.float64)
    support = (1 + places * ordered > ordered.cumsum(-1)).sum(-1, keepdim=True)
    tau = (ordered.cumsum(-1).gather(-1, support - 1) - 1) / support
    sparse = (x.double() - tau).clamp(min=0)
    torch.testing.assert_close(torchlml.constrained_sparsemax(x, 1).double(), sparse, **close)
    torch.testing.assert_close(torchlml.constrained_sparsemax(x, 1, upper=INF).double(), sparse, **close)


def test_the_entmax_package_agrees() -> None:
    entmax = pytest.importorskip("entmax", reason="the package entmax is not installed")
    x = torch.randn(20, 50, dtype=torch.float64) * 3
    torch.testing.assert_close(torchlml.constrained_sparsemax(x, 1), entmax.sparsemax(x, -1))
    # In entmax, the budget is an upper limit on the sum. It is active for these rows.
    budget = entmax.budget_bisect(x, budget=5, dim=-1, n_iter=80)
    assert bool((x.clamp(0, 1).sum(-1) >= 5).all())
    torch.testing.assert_close(torchlml.constrained_sparsemax(x, 5), budget, rtol=0, atol=1e-9)


# (name, x, k, y, options). In the names, m and p are the numbers of available entries and of entries at +inf.
SPECIAL: list[tuple[str, list[float], float, list[float], dict[str, Any]]] = [
    ("k = 0", [1.0, -2.0, 0.5], 0, [0, 0, 0], {}),
    ("k = n", [1.0, -2.0, 0.5], 3, [1, 1, 1], {}),
    ("k = sum of the bounds", [1.0, -2.0, 0.5], 1.5, [0.5, 0.25, 0.75], {"upper": [0.5, 0.25, 0.75]}),
    ("-inf leaves m = k", [1.0, -INF, 0.5], 2, [1, 0, 1], {}),
    ("-inf leaves m < k", [1.0, -INF, -INF], 2, [1, 0, 0], {}),
    ("only -inf", [-INF, -INF], 1, [0, 0], {}),
    ("-inf and a tie", [2.0, 2.0, -INF, 2.0, 2.0], 1, [0.25, 0.25, 0, 0.25, 0.25], {}),
    ("mask leaves m < k", [1.0, 3.0, 0.5], 2, [0, 0, 1], {"mask": [False, False, True]}),
    ("everything masked", [1.0, 3.0], 1, [0, 0], {"mask": [False, False]}),
    (
        "mask hides +inf and NaN",
        [0.0, INF, NAN, 0.0],
        1,
        [0.5, 0, 0, 0.5],
        {"mask": [True, False, False, True]},
    ),
    ("p = 1 < k", [0.0, INF, 0.0], 2, [0.5, 1, 0.5], {}),
    ("p = k", [0.0, INF, 3.0, INF], 2, [0, 1, 0, 1], {}),
    ("p > k", [0.0, INF, 3.0, INF, INF], 2, [0, 2 / 3, 0, 2 / 3, 2 / 3], {}),
    (
        "+inf entries share k up to their bounds",
        [0.0, INF, INF, INF],
        1,
        [0, 0.2, 0.4, 0.4],
        {"upper": [1, 0.2, 1, 1]},
    ),
    ("bounds of 0", [5.0, 0.0, 0.0], 1, [0, 0.5, 0.5], {"upper": [0, 1, 1]}),
    ("NaN", [0.0, NAN, 1.0], 1, [NAN] * 3, {}),
    ("NaN, k = 0", [0.0, NAN, 1.0], 0, [NAN] * 3, {}),
]


@each_constrained
@pytest.mark.parametrize("special", SPECIAL, ids=lambda special: special[0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_special_rows(member: Member, special: Any, dtype: torch.dtype) -> None:
    _, row, k, expected, options = special
    dtypes = {"upper": torch.float64, "mask": torch.bool}
    tensors = {name: torch.tensor(option, dtype=dtypes[name]) for name, option in options.items()}
    x = torch.tensor(row, dtype=dtype, requires_grad=True)
    target = torch.tensor(float(k), dtype=torch.float64, requires_grad=True)
    y = member.function(x, target, **tensors)
    limit = {torch.float64: 1e-11, torch.float32: 1e-6, torch.bfloat16: 2.0**-9}[dtype]
    wanted = torch.tensor(expected, dtype=torch.float64)
    if "upper" in options:
        wanted = torch.minimum(wanted, tensors["upper"].double())
    torch.testing.assert_close(y.double(), wanted, rtol=limit, atol=limit, equal_nan=True)
    dx, dk = torch.autograd.grad(y, (x, target), torch.arange(1.0, len(row) + 1, dtype=dtype))
    if NAN in expected or wanted.isnan().any():
        assert bool(dx.isnan().all())
    else:
        assert bool(dx.isfinite().all())
        assert bool(dx[~torch.tensor(row).isfinite()].eq(0).all())
        assert bool(dk.isfinite())
    # A special row does not affect the ordinary rows in its batch.
    others = torch.randn(2, len(row)).to(dtype)
    batch = torch.stack([others[0], x.detach(), others[1]])
    options = {**tensors, "mask": tensors.get("mask", torch.ones(len(row), dtype=torch.bool))}
    mixed = member.function(batch, target.detach(), **options)
    assert torch.equal(mixed[0], member.function(others[0], target.detach(), **options))
    alone = member.function(x.detach(), target.detach(), **options)
    torch.testing.assert_close(mixed[1], alone, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("size", [20_000])
@pytest.mark.parametrize("gap", [3.0, 100.0])
@each_constrained
def test_long_staircases_converge(member: Member, gap: float, size: int) -> None:
    # A solver that saturates one entry per iteration would take size / 2 iterations.
    x = torch.arange(size, dtype=torch.float64) * gap
    y = member.function(x, size // 2)
    assert abs(float(y.sum()) - size // 2) <= 1e-6
    assert bool((y[size // 2 + 1 :] == 1).all())


def test_rounding_of_bounds_that_sum_to_k_is_tolerated() -> None:
    upper = torch.rand(50).softmax(0) * 3
    for function in (torchlml.constrained_softmax, torchlml.constrained_sparsemax):
        torch.testing.assert_close(function(torch.randn(50), 3, upper=upper), upper)


@pytest.mark.parametrize("ties", [1000, 100_000])
@pytest.mark.parametrize("excess", [1e-15, 1e-9, 3e-8, 1e-7, 9e-7])
@each_dtype
def test_many_entries_that_barely_exceed_their_caps(dtype: torch.dtype, excess: float, ties: int) -> None:
    # Without caps, exp(x + nu) would be 1 + excess for the tied entries. The excess removed by the caps goes
    # to the one free entry.
    x = torch.zeros(ties + 1, dtype=dtype)
    x[-1] = -1.0
    k = ties + math.exp(-1) + (ties + math.exp(-1)) * excess
    y = torchlml.constrained_softmax(x, k).double()
    assert (y[:-1] - 1).abs().max() <= ACCURACY[dtype][0]
    assert abs(float(y[-1]) - (k - ties)) <= 2 * ACCURACY[dtype][0]


@pytest.mark.parametrize("free", [1, 3])
@pytest.mark.parametrize("spread", [1e-7, 1e-6, 1e-5])
def test_entries_within_rounding_of_their_caps(spread: float, free: int) -> None:
    x = torch.randn(1057, generator=torch.Generator().manual_seed(0)) * spread
    order = x.double().sort().values
    # At this nu, `free` entries are below 1 and all others are at 1, so k follows from the definition.
    nu = -(order[free - 1] + order[free]) / 2
    truth = (x.double() + nu).exp().clamp(max=1)
    y = torchlml.constrained_softmax(x, float(truth.sum()))
    torch.testing.assert_close(y.double(), truth, rtol=0, atol=1e-6)
