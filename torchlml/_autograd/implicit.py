"""The projection as differentiable operations, which support every PyTorch transform.

Only nu comes from an opaque operator, as a constant. Two Newton steps from this nu in pure PyTorch do not
change its value but provide its derivatives. Each step doubles the order of the error, so after two steps the
first three derivatives are exact in forward and backward mode, under vmap, in nested transforms and when
compiled.
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
Solve = Callable[..., Tensor]  # computes nu (2, R) from (x, k, mask, offsets)


def logsigmoid(z: Tensor) -> Tensor:
    """Compute log(sigmoid(z)); torch's own `logsigmoid` lacks a complete vmap rule."""
    # softplus is the identity above this threshold: e^-40 is below the precision of float64.
    return -softplus(-z, threshold=40)


def sigmoid(z: Tensor) -> Tensor:
    """Compute the logistic function, with a derivative that is accurate even if the value rounds to 1."""
    up = z > 0
    e = torch.exp(torch.where(up, -z, z))
    near = e / (1 + e)  # not torch.sigmoid, whose rounding depends on an entry's position in memory
    return torch.where(up, 1 - near, near)


class SolvedRows:
    """Rows whose nu is known and differentiable; `z` is x + nu."""

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
        # Keep infinite values out of the graph, because their derivatives would be 0 times infinity.
        self._live = ~(self.absent | self.infinite | self.broadcast(self.hi.isinf()))
        hi = torch.where(self.hi.isinf(), 0, self.hi)
        base = (torch.where(self.absent | self.infinite, 0, x) + self.broadcast(hi)) + self.broadcast(self.lo)
        self.correction = self._implicit_step(base, k)
        self.z = base + self.broadcast(self.correction)
        count = self.rows.sum(self.infinite.to(x.dtype))
        follows_k = (self.hi == -torch.inf) & (k > 0) & (k < count)
        # Each +inf entry gets k/p if there are p > k of them, and 1 otherwise. If k is 0, it gets 0.
        fixed = (k > 0).to(x.dtype)
        self.share = torch.where(follows_k, k.to(x.dtype) / count.clamp(min=1), fixed)

    def dual(self) -> Tensor:
        """Return nu with its derivatives."""
        nu = (self.hi + self.lo) + self.correction
        return torch.where(self.hi.isnan(), self.rows.sum(self._undefined()), nu)

    def _undefined(self) -> Tensor:
        """Return NaN, with NaN derivatives, at every entry of the rows in which nu is NaN."""
        return self.broadcast(torch.where(self.hi.isnan(), self.hi, 0)) * self._x

    def fill(self, y: Tensor, absent: float, present: float, infinite: Tensor) -> Tensor:
        """Replace y with its limit where the formula does not apply.

        The formula does not apply in rows without a finite nu, at infinite entries and at absent entries.
        """
        hi = self.broadcast(self.hi)
        y = torch.where(hi == torch.inf, present, torch.where(hi == -torch.inf, absent, y))
        y = torch.where(self.infinite, self.broadcast(infinite), torch.where(self.absent, absent, y))
        return torch.where(hi.isnan(), self._undefined(), y)

    def _implicit_step(self, base: Tensor, k: Tensor) -> Tensor:
        """Return zeros that have the derivatives of nu."""
        live, constant = self._live, base.detach()
        log_w = torch.where(live, logsigmoid(constant) + logsigmoid(-constant), -torch.inf)
        # Divide everything by the row's largest w, to remain accurate if every w underflows.
        largest = self.rows.max(log_w)
        largest = torch.where(largest.isfinite(), largest, 0)
        unit = torch.exp(-largest).clamp(max=torch.finfo(base.dtype).max)
        step = torch.zeros_like(self.hi)
        for _ in range(_STEPS):
            z = base + self.broadcast(step)
            # As in `newton.residual`, sum the distance of each entry from 0 or 1, whichever is nearer.
            up = z > 0
            toward_zero = torch.where(live, torch.where(up, -z, z), -1.0)
            log_t, scale = logsigmoid(toward_zero), self.broadcast(largest)
            t = torch.where(live, torch.exp(torch.where(live, log_t - scale, 0)), 0)
            w = t * sigmoid(-toward_zero)
            total = self.rows.sum(torch.where(up, -t, t))
            # The excess is 0 at the solution, up to rounding. Subtract its value and keep its derivatives.
            excess = (total - total.detach()) - (k - k.detach()).to(base.dtype) * unit
            slope = self.rows.sum(w)
            step = step - torch.where(self.hi.isinf(), 0, excess / torch.where(slope > 0, slope, 1))
        return step


def _projection(result: Callable[[SolvedRows], Tensor]) -> Callable[..., Tensor]:
    """Turn a function of `SolvedRows` into a function of canonical arguments and `solve`, which computes nu.

    A single dense row is computed as two identical rows. torch splits one row across threads and uses
    different instructions for the remainder of each part, so the last bits of the result would depend on the
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
    """Compute y for each row."""
    return rows.fill(sigmoid(rows.z), 0.0, 1.0, rows.share)


@_projection
def log_lml(rows: SolvedRows) -> Tensor:
    """Compute log y for each row."""
    positive = torch.where(rows.share > 0, rows.share, 1)
    log_share = torch.where(rows.share > 0, positive.log(), -torch.inf)
    return rows.fill(logsigmoid(rows.z), -torch.inf, 0.0, log_share)


@_projection
def lml_dual(rows: SolvedRows) -> Tensor:
    """Compute nu for each row."""
    return rows.dual()
