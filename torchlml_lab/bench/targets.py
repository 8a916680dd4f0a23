"""`torchlml bench short`, `balanced` and `losses`: time ratios, most of which have a target."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import torchlml
from torchlml_lab.bench.cases import DTYPES, Case
from torchlml_lab.bench.measurements import RowFile, measured
from torchlml_lab.bench.settings import (
    BalancedSettings,
    LossesSettings,
    ShortRowsSettings,
    check_choices,
    check_numbers,
    check_timing,
)
from torchlml_lab.bench.timing import race
from torchlml_lab.engine.output import ProgressBar, new_console, plain_table
from torchlml_lab.engine.settings import cores, use_threads

_BOTH = "forward+backward"
Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Work:
    """A row of the table: two functions to compare, the batch shape, and the largest acceptable ratio."""

    operator: str
    mode: str
    batch: int
    n: int
    k: int
    target: float

    def calls(self, case: Case) -> dict[str, Callable[[], object]]:
        """Return the calls to the baseline and to its competitor for a case, in this order."""
        x = case.logits()
        functions = _FUNCTIONS[self.operator](case)
        if self.mode == "forward":
            return {name: _forward(function, x) for name, function in functions.items()}
        grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(case.n)).to(x.dtype)
        return {
            name: _both(function, x.clone().requires_grad_(), grad) for name, function in functions.items()
        }


def _layer(case: Case) -> dict[str, Call]:
    return {"softmax": lambda x: torch.softmax(x, -1), "lml": lambda x: torchlml.lml(x, case.k)}


def _loss(case: Case) -> dict[str, Call]:
    target = torch.randint(case.n, (case.batch,), generator=torch.Generator().manual_seed(case.n))
    return {
        "cross_entropy": lambda x: F.cross_entropy(x, target),
        "lml_loss": lambda x: torchlml.lml_loss(x, target, case.k),
    }


def _k_per_row(case: Case) -> dict[str, Call]:
    k = torch.arange(case.batch) % case.k + 1
    return {"lml": lambda x: torchlml.lml(x, case.k), "lml, k per row": lambda x: torchlml.lml(x, k)}


def _masked(case: Case) -> dict[str, Call]:
    mask = torch.rand(case.batch, case.n, generator=torch.Generator().manual_seed(case.n)) < 0.8
    return {
        "lml": lambda x: torchlml.lml(x, case.k),
        "lml, mask": lambda x: torchlml.lml(x, case.k, mask=mask),
    }


_FUNCTIONS: Mapping[str, Callable[[Case], dict[str, Call]]] = {
    "lml / softmax": _layer,
    "lml_loss / cross_entropy": _loss,
    "k per row / one k": _k_per_row,
    "mask / no mask": _masked,
}


def _forward(function: Call, x: Tensor) -> Callable[[], object]:
    return lambda: function(x)


def _both(function: Call, x: Tensor, grad: Tensor) -> Callable[[], object]:
    def call() -> object:
        y = function(x)
        return torch.autograd.grad(y, x, grad if y.dim() else None)

    return call


def _two(batch: int, n: int, k: int, forward: float, both: float) -> tuple[Work, Work]:
    return (
        Work("lml / softmax", "forward", batch, n, k, forward),
        Work("lml / softmax", _BOTH, batch, n, k, both),
    )


WORKS: tuple[Work, ...] = (
    *_two(4096, 8, 2, 0.7, 0.75),
    *_two(4096, 32, 4, 1.3, 1.3),
    *_two(4096, 32, 8, 1.3, 1.3),
    *_two(4096, 64, 4, 1.3, 1.3),
    *_two(4096, 64, 8, 1.3, 1.3),
    *_two(16_384, 128, 8, 1.2, 1.2),
    *_two(8192, 256, 8, 1.2, 1.2),
    *_two(256, 100, 5, 1.6, 1.6),
    *_two(256, 1000, 5, 1.2, 1.3),
    Work("lml_loss / cross_entropy", _BOTH, 4096, 64, 8, 1.2),
    Work("lml_loss / cross_entropy", _BOTH, 16_384, 128, 8, 1.2),
    Work("k per row / one k", "forward", 4096, 64, 8, 1.5),
    Work("mask / no mask", "forward", 4096, 64, 8, 1.5),
)


def short_rows(settings: ShortRowsSettings) -> None:
    """Measure every case in the table, append its rows to the CSV, and print the table."""
    console = new_console()
    check_choices("--dtypes", settings.dtypes, DTYPES)
    check_numbers("--scales", settings.scales, 0)
    check_numbers("--threads", settings.threads, 1, cores())
    check_timing(settings)
    file = RowFile(settings.csv)
    jobs = [
        (dtype, number, work) for dtype in settings.dtypes for number in settings.threads for work in WORKS
    ]
    each = len(settings.scales) * settings.seconds
    file.announce(f"Measuring {len(jobs)} rows of the table, about {each:g} s each", console)
    heads = (
        "ratio",
        "rows",
        "k",
        "mode",
        *(f"scale {scale:g}" for scale in settings.scales),
        "target",
        "met",
    )
    shown = []
    with ProgressBar(console) as progress:
        task = progress.add_task("short rows", total=len(jobs))
        for done, (dtype, number, work) in enumerate(jobs):
            try:
                with use_threads(number):
                    shown.append(
                        (dtype, number, _line(work, list(_ratios(file, work, dtype, number, settings))))
                    )
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"Interrupted: {done} of {len(jobs)} rows of the table are in {settings.csv}."
                ) from None
            progress.advance(task)
    for dtype, number in dict.fromkeys((dtype, number) for dtype, number, _ in shown):
        title = f"{dtype}, {number} thread{'s' if number > 1 else ''}: median time ratios over the rounds"
        table = plain_table(title, heads)
        for line in (line for *of, line in shown if tuple(of) == (dtype, number)):
            table.add_row(*line)
        console.print(table)
    if lacks := file.lacks():
        raise RuntimeError(lacks)
    console.print(f"Results written to {settings.csv}.", soft_wrap=True)


def _line(work: Work, ratios: Sequence[float]) -> tuple[str, ...]:
    met = "yes" if max(ratios) <= work.target else "no"
    cells = (f"{ratio:.2f}" for ratio in ratios)
    return work.operator, f"{work.batch} x {work.n}", f"{work.k}", work.mode, *cells, f"{work.target:g}", met


def _ratios(
    file: RowFile, work: Work, dtype: str, threads: int, settings: ShortRowsSettings
) -> Iterator[float]:
    """Time both functions at every scale, append the rows to the file, and yield the ratios."""
    for scale in settings.scales:
        case = Case(work.n, work.k, work.batch, scale, dtype, threads)
        calls = work.calls(case)
        baseline, competitor = calls
        timings = race(calls, baseline, settings.repetitions, settings.seconds)
        file.add(
            measured(
                f"short rows, {work.operator}",
                name,
                work.mode,
                case,
                timing.seconds.times(1e6),
                timing.ratio,
                timing.rounds,
            )
            for name, timing in timings.items()
        )
        yield timings[competitor].ratio.p50


_SHAPES = ((4096, 64, 4), (16_384, 256, 8))  # tokens, experts, k
# The target for each mode and competitor: the largest acceptable ratio to the baseline.
_TARGETS = {
    ("forward", "cold start"): 15.0,
    ("forward", "warm start"): 6.0,
    ("backward", "balanced_lml"): 4.0,
}


def balanced(settings: BalancedSettings) -> None:
    """Time `balanced_lml` for every shape and skew, append the rows to the CSV, and print one table."""
    console = new_console()
    check_numbers("--threads", (settings.threads,), 1, cores())
    check_numbers("--skews", settings.skews, 0)
    check_timing(settings)
    check_choices("--dtype", (settings.dtype,), ("float32", "float64", "bfloat16"))
    file = RowFile(settings.csv)
    jobs = [(shape, skew) for shape in _SHAPES for skew in settings.skews]
    file.announce(f"Timing {len(jobs)} matrices, about {settings.seconds:g} s each", console)
    heads = ("balanced_lml", "tokens", "experts", "k", "skew", "ms", "ratio", "target", "met")
    table = plain_table(f"{settings.dtype}: time per call, and its ratio to the time of lml", heads)
    # Allocate and free one large block. Until a process has done so, glibc returns every large block to the
    # system when it is freed, and page faults would dominate these times. Training processes allocate large
    # blocks early.
    torch.empty(7 * 2**20)
    with ProgressBar(console) as progress, use_threads(settings.threads):
        task = progress.add_task("matrices", total=len(jobs))
        for (tokens, experts, k), skew in jobs:
            case = Case(experts, k, tokens, skew, settings.dtype, settings.threads)
            for mode, calls in _competitors(case).items():
                timings = race(calls, "lml", settings.repetitions, settings.seconds / 2)
                for name, timing in timings.items():
                    value = timing.seconds.times(1e6)
                    file.add([measured("balanced", name, mode, case, value, timing.ratio, timing.rounds)])
                    target = _TARGETS.get((mode, name))
                    if target is not None:
                        label = name if mode == "forward" else mode
                        numbers = (
                            f"{timing.seconds.p50 * 1e3:.3g}",
                            f"{timing.ratio.p50:.1f}",
                            f"{target:g}",
                        )
                        met = "yes" if timing.ratio.p50 <= target else "no"
                        table.add_row(label, f"{tokens}", f"{experts}", f"{k}", f"{skew:g}", *numbers, met)
            progress.advance(task)
    console.print(table)
    console.print(
        "Forward times are relative to lml's forward pass. The time of balanced_lml's backward pass is "
        "relative to lml's forward and backward passes. A warm start uses the multipliers of another batch "
        "with the same preferences.",
        soft_wrap=True,
    )
    if lacks := file.lacks():
        raise RuntimeError(lacks)
    console.print(f"Results written to {settings.csv}.", soft_wrap=True)


def _competitors(case: Case) -> dict[str, dict[str, Callable[[], object]]]:
    """Return the calls to time in each mode. The baseline is named `lml`."""
    generator = torch.Generator().manual_seed(case.n)
    preference = case.scale * torch.randn(case.n, generator=generator)

    def batch() -> Tensor:
        logits = torch.randn(case.batch, case.n, generator=generator) + preference
        return logits.to(getattr(torch, case.dtype))

    x, grad = batch(), batch()
    start = torchlml.balanced_lml_dual(batch(), case.k)[1]
    leaf = x.clone().requires_grad_()
    y = torchlml.balanced_lml(leaf, case.k)
    forward: dict[str, Callable[[], object]] = {
        "lml": lambda: torchlml.lml(x, case.k),
        "cold start": lambda: torchlml.balanced_lml(x, case.k),
        "warm start": lambda: torchlml.balanced_lml(x, case.k, start=start),
    }
    backward: dict[str, Callable[[], object]] = {
        "lml": lambda: torch.autograd.grad(torchlml.lml(leaf, case.k), leaf, grad),
        "balanced_lml": lambda: torch.autograd.grad(y, leaf, grad, retain_graph=True),
    }
    return {"forward": forward, "backward": backward}


@dataclass(frozen=True)
class Comparison:
    """Several losses on inputs of the same size. Ratios are relative to the first loss."""

    operator: str
    case: Case
    calls: dict[str, Callable[[], Tensor]]


# Each function builds a comparison for a given number of threads. It is called just before the timing.
COMPARISONS: tuple[Callable[[int], Comparison], ...] = (
    lambda threads: _single_label(1000, 5, threads),
    lambda threads: _single_label(1000, 100, threads),
    lambda threads: _single_label(10_000, 5, threads),
    lambda threads: _single_label(10_000, 100, threads),
    lambda threads: _ragged(threads),
)


def losses(settings: LossesSettings) -> None:
    """Measure every comparison, append its rows to the CSV, and print one table."""
    console = new_console()
    check_numbers("--threads", settings.threads, 1, cores())
    check_timing(settings)
    file = RowFile(settings.csv)
    jobs = [(number, make) for number in dict.fromkeys(settings.threads) for make in COMPARISONS]
    file.announce(f"Running {len(jobs)} comparisons of about {settings.seconds:g} s each", console)
    heads = ("loss", "batch", "n", "k", "threads", "ms", "ratio")
    title = f"{_BOTH}: time per call, and its ratio to the time of the first loss on inputs of the same size"
    table = plain_table(title, heads)
    with ProgressBar(console) as progress:
        task = progress.add_task("losses", total=len(jobs))
        for done, (number, make) in enumerate(jobs):
            try:
                with use_threads(number):
                    for row in _measure(file, make(number), settings):
                        table.add_row(*row)
                table.add_section()
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"Interrupted: {done} of {len(jobs)} comparisons are in {settings.csv}."
                ) from None
            progress.advance(task)
    console.print(table)
    if lacks := file.lacks():
        raise RuntimeError(lacks)
    console.print(f"Results written to {settings.csv}.", soft_wrap=True)


def _measure(file: RowFile, comparison: Comparison, settings: LossesSettings) -> Iterator[tuple[str, ...]]:
    """Time a comparison, append its rows to the CSV, and yield the rows of the table."""
    case, baseline = comparison.case, next(iter(comparison.calls))
    timings = race(comparison.calls, baseline, settings.repetitions, settings.seconds)
    file.add(
        measured(
            comparison.operator, name, _BOTH, case, timing.seconds.times(1e6), timing.ratio, timing.rounds
        )
        for name, timing in timings.items()
    )
    problem = (f"{case.batch}", f"{case.n}", f"{case.k}", f"{case.threads}")
    for name, timing in timings.items():
        yield name, *problem, f"{timing.seconds.p50 * 1e3:.3g}", f"{timing.ratio.p50:.2f}"


def _single_label(n: int, k: int, threads: int) -> Comparison:
    case = Case(n, k, 256, 3.0, "float32", threads)
    x = case.logits().requires_grad_()
    target = torch.randint(n, (256,), generator=torch.Generator().manual_seed(n))
    found: dict[str, Call] = {
        "cross_entropy": lambda x: F.cross_entropy(x, target),
        "lml_loss": lambda x: torchlml.lml_loss(x, target, k),
    }
    if n == 1000:
        found["truncated_entropy_loss"] = lambda x: torchlml.truncated_entropy_loss(x, target, k)
        found["topk_svm_loss"] = lambda x: torchlml.topk_svm_loss(x, target, k)
    if n == 1000 and k == 100:
        found["smooth_topk_svm_loss"] = lambda x: torchlml.smooth_topk_svm_loss(x, target, k)
    return Comparison("loss", case, {name: _gradient(loss, x) for name, loss in found.items()})


def _ragged(threads: int) -> Comparison:
    """Compare a ragged batch (six images with 100 to 380 edges, 50 predicates per edge) with a dense one."""
    lengths = 50 * torch.tensor([100, 150, 210, 260, 340, 380])
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    size = int(offsets[-1])
    case = Case(size // 6, 20, 6, 3.0, "float32", threads)
    generator = torch.Generator().manual_seed(0)
    dense = case.logits().requires_grad_()
    labels = torch.randint(case.n, (6, 10), generator=generator)
    values = (torch.randn(size, generator=generator) * case.scale).requires_grad_()
    positions = torch.randint(size, (60,), generator=generator)
    calls = {
        "lml_loss, dense": _gradient(lambda x: torchlml.lml_loss(x, labels, 20), dense),
        "lml_loss, ragged": _gradient(lambda x: torchlml.lml_loss(x, positions, 20, offsets=offsets), values),
    }
    return Comparison("ragged loss", case, calls)


def _gradient(loss: Call, x: Tensor) -> Callable[[], Tensor]:
    return lambda: torch.autograd.grad(loss(x), x)[0]
