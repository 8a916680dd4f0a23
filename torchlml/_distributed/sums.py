"""The sums of each process over its own labels, and selection of two neighboring ranks of a row.

Sums have one number per row, always in float64. An entry is written as 0 or 1, whichever is nearer, plus or
minus t = sigmoid(-|z|), as in `_solve/newton.py`. The sums include derivatives of
S(nu) = sum sigmoid(x + nu). From one evaluation near the root, Taylor series therefore give the root and
everything that depends on it without another round.

To select two neighboring ranks, each process sorts its part and proposes 128 of its entries, evenly spaced by
rank, together with their ranks. The proposals of all processes bound the rank of each proposed entry in the
whole row, and therefore give a window that contains the wanted entries. Every round shrinks the window by a
factor of 30 or more, regardless of the values. Once every process can propose all of its entries in the
window, the result is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from torchlml._distributed.group import LabelGroup, add_up

# Small enough for the cache, and too small for torch to split across threads.
_BLOCK_ON_CPU = 2**15
_BLOCK = 2**24
# Beyond this, e^-|z| is negligible in a row whose nearest entry is within 150 of the threshold.
_FAR = 500.0

UP, P, Q, DP, DQ, D2, D3, D4 = range(8)
SUMS = 8
F, A, B, C, E = range(5)
LABEL_SUMS = 5


class FiniteLabels(NamedTuple):
    """The labels of this process at finite entries: their rows, logits and weights."""

    row: Tensor
    x: Tensor
    weight: Tensor

    def of(self, rows: Tensor, count: int) -> FiniteLabels:
        """Return the labels of the selected rows, which are renumbered."""
        number = torch.full((count,), -1, dtype=torch.int64, device=rows.device)
        number[rows] = torch.arange(rows.numel(), device=rows.device)
        found = number[self.row]
        here = found >= 0
        return FiniteLabels(found[here], self.x[here], self.weight[here])


def evaluate(x: Tensor, base: Tensor, shift: Tensor) -> Tensor:
    """Compute the sums at nu = base + shift.

    Args:
        x: (R, n), -inf for absent entries.
        base: (R,), float64.
        shift: (D, R), float64; D points are evaluated at once.

    Returns:
        (D, R, 8): the number of entries with z > 0; the sums of t over z <= 0 and over z > 0, and their
        slopes; the second, third and fourth derivatives of S.
    """
    points, (rows, labels) = shift.shape[0], x.shape
    total = torch.zeros(points, rows, SUMS, dtype=torch.float64, device=x.device)
    block = _BLOCK_ON_CPU if x.device.type == "cpu" else _BLOCK
    height, width = max(1, block // max(1, labels)), min(labels, block)
    for top in range(0, rows, height):
        some = slice(top, top + height)
        for left in range(0, labels, max(1, width)):
            z = x[some, left : left + width].double() + base[some, None]
            e = torch.exp(-z.clamp(-_FAR, _FAR))
            for i in range(points):
                total[i, some] += _block_sums(e * torch.exp(-shift[i, some, None]))
    return total


def _block_sums(v: Tensor) -> Tensor:
    """Compute the eight sums over each row of a block; v = e^-z."""
    y = 1 / (1 + v)
    not_y = v * y
    up = v < 1
    w = not_y * y
    tilt = not_y - y
    down = torch.where(up, 0, y)
    above = torch.where(up, not_y, 0)
    w_down = torch.where(up, 0, w)
    tilted = w * tilt
    parts = (
        up.sum(-1),
        down.sum(-1),
        above.sum(-1),
        w_down.sum(-1),
        (w - w_down).sum(-1),
        tilted.sum(-1),
        (w - 6 * w * w).sum(-1),
        (tilted - 12 * w * tilted).sum(-1),
    )
    return torch.stack([part.double() for part in parts], dim=-1)


def evaluate_labels(labels: FiniteLabels, base: Tensor, shift: Tensor) -> Tensor:
    """Return (D, R, 5): sums over labels of -c log y, of c (1 - y), and of c times y's derivatives 1 to 3."""
    points, rows = shift.shape
    z = (labels.x.double() + base[labels.row]) + shift[:, labels.row]
    y, not_y = torch.sigmoid(z), torch.sigmoid(-z)
    w = y * not_y
    # softplus is the identity above this threshold: e^-40 is below the precision of float64.
    parts = (softplus(-z, threshold=40), not_y, w, w * (not_y - y), w * (1 - 6 * w))
    found = torch.stack([labels.weight * part for part in parts], dim=-1)
    total = torch.zeros(points, rows, LABEL_SUMS, dtype=torch.float64, device=z.device)
    return total.index_add(1, labels.row, found)


def gap_sums(x: Tensor, upper: Tensor, lower: Tensor) -> Tensor:
    """Return (R, 2): sums of e^(x - lower) for entries <= lower and of e^(upper - x) for entries >= upper."""
    z = x.double()
    below = torch.exp((z - lower[:, None]).clamp(max=0)) * (z <= lower[:, None])
    above = torch.exp((upper[:, None] - z).clamp(max=0)) * ((z >= upper[:, None]) & (z < torch.inf))
    return torch.stack([below.sum(-1), above.sum(-1)], dim=-1)


PROPOSALS = 128
# Entries that are this close need not be determined exactly, because the iteration does the rest.
_CLOSE = 1.0


def select(x: Tensor, upper_rank: Tensor, lower_rank: Tensor, group: LabelGroup) -> tuple[Tensor, Tensor]:
    """Find bounds on the entries at two ranks, which are exact or within 1 of each other.

    Args:
        x: (R, n), the part of this process; entries that are not finite are ignored.
        upper_rank, lower_rank: (R,), 1 for the largest entry; `lower_rank` is the same or the next one.
        group: the processes with the other parts.

    Returns:
        (upper, lower): the entry at `upper_rank` is at most `upper`, and the entry at `lower_rank` is at
        least `lower`. If they are more than 1 apart, they are equal to these entries.
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

    The result (R, 3, 128) contains them, and the number of entries in the window that are > and >= each of
    them. A window with fewer than 128 entries repeats its last one; an empty window gives -inf, 0 and 0.
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
    # The entry of rank r is at most c if fewer than r are greater than c, and at least c if r are not less.
    upper_at = ((possible < upper_rank[:, None]).sum(-1, keepdim=True) - 1).clamp(min=0)
    lower_at = (known < lower_rank[:, None]).sum(-1, keepdim=True).clamp(max=candidates.shape[-1] - 1)
    exact = (known.gather(-1, upper_at).squeeze(-1) >= upper_rank) & (
        possible.gather(-1, lower_at).squeeze(-1) < lower_rank
    )
    return candidates.gather(-1, upper_at).squeeze(-1), candidates.gather(-1, lower_at).squeeze(-1), exact
