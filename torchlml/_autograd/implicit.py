"""The projection in ordinary differentiable operations, for every transform that PyTorch has.

Only the number nu comes out of an opaque operator, as a constant. Two steps of Newton's method, taken from it
in plain torch, change no value but carry the derivatives: each step squares the order of the error, so that
after two the first three derivatives are exact, forwards, backwards, mapped, nested or compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import softplus

from torchlml._autograd import operators
from torchlml._rows import rows_of, work_dtype

_STEPS = 2
Solve = Callable[..., Tensor]  # nu (2, R) of (x, k, mask, offsets)


def logsigmoid(z: Tensor) -> Tensor:
    """The logarithm of the logistic function; torch's own has no complete rule for vmap."""
    # The threshold is where softplus becomes the identity: e^-40 is beyond even float64.
    return -softplus(-z, threshold=40)


def sigmoid(z: Tensor) -> Tensor:
    """The logistic function, with a derivative that is right also where the value rounds to 1."""
    up = z > 0
    e = torch.exp(torch.where(up, -z, z))
    near = e / (1 + e)  # torch.sigmoid rounds an entry differently by its place in memory
    return torch.where(up, 1 - near, near)


class SolvedRows:
    """Rows whose nu is known, as a differentiable number; `z` is x + nu."""

    def __init__(
        self,
        x: Tensor,
        k: Tensor,
        mask: Tensor | None,
        offsets: Tensor | None,
        solve: Solve = operators.solve,
    ) -> None:
        self.rows = rows_of(x, offsets, differentiable=True)
        self.broadcast = self.rows.broadcast
        x = x.to(work_dtype(x.dtype))
        self._x = x
        if mask is not None:
            x = torch.where(mask, x, -torch.inf)
        self.hi, self.lo = solve(x.detach(), k.detach(), None, offsets)
        self.absent, self.infinite = x == -torch.inf, x == torch.inf
        # Infinite numbers stay out of the graph: their derivatives would be 0 times infinity.
        self._live = ~(self.absent | self.infinite | self.broadcast(self.hi.isinf()))
        hi = torch.where(self.hi.isinf(), 0, self.hi)
        base = (torch.where(self.absent | self.infinite, 0, x) + self.broadcast(hi)) + self.broadcast(self.lo)
        self.correction = self._implicit_step(base, k)
        self.z = base + self.broadcast(self.correction)
        count = self.rows.sum(self.infinite.to(x.dtype))
        follows_k = (self.hi == -torch.inf) & (k > 0) & (k < count)
        # What a +inf entry gets: k/p where there are p > k of them; otherwise 1, but 0 when k is 0.
        fixed = (k > 0).to(x.dtype)
        self.share = torch.where(follows_k, k.to(x.dtype) / count.clamp(min=1), fixed)

    def dual(self) -> Tensor:
        """nu itself."""
        nu = (self.hi + self.lo) + self.correction
        return torch.where(self.hi.isnan(), self.rows.sum(self._undefined()), nu)

    def _undefined(self) -> Tensor:
        """NaN with NaN as its derivative, in the rows that have no answer."""
        return self.broadcast(torch.where(self.hi.isnan(), self.hi, 0)) * self._x

    def fill(self, y: Tensor, absent: float, present: float, infinite: Tensor) -> Tensor:
        """Put the limits where the formula has none: rows without finite nu, infinite and absent entries."""
        hi = self.broadcast(self.hi)
        y = torch.where(hi == torch.inf, present, torch.where(hi == -torch.inf, absent, y))
        y = torch.where(self.infinite, self.broadcast(infinite), torch.where(self.absent, absent, y))
        return torch.where(hi.isnan(), self._undefined(), y)

    def _implicit_step(self, base: Tensor, k: Tensor) -> Tensor:
        """0, with the derivatives of nu."""
        live, constant = self._live, base.detach()
        log_w = torch.where(live, logsigmoid(constant) + logsigmoid(-constant), -torch.inf)
        # Everything is taken relative to the largest w of the row, so that it is right when all w underflow.
        largest = self.rows.max(log_w)
        largest = torch.where(largest.isfinite(), largest, 0)
        unit = torch.exp(-largest).clamp(max=torch.finfo(base.dtype).max)
        step = torch.zeros_like(self.hi)
        for _ in range(_STEPS):
            z = base + self.broadcast(step)
            # The sum is that of `residual`: each entry as its distance from the nearer integer.
            up = z > 0
            toward_zero = torch.where(live, torch.where(up, -z, z), -1.0)
            log_t, scale = logsigmoid(toward_zero), self.broadcast(largest)
            t = torch.where(live, torch.exp(torch.where(live, log_t - scale, 0)), 0)
            w = t * sigmoid(-toward_zero)
            total = self.rows.sum(torch.where(up, -t, t))
            # At the solution the excess is 0: of its value only rounding is left, of k's not even that.
            excess = (total - total.detach()) - (k - k.detach()).to(base.dtype) * unit
            slope = self.rows.sum(w)
            step = step - torch.where(self.hi.isinf(), 0, excess / torch.where(slope > 0, slope, 1))
        return step


def _projection(result: Callable[[SolvedRows], Tensor]) -> Callable[..., Tensor]:
    """A function of canonical rows from one of their `SolvedRows`; `solve` finds nu.

    A single dense row is computed as two equal ones: torch splits one row among its threads and treats what
    is left over at the end of each part by other instructions, so that the last bits would depend on the
    number of threads.
    """

    @functools.wraps(result)
    def project(
        x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, solve: Solve = operators.solve
    ) -> Tensor:
        if offsets is not None or x.shape[0] != 1:
            return result(SolvedRows(x, k, mask, offsets, solve)).to(x.dtype)
        mask = None if mask is None else mask.repeat(2, 1)
        k = k if k.dim() == 0 else k.repeat(2)
        return result(SolvedRows(x.repeat(2, 1), k, mask, None, solve)).to(x.dtype)[:1]

    return project


@_projection
def lml(rows: SolvedRows) -> Tensor:
    """y of each row."""
    return rows.fill(sigmoid(rows.z), 0.0, 1.0, rows.share)


@_projection
def log_lml(rows: SolvedRows) -> Tensor:
    """log y of each row."""
    positive = torch.where(rows.share > 0, rows.share, 1)
    log_share = torch.where(rows.share > 0, positive.log(), -torch.inf)
    return rows.fill(logsigmoid(rows.z), -torch.inf, 0.0, log_share)


@_projection
def lml_dual(rows: SolvedRows) -> Tensor:
    """nu of each row."""
    return rows.dual()
