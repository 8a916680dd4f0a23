"""`torchlml gpu-check`: compare the GPU kernels with float64 on the CPU, and time them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import torchlml
from torchlml._triton import self_test
from torchlml_lab import info
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.files import check_file, replacing
from torchlml_lab.gpu_check.comparisons import Check, checks

Function = Callable[[Tensor], Tensor]
SHAPES = ((256, 100), (4096, 100), (256, 1000), (4096, 1000), (1024, 8192), (256, 50_000), (4, 1_000_000))
_DTYPES = (torch.float32, torch.bfloat16)
_ROUNDS = 50
# lml stores x, y and two values per row, and softmax stores y. Twice the input suffices, with a gradient.
_MEMORY_ALLOWED = 2.0


class GpuTiming(NamedTuple):
    """Median microseconds of a call and of its PyTorch baseline, and the peak memory relative to x."""

    name: str
    beside: str
    shape: tuple[int, int]
    dtype: str
    mode: str
    microseconds: float
    microseconds_beside: float
    memory: float

    @property
    def ratio(self) -> float:
        return self.microseconds / self.microseconds_beside

    @property
    def memory_passed(self) -> bool:
        # Below a megabyte, the rounding of the allocator dominates.
        return self.memory <= _MEMORY_ALLOWED or self.shape[0] * self.shape[1] < 250_000


def gpu_timings() -> Iterator[GpuTiming]:
    """Time each pair at each shape, forward alone and with its gradient."""
    for dtype in _DTYPES:
        for rows, n in SHAPES:
            x = torch.randn(rows, n, device="cuda", dtype=dtype).mul_(3)
            target = torch.randint(n, (rows,), device="cuda")
            pairs: dict[tuple[str, str], tuple[Function, Function]] = {
                ("lml", "softmax"): (partial(torchlml.lml, k=5), partial(torch.softmax, dim=-1)),
                ("log_lml", "log_softmax"): (
                    partial(torchlml.log_lml, k=5),
                    partial(torch.log_softmax, dim=-1),
                ),
                ("LMLLoss", "cross_entropy"): (
                    partial(torchlml.lml_loss, target=target, k=5),
                    partial(cross_entropy, target=target),
                ),
            }
            for (name, beside), (ours, theirs) in pairs.items():
                for mode in ("forward", "forward + backward"):
                    first, second = _call(ours, x, mode), _call(theirs, x, mode)
                    taken, taken_beside = _race(first, second)
                    yield GpuTiming(
                        name,
                        beside,
                        (rows, n),
                        str(dtype).removeprefix("torch."),
                        mode,
                        taken,
                        taken_beside,
                        _peak(first) / (x.numel() * x.element_size()),
                    )


def _call(function: Function, x: Tensor, mode: str) -> Callable[[], object]:
    if mode == "forward":
        return lambda: function(x)
    x = x.detach().requires_grad_()
    g = torch.randn_like(function(x))
    return lambda: torch.autograd.grad(function(x), x, g)


def _race(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Return the median microseconds of both calls, alternating so that clock changes affect both."""
    for _ in range(5):
        first()
        second()
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for call, times in zip((first, second), taken, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(1000 * start.elapsed_time(end))
    return median(taken[0]), median(taken[1])


def _peak(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def main(path: Path) -> None:
    """Run all checks, print the verdicts, and write the file."""
    if not torch.cuda.is_available():
        raise BadInput("`torchlml gpu-check` needs a GPU, but torch detects none.")
    self_test.skip()  # test the kernels themselves, not the fallback
    check_file("FILE", path)
    for line in info.report()["gpu kernel"] + info.report()["devices"]:
        sys.stdout.write(f"{line}\n")
    _say("Comparing with float64 on the CPU (the first call of each kernel compiles it).")
    accuracy = [*checks("cuda"), _graph()]
    sys.stdout.write(accuracy_table(accuracy))
    _say("Timing against softmax, log_softmax and cross_entropy.")
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
    """Format the failed checks, and the number of checks that passed."""
    wrong = [check for check in accuracy if not check.passed]
    lines = [
        f"  WRONG  {check.name}: error {check.error:.3g}, allowed {check.allowed:.3g}" for check in wrong
    ]
    verdict = f"{len(accuracy) - len(wrong)} of {len(accuracy)} comparisons with float64 passed"
    return "\n".join(["", *lines, verdict, ""])


def timing_table(timings: Sequence[GpuTiming]) -> str:
    """Format a line for each pair, shape, dtype and mode."""
    lines = [
        f"\n{'':<9}{'shape':>15} {'dtype':<9}{'mode':<19}{'µs':>9}{'PyTorch':>9}{'ratio':>7}{'memory':>8}"
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
    """Return the content of the file: versions and devices, all checks, and all measurements."""
    return {
        "versions": info.report(),
        "accuracy": [{**check._asdict(), "passed": check.passed} for check in accuracy],
        "timings": [{**timing._asdict(), "ratio": timing.ratio} for timing in timings],
    }


def _graph() -> Check:
    """Check that a projection replayed in a CUDA graph with another input matches a regular call."""
    x = torch.randn(64, 1000, device="cuda")
    torchlml.lml(x, 5)  # compiles the kernel, which is not allowed during capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torchlml.lml(x, 5)
    x.normal_()
    graph.replay()
    expected = torchlml.lml(x, 5)
    return Check("replayed in a CUDA graph", float((y != expected).sum()), 0.0)
