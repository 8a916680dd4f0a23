"""The constrained sparsemax: the Euclidean projection onto {0 <= y <= upper, sum y = k}."""

from __future__ import annotations

import torch
from torch import Tensor

from torchlml.family.capped import CappedRows, operator, pair, read
from torchlml.rows import Rows, rows_of
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
    ways to be so. Where the function is flat, nu goes to the next entry that would change it; a step that
    would leave the proven bracket halves it instead, and in the end every second one does.
    """
    rows = rows_of(x, offsets)
    if x.numel() == 0:
        return x.new_zeros(2, rows.count)
    finite = x.isfinite()
    epsilon = torch.finfo(x.dtype).eps
    largest = rows.max(torch.where(finite, x, -torch.inf))
    busy = largest.isfinite()
    # At this nu no finite entry exceeds its part of what they share, so it is not above the root.
    part = (k - rows.sum(torch.where(x == torch.inf, upper, 0))) / rows.sum(finite)
    nu = torch.stack([torch.where(busy, -largest, 0), torch.where(busy, part, 0)])
    # No entry gets more than k, so a bound of 2 k is none, and is finite.
    limit = torch.minimum(upper, rows.spread(2 * k))
    # How far it is from nu to what is proven to be below and above the root.
    below = torch.zeros_like(k)
    above = rows.max(torch.where(finite, limit - shifted(x, nu, rows), -torch.inf))
    saturated = free = torch.zeros_like(finite)
    whole = torch.zeros_like(busy)
    for number in range(_MAX_PASSES):
        z = shifted(x, nu, rows)
        before = saturated, free
        saturated = z > limit
        free = (z >= 0) & ~saturated & finite
        excess = rows.sum(torch.where(saturated, upper, torch.where(free, z, 0))) - k
        repeated = rows.sum((saturated != before[0]) | (free != before[1])) == 0
        busy = busy & (excess.abs() > 4 * epsilon * k) & ~(whole & repeated)
        if not bool(busy.any()):
            break
        below, above = torch.where(excess < 0, 0, below), torch.where(excess > 0, 0, above)
        root, inside = _root(x, k, upper, saturated, free, rows)
        step = (root[0] - nu[0]) + (root[1] - nu[1])
        upwards = -rows.max(torch.where(finite & (z < 0), z, -torch.inf))
        downwards = rows.max(torch.where(saturated & finite, limit - z, -torch.inf))
        step = torch.where(inside, step, torch.where(excess < 0, upwards, downwards))
        slack = 4 * epsilon * (above + below)
        whole = (-below - slack <= step) & (step <= above + slack)
        if number >= _FREE_PASSES and number % 2:
            whole = torch.zeros_like(whole)
        move = torch.where(busy, torch.where(whole, step, (above - below) / 2), 0)
        whole = whole & inside
        nu = torch.where(whole & busy, root, add(nu, move))
        # The proof is as good as the arithmetic, which rounds a large step.
        below, above = below + move + slack, above - move + slack
    return nu


def _root(
    x: Tensor, k: Tensor, upper: Tensor, saturated: Tensor, free: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """The nu that is right for these sets as a pair, whose high part is a free entry; and if there is one."""
    largest = rows.max(torch.where(free, x, -torch.inf))
    inside = largest.isfinite()
    largest = torch.where(inside, largest, 0)
    terms = torch.where(saturated, upper, torch.where(free, x - rows.spread(largest), 0))
    return pair(-largest, (k - rows.sum(terms)) / rows.sum(free).clamp(min=1)), inside


_dual = operator("constrained_sparsemax_dual", _solve)
