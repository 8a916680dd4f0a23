"""One step of `linear_lml_loss` in a process of its own, which then says its highest memory."""

import json
import resource
import sys

import torch

from torchlml_lab.bench.scale import steps


def main() -> None:
    """Take the step; the arguments are rows, labels, features and threads."""
    rows, labels, features, threads = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    steps(rows, labels, features)["linear_lml_loss"]()
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(json.dumps({"bytes": highest}))


if __name__ == "__main__":
    main()
