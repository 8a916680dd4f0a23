"""Exact samples of exactly k entries: independent coins, accepted if k of them succeed.

The coins of a row succeed k times with probability about 1 / sqrt(2πV), so for small V they are drawn until
they do. For large V the entries, in random order, are drawn block by block: half of them, then half of the
rest, and so on. A block is accepted with a probability proportional to that of the remaining coins making up
the rest of k, which `_counts` provides. That is rejection sampling from the exact conditional distribution.
It needs about 2.4 n coins per set instead of n sqrt(2πV).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchlml.distributions._counts import BUSY, angles, generating_function, side_of, variance_of
from torchlml.distributions._law import Law

_CHUNK = 2**20  # coins drawn at once


def sample(law: Law, count: int) -> Tensor:
    """Draw `count` sets from every row of a law.

    Returns:
        (count, R, n) bool, by torch's global random generator.
    """
    rows, n = law.b.shape
    drawn = law.above.repeat(count, 1)
    flips = law.b > 0
    variance = variance_of(law.b)
    # Rows with the same number of blocks are drawn together.
    levels = (variance / BUSY).log2().floor().clamp(min=0).long()
    levels = torch.where(flips.any(-1), levels, -1)
    for level in levels.unique().tolist():
        if level >= 0:
            row = (levels == level).nonzero().squeeze(-1)
            _sample_rows(law, row, level, drawn.view(count, rows, n))
    drawn = drawn.view(count, rows, n)
    return drawn if law.forced is None else drawn | law.forced


class _Block(NamedTuple):
    """Columns, and the chance that the columns after them make up a missing number of successes."""

    columns: Tensor
    chance: Tensor  # (rows, M), relative to the largest; column j mod M for j
    center: Tensor  # (rows,)


def _sample_rows(law: Law, row: Tensor, level: int, drawn: Tensor) -> None:
    """Draw the sets of some rows, and write them into `drawn` (count, R, n)."""
    b, above, d = law.b[row], law.above[row], law.d[row]
    side = side_of(above, b)
    missing = d.expand(len(drawn), -1).flatten()
    of_pair = torch.arange(len(row), device=b.device).repeat(len(drawn))
    flipped = torch.zeros(len(of_pair), b.shape[-1], dtype=torch.bool, device=b.device)
    for block in _blocks(b, side, level):
        missing = _draw_block(block, b, side, of_pair, missing, flipped)
    drawn[:, row] = above ^ flipped.view(len(drawn), *above.shape)


def _blocks(b: Tensor, side: Tensor, level: int) -> list[_Block]:
    """Split the columns into halves, quarters and so on, as long as the chances can be computed."""
    n, blocks = b.shape[-1], []
    columns = torch.randperm(n, device=b.device) if level else torch.arange(n, device=b.device)
    for _ in range(level):
        half = len(columns) // 2
        rest = columns[half:]
        b_rest, side_rest = b[:, rest], side[:, rest]
        variance = variance_of(b_rest)
        if bool((variance < BUSY).any()):
            break
        angle = angles(float(variance.max()), len(rest), b)
        size, phase = generating_function(b_rest, side_rest, variance, angle)
        chance = torch.fft.irfft(torch.polar(size, -phase), n=2 * len(angle) - 1).clamp(min=0)
        chance = chance / chance.amax(-1, keepdim=True)
        blocks.append(_Block(columns[:half], chance, (side_rest * b_rest).sum(-1).round()))
        columns = rest
    # Nothing comes after the last block: it must make up the missing number exactly.
    last = b.new_zeros(len(b), 3)
    last[:, 0] = 1
    blocks.append(_Block(columns, last, b.new_zeros(len(b))))
    return blocks


def _draw_block(
    block: _Block, b: Tensor, side: Tensor, of_pair: Tensor, missing: Tensor, flipped: Tensor
) -> Tensor:
    """Draw the coins of a block until they are accepted; returns the number that is still missing."""
    missing = missing.clone()
    b, side = b[:, block.columns], side[:, block.columns]
    points = block.chance.shape[-1]
    pending = torch.arange(len(of_pair), device=b.device)
    size = max(1, _CHUNK // max(1, len(block.columns)))
    while len(pending):
        rejected = []
        for part in pending.split(size):
            row = of_pair[part]
            flip = torch.rand(len(part), len(block.columns), dtype=b.dtype, device=b.device) < _rows(b, row)
            left = missing[part] - torch.where(flip, _rows(side, row), 0).sum(-1)
            near = (left - block.center[row]).abs() <= points // 2
            chance = block.chance[row, left.long() % points] * near
            accept = torch.rand(len(part), dtype=b.dtype, device=b.device) < chance
            kept = part[accept]
            missing[kept] = left[accept]
            flipped[kept.unsqueeze(-1), block.columns] = flip[accept]
            rejected.append(part[~accept])
        pending = torch.cat(rejected)
    return missing


def _rows(values: Tensor, row: Tensor) -> Tensor:
    """The rows of a small table for many pairs; a single row is broadcast instead of copied."""
    return values if len(values) == 1 else values[row]
