"""Rows that the numerical tests share, each named after what makes it difficult."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.support import truth

Make = Callable[[torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """A named test row. `make` creates it in float64, and `row` rounds it to a dtype."""

    name: str
    k: float
    make: Make
    extreme: bool = False  # values outside the range of float16
    long: bool = False  # too long for some tests

    def row(self, dtype: torch.dtype) -> torch.Tensor:
        return self.make(torch.Generator().manual_seed(len(self.name))).to(dtype)

    def truth(self, dtype: torch.dtype) -> truth.Row:
        return _truth(self.name, dtype)


def _normal(n: int, scale: float = 1.0, shift: float = 0.0) -> Make:
    return lambda g: torch.randn(n, generator=g, dtype=torch.float64) * scale + shift


def _entries(*values: float) -> Make:
    return lambda g: torch.tensor(values, dtype=torch.float64)


def _ties(n: int, value: float = 0.0) -> Make:
    return lambda g: torch.full((n,), value, dtype=torch.float64)


def _stairs(n: int, gap: float) -> Make:
    return lambda g: torch.randperm(n, generator=g).double() * gap - 2 * gap


def _bimodal(n: int, gap: float) -> Make:
    def make(g: torch.Generator) -> torch.Tensor:
        x = torch.randn(n, generator=g, dtype=torch.float64)
        x[torch.randperm(n, generator=g)[: n // 3]] += gap
        return x

    return make


def _with(base: Make, **entries: float) -> Make:
    """Set individual entries of `base`: `_with(base, at3=1e4)` sets entry 3 to 1e4."""

    def make(g: torch.Generator) -> torch.Tensor:
        x = base(g)
        for place, value in entries.items():
            x[int(place.removeprefix("at"))] = value
        return x

    return make


def _tied_pair(low: float, high: float, n: int) -> Make:
    return lambda g: torch.tensor([low, high], dtype=torch.float64).repeat_interleave(n)


PROBLEMS = [
    Problem("one of one hundred", 1, _normal(100)),
    Problem("five of one hundred", 5, _normal(100, 3.0)),
    Problem("prime length", 7, _normal(101, 2.0)),
    Problem("vector width minus one", 3, _normal(7)),
    Problem("vector width plus one", 4, _normal(17)),
    Problem("a pair", 1, _entries(1.5, -0.25)),
    Problem("a single entry, fractional k", 0.3, _ties(1, 2.5)),
    Problem("fractional k", 2.5, _normal(50)),
    Problem("tiny k", 1e-6, _normal(50)),
    Problem("k just below n", 49.999, _normal(50)),
    Problem("k just below an integer", 2.999, _stairs(8, 30.0)),
    Problem("k just above an integer", 3.001, _stairs(8, 30.0)),
    Problem("k = n - 1", 999, _normal(1000, 4.0)),
    Problem("k = n / 2", 500, _normal(1000, 4.0)),
    Problem("k = n - 1, tied: outside the paper's bracket", 1097, _ties(1098)),
    Problem("k = 1, tied, one hundred thousand", 1, _ties(100_000)),
    Problem("k = n - 1, tied, one hundred thousand", 99_999, _ties(100_000)),
    Problem("tied at the threshold", 3, _entries(5.0, 5, 2, 2, 2, 2, -1)),
    Problem("scale 1e-6", 5, _normal(200, 1e-6)),
    Problem("scale 1e-2", 5, _normal(200, 1e-2)),
    Problem("scale 30", 5, _normal(200, 30.0)),
    Problem("scale 1e3", 20, _normal(200, 1e3)),
    Problem("scale 1e5", 20, _normal(200, 1e5), extreme=True),
    Problem("shift 1e3", 5, _normal(200, 1.0, 1e3)),
    Problem("shift -1e5", 5, _normal(200, 1.0, -1e5), extreme=True),
    Problem("shift 1e7", 5, _normal(200, 3.0, 1e7), extreme=True),
    Problem("shift -1e7, k near n", 198, _normal(200, 3.0, -1e7), extreme=True),
    Problem("an outlier of 1e4", 5, _with(_normal(200), at17=1e4)),
    Problem("an outlier of -1e4, k near n", 197, _with(_normal(200), at17=-1e4)),
    Problem("outliers on both sides", 5, _with(_normal(200), at17=1e4, at3=-1e4)),
    Problem("staircase, gap 1", 10, _stairs(40, 1.0)),
    Problem("staircase, gap 20", 10, _stairs(40, 20.0)),
    Problem("staircase, gap 100", 10, _stairs(40, 100.0)),
    Problem("staircase, gap 1000", 10, _stairs(40, 1000.0)),
    Problem("staircase, fractional k", 10.25, _stairs(40, 100.0)),
    Problem("bimodal, k inside the upper", 20, _bimodal(90, 40.0)),
    Problem("bimodal, k at the gap", 30, _bimodal(90, 40.0)),
    Problem("bimodal, k in the lower", 50, _bimodal(90, 40.0)),
    Problem("wide gap, k at it", 30, _bimodal(90, 400.0)),
    Problem("wide gap with ties", 64, _tied_pair(-300.0, 300.0, 64)),
    Problem("largest values", 2, _entries(3e38, 2e38, -1.0, 0, -3e38), extreme=True),
    Problem(
        "largest values, fractional k",
        1.5,
        _entries(3e38, -3e38, 0.0),
        True,
    ),
    Problem("largest values tied", 1, _entries(3e38, 3e38, -3e38), extreme=True),
    Problem(
        "threshold among the largest",
        2,
        _entries(3e38, 3e38, 3e38, 1.0),
        True,
    ),
    Problem("subnormals", 2, lambda g: torch.arange(6, dtype=torch.float64) * 1e-45, extreme=True),
    Problem("one hundred thousand at 17.3", 100_000, _with(_ties(100_002, 17.3), at0=0.0, at1=0.5)),
    Problem("one hundred thousand normal", 50, _normal(100_000, 3.0), long=True),
    # The outputs of the tied entries are 6e-8 below 1. These differences add up to the first output, 0.03.
    Problem("half a million almost one", 500_000, _with(_ties(500_001, 20.0), at0=0.0), long=True),
    Problem("a million normal, scale 5", 1000, _normal(1_000_000, 5.0), long=True),
    Problem("a million, k near n", 999_000, _normal(1_000_000, 2.0), long=True),
]
BY_NAME = {problem.name: problem for problem in PROBLEMS}
SHORT = [problem for problem in PROBLEMS if not problem.long]


@functools.cache
def _truth(name: str, dtype: torch.dtype) -> truth.Row:
    problem = BY_NAME[name]
    return truth.solve(problem.row(dtype).double().numpy(), problem.k)
