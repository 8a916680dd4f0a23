"""How the rows of a tensor are laid over a GPU: blocks, warps, and whether a row is split."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Up to here a row stays on chip, at most 16 entries to a thread. Longer ones are read in blocks of _STREAMED.
LARGEST_BLOCK = 8192
_STREAMED = 4096
_SMALLEST_BLOCK = 32
# Threads to a block, found by compiling: with these no register is spilled on sm_80, sm_90 and sm_100.
_THREADS = {32: 32, 64: 32, 128: 32, 256: 64, 512: 128, 1024: 256, 2048: 512, 4096: 1024, 8192: 512}
_THREADS_PACKED = {**_THREADS, 2048: 256}
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


class Launch(NamedTuple):
    """What every launch takes: the plan, the entries, how they fall into rows, and nu (2, R)."""

    plan: Plan
    x: Tensor
    mask: Tensor | None
    offsets: Tensor | None
    nu: Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The number of rows, the length of a dense one, and the number of entries."""
        return self.nu.shape[1], self.x.shape[-1], self.x.numel()

    @property
    def block(self) -> dict[str, int]:
        """The settings of a kernel that reads blocks."""
        return {"BLOCK": self.plan.block, "num_warps": self.plan.warps}


def stride_of(per_row: Tensor) -> int:
    """The distance of two numbers per row in memory, 0 where one number stands for all rows."""
    return per_row.stride(0) if per_row.dim() else 0


def plan(rows: int, length: int, ragged: bool, processors: int, lanes: int = 32) -> Plan:
    """Choose for `rows` rows of `length` entries (on average, where ragged) and a GPU.

        >>> plan(256, 1000, False, 108)
        Plan(block=1024, warps=8, loop=False, splits=1)

    The GPU has so many multi`processors`, and a warp of it so many `lanes`.
    """
    if length >= _SPLIT_LENGTH and rows < processors:
        splits = min(_power_of_two(-(-4 * processors // max(rows, 1))), _power_of_two(length // _STREAMED))
        return Plan(_STREAMED, _THREADS[_STREAMED] // lanes, True, splits)
    # Packed rows differ in length: most fit where twice the average does.
    block = max(_power_of_two(2 * length if ragged else length), _SMALLEST_BLOCK)
    if block > LARGEST_BLOCK or (ragged and block > _STREAMED):
        return Plan(_STREAMED, _THREADS[_STREAMED] // lanes, True)
    threads = _THREADS_PACKED if ragged else _THREADS
    return Plan(block, max(threads[block] // lanes, 1), ragged)


def _power_of_two(n: int) -> int:
    """The smallest one that is not less than `n`."""
    return 1 << max(n - 1, 0).bit_length()
