"""Time and memory of lml, log_lml and LMLLoss on a GPU, beside softmax, log_softmax and cross_entropy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import torchlml

Function = Callable[[Tensor], Tensor]
SHAPES = ((256, 100), (4096, 100), (256, 1000), (4096, 1000), (1024, 8192), (256, 50_000), (4, 1_000_000))
_DTYPES = (torch.float32, torch.bfloat16)
_ROUNDS = 50
# lml keeps x, y and a pair for each row; softmax keeps y. Twice the input is room for both and a gradient.
_MEMORY_ALLOWED = 2.0


class GpuTiming(NamedTuple):
    """Median microseconds of a call and of PyTorch's beside it, and the peak of memory it added, over x."""

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
        # Less than a megabyte is the allocator's rounding.
        return self.memory <= _MEMORY_ALLOWED or self.shape[0] * self.shape[1] < 250_000


def gpu_timings() -> Iterator[GpuTiming]:
    """Each pair at each shape, forward alone and with its gradient."""
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
    """Median microseconds of both, taken in turn so that a change of the clock falls on both alike."""
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
