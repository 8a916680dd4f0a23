"""Find the entries on both sides of a row's threshold, and nu if the gap between them is wide.

`solve.py` needs them for rows whose initial interval is wide and for rows without an entry near the
threshold.

To find the entries at two neighboring ranks (positions in descending order), each process sorts its own
entries and proposes 128 of them, evenly spaced by rank, together with their ranks. The proposals of all
processes bound the rank of each proposed entry in the whole row, and therefore give a window that contains
the two entries. Every round shrinks the window by a factor of 30 or more, regardless of the values. Once
every process can propose all of its entries in the window, the result is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchlml._distributed.group import LabelGroup, add_up
from torchlml._solve.newton import order_offsets

PROPOSALS = 128
# Two entries this close need not be determined exactly, because the iteration in `solve.py` does the rest.
_CLOSE = 1.0


class Threshold(NamedTuple):
    """Bounds on the entries around the threshold, and the interval of nu - base that they imply."""

    upper: Tensor
    lower: Tensor
    gap: Tensor  # upper - lower
    base: Tensor
    low: Tensor
    high: Tensor


def find_threshold(x: Tensor, k: Tensor, available: Tensor, group: LabelGroup) -> Threshold:
    """Find the entries around the threshold, in a few rounds of communication.

    Args:
        x: (R, n), the columns of this process; entries that are not finite are ignored.
        k, available: (R,), the sum of y over the finite entries, and the number of finite entries.
        group: the processes that the columns are sharded across.
    """
    upper, lower = select(x, k.ceil().long(), (k.floor() + 1).long(), group)
    below, above = order_offsets(k, available)
    half = upper / 2 - lower / 2
    return Threshold(upper, lower, 2 * half, -(upper / 2 + lower / 2), -half - below, half + above)


def solve_gap(x: Tensor, upper: Tensor, lower: Tensor, group: LabelGroup) -> tuple[Tensor, Tensor]:
    """Return nu relative to the middle of a wide gap, and the logarithm of the slope.

    This takes one round of communication.

    In a wide gap, S - k = exp(-gap / 2) * (p * exp(nu) - q * exp(-nu)) to machine precision. Here p is the
    sum of exp(x - lower) over the entries below the gap, and q is the sum of exp(upper - x) over the entries
    above it. The threshold can lie in a gap only if k is an integer; exactly k entries are then above it.

    Args:
        x: (R, n), the columns of this process.
        upper, lower: (R,), the entries around the gap.
        group: the processes that the columns are sharded across.
    """
    z = x.double()
    below = torch.exp((z - lower[:, None]).clamp(max=0)) * (z <= lower[:, None])
    above = torch.exp((upper[:, None] - z).clamp(max=0)) * ((z >= upper[:, None]) & (z < torch.inf))
    p, q = group.sum(torch.stack([below.sum(-1), above.sum(-1)], dim=-1)).unbind(-1)
    half = upper / 2 - lower / 2
    log_slope = (p.log() + q.log()) / 2 + torch.log(torch.full_like(p, 2)) - half
    return (q.log() - p.log()) / 2, log_slope


def select(x: Tensor, upper_rank: Tensor, lower_rank: Tensor, group: LabelGroup) -> tuple[Tensor, Tensor]:
    """Find bounds on the entries at two ranks; the bounds are exact or within 1 of each other.

    Args:
        x: (R, n), the columns of this process; entries that are not finite are ignored.
        upper_rank, lower_rank: (R,), 1 for the largest entry; `lower_rank` is `upper_rank` or the next rank.
        group: the processes that the columns are sharded across.

    Returns:
        (upper, lower): the entry at `upper_rank` is at most `upper`, and the entry at `lower_rank` is at
        least `lower`. If `upper` and `lower` are more than 1 apart, they are equal to these entries.
    """
    x = torch.where(x.isfinite(), x.double(), -torch.inf).sort(-1, descending=True).values
    ascending = -x
    first = torch.zeros_like(upper_rank)
    last = x.isfinite().sum(-1)
    while True:
        proposed = _propose(x, ascending, first, last)
        parts = group.gather(torch.cat([first[:, None].double(), proposed.flatten(1)], -1))
        above = add_up(parts[..., 0]).long()
        proposals = parts[..., 1:].unflatten(-1, (3, PROPOSALS))
        upper, lower, exact = _limits(proposals, upper_rank - above, lower_rank - above)
        if bool((exact | (upper - lower <= _CLOSE)).all()):
            return upper, lower
        first = torch.searchsorted(ascending, -upper[:, None]).squeeze(-1)
        last = torch.searchsorted(ascending, -lower[:, None], right=True).squeeze(-1)


def _propose(x: Tensor, ascending: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Propose 128 entries of each window, evenly spaced by rank.

    The result (R, 3, 128) contains these entries and, for each of them, the numbers of entries in the window
    that are greater than it, and greater than or equal to it. A window with fewer than 128 entries repeats
    its last entry. For an empty window, the result contains -inf, 0 and 0.
    """
    if x.shape[1] == 0:
        nothing = x.new_full((x.shape[0], PROPOSALS), -torch.inf)
        return torch.stack([nothing, torch.zeros_like(nothing), torch.zeros_like(nothing)], 1)
    step, length = torch.arange(PROPOSALS, device=x.device), (last - first)[:, None]
    spaced = step * (length - 1) // (PROPOSALS - 1)
    place = first[:, None] + torch.where(length > PROPOSALS, spaced, torch.minimum(step, length - 1))
    values = torch.where(length > 0, x.gather(-1, place.clamp(0, x.shape[1] - 1)), -torch.inf)
    greater = torch.searchsorted(ascending, -values) - first[:, None]
    not_less = torch.searchsorted(ascending, -values, right=True) - first[:, None]
    counts = [torch.where(length > 0, count, 0).double() for count in (greater, not_less)]
    return torch.stack([values, *counts], 1)


def _limits(proposals: Tensor, upper_rank: Tensor, lower_rank: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return bounds on the entries of the window at two ranks, and whether the bounds are exact."""
    values, greater, not_less = proposals.unbind(2)
    # In sorted order, each proposal adds to the number of entries that are known to be >= it, and to the
    # number of entries that may be > the next proposal.
    end = not_less[..., -1:]
    at_least = torch.diff(not_less, prepend=torch.zeros_like(end))
    at_most = torch.diff(greater, append=end)
    candidates, order = values.movedim(0, 1).flatten(1).sort(-1, descending=True)
    known, possible = (
        torch.nn.functional.pad(t.movedim(0, 1).flatten(1).gather(-1, order).cumsum(-1), (1, 0))
        for t in (at_least, at_most)
    )
    ascending = -candidates
    known = known.gather(-1, torch.searchsorted(ascending, ascending, right=True))
    possible = possible.gather(-1, torch.searchsorted(ascending, ascending))
    # The entry at rank r is at most c if fewer than r entries are > c, and at least c if at least r entries
    # are >= c.
    upper_at = ((possible < upper_rank[:, None]).sum(-1, keepdim=True) - 1).clamp(min=0)
    lower_at = (known < lower_rank[:, None]).sum(-1, keepdim=True).clamp(max=candidates.shape[-1] - 1)
    exact = (known.gather(-1, upper_at).squeeze(-1) >= upper_rank) & (
        possible.gather(-1, lower_at).squeeze(-1) < lower_rank
    )
    return candidates.gather(-1, upper_at).squeeze(-1), candidates.gather(-1, lower_at).squeeze(-1), exact
