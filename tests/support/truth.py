"""Exact solutions of the projection, computed row by row without the library.

`solve` finds the dual variable by bisection. It writes `nu = d - anchor`, where `anchor` is the row's entry
at the threshold, so that `z = (x - anchor) + d` loses no digits when the logits are shifted by 1e7: the
difference is exact, and `d` is a small number. The residual is summed from `sigma(-|z|)`, because the entries
themselves may round to 1. `solve_with_mpmath` needs no such steps, because it uses 120 digits.
`test_accuracy.py` compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mpmath
import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Replaces an infinite logit. It is far above every finite test value, and its multiples do not overflow.
INFINITY_STAND_IN = 1e60


def _difference(x: Array, anchor: float) -> tuple[Array, Array]:
    """Return `x - anchor` as an unevaluated sum of two doubles, without rounding error (Knuth)."""
    high = x - anchor
    back = high - x
    return high, (x - (high - back)) - (anchor + back)


def _tails(z: Array) -> Array:
    """Return `sigma(-|z|)`, the distance from y to the nearer of 0 and 1, with full relative accuracy."""
    small = np.exp(-np.abs(z))
    return np.asarray(small / (1.0 + small))


def _exact_sum(terms: Array) -> float:
    """Sum with `math.fsum`, or with numpy's pairwise sum (relative error below 1e-14) for very long rows."""
    return math.fsum(terms.tolist()) if terms.size <= 20_000 else float(terms.sum())


@dataclass(frozen=True)
class Row:
    """A solved row, with all reference values that the tests need."""

    y: Array
    log_y: Array
    nu: float  # d - anchor, rounded once
    z: Array
    w: Array
    p: Array  # w / sum w
    sum_w: float
    alive: NDArray[np.bool_]  # available entries: not masked and not -inf

    def lml_gradient(self, g: Array) -> tuple[Array, float]:
        """Return the gradients of `sum(g * y)` with respect to x and k."""
        mean = float(self.p @ np.where(self.alive, g, 0.0))
        return self.w * (g - mean), mean

    def log_lml_gradient(self, g: Array) -> tuple[Array, float]:
        """Return the gradients of `sum(g * log y)` over the available entries, with respect to x and k."""
        upstream = np.where(self.alive, g, 0.0) * np.where(self.z > 0, _tails(self.z), 1.0 - _tails(self.z))
        total = _exact_sum(upstream)
        with np.errstate(divide="ignore", over="ignore"):
            return upstream - self.p * total, float(np.divide(total, self.sum_w)) if total else 0.0

    def dual_gradient(self, g: float) -> tuple[Array, float]:
        """Return the gradients of `g * nu` with respect to x and k."""
        return -g * self.p, g / self.sum_w


def solve(x: Sequence[float] | Array, k: float, mask: Sequence[bool] | None = None) -> Row:
    """Return the exact projection of one row for 0 < k < m, where m is the number of available entries.

    An entry at +inf is replaced by a very large number, which gives the limit of the projection.
    """
    full = np.asarray(x, dtype=np.float64)
    alive = full > -math.inf
    if mask is not None:
        alive &= np.asarray(mask, dtype=bool)
    if np.isnan(full[alive]).any() or not 0 < k < alive.sum():
        raise ValueError("`solve` accepts only ordinary rows. Use `projection` for special rows.")
    entries = np.minimum(full[alive], INFINITY_STAND_IN)
    anchor = float(np.sort(entries)[::-1][min(math.ceil(k), entries.size) - 1])
    values, counts = np.unique(entries, return_counts=True)  # evaluate tied entries once
    high, low = _difference(values, anchor)

    def residual(d: float) -> float:
        z = high + (low + d)
        above = z > 0
        tails = _tails(z) * counts
        # The surplus is exact if it is small. The tails are then added to a small number, not to a large sum.
        surplus = float(counts[above].sum()) - k
        if surplus == 0 and tails.max() < 1e-200:
            # In a gap so wide that the tails underflow, compare their logarithms.
            logs = np.log(counts) - np.abs(z)
            return float(np.logaddexp.reduce(logs[~above]) - np.logaddexp.reduce(logs[above]))
        return surplus + _exact_sum(np.where(above, -tails, tails))

    size = float(entries.size)
    lower = -float(high.max()) - math.log(size / k) - 1.0
    upper = -float(high.min()) - math.log1p(-k / size) + 1.0
    while upper - lower > 2.0**-62:
        middle = lower + (upper - lower) / 2
        if middle in (lower, upper):
            break
        lower, upper = (lower, middle) if residual(middle) > 0 else (middle, upper)
    d = lower + (upper - lower) / 2
    return _row(full, alive, anchor, d)


def _row(full: Array, alive: NDArray[np.bool_], anchor: float, d: float) -> Row:
    high, low = _difference(np.minimum(full[alive], INFINITY_STAND_IN), anchor)
    z_alive = high + (low + d)
    tails = _tails(z_alive)
    log_tails = -np.log1p(np.exp(-np.abs(z_alive)))
    log_w = -np.abs(z_alive) + 2 * log_tails
    p_alive = np.exp(log_w - log_w.max())
    p_alive /= _exact_sum(p_alive)

    def scatter(values: Array, elsewhere: float) -> Array:
        out = np.full(full.shape, elsewhere)
        out[alive] = values
        return out

    w = tails * (1.0 - tails)
    return Row(
        y=scatter(np.where(z_alive > 0, 1.0 - tails, tails), 0.0),
        log_y=scatter(np.minimum(z_alive, 0.0) + log_tails, -math.inf),
        nu=d - anchor,
        z=scatter(z_alive, -math.inf),
        w=scatter(w, 0.0),
        p=scatter(p_alive, 0.0),
        sum_w=_exact_sum(w),
        alive=alive,
    )


def projection(x: Sequence[float] | Array, k: float, mask: Sequence[bool] | None = None) -> Array:
    """Return the projection of any row, including limits (k = 0, too few entries, infinities) and NaN."""
    full = np.asarray(x, dtype=np.float64)
    available = np.ones(full.shape, dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
    if np.isnan(full[available]).any():
        return np.full(full.shape, math.nan)
    available &= full > -math.inf
    if k <= 0:
        return np.zeros(full.shape)
    if k >= available.sum():
        return available.astype(np.float64)
    return solve(full, k, mask).y


def solve_with_mpmath(x: Sequence[float], k: float, digits: int = 120) -> tuple[list[mpmath.mpf], mpmath.mpf]:
    """Return `(y, nu)` for a short finite row, by bisection in 120-digit arithmetic."""
    with mpmath.workdps(digits):
        entries = [mpmath.mpf(value) for value in x]
        target, size = mpmath.mpf(k), len(entries)
        scatter = mpmath.log(size / target) + mpmath.log(size / (size - target)) + 1
        lower, upper = -max(entries) - scatter, -min(entries) + scatter

        def values(nu: mpmath.mpf) -> list[mpmath.mpf]:
            return [1 / (1 + mpmath.exp(-(entry + nu))) for entry in entries]

        while upper - lower > mpmath.mpf(10) ** -25:
            middle = (lower + upper) / 2
            lower, upper = (lower, middle) if mpmath.fsum(values(middle)) > target else (middle, upper)
        return values(lower), lower


def plain(x: torch.Tensor, k: float | torch.Tensor) -> torch.Tensor:
    """Compute lml along the last dim by simple bisection in the dtype of x, for moderate logits."""
    target = torch.as_tensor(k, dtype=x.dtype).unsqueeze(-1) if isinstance(k, torch.Tensor) else float(k)
    lower = -x.amax(-1, keepdim=True) - 50
    upper = -x.amin(-1, keepdim=True) + 50
    for _ in range(100):
        middle = (lower + upper) / 2
        high = torch.sigmoid(x + middle).sum(-1, keepdim=True) > target
        lower, upper = torch.where(high, lower, middle), torch.where(high, middle, upper)
    return torch.sigmoid(x + (lower + upper) / 2)


def newton_from(x: torch.Tensor, k: float | torch.Tensor, nu: torch.Tensor, steps: int = 4) -> torch.Tensor:
    """Refine the dual variable nu with Newton steps in PyTorch, so that autograd can differentiate it."""
    for _ in range(steps):
        y = torch.sigmoid(x + nu.unsqueeze(-1))
        nu = nu - (y.sum(-1) - k) / (y * (1 - y)).sum(-1)
    return nu
