"""Operators related to lml, and their exact solutions, computed row by row without the library.

The two constrained projections use bisection in extended precision (`np.longdouble`), or with 120 digits
(`mpmath`) for short rows. Whether a bound on the sum is active follows from the sum of the sigmoids.
`lml_value` is computed from its definition, x.y + H(y), and not from the dual formula in the library.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

import torchlml
from tests.support.problems import BY_NAME, PROBLEMS, SHORT, Problem
from tests.support.truth import Array

Wide = np.longdouble


def capped(kind: str, x: Array, k: float, upper: Array) -> Array:
    """Solve `constrained_softmax` or `constrained_sparsemax` for a finite row with 0 < k < sum(upper)."""
    if x.size <= 12:
        return _capped_with_mpmath(kind, x, k, upper)
    # The few very long rows have no large entries, so double precision is sufficient for them.
    precision = Wide if x.size <= 20_000 else np.float64
    entries: Any = x.astype(precision)
    bounds: Any = upper.astype(precision)

    def values(nu: Any) -> Any:
        if kind == "constrained_softmax":
            return np.minimum(bounds, np.exp(np.minimum(entries + nu, 80)))
        return np.clip(entries + nu, 0, bounds)

    highest = np.log(np.maximum(bounds, 1e-300)) if kind == "constrained_softmax" else bounds
    lower = -entries.max() - precision(math.log(entries.size / k)) - 1
    lower, upper_end = min(lower, -entries.max()), (highest - entries).max() + 1
    for _ in range(300):
        middle = (lower + upper_end) / 2
        if middle in (lower, upper_end):
            break
        y = values(middle)
        # Subtract the entries at their bounds from k. Adding them to the small sum of the other entries would
        # lose digits of that sum.
        missing = k - bounds[y == bounds].sum()
        lower, upper_end = (lower, middle) if y[y < bounds].sum() > missing else (middle, upper_end)
    return np.asarray(values(lower), dtype=np.float64)


def _capped_with_mpmath(kind: str, x: Array, k: float, upper: Array) -> Array:
    with mpmath.workdps(120):
        entries, bounds = [mpmath.mpf(v) for v in x.tolist()], [mpmath.mpf(v) for v in upper.tolist()]
        soft = kind == "constrained_softmax"

        def values(nu: mpmath.mpf) -> list[mpmath.mpf]:
            if soft:
                return [min(b, mpmath.exp(min(e + nu, 100))) for e, b in zip(entries, bounds, strict=True)]
            return [min(b, max(mpmath.mpf(0), e + nu)) for e, b in zip(entries, bounds, strict=True)]

        ends = [mpmath.log(b) if soft else b for b in bounds if b > 0]
        lower = -max(entries) - abs(mpmath.log(len(entries) / mpmath.mpf(k))) - 1
        upper_end = max(ends) - min(entries) + 1
        while upper_end - lower > mpmath.mpf(10) ** -40:
            middle = (lower + upper_end) / 2
            big = mpmath.fsum(values(middle)) > k
            lower, upper_end = (lower, middle) if big else (middle, upper_end)
        return np.array([float(v) for v in values(lower)])


def bounded(problem: Problem, dtype: torch.dtype, bound: str) -> Array:
    """Return lml with a bound on the sum: sigmoid(x) if it satisfies the bound, otherwise the projection."""
    x = problem.row(dtype).double().numpy()
    tails = np.exp(-np.abs(x))
    sigmoid = np.where(x > 0, 1.0, tails) / (1.0 + tails)
    total = math.fsum(sigmoid.tolist())
    kept = total <= problem.k if bound == "at_most" else total >= problem.k
    return np.asarray(sigmoid) if kept else problem.truth(dtype).y


def value(problem: Problem, dtype: torch.dtype) -> tuple[float, float]:
    """Return x.y + H(y), and the sum of the absolute values of its terms."""
    x, row = problem.row(dtype).double().numpy(), problem.truth(dtype)
    log_rest = np.minimum(-row.z, 0.0) - np.log1p(np.exp(-np.abs(row.z)))
    terms = np.concatenate([row.y * x, -row.y * row.log_y, -np.exp(log_rest) * log_rest])
    return math.fsum(terms.tolist()), float(np.abs(terms).sum())


@dataclass(frozen=True)
class Member:
    """A related operator: a function of (x, k) that maps a row to a row, and its exact solution."""

    name: str
    function: Callable[..., torch.Tensor]
    truth: Callable[[Problem, torch.dtype], Array]
    fixed_sum: bool = True
    upper: bool = False  # accepts an upper bound per entry


def _constrained(name: str) -> Member:
    def solve(problem: Problem, dtype: torch.dtype) -> Array:
        x = problem.row(dtype).double().numpy()
        return capped(name, x, problem.k, np.ones_like(x))

    return Member(name, getattr(torchlml, name), solve, upper=True)


def _bounded(bound: str) -> Member:
    return Member(
        bound,
        functools.partial(torchlml.lml, bound=bound),
        lambda problem, dtype: bounded(problem, dtype, bound),
        fixed_sum=False,
    )


MEMBERS = [
    _constrained("constrained_softmax"),
    _constrained("constrained_sparsemax"),
    _bounded("at_most"),
    _bounded("at_least"),
]
CONSTRAINED = MEMBERS[:2]
_BY_MEMBER = {member.name: member for member in MEMBERS}


@functools.cache
def _expected(member: str, problem: str, dtype: torch.dtype) -> Array:
    return _BY_MEMBER[member].truth(BY_NAME[problem], dtype)


def expected(member: Member, problem: Problem, dtype: torch.dtype) -> Array:
    """Return the exact result of an operator for one of the `PROBLEMS`. Results are cached."""
    return _expected(member.name, problem.name, dtype)


# Tolerances for each entry of a row, and for its sum.
ACCURACY = {torch.float32: (1e-6, 2e-6), torch.float64: (1e-11, 1e-11)}
each_member = pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
each_constrained = pytest.mark.parametrize("member", CONSTRAINED, ids=lambda member: member.name)
each_dtype = pytest.mark.parametrize("dtype", ACCURACY, ids=str)
# Rows with a million entries are slow in pure PyTorch and in the references, so each is tested in one dtype.
_ONE_DTYPE = {"a million normal, scale 5": torch.float32, "a million, k near n": torch.float64}
each_problem_and_dtype = pytest.mark.parametrize(
    ("problem", "dtype"),
    [
        pytest.param(problem, dtype, id=f"{dtype}-{problem.name}")
        for dtype in ACCURACY
        for problem in PROBLEMS
        if _ONE_DTYPE.get(problem.name, dtype) == dtype
    ],
)
SMALL = [problem for problem in SHORT if problem.row(torch.float64).numel() <= 200]


def each(problems: list[Problem]) -> pytest.MarkDecorator:
    """Run a test for each of the problems."""
    return pytest.mark.parametrize("problem", problems, ids=lambda problem: problem.name)


def bounds_for(n: int, k: float) -> Array:
    """Return upper bounds of various sizes, whose sum exceeds k. One bound is 0 if n > 2."""
    upper = 0.05 + (np.arange(n) * 0.618) % 1.7
    if n > 2:
        upper[1] = 0.0
    return upper * max(1.0, 1.3 * k / upper.sum())
