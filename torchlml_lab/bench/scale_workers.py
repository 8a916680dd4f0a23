"""The worker processes of `torchlml bench scale`. The first argument is `step` or `rounds`.

`step` runs one step of `linear_lml_loss` and reports the peak memory of the whole process. `rounds` is one of
two processes that share sharded rows, and counts the collectives of `lml`.
"""

import json
import resource
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

import torchlml


def step(arguments: Sequence[str]) -> None:
    """Run the step. The arguments are the numbers of rows, labels, features and threads."""
    from torchlml_lab.bench.scale import steps

    rows, labels, features, threads = map(int, arguments)
    torch.set_num_threads(threads)
    steps(rows, labels, features)["linear_lml_loss"]()
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(json.dumps({"bytes": highest}))


def rounds(arguments: Sequence[str]) -> None:
    """Count collectives. The arguments are a rendezvous directory, the labels, the rank and the scales."""
    from torch.distributed.tensor.debug import CommDebugMode  # uses memory, so `step` avoids it

    folder, labels, rank, *scales = arguments
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=2)
    found = []
    for scale in map(float, scales):
        generator = torch.Generator().manual_seed(int(rank))
        x = torch.randn(16, int(labels) // 2, generator=generator) * scale
        with CommDebugMode() as counted:
            torchlml.lml(x, 5, group=dist.group.WORLD)
        found.append(counted.get_total_counts())
    sys.stdout.write(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    {"step": step, "rounds": rounds}[sys.argv[1]](sys.argv[2:])
