"""The constrained sparsemax: the Euclidean projection onto {0 <= y <= upper, sum y = k}."""

from __future__ import annotations

import torch
from torch import Tensor

from torchlml.family.capped import CappedRows, operator, read
from torchlml.rows import rows_of
from torchlml.solvers.newton import add
from torchlml.solvers.residual import shifted

# Rows in which this many passes did not find the entries at their bounds get every second one by bisection.
_FREE_PASSES = 16
_MAX_PASSES = 600


def constrained_sparsemax(
    x: Tensor,
    k: float | Tensor,
    upper: float | Tensor = 1.0,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The point nearest to x that sums to k, with every entry from 0 to `upper`: mostly exact zeros and ones.

        >>> torchlml.constrained_sparsemax(torch.tensor([1.5, 0.75, 0.25, -1.0]), 2)
        tensor([1.0000, 0.7500, 0.2500, 0.0000])

    Arguments as for `constrained_softmax`. Returns y, with the shape and dtype of `x`.

    y minimises |y - x|^2 over 0 <= y <= upper and sum y = k (Malaviya et al., 2018): y = clip(x + nu, 0,
    upper). With k = 1 and upper >= 1 it is the sparsemax. The entries strictly inside their bounds share
    what changes: dy/dx is the identity minus the mean on them, and 0 elsewhere. Where there are none of them
    the gradient is 0, for k too.

    Entries of -inf are 0; entries of +inf are at their bounds, or share k like ties where it does not
    suffice; for k = 0 the row is 0, without a gradient; a NaN makes its row NaN.
    """
    c, bounds = read(x, k, upper, dim, mask, offsets)
    r = CappedRows(c, bounds, _dual)
    rows = r.rows
    saturated = r.infinite | (r.finite & (r.z > r.upper))
    free = r.finite & ~saturated & ~(r.z <= 0)  # also NaN
    # One exact step from the solver's nu, on the entries that are known to be inside.
    missing = r.k - rows.sum(torch.where(saturated, r.upper, torch.where(free, r.z, 0)))
    inside = r.z + rows.spread(missing / rows.sum(free).clamp(min=1))
    y = torch.where(saturated, r.upper, torch.where(free, inside, 0))
    return c.restore(r.finish(y, c.x.dtype), dim)


def _solve(x: Tensor, k: Tensor, upper: Tensor, offsets: Tensor | None) -> Tensor:
    """nu of every row, by Newton's method on a piecewise linear function; see `capped.operator`.

    A step is exact once it does not change which entries are at which bound, and there are finitely many
    ways to be so. A step that would leave the proven bracket halves it instead, and in the end every second
    one does.
    """
    rows = rows_of(x, offsets)
    if x.numel() == 0:
        return x.new_zeros(2, rows.count)
    finite = x.isfinite()
    tolerance = 8 * torch.finfo(x.dtype).eps * k
    largest = rows.max(torch.where(finite, x, -torch.inf))
    busy = largest.isfinite()
    # At this nu no finite entry exceeds its part of what they share, so it is not above the root.
    top = rows.sum(torch.where(x == torch.inf, upper, 0))
    start = torch.stack([-largest, (k - top) / rows.sum(finite)])
    nu = add(torch.where(busy, start, 0), torch.zeros_like(k))
    below = torch.zeros_like(k)
    # No entry gets more than k, so a bound of 2 k is none, and is finite.
    limit = torch.minimum(upper, rows.spread(2 * k))
    above = rows.max(torch.where(finite, limit - shifted(x, nu, rows), -torch.inf))
    for number in range(_MAX_PASSES):
        z = shifted(x, nu, rows)
        saturated = z > limit
        free = (z > 0) & ~saturated
        excess = rows.sum(torch.where(saturated, upper, torch.where(free, z, 0))) - k
        busy = busy & (excess.abs() > tolerance)
        if not bool(busy.any()):
            break
        below, above = torch.where(excess < 0, 0, below), torch.where(excess > 0, 0, above)
        step, halving = -excess / rows.sum(free), (above - below) / 2
        inside = (-below <= step) & (step <= above)
        if number >= _FREE_PASSES and number % 2:
            inside = torch.zeros_like(inside)
        move = torch.where(busy, torch.where(inside, step, halving), 0)
        nu = add(nu, move)
        below, above = below + move, above - move
    return nu


_dual = operator("constrained_sparsemax_dual", _solve)
