"""The fast solver in pure PyTorch: a few cheap passes over a matrix, and a certificate for each row.

The solver computes e = exp(c - x) once, where c is near the threshold, and searches for delta = c + nu. With
u = exp(delta),

    y = sigmoid(x + nu) = u / (u + e),    t = sigmoid(-|x + nu|) = min(u, e) / (u + e),

so an evaluation needs only one more exponential per row, and an entry of -inf automatically gives 0. The
first steps are Halley steps on the log odds of sum(y), which are cheap but lose the digits of entries near 1.
The following steps use the signed sum of t described in `newton.py` and are accurate for every row. A row is
certified when such a step is short: the second derivative of sum(y) never exceeds the first, so the remaining
error is at most about half the square of the step. The caller solves uncertified rows with `newton`.

Every operation here rounds an entry in the same way regardless of its position, and finished rows are not
changed. The result for a row is therefore bitwise independent of the other rows.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchlml._rows import sum_rows, wide_dtype
from torchlml._solve.newton import add

# The maximum numbers of steps on the log odds and on the accurate sum. Evaluating the accurate sum takes
# about three times as long as evaluating the log odds. On a GPU, testing for convergence would synchronize,
# so the numbers of steps are fixed.
_ROUGH_STEPS, _ACCURATE_STEPS = 6, 12
_UNSYNCED_ROUGH_STEPS, _UNSYNCED_ACCURATE_STEPS = 4, 3
# The largest |delta|. At this distance, x - c has a rounding error of 5e-7 in float32.
_REACH = 16.0


class _Limits(NamedTuple):
    """The largest steps that end the two phases, and the smallest slope that allows a certificate."""

    rough: float  # a step on the log odds of at most this size ends the first phase
    last: float  # a step on the accurate sum of at most this size ends the second phase
    slope: float  # the smallest slope of a certified row, divided by its length


# After a Halley step s, the error is about s^3 / 6. The last step is then short, and the remaining error is
# below 1.3e-7 in float32 and 5e-13 in float64.
_LIMITS = {torch.float32: _Limits(0.12, 5e-4, 1e-20), torch.float64: _Limits(1.5e-2, 1e-6, 1e-200)}


class FastSolution(NamedTuple):
    """The solution for each row: e, u, the center c and delta. It is valid only in certified rows."""

    e: Tensor
    u: Tensor
    center: Tensor
    delta: Tensor
    certified: Tensor

    def y(self) -> Tensor:
        """Compute the projection; this overwrites e."""
        u = self.u.unsqueeze(-1)
        return torch.div(u, self.e.add_(u), out=self.e)

    def nu(self) -> Tensor:
        """Return the dual variable as a pair (2, R); see `newton.add`."""
        return add(torch.stack([-self.center, torch.zeros_like(self.center)]), self.delta)


def solve_fast(x: Tensor, k: Tensor) -> FastSolution:
    """Solve sum(sigmoid(x + nu)) = k for those rows of a matrix that converge within a few passes.

    Args:
        x: (R, n), float32 or float64, contiguous, with -inf for unavailable entries.
        k: the target sums, 0-d or one per row.
    """
    wide = wide_dtype(x.device)
    if k.device != x.device:
        k = torch.full((), k.item(), dtype=wide, device=x.device)  # a 0-d k is on the CPU
    k = k.to(wide).reshape(-1)
    scratch = x.new_empty(2, *x.shape)  # two temporary matrices, shared by all steps
    m, center = _guess(x, k, scratch[0])
    e = torch.sub(center.unsqueeze(-1), x).exp_()
    delta = _rough_steps(e, k, m, scratch)
    delta, certified = _accurate_steps(e, k, delta, scratch)
    return FastSolution(e, delta.exp().to(x.dtype), center, delta, certified & (delta.abs() < _REACH))


def on_host(x: Tensor) -> bool:
    """Whether values can be read without synchronizing a device."""
    return x.device.type == "cpu"


def _guess(x: Tensor, k: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """Return (m, c): the number of available entries per row, and an estimate of -nu.

    The estimate assumes normally distributed entries.
    """
    n = x.shape[1]
    total = sum_rows(x)
    m = k.new_full((1,), n)
    whole = on_host(x) and bool(total.isfinite().all())
    if not whole:
        m = sum_rows((x != -torch.inf).to(x.dtype)).to(k.dtype)
        torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0, out=scratch)
        total = sum_rows(scratch)
        x = scratch
    mean = total.to(k.dtype) / m
    torch.sub(x, mean.to(x.dtype).unsqueeze(-1), out=scratch)
    variance = sum_rows(scratch.mul_(scratch)).to(k.dtype)
    if not whole:
        variance = variance - (n - m) * mean * mean  # unavailable entries were counted as 0
    variance = (variance / m).clamp_(min=0)
    shared = whole and k.numel() == 1
    logit, probit, tail = _shared_quantiles(float(k), n, k.dtype) if shared else _quantiles(k, m)
    wide = (variance + 8 / math.pi).sqrt_() * probit
    narrow = logit - variance * tail
    nu = wide + (narrow - wide) * (2 / (2 + variance)) - mean
    return m, -nu.to(x.dtype)


def _quantiles(k: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logit of k / m, the normal quantile of k / m, and 1/2 - k / m."""
    p = torch.minimum(k, m - k) / m
    sign = (2 * k - m).sign()
    # Abramowitz and Stegun 26.2.23.
    t = (-2 * p.log()).sqrt()
    q = t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308)))
    return (k / (m - k)).log(), sign * q, sign * (p - 0.5)


@functools.lru_cache(maxsize=256)
def _shared_quantiles(k: float, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return `_quantiles` for rows that share k and have m = n, cached to save time on short rows."""
    return _quantiles(torch.tensor([k], dtype=dtype), torch.tensor([n], dtype=dtype))


def _rough_steps(e: Tensor, k: Tensor, m: Tensor, scratch: Tensor) -> Tensor:
    """Find delta to a few digits by Halley's method on log(S / (m - S)), S = sum(y), in the dtype of e."""
    # Use tensors, because torch converts Python numbers in each operation, which takes as long as the
    # operation itself.
    one, limit = e.new_ones(1), e.new_full((1,), _LIMITS[e.dtype].rough)
    k, m = k.to(e.dtype), m.to(e.dtype)
    delta = e.new_zeros(e.shape[0])
    target = (k / (m - k)).log_()
    room, power = scratch.unbind()
    moving: Tensor | None = None
    for _ in range(_ROUGH_STEPS if on_host(e) else _UNSYNCED_ROUGH_STEPS):
        u = delta.exp().unsqueeze_(-1)
        y = torch.div(u, torch.add(e, u, out=room), out=room)
        s = sum_rows(y)
        squares = sum_rows(torch.mul(y, y, out=power))
        cubes = sum_rows(power.mul_(y))
        # S' = sum(w) and S'' = sum(w * (1 - 2 * y)), where w = y * (1 - y).
        slope, bend = s - squares, torch.add(s, squares, alpha=-3).add_(cubes, alpha=2)
        rest = m - s
        product = s * rest
        step = (target - (s / rest).log_()).mul_(product).div_(slope * m)
        # So far, `step` is a Newton step on f = log(S / (m - S)). Halley's correction to it contains half of
        # f'' / f' = S'' / S' - S' * (1 / S - 1 / (m - S)).
        curvature = bend.div_(slope).sub_(slope.mul_(rest.sub_(s)).div_(product))
        step.div_(torch.addcmul(one, curvature, step, value=0.5).clamp_(0.5, 2))
        step = step if moving is None else step.mul_(moving)
        delta = delta.add_(step).clamp_(-_REACH, _REACH)
        large = step.abs_() > limit
        # Rows whose step was small are finished and no longer change.
        moving = large.to(e.dtype)
        if on_host(e) and not bool(large.any()):
            break
    return delta


def _accurate_steps(e: Tensor, k: Tensor, delta: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (delta, certified) by Newton's method on log A - log B (see `newton`).

    The last step of each row is a Newton step on the sum itself.
    """
    sync = on_host(e)
    delta = delta.to(k.dtype)
    certified = torch.zeros_like(delta, dtype=torch.bool)
    where, found = None, delta
    for _ in range(_ACCURATE_STEPS if sync else _UNSYNCED_ACCURATE_STEPS):
        sums = _accurate_sums(e, k, delta, scratch)
        plain = sums.value / sums.slope
        done = (plain.abs() <= _LIMITS[e.dtype].last) & (sums.slope >= _LIMITS[e.dtype].slope * e.shape[1])
        all_done = sync and bool(done.all())
        delta = delta - (plain if all_done else torch.where(done, plain, sums.log_ratio_step()))
        if not sync:
            delta = found = torch.where(certified, found, delta)
            certified = certified | done
            continue
        if where is None:
            found, certified = delta, done
        else:
            found[where], certified[where] = delta, done
        if all_done:
            break
        left = (~done & (delta.abs() < _REACH)).nonzero().squeeze(-1)
        if left.numel() == 0:
            break
        # Continue with the unfinished rows only.
        where = left if where is None else where[left]
        e, delta, scratch = e[left], delta[left], scratch[:, : left.numel()]
        k = k if k.numel() == 1 else k[left]
    return found, certified


class _Sums(NamedTuple):
    """The sums over each row that a step needs, in the notation of `newton.py`.

    They are c, sum(s * t), sum(t), sum(w) and sum(s * w), where s is 1 for z < 0 and -1 for z > 0.
    """

    c: Tensor
    signed: Tensor
    total: Tensor
    slope: Tensor
    signed_slope: Tensor

    @property
    def value(self) -> Tensor:
        return self.c + self.signed

    def log_ratio_step(self) -> Tensor:
        """Return the amount to subtract from nu: the Newton step on log A - log B, or 0 if it is NaN."""
        least = 1e-8 * self.total
        a = torch.maximum((self.total + self.signed) / 2, least) + self.c.clamp(min=0)
        b = torch.maximum((self.total - self.signed) / 2, least) - self.c.clamp(max=0)
        slope = (self.slope + self.signed_slope) * b + (self.slope - self.signed_slope) * a
        return (2 * a * b * (a / b).log() / slope).clamp_(-_REACH, _REACH).nan_to_num_(0.0)


def _accurate_sums(e: Tensor, k: Tensor, delta: Tensor, scratch: Tensor) -> _Sums:
    u = delta.exp().to(e.dtype).unsqueeze_(-1)
    room, t = scratch.unbind()
    torch.minimum(e, u, out=t).div_(torch.add(e, u, out=room))
    sign = torch.sub(e, u, out=room).sign_()
    # The number of entries above the threshold, minus k. An entry with z = 0 has sign 0 and counts as half.
    c = (e.shape[1] - sum_rows(sign).to(k.dtype)) / 2 - k
    signed = sum_rows(sign.mul_(t), k.dtype)
    signed_slope = signed - sum_rows(sign.mul_(t))
    total = sum_rows(t).to(k.dtype)
    return _Sums(c, signed, total, total - sum_rows(t.mul_(t)), signed_slope)
