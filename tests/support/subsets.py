"""Exact distributions over k-subsets, computed independently of torchlml, and the rows used in tests.

`enumerate_sets` sums over all sets with 60 digits. `dynamic_programming` runs the O(nk) recursion on
logarithms in extended precision. Unlike torchlml, neither uses exponential tilting or a Fourier transform.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import mpmath
import numpy as np
import torch

MP = mpmath.mp.clone()
MP.dps = 60


@dataclass(frozen=True)
class Exact:
    """Exact quantities for one row, as mpmath or extended-precision numbers."""

    log_normalizer: object
    inclusion: list
    exclusion: list  # 1 - inclusion, with full relative precision
    entropy: object = None
    sets: dict = field(default_factory=dict)  # members of a set -> log probability


def enumerate_sets(x: torch.Tensor, k: int) -> Exact:
    """Return all quantities for a row of up to 12 entries, which may include -inf."""
    values = [MP.mpf(float(v)) if math.isfinite(v) else None for v in x.tolist()]
    weights = {
        members: MP.exp(MP.fsum(values[i] for i in members))
        if all(values[i] is not None for i in members)
        else MP.mpf(0)
        for members in itertools.combinations(range(len(values)), k)
    }
    total = MP.fsum(weights.values())
    chances = {members: weight / total for members, weight in weights.items()}

    def log(members):
        """Return log P, computed from the weights of all other sets, so that it is accurate near P = 1."""
        if chances[members] == 0:
            return -MP.inf
        others = MP.fsum(w for other, w in weights.items() if other != members)
        return -MP.log1p(others / weights[members])

    logs = {members: log(members) for members in chances}
    n = len(values)
    return Exact(
        log_normalizer=MP.log(total),
        inclusion=[MP.fsum(p for s, p in chances.items() if i in s) for i in range(n)],
        exclusion=[MP.fsum(p for s, p in chances.items() if i not in s) for i in range(n)],
        entropy=-MP.fsum(p * logs[s] for s, p in chances.items() if p > 0),
        sets=logs,
    )


def dynamic_programming(x: torch.Tensor, k: int) -> Exact:
    """Return all quantities except `sets` for a finite row, computed in 80-bit floating point."""
    values = x.numpy().astype(np.longdouble)
    n = len(values)
    forward, backward = (_log_polynomials(each, k) for each in (values, values[::-1]))
    backward = backward[::-1]
    total = forward[n, k]

    def without(i, j):
        terms = forward[i, : j + 1] + backward[i + 1, : j + 1][::-1]
        largest = terms.max()
        return largest if np.isinf(largest) else largest + np.log(np.exp(terms - largest).sum())

    inclusion = np.exp(np.array([values[i] + without(i, k - 1) - total for i in range(n)]))
    exclusion = np.exp(np.array([without(i, k) - total for i in range(n)]))
    # The entropy is -log P for the set of the k largest entries, plus the expected difference between this
    # set's log P and that of a random set. This formula does not subtract large numbers from each other.
    order = np.argsort(-values, kind="stable")
    best, threshold = np.zeros(n, bool), values[order[k - 1 : k + 1]].mean()
    best[order[:k]] = True
    deviation = np.where(best, exclusion, inclusion)
    entropy = total - values[best].sum() + (deviation * np.abs(values - threshold)).sum()
    return Exact(total, list(inclusion), list(exclusion), entropy)


def _log_polynomials(values: np.ndarray, k: int) -> np.ndarray:
    """Return a table whose element (i, j) is log e_j(exp(values[:i])).

    e_j is the elementary symmetric polynomial of degree j.
    """
    table = np.full((len(values) + 1, k + 1), -np.inf, dtype=np.longdouble)
    table[0, 0] = 0
    for i, value in enumerate(values):
        table[i + 1, 0] = 0
        table[i + 1, 1:] = np.logaddexp(table[i, 1:], table[i, :-1] + value)
    return table


def count_inside(x: torch.Tensor, k: int, inside: torch.Tensor) -> np.ndarray:
    """Return the probability that j of the k chosen entries are in the mask `inside`, for j from 0 to k."""
    values = x.numpy().astype(np.longdouble)
    part, rest = (_log_polynomials(values[side], k)[-1] for side in (inside.numpy(), ~inside.numpy()))
    terms = part + rest[::-1]
    return np.exp(terms - np.logaddexp.reduce(terms)).astype(float)


def _row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _normal(n: int, scale: float, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, generator=generator, dtype=torch.float64) * scale + shift


INF = math.inf
# name -> row, k. All rows have at most 12 entries, so that all sets can be enumerated.
HOSTILE = {
    "ordinary": (_normal(10, 1.0), 4),
    "ties": (torch.zeros(12, dtype=torch.float64), 5),
    "ties at the threshold": (_row(5, 5, 2, 2, 2, 2, -1), 3),
    "one of three, tied": (torch.zeros(3, dtype=torch.float64), 1),
    "a pair": (_row(1.5, -0.25), 1),
    "an almost tied pair": (_row(0.1, 0.1 + 1e-15), 1),
    "k = 1": (_normal(12, 2.0), 1),
    "k = n - 1": (_normal(12, 2.0), 11),
    "k = 0": (_normal(6, 2.0), 0),
    "k = n": (_normal(6, 2.0), 6),
    "a single entry": (_row(3.5), 1),
    "gap of 20": (_row(20, 20.5, 19, 0, 0.5, -1, 1), 3),
    "gap of 40": (_row(40, 41, 39, 0, 0.5, -1), 3),
    "gap of 1e4": (_row(1e4, 1e4 + 1, 0, 0.5, -1), 2),
    "gap of 1e4, k inside the upper group": (_row(1e4, 1e4 + 1, 1e4 - 1, 0, 0.5, -1), 2),
    "gap of 1e4, k inside the lower group": (_row(1e4, 1e4 + 1, 0, 0.5, -1), 3),
    "staircase of 8": (_row(*(8.0 * i for i in range(10))), 4),
    "staircase of 700": (_row(*(700.0 * i for i in range(8))), 4),
    "shift of 1e6": (_normal(11, 1.0, 1e6), 4),
    "shift of -1e6": (_normal(11, 3.0, -1e6), 7),
    "scale 1e-9": (_normal(11, 1e-9), 3),
    "scale 50": (_normal(12, 50.0), 6),
    "-inf": (_row(1, -INF, 2, 0.5, -INF, -1), 2),
    "-inf, only one possible set": (_row(1, -INF, 2, 0.5), 3),
    # The variances of the number of successes (see torchlml/distributions/_counts.py) are on both sides of
    # 1/64, where torchlml switches methods.
    "variance just below 1/64": (_row(11.08, 11.08, 0, 0), 2),
    "variance just above 1/64": (_row(11.06, 11.06, 0, 0), 2),
    "one entry dominates": (_row(12, 0, 0, 0, 0, 0, -30), 1),
}
# n, k, scale. The variances of the number of successes are on both sides of 18, where torchlml switches
# methods, and of 100, where it changes the length of a series.
LONG = [(60, 30, 1.0), (120, 20, 0.5), (140, 22, 0.5), (400, 200, 0.1), (500, 200, 1.0), (1000, 990, 3.0),
        (2000, 5, 12.0), (2000, 60, 1.0), (2000, 1000, 0.0), (2000, 1400, 30.0)]  # fmt: skip


def long_row(n: int, scale: float) -> torch.Tensor:
    return _normal(n, scale)
