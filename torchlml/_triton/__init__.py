"""The Triton kernels. This module chooses the launch settings: block size, warps, and programs per row.

`self_test` decides when the kernels run. This module does not import triton, which is not available
everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Rows up to this length stay on chip, with at most 16 entries per thread. Longer rows are read in blocks of
# `_STREAMED` entries.
LARGEST_BLOCK = 8192
_STREAMED = 4096
_SMALLEST_BLOCK = 32
# The number of threads for each block size. With these numbers, the compiled kernels do not spill registers
# on sm_80, sm_90 and sm_100.
_THREADS = {32: 32, 64: 32, 128: 32, 256: 64, 512: 128, 1024: 256, 2048: 512, 4096: 1024, 8192: 512}
_THREADS_PACKED = {**_THREADS, 2048: 256}
# Rows at least this long are split if there are too few of them to occupy the GPU.
_SPLIT_LENGTH = 65536


class Plan(NamedTuple):
    """The launch settings: entries per block, warps per program, and programs per row.

    With `loop`, a row may be longer than its block: the first block stays on chip, and the other blocks are
    read again in every pass. For ragged rows, `loop` is always True, because their lengths are known only on
    the device.
    """

    block: int
    warps: int
    loop: bool
    splits: int = 1


class Launch(NamedTuple):
    """The common arguments of all launches: the plan, the entries, their division into rows, and nu."""

    plan: Plan
    x: Tensor
    mask: Tensor | None
    offsets: Tensor | None
    nu: Tensor  # (2, R)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The number of rows, the length of a dense row, and the number of entries."""
        return self.nu.shape[1], self.x.shape[-1], self.x.numel()

    @property
    def block(self) -> dict[str, int]:
        """The launch settings for a kernel that reads rows in blocks."""
        return {"BLOCK": self.plan.block, "num_warps": self.plan.warps}


def stride_of(per_row: Tensor) -> int:
    """Return the stride of a tensor with one number per row, or 0 if all rows share one number."""
    return per_row.stride(0) if per_row.dim() else 0


def plan(rows: int, length: int, ragged: bool, processors: int, lanes: int = 32) -> Plan:
    """Choose the launch settings for `rows` rows of `length` entries (on average, if ragged) on a GPU.

        >>> plan(256, 1000, False, 108)
        Plan(block=1024, warps=8, loop=False, splits=1)

    `processors` is the number of multiprocessors on the GPU, and `lanes` is the number of threads in a warp.
    """
    if length >= _SPLIT_LENGTH and rows < processors:
        splits = min(_power_of_two(-(-4 * processors // max(rows, 1))), _power_of_two(length // _STREAMED))
        return Plan(_STREAMED, _THREADS[_STREAMED] // lanes, True, splits)
    # Most ragged rows are at most twice as long as the average.
    block = max(_power_of_two(2 * length if ragged else length), _SMALLEST_BLOCK)
    if block > LARGEST_BLOCK or (ragged and block > _STREAMED):
        return Plan(_STREAMED, _THREADS[_STREAMED] // lanes, True)
    threads = _THREADS_PACKED if ragged else _THREADS
    return Plan(block, max(threads[block] // lanes, 1), ragged)


def _power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()
