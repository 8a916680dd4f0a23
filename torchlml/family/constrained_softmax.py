"""The constrained softmax: the entropic projection onto {0 <= y <= upper, sum y = k}."""

from __future__ import annotations

import torch
from torch import Tensor

from torchlml._core.rows import Rows, rows_of
from torchlml.family.capped import CappedRows, ConstrainedProjection, mean_cap, pair, read, start, sum_at_caps
from torchlml.solvers.newton import add
from torchlml.solvers.residual import shifted

# Rows in which this many passes did not find the entries at their bounds get every second one by bisection.
_FREE_PASSES = 8
_MAX_PASSES = 600


def constrained_softmax(
    x: Tensor,
    k: float | Tensor,
    upper: float | Tensor = 1.0,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The softmax that sums to k and in which no entry exceeds `upper`.

        >>> torchlml.constrained_softmax(torch.tensor([3.0, 1.0, 0.0, -1.0]), 2)
        tensor([1.0000, 0.6652, 0.2447, 0.0900])

    Args:
        x: logits, of any shape.
        k: the sum. A number, or a tensor that broadcasts to the shape of `x` without `dim` (with `offsets`:
            one number per row); differentiable.
        upper: the most that an entry may get. A number from 0 on, infinity among them, or a tensor that
            broadcasts to `x`; differentiable. Bounds that sum to less than k are refused, except with `mask`
            or `offsets`: there, as in `torchlml.lml`, every entry that is left then is at its bound.
        dim: the dimension that sums to k.
        mask: bool, True where an entry may be positive; broadcasts to `x`.
        offsets: for packed rows of different lengths, as in `torchlml.lml`.

    Returns:
        y, with the shape and dtype of `x`.

    y maximises x.y + H(y), H the entropy -sum y log y, over 0 <= y <= upper and sum y = k (Martins and
    Kreutzer, 2017): y = min(upper, exp(x + nu)). With k = 1 and upper >= 1 it is the softmax. Entries at
    their bound have no gradient for x, the others that of a softmax.

    Entries of -inf are 0; entries of +inf are at their bounds, or share k like ties where it does not
    suffice; for k = 0 the row is 0, without a gradient; a NaN makes its row NaN.
    """
    c, bounds = read(x, k, upper, dim, mask, offsets)
    return c.restore(_project(c, bounds), dim)


def _values(r: CappedRows) -> Tensor:
    """y of rows whose nu is known, in ordinary operations."""
    rows = r.rows
    saturated, free = _sets(r)
    rest = r.k - rows.sum(torch.where(saturated, r.upper, 0))
    e = torch.where(free, torch.exp(torch.where(free, r.z, 0)), 0)
    total = rows.sum(e)
    share = e * rows.spread(rest / torch.where(total > 0, total, 1))
    return r.finish(torch.where(saturated, r.upper, share))


def _moves(r: CappedRows) -> tuple[Tensor, Tensor]:
    """dy/dz of each entry, and where it is at its bound."""
    saturated, free = _sets(r)
    return torch.where(free, torch.minimum(r.z.exp(), r.upper), 0), saturated


def _sets(r: CappedRows) -> tuple[Tensor, Tensor]:
    """The entries at their bounds, and the others."""
    saturated = r.infinite | (r.finite & (r.z > _edge(r.upper.detach().log())))
    return saturated, r.finite & ~saturated


def _solve(x: Tensor, k: Tensor, upper: Tensor, offsets: Tensor | None) -> Tensor:
    """nu of every row, by saturating more and more entries; see `capped.ConstrainedProjection`.

    For any set of saturated entries, sum of their bounds + sum of exp(x + nu) over the others = k has a root
    that is at most nu, because each term is at least min(upper, exp(x + nu)). So the entries that exceed
    their bounds at a root found so far do so at nu as well: the set grows, at most n times, until it is
    right. Long staircases would be climbed one step at a time; there, bisection takes turns.
    """
    rows = rows_of(x, offsets)
    if x.numel() == 0:
        return x.new_zeros(2, rows.count)
    epsilon = torch.finfo(x.dtype).eps
    # No entry gets more than k, so a bound of 2 k is none, and is finite.
    bound = torch.minimum(upper, rows.spread(2 * k))
    limit = bound.log()
    edge = _edge(limit)
    # Far below the bounds lml is an exponential as well.
    unit = mean_cap(k, upper, rows)
    nu = add(start(x, k / unit, offsets), unit.log())
    infinite = x == torch.inf
    largest = rows.max(torch.where(infinite, -torch.inf, x)) if bool(infinite.any()) else rows.max(x)
    busy = largest.isfinite()
    nu = torch.where(busy, nu, 0)
    # How far it is from nu to what is proven to be below and above the root. Where no entry exceeds its part
    # of what the finite ones share, it is below.
    below = ((nu[0] + largest) + nu[1]) - ((k - sum_at_caps(infinite, bound, rows)) / x.shape[-1]).log()
    above = torch.full_like(k, torch.inf)
    count = torch.full_like(k, -1)
    rooted = torch.zeros_like(busy)
    for number in range(_MAX_PASSES):
        z = shifted(x, nu, rows)
        saturated = z > edge
        previous, count = count, rows.sum(saturated)
        taken = sum_at_caps(saturated, bound, rows)
        rest, filled = k - taken, rows.sum(torch.minimum(z, limit).exp_()) - taken
        # The sum's excess over k is filled - rest. The root for this set is a step of log(rest / filled).
        root, step = add(nu, (rest / filled).log()), (rest / filled).log()
        vague_sum = ~(filled > 1e-3 * k)
        vague = busy & (rest > 0) & vague_sum
        if bool(vague.any()):
            exact = _root(x, rest, saturated | ~x.isfinite(), rows)
            root = torch.where(vague, exact, root)
            step = torch.where(vague, (exact[0] - nu[0]) + (exact[1] - nu[1]), step)
        overfull = ~(rest > 0)
        step = torch.where(overfull, -torch.inf, step)
        # The sets are nested, so one of the same size is the same; and the root of a set is exact.
        small = 4 * epsilon * (1 + taken / torch.maximum(filled, 1e-3 * k))
        busy = busy & ~((rooted & (count == previous)) | (step.abs() <= small))
        if not bool(busy.any()):
            break
        if number == _FREE_PASSES:
            above = torch.minimum(above, rows.max(torch.where(x.isfinite(), limit - z, -torch.inf)))
        top = torch.where(step > 0, above, 0)
        if bool((busy & overfull).any()):
            # The entry that was saturated last is not: this is where it begins to be.
            last = rows.max(torch.where(saturated & ~infinite, limit - z, -torch.inf))
            top = torch.where(overfull, torch.minimum(top, last), top)
        # The proof is as good as the arithmetic, which rounds a large step.
        slack = small + 4 * epsilon * torch.where(step.isfinite(), step.abs(), below)
        lower = torch.where(step >= -below - slack, step, -below)
        # Where most of k is at the bounds, the sum is a staircase in nu rather than an exponential.
        straight = torch.where(vague_sum, top, torch.minimum((rest - filled) / filled, top))
        stairs = overfull | (~vague_sum & (taken > k / 2) & (straight.abs() > 0.25))
        move = torch.where(stairs & (straight > lower), straight, lower)
        if number >= _FREE_PASSES and number % 2:
            move = (lower + top) / 2
        rooted = move == step
        nu = torch.where(busy, torch.where(rooted, root, add(nu, torch.where(busy, move, 0))), nu)
        below, above = move - lower + slack, top - move + slack
    return nu


def _root(x: Tensor, rest: Tensor, taken: Tensor, rows: Rows) -> Tensor:
    """The nu for which the entries that are not taken sum to `rest`; its high part is the largest's."""
    largest = rows.max(torch.where(taken, -torch.inf, x))
    largest = torch.where(largest.isfinite(), largest, 0)
    total = rows.sum(torch.where(taken, 0, torch.exp(x - rows.spread(largest))))
    return pair(-largest, rest.log() - total.log())


def _edge(limit: Tensor) -> Tensor:
    # An entry that reaches its bound up to rounding still counts as free: it is the one that k moves.
    return limit + 8 * torch.finfo(limit.dtype).eps * (1 + limit.abs().clamp(max=1000))


_project = ConstrainedProjection("constrained_softmax", _solve, _values, _moves)
