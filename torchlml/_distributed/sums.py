"""Sums of a process over its own labels: numbers per row, always in float64.

An entry counts as its nearer integer plus or minus t = sigmoid(-|z|), as in `_solve/newton.py`. The sums
include derivatives of S(nu) = sum sigmoid(x + nu). From one evaluation near the root, Taylor series therefore
give the root and everything that depends on it without another round.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

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
        slopes; the second, third and fourth derivative of S.
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
    """(D, R, 5): sums over the labels of -c log y, of c (1 - y), and of c times y's derivatives 1 to 3."""
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
    """(R, 2): the sums of e^(x - lower) over entries <= lower, and of e^(upper - x) over entries >= upper."""
    z = x.double()
    below = torch.exp((z - lower[:, None]).clamp(max=0)) * (z <= lower[:, None])
    above = torch.exp((upper[:, None] - z).clamp(max=0)) * ((z >= upper[:, None]) & (z < torch.inf))
    return torch.stack([below.sum(-1), above.sum(-1)], dim=-1)
