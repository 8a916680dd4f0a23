"""Checks that run in real processes: one start for many of them, since a start takes seconds.

A check is a function of a group; `run` calls it in groups of 2, 3 and 4 processes, which talk by gloo.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from tests.support.processes import fork

PROCESSES = 4
_TIMEOUT = timedelta(minutes=5)  # a process waits here while others, in a smaller group, do without it


def run(module: dict[str, Any]) -> None:
    """Call every `check_*` of a module, which gives its `globals()`; the first that fails ends them all."""
    checks = [name for name in module if name.startswith("check_")]
    with tempfile.TemporaryDirectory() as folder:
        processes = [fork(_work, rank, module["__name__"], checks, folder) for rank in range(PROCESSES)]
        for process in processes:
            process.join()
        wrong = "\n".join(path.read_text() for path in Path(folder).glob("error *"))
    assert [process.exitcode for process in processes] == [0] * PROCESSES, wrong


def _work(rank: int, module: str, checks: list[str], folder: str) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=_TIMEOUT)
    groups = {size: dist.new_group(list(range(size)), timeout=_TIMEOUT) for size in (2, 3, 4)}
    holder, at = importlib.import_module(module), ""
    try:
        for name in checks:
            check = getattr(holder, name)
            for size in getattr(check, "sizes", (2, 3, 4)):
                if rank < size:
                    at = f"{name}, process {rank} of {size}"
                    torch.manual_seed(0)
                    check(groups[size])
    except Exception:
        (Path(folder) / f"error {rank}").write_text(f"{at}: {traceback.format_exc()}")
        os._exit(1)  # the others, which may wait for this one, see that it is gone
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
