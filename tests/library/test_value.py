"""`lml_value`: its definition, its limit at low temperature and special rows."""

from __future__ import annotations

import math
from typing import Any

import torch

import torchlml
from tests.support import related
from tests.support.problems import Problem
from tests.support.related import each_dtype, each_problem_and_dtype

INF, NAN = math.inf, math.nan


@each_problem_and_dtype
def test_the_value(problem: Problem, dtype: torch.dtype) -> None:
    x = problem.row(dtype)
    expected, size = related.value(problem, dtype)
    expected = float(torch.tensor(expected, dtype=torch.float64).to(dtype))  # 5e38 is inf in float32
    got = torchlml.lml_value(x, problem.k)
    assert got.dtype == dtype
    if math.isinf(expected):
        assert float(got) == expected
        return
    # The relative error of exp(z) is |z| * eps, and only |z| up to 12 matters. Errors of tied entries add up.
    unit = torch.finfo(dtype).eps
    assert abs(float(got) - expected) <= 12 * unit * max(size, 1.0)
    with torch.no_grad():
        (differentiable, _) = torch.func.jvp(lambda x: torchlml.lml_value(x, problem.k), (x,), (x,))
    assert abs(float(differentiable) - expected) <= 12 * unit * max(size, 1.0)


def test_the_value_tends_to_the_sum_of_the_k_largest_logits() -> None:
    x = torch.randn(5, 30, dtype=torch.float64)
    limit = 1e-4 * torchlml.lml_value(x / 1e-4, 4)
    torch.testing.assert_close(limit, x.topk(4).values.sum(-1), rtol=0, atol=1e-3)


@each_dtype
def test_special_rows_of_the_value(dtype: torch.dtype) -> None:
    def value(row: list[float], k: float, **options: Any) -> list[float]:
        x = torch.tensor(row, dtype=dtype, requires_grad=True)
        target = torch.tensor(float(k), dtype=torch.float64, requires_grad=True)
        v = torchlml.lml_value(x, target, **options)
        dx, dk = torch.autograd.grad(v, (x, target))
        y = torchlml.lml(x, k, **options).detach()
        torch.testing.assert_close(dx, y, equal_nan=True)
        assert bool(dk.isfinite()) or math.isnan(float(v.detach()))
        return [float(v.detach()), float(dk)]

    assert value([1.0, -2.0, 0.5], 0) == [0, 0]
    assert value([1.0, -2.0, 0.5], 3) == [-0.5, 0]
    assert value([1.0, -INF, 0.5], 2) == [1.5, 0]
    assert value([1.0, NAN, 0.5], 2, mask=torch.tensor([True, False, True])) == [1.5, 0]
    assert value([1.0, INF, 0.5], 2)[0] == INF
    assert value([1.0, INF, 0.5], 0) == [0, 0]
    assert math.isnan(value([1.0, NAN, 0.5], 1)[0])
    assert torchlml.lml_value(torch.empty(3, 0), 0).tolist() == [0, 0, 0]
    assert torchlml.lml_value(torch.tensor([1.0, 2, 5]), 2, offsets=torch.tensor([0, 0, 2, 3])).tolist() == [
        0,
        3,
        5,
    ]
