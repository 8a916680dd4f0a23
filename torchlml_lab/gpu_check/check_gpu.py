"""`torchlml gpu-check`: checks and times the kernels on the GPU of this machine. Needs nothing but torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import torchlml
from torchlml._triton import self_test
from torchlml_lab import info
from torchlml_lab.cli import answer_help
from torchlml_lab.errors import BadInput
from torchlml_lab.files import check_file, replacing
from torchlml_lab.gpu_check.comparisons import Check, checks
from torchlml_lab.gpu_check.gpu_timing import GpuTiming, gpu_timings

USAGE = """usage: torchlml gpu-check [FILE]

Projects rows of every kind on the GPU and compares them with float64 on the
CPU; captures a projection in a CUDA graph; times lml, log_lml and LMLLoss
beside softmax, log_softmax and cross_entropy; looks at the peak of memory.
Prints a verdict, and writes everything to FILE, to attach to an issue. Exits
with 1 if a check fails.

arguments:
  FILE        the JSON file to write (torchlml-gpu-check.json)
"""


def main(arguments: Sequence[str]) -> None:
    """Run everything, print the verdicts and write the file."""
    answer_help(arguments, USAGE)
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        raise BadInput(f"`torchlml gpu-check` takes one file name, and `{' '.join(arguments)}` was given.")
    if not torch.cuda.is_available():
        raise BadInput("`torchlml gpu-check` needs a GPU, and torch sees none here.")
    self_test.skip()  # it is the kernels that are to be examined here, not what stands in for them
    path = Path(arguments[0] if arguments else "torchlml-gpu-check.json")
    check_file("FILE", path)
    for line in info.report()["gpu kernel"] + info.report()["devices"]:
        sys.stdout.write(f"{line}\n")
    _say("Comparing with float64 on the CPU; the first call of each kernel compiles it.")
    accuracy = [*checks("cuda"), _graph()]
    sys.stdout.write(accuracy_table(accuracy))
    _say("Timing beside softmax, log_softmax and cross_entropy.")
    timings = list(gpu_timings())
    sys.stdout.write(timing_table(timings))
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(as_json(accuracy, timings), indent=1) + "\n")
    sys.stdout.write(f"\nWrote {path}.\n")
    failed = sum(not check.passed for check in accuracy) + sum(not timing.memory_passed for timing in timings)
    if failed:
        raise RuntimeError(f"{failed} checks failed; please attach {path} to an issue.")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def accuracy_table(accuracy: Sequence[Check]) -> str:
    """Write the verdict on the numbers: every check that failed, and how many are right."""
    wrong = [check for check in accuracy if not check.passed]
    lines = [
        f"  WRONG  {check.name}: error {check.error:.3g}, allowed {check.allowed:.3g}" for check in wrong
    ]
    verdict = f"{len(accuracy) - len(wrong)} of {len(accuracy)} comparisons with float64 are right"
    return "\n".join(["", *lines, verdict, ""])


def timing_table(timings: Sequence[GpuTiming]) -> str:
    """Write a line for each pair, shape, dtype and mode."""
    lines = [
        f"\n{'':<9}{'shape':>15} {'dtype':<9}{'mode':<19}{'µs':>9}{'beside':>9}{'ratio':>7}{'memory':>8}"
    ]
    for t in timings:
        shape = f"{t.shape[0]} x {t.shape[1]}"
        memory = f"{t.memory:.2f}x" + ("" if t.memory_passed else "  TOO MUCH")
        lines.append(
            f"{t.name:<9}{shape:>15} {t.dtype:<9}{t.mode:<19}{t.microseconds:>9.1f}"
            f"{t.microseconds_beside:>9.1f}{t.ratio:>7.2f}{memory:>8}"
        )
    return "\n".join([*lines, ""])


def as_json(accuracy: Sequence[Check], timings: Sequence[GpuTiming]) -> dict[str, Any]:
    """What the file holds: versions and devices, every check, every measurement."""
    return {
        "versions": info.report(),
        "accuracy": [{**check._asdict(), "passed": check.passed} for check in accuracy],
        "timings": [{**timing._asdict(), "ratio": timing.ratio} for timing in timings],
    }


def _graph() -> Check:
    """A projection in a CUDA graph, replayed with another input, gives what a plain call gives."""
    x = torch.randn(64, 1000, device="cuda")
    torchlml.lml(x, 5)  # compiles, which a capture may not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torchlml.lml(x, 5)
    x.normal_()
    graph.replay()
    expected = torchlml.lml(x, 5)
    return Check("replayed in a CUDA graph", float((y != expected).sum()), 0.0)
