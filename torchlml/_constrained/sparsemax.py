"""The constrained sparsemax: the Euclidean projection onto {0 <= y <= upper, sum y = k}."""

from __future__ import annotations

import torch
from torch import Tensor

from torchlml._constrained.capped import (
    CappedRows,
    ConstrainedProjection,
    mean_cap,
    pair,
    read,
    start,
    sum_at_caps,
)
from torchlml._rows import Rows, rows_of
from torchlml._solve.newton import add
from torchlml._solve.residual import shifted

# Normal logits, n from 10 to 1000, take 1 to 7 passes. After these, every second pass bisects.
_FREE_PASSES = 16
# 292 bisections narrow a bracket as wide as 1e70 to the spacing of doubles.
_MAX_PASSES = 600
# A longer step loses more than four digits beside entries near 1: the root is then computed without the step.
_LONG_STEP = 1e4


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
    upper). With k = 1 and upper >= 1 it is the sparsemax. The entries strictly between 0 and their caps
    share what changes: dy/dx is the identity minus the mean on them, and 0 elsewhere. Where there are none of
    them the gradient is 0, for k too.

    Infinite entries, a NaN and k = 0 are treated as there.
    """
    c, caps = read(x, k, upper, dim, mask, offsets)
    return c.restore(_project(c, caps), dim)


def _values(r: CappedRows) -> Tensor:
    """y of rows whose nu is known, in ordinary operations."""
    rows = r.rows
    saturated, free = _sets(r)
    # One exact step from the solver's nu, on the entries that are known to be inside.
    missing = r.k - rows.sum(torch.where(saturated, r.upper, torch.where(free, r.z, 0)))
    inside = r.z + rows.spread(missing / rows.sum(free).clamp(min=1))
    return r.finish(torch.where(saturated, r.upper, torch.where(free, inside, 0)))


def _moves(r: CappedRows) -> tuple[Tensor, Tensor]:
    """dy/dz of each entry, and where it is saturated."""
    saturated, free = _sets(r)
    return free.to(r.z.dtype), saturated


def _sets(r: CappedRows) -> tuple[Tensor, Tensor]:
    """The saturated entries, and those strictly between 0 and their caps, NaN among them."""
    saturated = r.infinite | (r.finite & (r.z > r.upper))
    return saturated, r.finite & ~saturated & ~(r.z <= 0)


def _solve(x: Tensor, k: Tensor, upper: Tensor, offsets: Tensor | None) -> Tensor:
    """nu of every row, by Newton's method on a piecewise linear function; see `capped.ConstrainedProjection`.

    A step is exact once it does not change which entries are at 0 and which at their caps, of which there
    are finitely many ways. Where the function is flat, nu goes to the next entry that would change it; a step
    that would leave the proven bracket halves it instead, and in the end every second one does.
    """
    rows = rows_of(x, offsets)
    if x.numel() == 0:
        return x.new_zeros(2, rows.count)
    epsilon = torch.finfo(x.dtype).eps
    # No entry gets more than k, so a cap of 2 k is none, and is finite.
    limit = torch.minimum(upper, rows.spread(2 * k))
    # A sigmoid four times as steep is close to a clip.
    unit = mean_cap(k, upper, rows)
    nu = add(start(x * rows.spread(4 / unit), k / unit, offsets) * (unit / 4), unit / 2)
    infinite = x == torch.inf
    largest = rows.max(torch.where(infinite, -torch.inf, x)) if bool(infinite.any()) else rows.max(x)
    busy = largest.isfinite()
    nu = torch.where(busy, nu, 0)
    # How far it is from nu to what is proven to be below and above the root. Where no entry exceeds its part
    # of what the finite ones share, it is below.
    below = ((nu[0] + largest) + nu[1]) - (k - sum_at_caps(infinite, limit, rows)) / x.shape[-1]
    above = torch.full_like(k, torch.inf)
    counts = torch.full_like(nu, -1)
    whole = torch.zeros_like(busy)
    for number in range(_MAX_PASSES):
        z = shifted(x, nu, rows)
        excess = rows.sum(torch.minimum(z.clamp(min=0), limit)) - k
        saturated, positive = z > limit, z >= 0
        previous, counts = counts, torch.stack([rows.sum(saturated), rows.sum(positive)])
        # The sets are nested, so those of the same sizes are the same. The root of a set is exact.
        repeated = (counts == previous).all(0)
        busy = busy & (excess.abs() > 4 * epsilon * k) & ~(whole & repeated)
        if not bool(busy.any()):
            break
        below, above = torch.where(excess < 0, 0, below), torch.where(excess > 0, 0, above)
        if number == _FREE_PASSES:
            above = torch.minimum(above, rows.max(torch.where(x.isfinite(), limit - z, -torch.inf)))
        inside = counts[1] > counts[0]
        step = -excess / (counts[1] - counts[0])
        root = add(nu, step)
        vague = busy & ~(step.abs() < _LONG_STEP)
        if bool(vague.any()):
            exact, some = _root(x, k, limit, saturated, positive & ~saturated & x.isfinite(), rows)
            upwards = -rows.max(torch.where(positive, -torch.inf, z))
            downwards = rows.max(torch.where(saturated & x.isfinite(), limit - z, -torch.inf))
            flat = torch.where(excess < 0, upwards, downwards)
            root, inside = torch.where(vague, exact, root), torch.where(vague, some, inside)
            far = torch.where(some, (exact[0] - nu[0]) + (exact[1] - nu[1]), flat)
            step = torch.where(vague, far, step)
        slack = 4 * epsilon * torch.where(above.isfinite(), above + below, step.abs())
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
    x: Tensor, k: Tensor, limit: Tensor, saturated: Tensor, free: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """The nu that is right for these sets as a pair, whose high part is a free entry; and if there is one."""
    largest = rows.max(torch.where(free, x, -torch.inf))
    inside = largest.isfinite()
    largest = torch.where(inside, largest, 0)
    terms = torch.where(saturated, limit, torch.where(free, x - rows.spread(largest), 0))
    return pair(-largest, (k - rows.sum(terms)) / rows.sum(free).clamp(min=1)), inside


_project = ConstrainedProjection("constrained_sparsemax", _solve, _values, _moves)
