"""Run tests in several processes that communicate through gloo.

A test decorated with `in_processes(2, 3)` becomes one pytest test per number of processes. Its body runs in
every process of a pool that is started once per session, because startup takes seconds. If a test fails,
times out or ends a process, its pool is discarded, and the next test starts a new one.
"""

from __future__ import annotations

import importlib
import multiprocessing.connection
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from tests.support.processes import fork

Check = Callable[[dist.ProcessGroup], None]
_SECONDS = 240.0
# After the first failure, the other processes have this many seconds to report theirs.
_GRACE = 5.0


def in_processes(*sizes: int) -> Callable[[Check], Any]:
    """Run a test in process groups of the given sizes. Each process calls the test with its group."""

    def decorate(check: Check) -> Any:
        @pytest.mark.parametrize("size", sizes)
        def test(size: int, pools: Pools) -> None:
            pools.run(size, check.__module__, check.__name__)

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        setattr(test, "check", check)  # noqa: B010
        return test

    return decorate


class Pools:
    """One pool of worker processes per group size, started by the first test that needs it."""

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._pools: dict[int, _Pool] = {}

    def run(self, size: int, module: str, name: str) -> None:
        """Run the decorated test `name` from `module` in `size` processes, and fail if any of them fails."""
        pool = self._pools.pop(size, None) or _Pool(size)
        problems = pool.run(module, name, self._seconds)
        if problems:
            pool.kill()
            pytest.fail("\n".join(problems), pytrace=False)
        self._pools[size] = pool

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.kill()
        self._pools.clear()


class _Pool:
    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        for rank in range(size):
            own, theirs = multiprocessing.Pipe()
            self._processes.append(fork(_serve, rank, size, self._folder.name, theirs))
            self._pipes.append(own)
            theirs.close()  # so that the pipe closes when the process ends

    def run(self, module: str, name: str, seconds: float) -> list[str]:
        """Run a test, and return the errors of the processes. The list is empty if the test passed."""
        waiting = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        problems = []
        for pipe in self._pipes:
            pipe.send((module, name))
        end = time.monotonic() + seconds
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0, end - time.monotonic()))
            if not ready:
                problems.append(f"Processes {sorted(waiting.values())} did not finish in time.")
                break
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                rank = waiting.pop(pipe)
                try:
                    problem = pipe.recv()
                except EOFError:
                    self._processes[rank].join(_GRACE)
                    problem = f"The process ended with exit code {self._processes[rank].exitcode}."
                if problem:
                    problems.append(f"Process {rank} of {len(self._pipes)}: {problem}")
                    end = min(end, time.monotonic() + _GRACE)
        return problems

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def _serve(rank: int, size: int, folder: str, pipe: Connection) -> None:
    """Run the requested tests in order until the pool is killed or pytest ends."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=_SECONDS)
    )
    while True:
        try:
            module, name = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            torch.manual_seed(0)
            getattr(importlib.import_module(module), name).check(dist.group.WORLD)
            pipe.send("")
        except BaseException:  # report every failure, so that pytest does not block
            pipe.send(traceback.format_exc())


def part(t: torch.Tensor, group: dist.ProcessGroup, dim: int = -1) -> torch.Tensor:
    """Return the shard of this process. Shards are uneven, and one is empty in groups of 3 and 4."""
    n, size, rank = t.shape[dim], dist.get_world_size(group), dist.get_rank(group)
    cuts = {1: [0, n], 2: [0, n // 3, n], 3: [0, n // 2, n // 2, n], 4: [0, 0, n // 5, n - 1, n]}[size]
    return t.narrow(dim, cuts[rank], cuts[rank + 1] - cuts[rank]).clone()


def whole(t: torch.Tensor, group: dist.ProcessGroup, dim: int = -1) -> torch.Tensor:
    """Concatenate all shards on every process."""
    parts: list[torch.Tensor] = [t] * dist.get_world_size(group)
    dist.all_gather_object(parts, t.detach(), group=group)
    return torch.cat(parts, dim)


def same_on_all(t: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether a tensor is bitwise identical on all processes."""
    bits = t.detach().contiguous().numpy().tobytes()
    found: list[bytes] = [b""] * dist.get_world_size(group)
    dist.all_gather_object(found, bits, group=group)
    return all(other == bits for other in found)
