"""Constrained projections, and lml with a bound on the sum, have the accuracy guaranteed for lml.

The values are compared with exact solutions from `tests/support/related.py`.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from tests.support import related
from tests.support.problems import Problem
from tests.support.related import (
    ACCURACY,
    CONSTRAINED,
    SMALL,
    Member,
    bounds_for,
    each,
    each_constrained,
    each_dtype,
    each_member,
    each_problem_and_dtype,
)


def check(y: torch.Tensor, expected: np.ndarray, k: float | None, dtype: torch.dtype) -> None:
    entry, total = ACCURACY[dtype]
    assert y.dtype == dtype
    got = y.double().numpy()
    assert np.abs(got - expected).max() <= entry
    if k is not None:
        assert abs(math.fsum(got.tolist()) - k) <= total * max(1.0, k)
    assert got.min() >= 0


@pytest.mark.parametrize("kind", [member.name for member in CONSTRAINED])
@each([problem for problem in SMALL if problem.row(torch.float64).numel() <= 12 and not problem.extreme])
def test_the_reference_solution_is_right(kind: str, problem: Problem) -> None:
    # Extra entries with a bound of 0 change only the reference's algorithm, not the solution.
    x = problem.row(torch.float64).numpy()
    upper = bounds_for(x.size, problem.k)
    long = np.concatenate([x, np.zeros(20)]), np.concatenate([upper, np.zeros(20)])
    short_way, long_way = (related.capped(kind, a, problem.k, u) for a, u in ((x, upper), long))
    assert np.abs(short_way - long_way[: x.size]).max() <= 1e-15 * max(1.0, float(np.abs(x).max()))


@each_member
@each_problem_and_dtype
def test_values(member: Member, problem: Problem, dtype: torch.dtype) -> None:
    y = member.function(problem.row(dtype), problem.k)
    check(y, related.expected(member, problem, dtype), problem.k if member.fixed_sum else None, dtype)
    assert float(y.max()) <= 1


@each_constrained
@each(SMALL)
@each_dtype
def test_bounds_per_entry(member: Member, problem: Problem, dtype: torch.dtype) -> None:
    x = problem.row(dtype)
    upper = torch.from_numpy(bounds_for(x.numel(), problem.k)).to(dtype)
    y = member.function(x, problem.k, upper=upper)
    truth = related.capped(member.name, x.double().numpy(), problem.k, upper.double().numpy())
    scale = max(1.0, float(truth.max()))
    assert np.abs(y.double().numpy() - truth).max() <= scale * ACCURACY[dtype][0]
    assert abs(float(y.double().sum()) - problem.k) <= ACCURACY[dtype][1] * max(1.0, problem.k)
    assert bool((y <= upper).all())


@each_member
@each_dtype
def test_jagged_and_masked_rows(member: Member, dtype: torch.dtype) -> None:
    rows = [problem.row(dtype) for problem in SMALL]
    sizes = [row.numel() for row in rows]
    k = torch.tensor([problem.k for problem in SMALL], dtype=torch.float64)
    offsets = torch.tensor([0, *np.cumsum(sizes)])
    packed = member.function(torch.cat(rows), k, offsets=offsets).split(sizes)
    padded = torch.full((len(rows), 211), math.nan, dtype=dtype)
    mask = torch.zeros(len(rows), 211, dtype=torch.bool)
    for i, row in enumerate(rows):
        padded[i, 3 : 3 + row.numel()] = row
        mask[i, 3 : 3 + row.numel()] = True
    masked = member.function(padded, k, mask=mask)
    assert bool((masked[~mask] == 0).all())
    for i, problem in enumerate(SMALL):
        truth = related.expected(member, problem, dtype)
        for y in (packed[i], masked[i][mask[i]]):
            check(y, truth, problem.k if member.fixed_sum else None, dtype)


@each_member
@each([problem for problem in SMALL if not problem.extreme][::4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(member: Member, problem: Problem, dtype: torch.dtype) -> None:
    x = problem.row(dtype)
    y = member.function(x, problem.k)
    assert y.dtype == dtype
    truth = related.expected(member, problem, dtype)
    slack = 1e-6 * truth * max(1.0, float(x.abs().max())) + torch.finfo(torch.float32).tiny
    lowest, highest = (torch.from_numpy(truth + sign * slack).to(dtype) for sign in (-1, 1))
    assert bool(((lowest <= y) & (y <= highest)).all())


@each_member
def test_shapes(member: Member) -> None:
    x = torch.randn(3, 4, 5)
    y = member.function(x, 2, dim=1)
    torch.testing.assert_close(y, member.function(x.movedim(1, -1), 2).movedim(-1, 1))
    for shape, k in [((3, 0), 0), ((0, 5), 2), ((2, 0, 4), 1.5), ((0,), 0)]:
        assert member.function(torch.empty(shape), k).shape == shape
    assert member.function(torch.empty(0), 1, offsets=torch.tensor([0, 0])).shape == (0,)
    per_row = torch.tensor([1.0, 2.0, 3.5])
    rows = torch.stack([member.function(x[i], float(per_row[i])) for i in range(3)])
    torch.testing.assert_close(member.function(x, per_row.unsqueeze(-1)), rows)


@pytest.mark.parametrize("shape", [(57, 33), (1, 30_001), (3, 20_003)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@each_member
def test_threads_and_batches_do_not_change_the_bits(
    member: Member, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x = (torch.randn(shape, dtype=torch.float64) * 4).to(dtype)
    k = torch.linspace(0.5, shape[1] - 0.5, shape[0], dtype=torch.float64)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            leaf = x.clone().requires_grad_()
            y = member.function(leaf, k)
            (gradient,) = torch.autograd.grad(
                y, leaf, torch.linspace(-1, 1, shape[1], dtype=dtype).expand(shape)
            )
            results.append((y.detach(), gradient))
    finally:
        torch.set_num_threads(before)
    for a, b in itertools.pairwise(results):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    for i in {0, shape[0] // 2, shape[0] - 1}:
        assert torch.equal(member.function(x[i], k[i]), results[0][0][i])
