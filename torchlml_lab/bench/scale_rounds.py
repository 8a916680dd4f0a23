"""One of two processes that share rows: it counts the collectives of `lml` for logits of several scales."""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.tensor.debug import CommDebugMode

import torchlml


def main() -> None:
    """Count; the arguments are a folder to meet in, the number of labels, the rank and the scales."""
    folder, labels, rank, *scales = sys.argv[1:]
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
    main()
