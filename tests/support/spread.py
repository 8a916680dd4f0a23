"""Checks that run in real processes: one start for many of them, since a start takes seconds.

A check is a function of a group; `run` calls it in groups of 2, 3 and 4 processes, which talk by gloo.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import start_processes

PROCESSES = 4
_TIMEOUT = timedelta(seconds=60)


def run(module: str, checks: Sequence[str]) -> dict[str, str]:
    """What went wrong in each check, on whatever process: an empty text for nothing.

    Args:
        module: the name of the module that holds the checks.
        checks: their names.
    """
    with tempfile.TemporaryDirectory() as folder:
        start(_work, (module, list(checks), folder), PROCESSES, module)
        found = [pickle.loads((Path(folder) / f"{rank}").read_bytes()) for rank in range(PROCESSES)]
    return {check: "\n".join(filter(None, (one[check] for one in found))) for check in checks}


def start(work: Callable[..., None], arguments: tuple[object, ...], processes: int, module: str) -> None:
    """Run `work(rank, *arguments)` in processes that share one import of torch and of the module."""
    multiprocessing.set_forkserver_preload(["torch", module])
    start_processes(work, arguments, processes, start_method="forkserver")


def _work(rank: int, module: str, checks: list[str], folder: str) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=_TIMEOUT)
    groups = {size: dist.new_group(list(range(size)), timeout=_TIMEOUT) for size in (2, 3, 4)}
    found = {}
    holder = importlib.import_module(module)
    for name in checks:
        check = getattr(holder, name)
        found[name] = ""
        for size in getattr(check, "sizes", (2, 3, 4)):
            if rank < size and not found[name]:
                torch.manual_seed(0)
                try:
                    check(groups[size])
                except Exception:
                    found[name] = f"process {rank} of {size}: {traceback.format_exc()}"
    (Path(folder) / f"{rank}").write_bytes(pickle.dumps(found))
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(PROCESSES)])
    dist.destroy_process_group()


def part(t: torch.Tensor, group: dist.ProcessGroup, dim: int = -1) -> torch.Tensor:
    """This process's part of a whole row: uneven ones, and in groups of 3 and 4 an empty one."""
    n, size, rank = t.shape[dim], dist.get_world_size(group), dist.get_rank(group)
    cuts = {1: [0, n], 2: [0, n // 3, n], 3: [0, n // 2, n // 2, n], 4: [0, 0, n // 5, n - 1, n]}[size]
    return t.narrow(dim, cuts[rank], cuts[rank + 1] - cuts[rank]).clone()


def whole(t: torch.Tensor, group: dist.ProcessGroup, dim: int = -1) -> torch.Tensor:
    """All parts together, on every process."""
    parts: list[torch.Tensor] = [t] * dist.get_world_size(group)
    dist.all_gather_object(parts, t.detach(), group=group)
    return torch.cat(parts, dim)


def same_on_all(t: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether every process has the same bits."""
    bits = t.detach().contiguous().numpy().tobytes()
    found: list[bytes] = [b""] * dist.get_world_size(group)
    dist.all_gather_object(found, bits, group=group)
    return all(other == bits for other in found)
