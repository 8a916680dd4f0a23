"""The constrained softmax and the constrained sparsemax: projections onto {0 <= y <= upper, sum(y) = k}."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchlml._capped import (
    CappedRows,
    ConstrainedProjection,
    mean_cap,
    pair,
    read,
    start,
    sum_at_caps,
)
from torchlml._rows import Rows, rows_of, shifted
from torchlml._solve.newton import add

# The number of solver passes after which every second pass bisects. Rows of 10 to 1000 normally distributed
# logits need only 1 to 7 passes.
_SOFTMAX_FREE_PASSES, _SPARSEMAX_FREE_PASSES = 8, 16
# At least 292 of these passes bisect, which narrows even a bracket of width 1e70 to the spacing of doubles.
_MAX_PASSES = 600
# A difference of sums below this fraction of k has lost at least three digits, so another formula is used.
_VAGUE = 1e-3
# A longer step would lose more than four digits in entries near 1, so the root is recomputed directly.
_LONG_STEP = 1e4


def constrained_softmax(
    x: Tensor,
    k: float | Tensor,
    dim: int = -1,
    *,
    upper: float | Tensor = 1.0,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Compute the constrained softmax, which sums to k and has no entry above `upper`.

        >>> torchlml.constrained_softmax(torch.tensor([3.0, 1.0, 0.0, -1.0]), 2)
        tensor([1.0000, 0.6652, 0.2447, 0.0900])

    Args:
        x: logits, of any shape.
        k: the sum of each row. A number, or a tensor that broadcasts to the shape of `x` without `dim` (with
            `offsets`: one number per row). The result is differentiable with respect to it.
        dim: the dimension along which the result sums to k.
        upper: the cap on each entry. A nonnegative number, which may be infinite, or a tensor that broadcasts
            to the shape of `x`. The result is differentiable with respect to it. If the caps of a row sum to
            less than k, an error is raised on the CPU. On other devices, and with `mask` or `offsets`, this
            is not checked, and each available entry of the row gets its cap.
        mask: a bool tensor that broadcasts to the shape of `x`, with True for entries that may be positive.
        offsets: row boundaries of a ragged batch, as for `torchlml.lml`.

    Returns:
        y, with the shape and dtype of `x`.

    y maximizes dot(x, y) + H(y), where H(y) = -sum(y * log(y)) is the entropy, subject to 0 <= y <= upper and
    sum(y) = k (Martins and Kreutzer, 2017). The solution is y = min(upper, exp(x + nu)). With k = 1 and
    upper >= 1, it is the softmax. Capped entries have zero gradient with respect to x. The other entries
    form a softmax, scaled so that the row sums to k, and have its gradient.

    Entries equal to -inf get 0. Entries equal to +inf get their caps, or share k like tied entries if k is
    smaller than the sum of these caps. For k = 0, the row and its gradient are 0. A NaN makes its whole row
    NaN.
    """
    c, caps = read(x, k, upper, dim, mask, offsets)
    return c.restore(_softmax_project(c, caps), dim)


def constrained_sparsemax(
    x: Tensor,
    k: float | Tensor,
    dim: int = -1,
    *,
    upper: float | Tensor = 1.0,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Compute the constrained sparsemax: the point nearest to x that sums to k, with entries in [0, upper].

        >>> torchlml.constrained_sparsemax(torch.tensor([1.5, 0.75, 0.25, -1.0]), 2)
        tensor([1.0000, 0.7500, 0.2500, 0.0000])

    The arguments are those of `constrained_softmax`.

    Returns:
        y, with the shape and dtype of `x`. Typically, most entries are exactly 0 or equal to their caps.

    y minimizes |y - x|^2 subject to 0 <= y <= upper and sum(y) = k (Malaviya et al., 2018). The solution is
    y = clip(x + nu, 0, upper). With k = 1 and upper >= 1, it is the sparsemax. For the m entries strictly
    between 0 and their caps, dy/dx is the m x m identity matrix with 1/m subtracted from every element. All
    other entries have zero gradient. If no entry is strictly between 0 and its cap, all gradients with
    respect to x and k are 0.

    Infinite entries, NaN and k = 0 are handled as in `constrained_softmax`.
    """
    c, caps = read(x, k, upper, dim, mask, offsets)
    return c.restore(_sparsemax_project(c, caps), dim)


def _softmax_values(r: CappedRows) -> Tensor:
    """Compute y for rows whose nu is known, with differentiable operations."""
    rows = r.rows
    saturated, free = _softmax_sets(r)
    rest = r.k - rows.sum(torch.where(saturated, r.upper, 0))
    e = torch.where(free, torch.exp(torch.where(free, r.z, 0)), 0)
    total = rows.sum(e)
    share = e * rows.broadcast(rest / torch.where(total > 0, total, 1))
    return r.finish(torch.where(saturated, r.upper, share))


def _softmax_moves(r: CappedRows) -> tuple[Tensor, Tensor]:
    """Return dy/dz for each entry, and a mask of the saturated entries."""
    saturated, free = _softmax_sets(r)
    return torch.where(free, torch.minimum(r.z.exp(), r.upper), 0), saturated


def _softmax_sets(r: CappedRows) -> tuple[Tensor, Tensor]:
    """Return masks of the saturated entries and of the free entries."""
    saturated = r.infinite | (r.finite & (r.z > _edge(r.upper.detach().log())))
    return saturated, r.finite & ~saturated


class _Caps(NamedTuple):
    """The caps, their logarithms, and the value of z = x + nu above which an entry counts as saturated."""

    cap: Tensor
    log: Tensor
    edge: Tensor


class _Sums(NamedTuple):
    """The state of each row at a given nu.

    The caps of the `saturated` entries, whose count is `number`, sum to `taken`. At the root, the free
    entries sum to `rest`, which is k minus `taken`. At this nu, they sum to `filled`, which is computed as a
    difference of sums. If `filled` is small compared with k, it has few correct digits, and the row is
    flagged as `vague`.
    """

    z: Tensor
    saturated: Tensor
    number: Tensor
    taken: Tensor
    rest: Tensor
    filled: Tensor
    vague: Tensor


def _softmax_solve(x: Tensor, k: Tensor, upper: Tensor, offsets: Tensor | None) -> Tensor:
    """Find nu for every row by saturating more and more entries.

    For any set of saturated entries, the root is the nu at which their caps plus the sum of exp(x + nu) over
    all other entries equal k. The root is at most the true nu, because each term is at least
    min(upper, exp(x + nu)). Entries that exceed their caps at the root therefore also exceed them at the true
    nu. So the set grows, at most n times, until it is correct. To avoid many passes that each saturate a
    single entry, every second pass eventually bisects. See `_capped.ConstrainedProjection` for the arguments.
    """
    rows = rows_of(x, offsets)
    if x.numel() == 0:
        return x.new_zeros(2, rows.count)
    # Limit the caps to 2 * k, which is finite. The result does not change, because no entry exceeds k.
    cap = torch.minimum(upper, rows.broadcast(2 * k))
    caps = _Caps(cap, cap.log(), _edge(cap.log()))
    # Start from the nu of `lml`, because a sigmoid far below its cap is also close to an exponential.
    unit = mean_cap(k, upper, rows)
    nu = add(start(x, k / unit, offsets), unit.log())
    infinite = x == torch.inf
    largest = rows.max(torch.where(infinite, -torch.inf, x)) if bool(infinite.any()) else rows.max(x)
    busy = largest.isfinite()
    nu = torch.where(busy, nu, 0)
    # Distances from nu to proven lower and upper bounds on the root. At the lower bound, the largest finite
    # entry gets the amount left for all finite entries divided by the number of entries.
    below = ((nu[0] + largest) + nu[1]) - ((k - sum_at_caps(infinite, cap, rows)) / x.shape[-1]).log()
    above = torch.full_like(k, torch.inf)
    count = torch.full_like(k, -1)
    rooted = torch.zeros_like(busy)
    for number in range(_MAX_PASSES):
        sums = _evaluate(x, k, nu, caps, rows)
        previous, count = count, sums.number
        root, step = _step_to_root(x, nu, sums, busy, rows)
        small = 4 * torch.finfo(x.dtype).eps * (1 + sums.taken / torch.maximum(sums.filled, _VAGUE * k))
        # The set of saturated entries can only grow with nu, so sets of equal size are identical. If the set
        # did not change, its root is exact.
        busy = busy & ~((rooted & (count == previous)) | (step.abs() <= small))
        if not bool(busy.any()):
            break
        if number == _SOFTMAX_FREE_PASSES:
            above = torch.minimum(above, rows.max(torch.where(x.isfinite(), caps.log - sums.z, -torch.inf)))
        slack = small + 4 * torch.finfo(x.dtype).eps * torch.where(step.isfinite(), step.abs(), below)
        # The bound is accurate only up to the rounding error of a large step.
        lower = torch.where(step >= -below - slack, step, -below)
        top = _highest_step(step, above, sums, caps, busy, infinite, rows)
        bisect = number >= _SOFTMAX_FREE_PASSES and number % 2 == 1
        move = (lower + top) / 2 if bisect else _choose_step(k, lower, top, sums)
        rooted = move == step
        nu = torch.where(busy, torch.where(rooted, root, add(nu, torch.where(busy, move, 0))), nu)
        below, above = move - lower + slack, top - move + slack
    return nu


def _evaluate(x: Tensor, k: Tensor, nu: Tensor, caps: _Caps, rows: Rows) -> _Sums:
    z = shifted(x, nu, rows)
    saturated = z > caps.edge
    taken = sum_at_caps(saturated, caps.cap, rows)
    filled = rows.sum(torch.minimum(z, caps.log).exp_()) - taken
    return _Sums(z, saturated, rows.sum(saturated), taken, k - taken, filled, ~(filled > _VAGUE * k))


def _step_to_root(x: Tensor, nu: Tensor, s: _Sums, busy: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the root for the current saturated entries and the step to it.

    The step is -inf if the caps of these entries sum to k or more.
    """
    step = (s.rest / s.filled).log()
    root = add(nu, step)
    vague = busy & (s.rest > 0) & s.vague
    if bool(vague.any()):
        exact = _softmax_root(x, s.rest, s.saturated | ~x.isfinite(), rows)
        root = torch.where(vague, exact, root)
        step = torch.where(vague, (exact[0] - nu[0]) + (exact[1] - nu[1]), step)
    return root, torch.where(s.rest > 0, step, -torch.inf)


def _highest_step(
    step: Tensor, above: Tensor, s: _Sums, caps: _Caps, busy: Tensor, infinite: Tensor, rows: Rows
) -> Tensor:
    """Return a step that is guaranteed to reach or pass the root."""
    top = torch.where(step > 0, above, 0)
    overfull = ~(s.rest > 0)
    if bool((busy & overfull).any()):
        # At the root, the saturated entry that is closest to its cap must be free, so step to the point where
        # it reaches its cap.
        last = rows.max(torch.where(s.saturated & ~infinite, caps.log - s.z, -torch.inf))
        top = torch.where(overfull, torch.minimum(top, last), top)
    return top


def _choose_step(k: Tensor, lower: Tensor, top: Tensor, s: _Sums) -> Tensor:
    """Return the step to the root for the current saturated entries, or a longer step where that is better.

    If the caps of the saturated entries sum to more than half of k, the sum as a function of nu resembles a
    staircase more than an exponential. A long Newton step (with the slope `filled`) is then better. Both
    steps are safe: the conditions below affect only the number of passes, not the result.
    """
    straight = torch.where(s.vague, top, torch.minimum((s.rest - s.filled) / s.filled, top))
    stairs = ~(s.rest > 0) | (~s.vague & (s.taken > k / 2) & (straight.abs() > 0.25))
    return torch.where(stairs & (straight > lower), straight, lower)


def _softmax_root(x: Tensor, rest: Tensor, taken: Tensor, rows: Rows) -> Tensor:
    """Return the nu for which exp(x + nu), summed over all entries except those in `taken`, equals `rest`.

    nu is minus the largest x in this sum, plus a remainder that is accurate even if x is large.
    """
    largest = rows.max(torch.where(taken, -torch.inf, x))
    largest = torch.where(largest.isfinite(), largest, 0)
    total = rows.sum(torch.where(taken, 0, torch.exp(x - rows.broadcast(largest))))
    return pair(-largest, rest.log() - total.log())


def _edge(limit: Tensor) -> Tensor:
    # An entry that reaches its cap only up to rounding still counts as free, because it may be the only entry
    # that depends on k. The rounding error of z is a few eps, relative to the logarithm of the cap. For a cap
    # of 0, whose logarithm is -inf, the error is computed as if the logarithm were -1000.
    return limit + 8 * torch.finfo(limit.dtype).eps * (1 + limit.abs().clamp(max=1000))


_softmax_project = ConstrainedProjection(
    "constrained_softmax", _softmax_solve, _softmax_values, _softmax_moves
)


def _sparsemax_values(r: CappedRows) -> Tensor:
    """Compute y for rows whose nu is known, with differentiable operations."""
    rows = r.rows
    saturated, free = _sparsemax_sets(r)
    # Take one exact step from the solver's nu, based on the entries that are known to be free.
    missing = r.k - rows.sum(torch.where(saturated, r.upper, torch.where(free, r.z, 0)))
    inside = r.z + rows.broadcast(missing / rows.sum(free).clamp(min=1))
    return r.finish(torch.where(saturated, r.upper, torch.where(free, inside, 0)))


def _sparsemax_moves(r: CappedRows) -> tuple[Tensor, Tensor]:
    """Return dy/dz for each entry, and a mask of the saturated entries."""
    saturated, free = _sparsemax_sets(r)
    return free.to(r.z.dtype), saturated


def _sparsemax_sets(r: CappedRows) -> tuple[Tensor, Tensor]:
    """Return masks of the saturated entries and of the free entries.

    Free entries are strictly between 0 and their caps, or NaN.
    """
    saturated = r.infinite | (r.finite & (r.z > r.upper))
    return saturated, r.finite & ~saturated & ~(r.z <= 0)


def _sparsemax_solve(x: Tensor, k: Tensor, upper: Tensor, offsets: Tensor | None) -> Tensor:
    """Find nu for every row by Newton's method on a piecewise linear function.

    A step is exact once it no longer changes which entries are at 0 and which are at their caps. Where the
    function is flat, nu moves to the point at which the next entry leaves its bound. If a step would leave
    the proven bracket, the bracket is bisected instead. After many passes, every second pass bisects. See
    `_capped.ConstrainedProjection` for the arguments.
    """
    rows = rows_of(x, offsets)
    if x.numel() == 0:
        return x.new_zeros(2, rows.count)
    epsilon = torch.finfo(x.dtype).eps
    # Limit the caps to 2 * k, which is finite. This has no effect, because no entry exceeds k.
    limit = torch.minimum(upper, rows.broadcast(2 * k))
    # Start from the nu of `lml` with steeper sigmoids: sigmoid(4 * z) is close to clip(z + 1/2, 0, 1).
    unit = mean_cap(k, upper, rows)
    nu = add(start(x * rows.broadcast(4 / unit), k / unit, offsets) * (unit / 4), unit / 2)
    infinite = x == torch.inf
    largest = rows.max(torch.where(infinite, -torch.inf, x)) if bool(infinite.any()) else rows.max(x)
    busy = largest.isfinite()
    nu = torch.where(busy, nu, 0)
    # Distances from nu to proven lower and upper bounds on the root. At the lower bound, the largest finite
    # entry gets the amount left for all finite entries divided by the number of entries.
    below = ((nu[0] + largest) + nu[1]) - (k - sum_at_caps(infinite, limit, rows)) / x.shape[-1]
    above = torch.full_like(k, torch.inf)
    counts = torch.full_like(nu, -1)
    whole = torch.zeros_like(busy)
    for number in range(_MAX_PASSES):
        z = shifted(x, nu, rows)
        excess = rows.sum(torch.minimum(z.clamp(min=0), limit)) - k
        saturated, positive = z > limit, z >= 0
        previous, counts = counts, torch.stack([rows.sum(saturated), rows.sum(positive)])
        # Both sets can only grow with nu, so sets of equal size are identical. If neither set changed, their
        # root is exact.
        repeated = (counts == previous).all(0)
        busy = busy & (excess.abs() > 4 * epsilon * k) & ~(whole & repeated)
        if not bool(busy.any()):
            break
        below, above = torch.where(excess < 0, 0, below), torch.where(excess > 0, 0, above)
        if number == _SPARSEMAX_FREE_PASSES:
            above = torch.minimum(above, rows.max(torch.where(x.isfinite(), limit - z, -torch.inf)))
        inside = counts[1] > counts[0]
        step = -excess / (counts[1] - counts[0])
        root = add(nu, step)
        vague = busy & ~(step.abs() < _LONG_STEP)
        if bool(vague.any()):
            exact, some = _sparsemax_root(x, k, limit, saturated, positive & ~saturated & x.isfinite(), rows)
            upwards = -rows.max(torch.where(positive, -torch.inf, z))
            downwards = rows.max(torch.where(saturated & x.isfinite(), limit - z, -torch.inf))
            flat = torch.where(excess < 0, upwards, downwards)
            root, inside = torch.where(vague, exact, root), torch.where(vague, some, inside)
            far = torch.where(some, (exact[0] - nu[0]) + (exact[1] - nu[1]), flat)
            step = torch.where(vague, far, step)
        slack = 4 * epsilon * torch.where(above.isfinite(), above + below, step.abs())
        whole = (-below - slack <= step) & (step <= above + slack)
        if number >= _SPARSEMAX_FREE_PASSES and number % 2:
            whole = torch.zeros_like(whole)
        move = torch.where(busy, torch.where(whole, step, (above - below) / 2), 0)
        whole = whole & inside
        nu = torch.where(whole & busy, root, add(nu, move))
        # The bounds are accurate only up to the rounding error of a large step.
        below, above = below + move + slack, above - move + slack
    return nu


def _sparsemax_root(
    x: Tensor, k: Tensor, limit: Tensor, saturated: Tensor, free: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """Return the root for given sets of saturated and free entries, and whether there is a free entry.

    The root is minus the largest free entry, plus a remainder that is accurate even if x is large.
    """
    largest = rows.max(torch.where(free, x, -torch.inf))
    inside = largest.isfinite()
    largest = torch.where(inside, largest, 0)
    terms = torch.where(saturated, limit, torch.where(free, x - rows.broadcast(largest), 0))
    return pair(-largest, (k - rows.sum(terms)) / rows.sum(free).clamp(min=1)), inside


_sparsemax_project = ConstrainedProjection(
    "constrained_sparsemax", _sparsemax_solve, _sparsemax_values, _sparsemax_moves
)
