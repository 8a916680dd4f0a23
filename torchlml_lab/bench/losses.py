"""The losses, timed forward and backward beside what they compete with: `torchlml bench --losses`."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

import torchlml
from torchlml_lab.bench import records
from torchlml_lab.bench.cases import Case
from torchlml_lab.bench.records import Record
from torchlml_lab.bench.timing import Timing, race
from torchlml_lab.info import kernel

_MODE = "forward+backward"


@dataclass(frozen=True)
class Comparison:
    """Losses on one problem; the first is what the ratios are to."""

    operator: str
    case: Case
    calls: dict[str, Callable[[], Tensor]]


def comparisons(threads: int) -> Iterator[Comparison]:
    """Everything that is compared; a problem is made when its turn comes."""
    for n, k in ((1000, 5), (1000, 100), (10_000, 5), (10_000, 100)):
        yield _single_label(n, k, threads)
    yield _ragged(threads)


def run(threads: tuple[int, ...], repetitions: int, seconds: float, csv: Path, console: Console) -> None:
    """Measures every comparison, appends its rows to the CSV and shows one table.

    Args:
        threads: Numbers of threads torch may use.
        repetitions: Rounds at most; in each one every loss is timed once.
        seconds: Time for one comparison.
        csv: The CSV that the rows are appended to.
        console: Where the table goes.
    """
    table = Table(title=f"{_MODE}: time", title_justify="left")
    for name in ("loss", "batch", "n", "k", "threads", "ms", "ratio", "to"):
        table.add_column(name, justify="left" if name in ("loss", "to") else "right")
    csv.parent.mkdir(parents=True, exist_ok=True)
    before = torch.get_num_threads()
    try:
        for number in dict.fromkeys(threads):
            torch.set_num_threads(number)
            for comparison in comparisons(number):
                baseline = next(iter(comparison.calls))
                timings = race(comparison.calls, baseline, repetitions, seconds)
                records.append(csv, [_record(comparison, *item) for item in timings.items()])
                for name, timing in timings.items():
                    case = comparison.case
                    row = (name, case.batch, case.n, case.k, number)
                    time, ratio = f"{timing.seconds.p50 * 1e3:.3g}", f"{timing.ratio.p50:.2f}"
                    table.add_row(*map(str, row), time, ratio, baseline)
    finally:
        torch.set_num_threads(before)
    console.print(table)
    console.print(f"The rows are in {csv}.", soft_wrap=True)


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
    """Six images of 100 to 380 edges with 50 predicates each, beside six rows of their mean length."""
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


def _record(comparison: Comparison, name: str, timing: Timing) -> Record:
    seconds, ratio = timing.seconds, timing.ratio
    return Record(
        operator=comparison.operator,
        provider=name,
        mode=_MODE,
        metric="time",
        unit="us",
        **vars(comparison.case),
        **{quantile: 1e6 * value for quantile, value in vars(seconds).items()},
        **{f"ratio_{quantile}": value for quantile, value in vars(ratio).items()},
        config=json.dumps({"rounds": timing.rounds, "kernel": kernel()}),
        machine=records.machine(),
        torch=str(torch.__version__),
        torchlml=torchlml.__version__,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
