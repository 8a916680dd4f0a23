"""The two-sided projection: constraints, optimality, difficult inputs and invalid arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

import torchlml

F64 = torch.float64
ERROR = {torch.float32: 1e-4, torch.float64: 1e-9}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def check_sums(y: Tensor, k: Any, capacity: Any, limit: float) -> None:
    """Check that y is in [0, 1], rows sum to k, and column sums have a relative error of at most `limit`."""
    y = y.detach().double()
    assert 0 <= float(y.min()) <= float(y.max()) <= 1
    rows = torch.as_tensor(k, dtype=F64)
    assert float((y.sum(-1) - rows).abs().max()) <= 1e-6 * max(1, float(rows.max()))
    columns = torch.as_tensor(capacity, dtype=F64)
    error = (y.sum(-2) - columns).abs() / columns.clamp(min=1e-300)
    assert float(torch.where(columns > 0, error, y.sum(-2)).max()) <= limit


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("skew", [0, 1, 3, 10])
@pytest.mark.parametrize(("rows", "columns", "k"), [(2048, 32, 4), (9000, 16, 2), (1500, 96, 8)])
def test_sums_for_every_skew(rows: int, columns: int, k: int, skew: float, dtype: torch.dtype) -> None:
    x = (random(rows, columns) + skew * random(columns, seed=1)).to(dtype)
    check_sums(torchlml.balanced_lml(x, k), k, rows * k / columns, ERROR[dtype])


def one_preferred(gap: float) -> Tensor:
    return random(512, 16) + gap * (torch.arange(16) == 3)


HOSTILE: dict[str, tuple[Tensor, Any, Any]] = {
    "one expert preferred by 50": (one_preferred(50), 2, None),
    "one expert preferred by 1e4": (one_preferred(1e4), 2, None),
    "all equal": (torch.zeros(200, 8, dtype=F64), 3, None),
    "integer ties": (random(512, 16).round(), 2, None),
    "ties 1e4 apart": (1e4 * random(512, 16).round(), 2, None),
    "gaps of 100": (100 * random(512, 16), 2, None),
    "gaps of 1e4": (1e4 * random(512, 16), 2, None),
    "gaps of 1e8": (1e8 * random(64, 16), 2, None),
    "equal rows 1e4 apart": (1e4 * random(1, 16).expand(512, 16), 2, None),
    "one row": (5 * random(1, 4), 2, torch.tensor([0.2, 0.5, 0.9, 0.4], dtype=F64)),
    "one column": (random(16, 1), 0.5, None),
    "k = n": (random(16, 4), 4, None),
    "k close to n": (random(64, 16), 15.9999, None),
    "k close to 0": (random(64, 16), 1e-6, None),
    "k per row": (3 * random(64, 16), torch.linspace(0, 16, 64, dtype=F64), None),
    "capacity 0": (random(5, 4), 1, torch.tensor([0.0, 1.5, 1.5, 2.0], dtype=F64)),
    "capacity = number of rows": (random(5, 4), 2, torch.tensor([0.0, 5.0, 2.0, 3.0], dtype=F64)),
    "capacity close to 0": (random(50, 4), 2, torch.tensor([1e-6, 30.0, 30.0, 40 - 1e-6], dtype=F64)),
    "capacity close to the number of rows": (
        random(50, 4),
        2,
        torch.tensor([50 - 1e-6, 20, 20, 10 + 1e-6], dtype=F64),
    ),
    "unequal capacities": (3 * random(512, 4), 2, torch.tensor([10.0, 500.0, 100.0, 414.0], dtype=F64)),
    "magnitude 1e300": (1e300 * random(6, 3), 1, None),
}


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("name", HOSTILE)
def test_sums_for_hostile_inputs(name: str, dtype: torch.dtype) -> None:
    x, k, capacity = HOSTILE[name]
    if dtype == torch.float32 and "1e300" in name:
        x = x / 1e270
    y = torchlml.balanced_lml(x.to(dtype), k, capacity)
    total = float(torch.as_tensor(k, dtype=F64).expand(len(x)).sum())
    capacity = total / x.shape[1] if capacity is None else capacity
    check_sums(y, k, capacity, ERROR[dtype] + 2e-15 * float(x.abs().max()) * ("1e8" in name))


def test_nearly_hard_assignments_in_float32() -> None:
    """In some of these problems, rounding x + mu to float32 would by itself exceed the allowed error."""
    for seed in range(30):
        x = 60 * torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
        check_sums(torchlml.balanced_lml(x, 1), 1, 0.5, ERROR[torch.float32])


def tight(last: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return a problem in which 32 rows may use only four columns, whose capacity is 16 + `last` each."""
    mask = torch.ones(256, 16, dtype=torch.bool)
    mask[:32, 4:] = False
    first = torch.full((4,), 16.0 + last, dtype=F64)
    return random(256, 16), mask, torch.cat([first, (512 - first.sum()).expand(12) / 12])


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("slack", [0.0, 1e-7, 1.0])
def test_nearly_infeasible_masks(slack: float, dtype: torch.dtype) -> None:
    x, mask, capacity = tight(slack)
    y = torchlml.balanced_lml(x.to(dtype), 2, capacity, mask=mask)
    check_sums(y, 2, capacity, ERROR[dtype])
    assert not y[~mask].any()


def test_random_masks_with_a_known_feasible_point() -> None:
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        inside = torch.rand(30, 7, dtype=F64, generator=generator)
        mask = torch.rand(30, 7, generator=generator) < 0.5
        inside = torch.where(mask, inside.round() if seed % 2 else inside, 0)
        y = torchlml.balanced_lml(10 * random(30, 7, seed=seed), inside.sum(1), inside.sum(0), mask=mask)
        check_sums(y, inside.sum(1), inside.sum(0), 1e-9)


def entropy(y: Tensor) -> Tensor:
    return -(torch.xlogy(y, y) + torch.xlogy(1 - y, 1 - y)).sum()


@pytest.mark.parametrize("bound", ["exactly", "at_most"])
@pytest.mark.parametrize("seed", range(3))
def test_y_is_the_optimum_found_by_a_general_solver(bound: str, seed: int) -> None:
    x = 2 * random(4, 3, seed=seed)
    k = torch.tensor([1.0, 0.5, 2.0, 1.5], dtype=F64)
    capacity = torch.tensor([1.0, 2.5, 1.5], dtype=F64) * (1.3 if bound == "at_most" else 1)

    def negative(flat: np.ndarray) -> tuple[float, np.ndarray]:
        y = torch.from_numpy(flat).view(4, 3).requires_grad_()
        value = -((x * y).sum() + entropy(y))
        return value.item(), torch.autograd.grad(value, y)[0].flatten().numpy()

    kind = "eq" if bound == "exactly" else "ineq"
    constraints = [
        {"type": "eq", "fun": lambda f: f.reshape(4, 3).sum(1) - k.numpy()},
        {"type": kind, "fun": lambda f: capacity.numpy()[:2] - f.reshape(4, 3).sum(0)[:2]},
    ]
    if bound == "at_most":
        constraints.append(
            {"type": "ineq", "fun": lambda f: capacity.numpy()[2:] - f.reshape(4, 3).sum(0)[2:]}
        )
    found = minimize(
        negative,
        np.full(12, 0.4),
        jac=True,
        method="SLSQP",
        bounds=[(1e-9, 1 - 1e-9)] * 12,
        constraints=constraints,
        options={"ftol": 1e-14, "maxiter": 500},
    )
    y = torchlml.balanced_lml(x, k, capacity, bound=bound)
    np.testing.assert_allclose(y.flatten().numpy(), found.x, atol=2e-6)


def test_the_multipliers_give_y() -> None:
    x, capacity = 3 * random(40, 6), torch.tensor([5.0, 20.0, 15.0, 10.0, 25.0, 5.0], dtype=F64)
    nu, mu = torchlml.balanced_lml_dual(x, 2, capacity)
    y = torchlml.balanced_lml(x, 2, capacity)
    torch.testing.assert_close(torch.sigmoid(x + nu[:, None] + mu), y, rtol=0, atol=1e-9)
    assert abs(float(mu.mean())) < 1e-12
    # Columns whose capacity is 0 or the number of rows have infinite multipliers.
    _, mu = torchlml.balanced_lml_dual(random(5, 4), 2, torch.tensor([0.0, 5.0, 2.0, 3.0]))
    assert mu[0] == -math.inf
    assert mu[1] == math.inf
    assert mu[2:].isfinite().all()


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("factor", [1.0, 1.0001, 1.25, 4.0, 100.0])
def test_capacities_as_limits(factor: float, dtype: torch.dtype) -> None:
    x = (random(512, 16) + 3 * random(16, seed=1)).to(dtype)
    capacity = factor * 64
    y = torchlml.balanced_lml(x, 2, capacity, bound="at_most")
    _, mu = torchlml.balanced_lml_dual(x, 2, capacity, bound="at_most")
    sums = y.double().sum(0)
    assert float(mu.max()) == 0
    assert float((sums / capacity).max()) <= 1 + ERROR[dtype]
    # Complementary slackness: a column below its limit has a multiplier of 0.
    below = sums < capacity * (1 - 2 * ERROR[dtype])
    assert float(mu[below].abs().max() if below.any() else 0) <= ERROR[dtype]
    if factor == 100:
        torch.testing.assert_close(y, torchlml.lml(x, 2))


def test_a_batch_matches_its_separate_problems() -> None:
    x, k = 3 * random(2, 3, 20, 5), torch.tensor([[[1.0], [2.0], [1.5]]], dtype=F64).expand(2, 3, 20)
    y = torchlml.balanced_lml(x, k)
    nu, mu = torchlml.balanced_lml_dual(x, k)
    assert (y.shape, nu.shape, mu.shape) == (x.shape, x.shape[:-1], (2, 3, 5))
    for i in range(2):
        for j in range(3):
            alone = torchlml.balanced_lml(x[i, j], float(k[i, j, 0]))
            torch.testing.assert_close(y[i, j], alone, rtol=0, atol=1e-9)
            check_sums(y[i, j], k[i, j], float(k[i, j].sum()) / 5, 1e-9)
    assert torchlml.balanced_lml(x[:, :0], 2).shape == (2, 0, 20, 5)
    assert torchlml.balanced_lml(x[0, 0, :0], 2).shape == (0, 5)
    assert [t.shape for t in torchlml.balanced_lml_dual(x[:, :0], 2)] == [(2, 0, 20), (2, 0, 5)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    x = (random(256, 8) + 3 * random(8, seed=1)).to(dtype)
    y = torchlml.balanced_lml(x, 2)
    assert y.dtype == dtype
    assert torch.equal(y, torchlml.balanced_lml(x.float(), 2).to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torchlml.balanced_lml(x, 2).dtype == torch.float32


def test_start_does_not_change_the_result() -> None:
    x = random(300, 8) + 5 * random(8, seed=1)
    y = torchlml.balanced_lml(x, 2)
    for start in (
        torch.zeros(8),
        1e3 * random(8, seed=2),
        torch.full((8,), math.inf),
        torch.tensor(math.nan),
    ):
        torch.testing.assert_close(torchlml.balanced_lml(x, 2, start=start), y, rtol=0, atol=1e-9)


X = torch.zeros(4, 3)
WRONG: dict[str, tuple[Callable[..., Any], type[Exception], list[str]]] = {
    "totals": (lambda f: f(X, 1, 2.0), ValueError, ["`k` sums to 4", "`capacity` sums to 6"]),
    "limits too low": (lambda f: f(X, 2, 1, bound="at_most"), ValueError, ["sums to 8", "sums to 3"]),
    "capacity < 0": (lambda f: f(X, 1, torch.tensor([-1.0, 2, 3])), ValueError, ["`capacity`", "-1"]),
    "capacity > rows": (
        lambda f: f(X, 2, torch.tensor([5.0, 2, 1])),
        ValueError,
        ["`capacity`", "column 0", "5", "4 available rows"],
    ),
    "capacity is a number < 0": (lambda f: f(X, 1, -3.0), ValueError, ["`capacity`", "nonnegative", "-3"]),
    "capacity NaN": (lambda f: f(X, 1, torch.tensor([math.nan, 2, 2])), ValueError, ["`capacity`", "nan"]),
    "capacity shape": (lambda f: f(X, 1, torch.ones(4)), ValueError, ["`capacity`", "(3,)", "(4,)"]),
    "capacity str": (lambda f: f(X, 1, "2"), TypeError, ["`capacity`", "'2'"]),
    "masked column": (
        lambda f: f(X, 1, mask=torch.tensor([True, True, False])),
        ValueError,
        ["column 2", "0 available rows"],
    ),
    "masked row": (
        lambda f: f(X, 2, mask=torch.tensor([[True], [False], [True], [True]]).expand(4, 3)),
        ValueError,
        ["`k`", "row 1", "k = 2", "0 available entries"],
    ),
    "masked set": (
        lambda f: f(X, 1, mask=torch.tensor([[1, 0, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]]).bool()),
        ValueError,
        ["No solution", "at least 2", "columns {0}", "1.33333"],
    ),
    "NaN": (lambda f: f(X * math.nan, 1), ValueError, ["`x`", "NaN"]),
    "+inf": (lambda f: f(X + math.inf, 1), ValueError, ["`x`", "+inf"]),
    "k > n": (lambda f: f(X, 4), ValueError, ["`k`", "k = 4", "3 available"]),
    "k < 0": (lambda f: f(X, -1), ValueError, ["`k`", "nonnegative", "-1"]),
    "k is huge": (lambda f: f(X, 10**400), ValueError, ["`k`", "1329 bits"]),
    "capacity is huge": (lambda f: f(X, 1, 10**400), ValueError, ["`capacity`", "1329 bits"]),
    "k shape": (lambda f: f(X, torch.ones(3)), ValueError, ["`k`", "(4,)", "(3,)"]),
    "x int": (lambda f: f(X.long(), 1), TypeError, ["`x`", "int64"]),
    "x 1-d": (lambda f: f(X[0], 1), ValueError, ["`x`", "1-d", "two dimensions"]),
    "x list": (lambda f: f([[1.0]], 1), TypeError, ["`x`", "list"]),
    "mask float": (lambda f: f(X, 1, mask=X), TypeError, ["`mask`", "float32"]),
    "mask shape": (
        lambda f: f(X, 1, mask=torch.ones(2, 3).bool()),
        ValueError,
        ["`mask`", "(4, 3)", "(2, 3)"],
    ),
    "x nested": (lambda f: f(torch.nested.nested_tensor([X]), 1), TypeError, ["`x`", "nested"]),
    "bound": (
        lambda f: f(X, 1, bound="at_least"),
        ValueError,
        ["`bound`", '"exactly" or "at_most", but', "at_least"],
    ),
    "unknown bound": (
        lambda f: f(X, 1, bound="few"),
        ValueError,
        ["`bound`", '"exactly" or "at_most", but', "few"],
    ),
    "start shape": (lambda f: f(X, 1, start=torch.ones(4)), ValueError, ["`start`", "(4,)", "(3,)"]),
    "group": (lambda f: f(X, 1, group=object()), ValueError, ["init_process_group"]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("function", [torchlml.balanced_lml, torchlml.balanced_lml_dual])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str, function: Any) -> None:
    call, kind, needles = WRONG[name]
    with pytest.raises(kind) as caught:
        call(function)
    for needle in needles:
        assert needle in str(caught.value)


def test_a_full_column_with_totals_that_differ_slightly():
    capacity = torch.tensor([5.0, 2 - 1e-5, 3.0, 0.0], dtype=torch.float64)
    y = torchlml.balanced_lml(torch.randn(5, 4, dtype=torch.float64), 2, capacity)
    torch.testing.assert_close(y.sum(0), capacity, rtol=0, atol=2e-5)
    torch.testing.assert_close(y.sum(1), torch.full((5,), 2.0, dtype=torch.float64))
