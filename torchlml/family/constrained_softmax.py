"""The constrained softmax: the entropic projection onto {0 <= y <= upper, sum y = k}."""

from __future__ import annotations

import torch
from torch import Tensor

from torchlml.family.capped import CappedRows, operator, read
from torchlml.rows import Rows, rows_of
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
    r = CappedRows(c, bounds, _dual)
    rows = r.rows
    saturated = r.infinite | (r.finite & _above(r.z, r.upper.detach().log()))
    free = r.finite & ~saturated
    rest = r.k - rows.sum(torch.where(saturated, r.upper, 0))
    e = torch.where(free, torch.exp(torch.where(free, r.z, 0)), 0)
    total = rows.sum(e)
    share = e * rows.spread(rest / torch.where(total > 0, total, 1))
    return c.restore(r.finish(torch.where(saturated, r.upper, share), c.x.dtype), dim)


def _solve(x: Tensor, k: Tensor, upper: Tensor, offsets: Tensor | None) -> Tensor:
    """nu of every row, by saturating more and more entries; see `capped.operator`.

    For any set of saturated entries, sum of their bounds + sum of exp(x + nu) over the others = k has a root
    that is at most nu, because each term is at least min(upper, exp(x + nu)). So the entries that exceed
    their bounds at a root found so far do so at nu as well: the set grows, at most n times, until it is right.
    Long staircases would be climbed one step at a time; there, bisection takes turns.
    """
    rows = rows_of(x, offsets)
    if x.numel() == 0:
        return x.new_zeros(2, rows.count)
    finite = x.isfinite()
    tolerance = 8 * torch.finfo(x.dtype).eps
    # No entry gets more than k, so a bound of 2 k is none, and is finite.
    limit = torch.minimum(upper, rows.spread(2 * k)).log()
    largest = rows.max(torch.where(finite, x, -torch.inf))
    busy = largest.isfinite()
    nu = torch.stack([torch.where(busy, -largest, 0), torch.zeros_like(largest)])
    z = shifted(x, nu, rows)
    step = (k - rows.sum(torch.where(x == torch.inf, upper, 0))).log() - _log_sum_exp(z, finite, rows)
    step = torch.where(busy, step, 0)
    # How far it is from nu to what is proven to be below and above the root.
    below = torch.zeros_like(k)
    above = rows.max(torch.where(finite, limit - z, -torch.inf)) - step
    nu = add(nu, step)
    for number in range(_MAX_PASSES):
        z = shifted(x, nu, rows)
        saturated = _above(z, limit)
        rest = k - rows.sum(torch.where(saturated, upper, 0))
        log_sum = _log_sum_exp(z, finite & ~saturated, rows)
        step = rest.clamp(min=0).log() - log_sum
        slack = tolerance * (1 + log_sum.abs())
        busy = busy & ~((below == 0) & ~(step > slack))
        if not bool(busy.any()):
            break
        lower, top = torch.maximum(step, -below), torch.where(step > 0, above, 0)
        move = (lower + top) / 2 if number >= _FREE_PASSES and number % 2 else lower
        move = torch.where(busy, move, 0)
        nu = add(nu, move)
        below, above = torch.where(busy, move - lower, 0), top - move
    return nu


_dual = operator("constrained_softmax_dual", _solve)


def _above(z: Tensor, limit: Tensor) -> Tensor:
    # An entry that reaches its bound up to rounding still counts as free: it is the one that k moves.
    return z > limit + 8 * torch.finfo(z.dtype).eps * (1 + limit.abs())


def _log_sum_exp(z: Tensor, of: Tensor, rows: Rows) -> Tensor:
    largest = rows.max(torch.where(of, z, -torch.inf))
    largest = torch.where(largest.isfinite(), largest, 0)
    return rows.sum(torch.where(of, torch.exp(z - rows.spread(largest)), 0)).log() + largest
