"""The fast pure-PyTorch solver: a few cheap passes over a matrix, and a certificate for each row.

It stores e = exp(c - x) once, c being near the threshold, and searches delta = c + nu. With u = e^delta,

    y = sigmoid(x + nu) = u / (u + e),    t = sigmoid(-|x + nu|) = min(u, e) / (u + e),

so that no evaluation needs another exponential, and an entry at -inf gives 0 by itself. First come Halley's
steps on the log odds of sum y, which cost little but lose the digits of entries near 1; then steps on the sum
that `newton.residual` describes, of t with a sign, which is accurate for every row. A row is certified when
such a step is short: the second derivative of sum y never exceeds the first, so the error left is about half
its square. The caller solves the other rows by `newton`.

Every operation here rounds an entry the same way wherever it stands, and a row that is done is left alone:
the bits depend on the row, not on its neighbours.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchlml._rows import sum_rows, wide_dtype
from torchlml._solve.newton import add

# At most so many steps on the log odds, and on the accurate sum, whose evaluation takes three times as many
# operations. On a GPU, where reading the values would synchronize, the unsynced numbers of steps are taken.
_ROUGH_STEPS, _ACCURATE_STEPS = 6, 12
_UNSYNCED_ROUGH_STEPS, _UNSYNCED_ACCURATE_STEPS = 4, 3
# How far delta may go: x - c is rounded to half a millionth there.
_REACH = 16.0


class _Limits(NamedTuple):
    """When a row is done: the last step on the log odds, the last step at all, the least slope per entry."""

    rough: float
    last: float
    slope: float


# A step of Halley's leaves about a sixth of its cube: then the last step is short, and it leaves less than
# 1.3e-7 and 5e-13.
_LIMITS = {torch.float32: _Limits(0.12, 5e-4, 1e-20), torch.float64: _Limits(1.5e-2, 1e-6, 1e-200)}


class FastSolution(NamedTuple):
    """e, u, the center and delta of each row, valid in the certified rows only."""

    e: Tensor
    u: Tensor
    center: Tensor
    delta: Tensor
    certified: Tensor

    def y(self) -> Tensor:
        """The projection, written in place of e."""
        u = self.u.unsqueeze(-1)
        return torch.div(u, self.e.add_(u), out=self.e)

    def nu(self) -> Tensor:
        """The dual variable as a pair (2, R), see `newton.add`."""
        return add(torch.stack([-self.center, torch.zeros_like(self.center)]), self.delta)


def solve_fast(x: Tensor, k: Tensor) -> FastSolution:
    """Solve sum sigmoid(x + nu) = k for the rows of a matrix, as many as a few passes can.

    Args:
        x: (R, n) of float32 or float64, contiguous, -inf where an entry is not available.
        k: the target sums, 0-d or one per row.
    """
    wide = wide_dtype(x.device)
    if k.device != x.device:
        k = torch.full((), k.item(), dtype=wide, device=x.device)  # a number: it comes on the CPU
    k = k.to(wide).reshape(-1)
    scratch = x.new_empty(2, *x.shape)  # room for two matrices, for all steps
    m, center = _guess(x, k, scratch[0])
    e = torch.sub(center.unsqueeze(-1), x).exp_()
    delta = _rough_steps(e, k, m, scratch)
    delta, certified = _accurate_steps(e, k, delta, scratch)
    return FastSolution(e, delta.exp().to(x.dtype), center, delta, certified & (delta.abs() < _REACH))


def on_host(x: Tensor) -> bool:
    """Whether values can be read without synchronizing a device."""
    return x.device.type == "cpu"


def _guess(x: Tensor, k: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """(m, c): the available entries of each row, and -nu were its entries normally distributed."""
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
        variance = variance - (n - m) * mean * mean  # what is not available was taken for 0
    variance = (variance / m).clamp_(min=0)
    shared = whole and k.numel() == 1
    logit, probit, tail = _shared_quantiles(float(k), n, k.dtype) if shared else _quantiles(k, m)
    wide = (variance + 8 / math.pi).sqrt_() * probit
    narrow = logit - variance * tail
    nu = wide + (narrow - wide) * (2 / (2 + variance)) - mean
    return m, -nu.to(x.dtype)


def _quantiles(k: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of k / m: its logit, its quantile of the normal distribution, and how far it is from 1/2."""
    p = torch.minimum(k, m - k) / m
    sign = (2 * k - m).sign()
    # Abramowitz and Stegun 26.2.23.
    t = (-2 * p.log()).sqrt()
    q = t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308)))
    return (k / (m - k)).log(), sign * q, sign * (p - 0.5)


@functools.lru_cache(maxsize=256)
def _shared_quantiles(k: float, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The same where all rows share k and m = n, kept from call to call: short rows take no longer."""
    return _quantiles(torch.tensor([k], dtype=dtype), torch.tensor([n], dtype=dtype))


def _rough_steps(e: Tensor, k: Tensor, m: Tensor, scratch: Tensor) -> Tensor:
    """delta to a few digits, by Halley's method on log(S / (m - S)), all of it in the dtype of e."""
    # As tensors: a number would be made into one each time, which takes as long as the operation.
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
        # S' = sum w and S'' = sum w (1 - 2 y) with w = y (1 - y).
        slope, bend = s - squares, torch.add(s, squares, alpha=-3).add_(cubes, alpha=2)
        rest = m - s
        product = s * rest
        step = (target - (s / rest).log_()).mul_(product).div_(slope * m)
        # Newton's step so far; Halley's takes half of f'' / f' = S'' / S' - S' (1 / S - 1 / (m - S)) in.
        curvature = bend.div_(slope).sub_(slope.mul_(rest.sub_(s)).div_(product))
        step.div_(torch.addcmul(one, curvature, step, value=0.5).clamp_(0.5, 2))
        step = step if moving is None else step.mul_(moving)
        delta = delta.add_(step).clamp_(-_REACH, _REACH)
        large = step.abs_() > limit
        # A row whose step was small is left alone.
        moving = large.to(e.dtype)
        if on_host(e) and not bool(large.any()):
            break
    return delta


def _accurate_steps(e: Tensor, k: Tensor, delta: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """(delta, certified) by Newton's method on log A - log B, see `newton`, and a last plain step."""
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
        # Only the rows that are not done go on.
        where = left if where is None else where[left]
        e, delta, scratch = e[left], delta[left], scratch[:, : left.numel()]
        k = k if k.numel() == 1 else k[left]
    return found, certified


class _Sums(NamedTuple):
    """Sums over each row: c, s t, t, and the slopes of S in all and with the sign s, see `residual`."""

    c: Tensor
    signed: Tensor
    total: Tensor
    slope: Tensor
    signed_slope: Tensor

    @property
    def value(self) -> Tensor:
        return self.c + self.signed

    def log_ratio_step(self) -> Tensor:
        """Newton's step on log A - log B, see `newton`, to be taken from nu; 0 where a side is empty."""
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
    # How many are above the threshold; one with z = 0 counts half, and has the sign 0.
    c = (e.shape[1] - sum_rows(sign).to(k.dtype)) / 2 - k
    signed = sum_rows(sign.mul_(t), k.dtype)
    signed_slope = signed - sum_rows(sign.mul_(t))
    total = sum_rows(t).to(k.dtype)
    return _Sums(c, signed, total, total - sum_rows(t.mul_(t)), signed_slope)
