"""`torchlml gpu-check`: compare the GPU kernels with float64 results on the CPU, and time the kernels."""

from __future__ import annotations

import json
import math
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

_COMPARED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The tolerance for y: for float32, the guaranteed accuracy; for other dtypes, the largest distance between
# adjacent values in (0, 1).
_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class Check(NamedTuple):
    """The result of a check: its name, the largest error found, and the largest error allowed."""

    name: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed


class Case(NamedTuple):
    """Rows of one kind, with one k for all rows or one k per row, and optionally a mask or offsets."""

    name: str
    x: Tensor
    k: float | Tensor
    mask: Tensor | None = None
    offsets: Tensor | None = None


def cases() -> Iterator[Case]:
    """Yield the cases. Their row lengths cover the kernels for on-chip, streamed and split rows."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    for n in (1, 7, 32, 33, 100, 1000, 4096, 4097, 8192, 8193, 50_000):
        for k in sorted({0.3 * min(n, 2), min(5.0, n / 2), n / 2, n - 0.5}):
            yield Case(f"normal, n = {n}, k = {k:g}", 3 * normal(5, n), k)
    yield Case("few long rows, n = 1,000,000", 5 * normal(2, 1_000_000), 1000)
    yield Case("few long rows, k near n", 2 * normal(1, 1_000_000), 999_000)
    for scale in (1e-6, 1e-2, 30.0, 1e3, 1e5):
        yield Case(f"scale {scale:g}", scale * normal(4, 200), 20)
    for shift in (1e3, -1e5, 1e7):
        yield Case(f"shift {shift:g}", normal(4, 200) + shift, 5)
    stairs = torch.stack([torch.randperm(40, generator=g).double() for _ in range(4)])
    for gap in (1.0, 20.0, 100.0, 1000.0):
        yield Case(f"staircase, gap {gap:g}", stairs * gap, 10)
        yield Case(f"staircase, gap {gap:g}, fractional k", stairs * gap, 10.25)
    bimodal = torch.cat([normal(4, 30) + 400, normal(4, 60)], 1)
    for k in (20.0, 30.0, 50.0):
        yield Case(f"a gap of 400, k = {k:g}", bimodal, k)
    yield Case("ties, outside the paper's bracket", torch.zeros(2, 1098, dtype=torch.float64), 1097)
    yield Case("one hundred thousand ties", torch.zeros(2, 100_000, dtype=torch.float64), 1)
    almost = torch.full((1, 100_002), 17.3, dtype=torch.float64)
    almost[0, 0], almost[0, 1] = 0.0, 0.5
    yield Case("one hundred thousand entries near one", almost, 100_000)
    yield Case(
        "one k per row", 3 * normal(4, 300), torch.tensor([1.0, 2.5, 150.0, 299.0], dtype=torch.float64)
    )
    yield Case("masked", 3 * normal(6, 300), 5, mask=torch.rand(6, 300, generator=g) < 0.5)
    lengths = torch.tensor([3, 0, 100, 1, 5000, 40, 9000])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    yield Case("jagged rows", 3 * normal(int(offsets[-1])), 5, offsets=offsets)
    inf, nan = math.inf, math.nan
    special = [[1, inf, 0, 2], [inf, inf, inf, 1], [-inf, 1, 2, -inf], [nan, 0, 1, 2], [-inf] * 4, [inf] * 4]
    for k in (0.0, 1.0, 1.5, 2.0, 4.0):
        yield Case(f"special rows, k = {k:g}", torch.tensor(special, dtype=torch.float64), k)


def checks(device: str) -> Iterator[Check]:
    """Check y, log y, nu and the gradients in all cases and dtypes, then repeatability and the LML loss.

    Cases with finite logits above 6e4 in magnitude are skipped for float16, whose largest value is 65504.
    """
    for dtype in _COMPARED_DTYPES:
        for case in cases():
            if dtype == torch.float16 and bool((case.x.abs().nan_to_num(0, 0, 0) > 6e4).any()):
                continue
            yield _compare(case, dtype, device)
    yield _repeatable(device)
    for loss in losses():
        yield _compare_loss(loss, device)


def _compare(case: Case, dtype: torch.dtype, device: str) -> Check:
    """Compare a case with float64. The reported error is the largest ratio of an error to its tolerance."""
    x = case.x.to(dtype)
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    wide = _results(case, x.double(), g.double())
    narrow = _results(case, x.to(device), g.to(device))
    unit = _TOLERANCE[dtype]
    # The rounding error of z = x + nu is relative to its magnitude. If every |z| is large, that is, if the
    # threshold is in a gap between the logits, this error affects the gradients.
    z = (case.x + _spread(wide["nu"], case)).abs()
    gap = z[z.isfinite()].min().item() if bool(z.isfinite().any()) else 0.0
    worst = 0.0
    for name, exact in wide.items():
        got = narrow[name].double().cpu()
        allowed = torch.full_like(exact, unit)
        if name != "y":
            allowed = 8 * unit * (1 + exact.abs().nan_to_num(0, 0, 0))
        if name in ("dy", "dlog y"):
            allowed = allowed * (1 + gap)
        same = (got == exact) | (got.isnan() & exact.isnan())
        # Beyond the range of the dtype, infinity is the correctly rounded value.
        same |= got.isinf() & (exact.abs() > torch.finfo(dtype).max)
        ratio = torch.where(same, 0.0, (got - exact).abs() / allowed)
        worst = max(worst, ratio.nan_to_num(math.inf).max().item() if ratio.numel() else 0.0)
    return Check(f"{str(dtype).removeprefix('torch.')}: {case.name}", worst, 1.0)


def _spread(per_row: Tensor, case: Case) -> Tensor:
    if case.offsets is None:
        return per_row.unsqueeze(-1)
    return per_row.repeat_interleave(case.offsets.diff())


def _results(case: Case, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    def on(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.to(x.device)

    k = case.k.to(x.device) if isinstance(case.k, Tensor) else case.k
    mask, offsets = on(case.mask), on(case.offsets)
    x = x.detach().requires_grad_()
    y = torchlml.lml(x, k, mask=mask, offsets=offsets)
    (dy,) = torch.autograd.grad(y, x, g)
    log_y = torchlml.log_lml(x, k, mask=mask, offsets=offsets)
    (dlog,) = torch.autograd.grad(log_y, x, g)
    nu = torchlml.lml_dual(x.detach(), k, mask=mask, offsets=offsets)
    return {"y": y.detach(), "log y": log_y.detach(), "nu": nu, "dy": dy, "dlog y": dlog}


def _repeatable(device: str) -> Check:
    """Check that repeating a call gives bitwise identical results."""
    x = torch.randn(64, 3000, generator=torch.Generator().manual_seed(2)).to(device)
    first, again = torchlml.lml(x, 5), torchlml.lml(x, 5)
    return Check("bitwise repeatable", float((first != again).sum()), 0.0)


class LossCase(NamedTuple):
    """Rows with labels in one of the formats that the loss accepts."""

    name: str
    x: Tensor
    target: Tensor
    k: float
    offsets: Tensor | None = None


def losses() -> Iterator[LossCase]:
    """Yield cases with single, multiple and multi-hot labels, for on-chip, streamed and split rows."""
    g = torch.Generator().manual_seed(3)
    for rows, n in ((64, 1000), (8, 20_000), (2, 1_000_000)):
        x = 3 * torch.randn(rows, n, generator=g)
        yield LossCase(f"one label, n = {n}", x, torch.randint(n, (rows,), generator=g), 5)
        yield LossCase(f"lists of labels, n = {n}", x, torch.randint(n, (rows, 50), generator=g), n / 2)
        yield LossCase(f"multi-hot, n = {n}", x, torch.rand(rows, n, generator=g) < 5 / n, 5.5)
    offsets = torch.tensor([0, 3, 3, 103, 9103])
    positions = torch.tensor([1, 40, 41, 5000, 9102])
    yield LossCase("labels of jagged rows", 3 * torch.randn(9103, generator=g), positions, 5, offsets)


def _compare_loss(case: LossCase, device: str) -> Check:
    """Compare the LML loss and its gradient with float64, and return the larger relative error."""

    def both(where: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        logits = case.x.to(where, dtype).requires_grad_()
        offsets = None if case.offsets is None else case.offsets.to(where)
        target = case.target.to(where)
        loss = torchlml.lml_loss(logits, target, case.k, reduction="sum", offsets=offsets)
        return loss.detach().double().cpu(), torch.autograd.grad(loss, logits)[0].double().cpu()

    (loss, dx), (exact, exact_dx) = both(device, torch.float32), both("cpu", torch.float64)
    error = float((loss - exact).abs() / exact)
    error = max(error, float((dx - exact_dx).abs().max() / exact_dx.abs().max()))
    return Check(f"LMLLoss and its gradient: {case.name}", error, 4e-6)


Function = Callable[[Tensor], Tensor]
SHAPES = ((256, 100), (4096, 100), (256, 1000), (4096, 1000), (1024, 8192), (256, 50_000), (4, 1_000_000))
_DTYPES = (torch.float32, torch.bfloat16)
_ROUNDS = 50
# With gradients, a call allocates y and the gradient, which are as large as x, and a few values per row. In a
# row of 100 entries, these values take up at most 6% of the row's size.
_MEMORY_ALLOWED = 2.1


class GpuTiming(NamedTuple):
    """The median times of a call and its PyTorch baseline, and the call's peak memory relative to x."""

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
        # Below a megabyte, the allocator's block sizes dominate.
        return self.memory <= _MEMORY_ALLOWED or self.shape[0] * self.shape[1] < 250_000


def gpu_timings() -> Iterator[GpuTiming]:
    """Time each function and its PyTorch baseline at each shape, for the forward pass and with gradients."""
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
    """Return the median microseconds of two calls, which alternate so that clock changes affect both."""
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
    """Run all checks, print the verdicts, and write the results to `path`."""
    if not torch.cuda.is_available():
        raise BadInput("`torchlml gpu-check` needs a GPU, but PyTorch does not detect one.")
    self_test.skip()  # test the kernels even if the library would not use them
    check_file("FILE", path)
    for line in info.report()["gpu kernel"] + info.report()["devices"]:
        sys.stdout.write(f"{line}\n")
    _say("Comparing with float64 on the CPU (the first call to each kernel compiles it).")
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
        raise RuntimeError(f"Number of failed checks: {failed}. Please attach {path} to an issue.")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def accuracy_table(accuracy: Sequence[Check]) -> str:
    """Format the failed checks, and the number of checks that passed."""
    wrong = [check for check in accuracy if not check.passed]
    lines = [
        f"  WRONG  {check.name}: error {check.error:.3g}, allowed {check.allowed:.3g}" for check in wrong
    ]
    verdict = f"{len(accuracy) - len(wrong)} of {len(accuracy)} checks passed"
    return "\n".join(["", *lines, verdict, ""])


def timing_table(timings: Sequence[GpuTiming]) -> str:
    """Format a line for each function, shape, dtype and mode."""
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
    """Check that a projection replayed in a CUDA graph with a new input matches a regular call."""
    x = torch.randn(64, 1000, device="cuda")
    torchlml.lml(x, 5)  # compiles the kernel, which is not allowed during capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torchlml.lml(x, 5)
    x.normal_()
    graph.replay()
    expected = torchlml.lml(x, 5)
    return Check("replayed in a CUDA graph", float((y != expected).sum()), 0.0)
