"""How many threads torch computes with: set for a block, and refused where it cannot be meant."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchlml_lab.errors import BadInput


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_threads(threads: int, option: str = "--threads") -> None:
    """Refuse less than one thread, and more than there are cores: they would only wait for one another."""
    if not 1 <= threads <= cores():
        raise BadInput(
            f"`{option}` is {threads}, and must be from 1 to {cores()}, the cores of this machine."
        )


@contextmanager
def use_threads(threads: int) -> Iterator[None]:
    """Let torch use so many threads within the block, and as many as before after it.

        with use_threads(1):
            ...

    Args:
        threads: At least 1.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
