"""How memory is taken: what a call adds to the process's resident memory at its highest, result included.

This sees everything, also what the native kernel allocates for itself and what the allocator wastes. It needs
Linux, which tells a process's highest resident memory since a moment of our choice, and the C library's
`malloc_trim`, without which a call could hide in memory that was freed before.
"""

import ctypes
import mmap
import re
from collections.abc import Callable
from pathlib import Path

PAGE = mmap.PAGESIZE
_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_RESET_HIGHEST = "5"


def measurable() -> bool:
    """Can this system tell? Not outside Linux with the GNU C library."""
    try:
        _RESET.write_text(_RESET_HIGHEST)
        return hasattr(ctypes.CDLL(None), "malloc_trim") and _resident("VmHWM") > 0
    except (OSError, AttributeError):
        return False


def added_bytes(call: Callable[[], object]) -> int:
    """Measure the bytes that a call adds at its highest point, result included.

        x = torch.zeros(1000, 1000)
        added_bytes(lambda: x + 1)  # 4001792

    Args:
        call: What to measure; it runs once before, so that what is allocated only once does not count.

    Returns:
        A multiple of the page size.
    """
    call()
    ctypes.CDLL(None).malloc_trim(0)
    _RESET.write_text(_RESET_HIGHEST)
    before = _resident("VmRSS")
    result = call()
    highest = _resident("VmHWM")
    del result
    return max(0, highest - before)


def _resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text())
    if found is None:
        raise OSError(f"{_STATUS} does not say `{field}`.")
    return int(found[1]) * 1024
