"""The entries of two neighboring ranks in rows that are sharded across processes.

Each process sorts its part and proposes 128 of its entries, evenly spaced by rank, together with their ranks.
The proposals of all processes bound the rank of each proposed entry in the whole row, and therefore give a
window that contains the wanted entries. Every round shrinks the window by a factor of 30 or more, regardless
of the values. Once every process can propose all of its entries in the window, the result is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchlml._distributed.group import LabelGroup, add_up

PROPOSALS = 128
# Entries this close need not be determined exactly: the iteration handles the rest.
_CLOSE = 1.0


def select(x: Tensor, upper_rank: Tensor, lower_rank: Tensor, group: LabelGroup) -> tuple[Tensor, Tensor]:
    """Bounds of the entries at two ranks: exact, or within 1 of each other.

    Args:
        x: (R, n), the part of this process; entries that are not finite are ignored.
        upper_rank, lower_rank: (R,), 1 for the largest entry; `lower_rank` is the same or the next one.
        group: the processes with the other parts.

    Returns:
        (upper, lower): the entry at `upper_rank` is at most `upper`, that at `lower_rank` at least `lower`.
        If they are further apart than 1, they are equal to these entries.
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
    """Propose (R, 3, 128): entries evenly spaced by rank, and how many in the window are > and >= each.

    A window of fewer entries repeats its last one; an empty window gives -inf, 0 and 0.
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
    """Bounds of two entries of the window from the proposals (P, R, 3, 128), and whether they are exact."""
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
    # The entry of rank r is at most c if fewer than r are greater than c, and at least c if r are not less.
    upper_at = ((possible < upper_rank[:, None]).sum(-1, keepdim=True) - 1).clamp(min=0)
    lower_at = (known < lower_rank[:, None]).sum(-1, keepdim=True).clamp(max=candidates.shape[-1] - 1)
    exact = (known.gather(-1, upper_at).squeeze(-1) >= upper_rank) & (
        possible.gather(-1, lower_at).squeeze(-1) < lower_rank
    )
    return candidates.gather(-1, upper_at).squeeze(-1), candidates.gather(-1, lower_at).squeeze(-1), exact
