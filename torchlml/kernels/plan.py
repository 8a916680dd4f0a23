"""How the rows of a tensor are laid over a GPU: blocks, warps, and whether a row is split."""

from __future__ import annotations

from typing import NamedTuple

# Up to here a row stays on chip, at most 16 entries to a thread. Longer ones are read in blocks of _STREAMED.
LARGEST_BLOCK = 8192
_STREAMED = 4096
_SMALLEST_BLOCK = 32
# Rows at least this long are split where there are too few of them to occupy the GPU.
_SPLIT_LENGTH = 65536


class Plan(NamedTuple):
    """The shape of a launch: entries in a block, warps to a block, and programs to a row.

    With `loop` a row may be longer than its block: the first block stays on chip, the others are read again
    in every pass. Packed rows always loop, because their lengths are known only on the device.
    """

    block: int
    warps: int
    loop: bool
    splits: int = 1


def plan(rows: int, length: int, ragged: bool, processors: int) -> Plan:
    """Choose for `rows` rows of `length` entries (on average, where ragged) on so many multiprocessors.

    >>> plan(256, 1000, False, 108)
    Plan(block=1024, warps=8, loop=False, splits=1)
    """
    if length >= _SPLIT_LENGTH and rows < processors:
        splits = min(_power_of_two(-(-4 * processors // max(rows, 1))), _power_of_two(length // _STREAMED))
        return Plan(_STREAMED, _warps(_STREAMED), True, splits)
    # Packed rows differ in length: most fit where twice the average does.
    block = max(_power_of_two(2 * length if ragged else length), _SMALLEST_BLOCK)
    if block > LARGEST_BLOCK or (ragged and block > _STREAMED):
        return Plan(_STREAMED, _warps(_STREAMED), True)
    return Plan(block, _warps(block), ragged)


def _warps(block: int) -> int:
    """4 entries to a thread, 8 or 16 in long blocks: chosen so that no register is spilled."""
    return min(max(block // 128, 1), 8) if block < _STREAMED else 16


def _power_of_two(n: int) -> int:
    """The smallest one that is not less than `n`."""
    return 1 << max(n - 1, 0).bit_length()
