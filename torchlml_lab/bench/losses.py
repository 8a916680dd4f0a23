"""`torchlml bench losses`: the losses, forward and backward, compared with their baselines."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

import torchlml
from torchlml_lab.bench.cases import Case
from torchlml_lab.bench.measurements import RowFile, measured
from torchlml_lab.bench.settings import LossesSettings, check_numbers, check_timing
from torchlml_lab.bench.timing import race
from torchlml_lab.engine.output import ProgressBar, new_console, plain_table
from torchlml_lab.engine.settings import cores, use_threads

_MODE = "forward+backward"


@dataclass(frozen=True)
class Comparison:
    """Losses on one problem. Ratios are relative to the first loss."""

    operator: str
    case: Case
    calls: dict[str, Callable[[], Tensor]]


# Each problem is built when it is needed, for a given number of threads.
COMPARISONS: tuple[Callable[[int], Comparison], ...] = (
    lambda threads: _single_label(1000, 5, threads),
    lambda threads: _single_label(1000, 100, threads),
    lambda threads: _single_label(10_000, 5, threads),
    lambda threads: _single_label(10_000, 100, threads),
    lambda threads: _ragged(threads),
)


def main(settings: LossesSettings) -> None:
    """Run the benchmark."""
    run(settings, new_console())


def run(settings: LossesSettings, console: Console) -> None:
    """Measure every comparison, append its rows to the CSV, and print one table."""
    check_numbers("--threads", settings.threads, 1, cores())
    check_timing(settings)
    file = RowFile(settings.csv)
    jobs = [(number, make) for number in dict.fromkeys(settings.threads) for make in COMPARISONS]
    file.announce(f"Running {len(jobs)} comparisons of about {settings.seconds:g} s each", console)
    heads = ("loss", "batch", "n", "k", "threads", "ms", "ratio")
    table = plain_table(f"{_MODE}: time per call, and its ratio to the first loss of the problem", heads)
    with ProgressBar(console) as progress:
        task = progress.add_task("losses", total=len(jobs))
        for done, (number, make) in enumerate(jobs):
            try:
                with use_threads(number):
                    for row in _add(file, make(number), settings):
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


def _add(file: RowFile, comparison: Comparison, settings: LossesSettings) -> Iterator[tuple[str, ...]]:
    """Time a comparison, write it to the file, and yield the rows of the table."""
    case, baseline = comparison.case, next(iter(comparison.calls))
    timings = race(comparison.calls, baseline, settings.repetitions, settings.seconds)
    file.add(
        measured(
            comparison.operator, name, _MODE, case, timing.seconds.times(1e6), timing.ratio, timing.rounds
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
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "cross_entropy": lambda x: F.cross_entropy(x, target),
        "lml_loss": lambda x: torchlml.lml_loss(x, target, k),
    }
    if n == 1000:
        losses["truncated_entropy_loss"] = lambda x: torchlml.truncated_entropy_loss(x, target, k)
        losses["topk_svm_loss"] = lambda x: torchlml.topk_svm_loss(x, target, k)
    if n == 1000 and k == 100:
        losses["smooth_topk_svm_loss"] = lambda x: torchlml.smooth_topk_svm_loss(x, target, k)
    return Comparison("loss", case, {name: _both(loss, x) for name, loss in losses.items()})


def _ragged(threads: int) -> Comparison:
    """Compare six images of 100 to 380 edges, 50 predicates each, with six rows of their mean length."""
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
        "lml_loss, dense": _both(lambda x: torchlml.lml_loss(x, labels, 20), dense),
        "lml_loss, ragged": _both(lambda x: torchlml.lml_loss(x, positions, 20, offsets=offsets), values),
    }
    return Comparison("ragged loss", case, calls)


def _both(loss: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    return lambda: torch.autograd.grad(loss(x), x)[0]
