"""The benchmark of a function of the logits and k: every competitor on every case of a grid, over softmax."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar, cast

from rich.console import Console

from torchlml_lab.bench import report
from torchlml_lab.bench.cases import (
    DTYPES,
    Case,
    TimingSettings,
    case_grid,
    check_choices,
    check_numbers,
    check_timing,
)
from torchlml_lab.bench.competitors import BASELINE, FAMILY, LAYER, MODES, Mode, Provider, call_of
from torchlml_lab.bench.measurements import Measurement, RowFile, latest, measured, read
from torchlml_lab.bench.timing import PAGE_BYTES, Quantiles, added_bytes, measurable, race
from torchlml_lab.cli import parse_settings
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.progress import ProgressBar
from torchlml_lab.engine.settings import cores, use_threads
from torchlml_lab.files import check_file
from torchlml_lab.plots import check_picture

METRICS = ("time", "memory")


def _metrics() -> tuple[str, ...]:
    return METRICS if measurable() else METRICS[:1]


@dataclass(frozen=True)
class GridSettings(TimingSettings):
    """What the benchmarks on a grid of cases have in common."""

    sizes: tuple[int, ...] = (100, 1000, 10_000, 1_000_000)
    """Lengths n of a row."""
    ks: tuple[str, ...] = ("5", "n/2")
    """How many to choose: numbers, or `n/NUMBER`, or `n-NUMBER`; those outside 1 to n-1 are left out."""
    batches: tuple[int, ...] = (256,)
    """Numbers of rows; long rows get fewer, so that no tensor has more than 4,000,000 entries."""
    scales: tuple[float, ...] = (1.0, 12.0)
    """Standard deviations of the logits."""
    dtypes: tuple[str, ...] = ("float32",)
    """Types of the logits: float32, float64, bfloat16, float16."""
    threads: tuple[int, ...] = (1,)
    """Numbers of threads torch may use."""
    providers: tuple[str, ...] = ()
    """Who competes; by default all that can run here. Softmax always takes part: the ratios are to it."""
    modes: tuple[str, ...] = MODES
    """What is measured: forward without a graph, backward alone, forward+backward through autograd."""
    metrics: tuple[str, ...] = field(default_factory=_metrics)
    """`time` of a call, or `memory` (Linux): what a call adds to the process at its highest, result too."""
    plot: Path | None = None
    """The PNG or SVG of the times in the whole CSV; by default a PNG beside the CSV, with its name."""
    compare: Path | None = None
    """The CSV of an earlier run, whose ratios are shown beside the new ones."""
    quick: bool = False
    """Begin from a small selection that takes well under a minute; other options still change it."""


Kind = TypeVar("Kind", bound=GridSettings)

# What `--quick` begins from.
QUICK: dict[str, Any] = {
    "sizes": (100, 1000, 10_000),
    "ks": ("5",),
    "batches": (64,),
    "scales": (3.0,),
    "metrics": ("time",),
    "seconds": 1.0,
}


def read_options(kind: type[Kind], command: str, arguments: Sequence[str]) -> Kind:
    """Read the options of a benchmark on a grid; with `--quick` the others start from the small selection."""
    usual = kind()
    settings = parse_settings(kind, command, arguments, usual)
    if settings.quick:
        settings = parse_settings(kind, command, arguments, replace(usual, **QUICK))
    check_file("--csv", settings.csv)
    return settings


def run(
    settings: GridSettings, operator: str, competitors: Sequence[Provider], plot: Path, console: Console
) -> None:
    """Measure every case, appending its rows to the CSV as soon as it is done.

    Args:
        settings: What to measure; wrong values raise `BadInput` before anything is measured.
        operator: The benchmark's name in the CSV.
        competitors: All that can be named in the settings.
        plot: The picture to draw.
        console: Where the progress, the tables and what was written go.
    """
    providers = _checked(settings, competitors)
    cases = case_grid(
        settings.sizes, settings.ks, settings.batches, settings.scales, settings.dtypes, settings.threads
    )
    check_picture(plot, "--plot")
    earlier = latest(read(settings.compare, "--compare")) if settings.compare else {}
    file = RowFile(settings.csv)
    jobs = list(product(cases, cast(tuple[Mode, ...], tuple(dict.fromkeys(settings.modes)))))
    turns = f"{len(providers)} competitors take turns in {len(jobs)} measurements"
    file.announce(f"{turns} of about {settings.seconds:g} s each", console)
    with ProgressBar(console) as progress:
        task = progress.add_task("", total=len(jobs))
        for done, (case, mode) in enumerate(jobs):
            progress.update(task, description=f"{mode}, {case.batch} x {case.n}, k {case.k}, {case.dtype}")
            try:
                with use_threads(case.threads):
                    file.add(_measure(providers, case, mode, settings, operator))
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"Interrupted: {done} of {len(jobs)} measurements are in {settings.csv}."
                ) from None
            progress.advance(task)
    for part in report.tables(file.new, earlier, console.width):
        console.print(part, highlight=False)
    if settings.compare and not any(row.key in earlier for row in file.new):
        console.print(f"Nothing that was measured now is in {settings.compare}.", soft_wrap=True)
    times = [row for row in (*file.earlier, *file.new) if (row.operator, row.metric) == (operator, "time")]
    report.finish(file, plot, (lambda: report.draw(times, plot)) if times else None, console)


def _measure(
    providers: Sequence[Provider], case: Case, mode: Mode, settings: GridSettings, operator: str
) -> Iterator[Measurement]:
    calls = {provider.name: call_of(provider, case, mode) for provider in providers}
    if "time" in settings.metrics:
        for name, timing in race(calls, BASELINE, settings.repetitions, settings.seconds).items():
            micro = timing.seconds.times(1e6)
            yield measured(operator, name, mode, case, micro, timing.ratio, timing.rounds)
    if "memory" in settings.metrics:
        gc.collect()
        added = {name: added_bytes(call) / 2**20 for name, call in calls.items()}
        # The tiniest cases may add less than a page for softmax; their ratio says little.
        one = max(added[BASELINE], PAGE_BYTES / 2**20)
        for name, size in added.items():
            value, ratio = Quantiles.of([size]), Quantiles.of([size / one])
            yield measured(operator, name, mode, case, value, ratio, 1, metric="memory", unit="MiB")


def _checked(settings: GridSettings, competitors: Sequence[Provider]) -> list[Provider]:
    """The providers that were named, softmax first; wrong options are refused here."""
    known = {provider.name: provider for provider in competitors}
    check_choices("--providers", settings.providers, known)
    check_choices("--modes", settings.modes, MODES)
    check_choices("--metrics", settings.metrics, METRICS)
    check_choices("--dtypes", settings.dtypes, DTYPES)
    check_numbers("--sizes", settings.sizes, 2)
    check_numbers("--batches", settings.batches, 1)
    check_numbers("--scales", settings.scales, 0)
    check_numbers("--threads", settings.threads, 1, cores())
    check_timing(settings)
    for name in settings.providers:
        if (why := known[name].absent()) is not None:
            raise BadInput(f"`--providers` names `{name}`, which cannot run here: {why}.")
    if "memory" in settings.metrics and not measurable():
        raise BadInput("`--metrics` names `memory`, which needs Linux and the GNU C library.")
    return [known[name] for name in dict.fromkeys((BASELINE, *settings.providers))]


def _here() -> tuple[str, ...]:
    return tuple(provider.name for provider in LAYER if provider.absent() is None)


@dataclass(frozen=True)
class LayerSettings(GridSettings):
    """Time lml beside softmax, topk, sort and sigmoid, in turn, as ratios to softmax.

    A ratio is formed from two calls within milliseconds, so that it holds on a noisy machine too.
    """

    providers: tuple[str, ...] = field(default_factory=_here)
    """Who competes; by default all that can run here. Softmax always takes part: the ratios are to it."""


def layer(arguments: Sequence[str]) -> None:
    """Read the options and run the benchmark."""
    settings = read_options(LayerSettings, "bench layer", arguments)
    plot = settings.plot or settings.csv.with_suffix(".png")
    run(settings, "projection", LAYER, plot, Console())


@dataclass(frozen=True)
class ConstrainedSettings(GridSettings):
    """Time the relatives of lml, in turn, as ratios to softmax."""

    providers: tuple[str, ...] = tuple(provider.name for provider in FAMILY)
    """Who competes. Softmax always takes part: the ratios are to it."""
    plot: Path | None = None
    """The PNG or SVG of the times in the whole CSV; by default beside the CSV, as NAME-family.png."""


def constrained(arguments: Sequence[str]) -> None:
    """Read the options and run the benchmark."""
    settings = read_options(ConstrainedSettings, "bench family", arguments)
    plot = settings.plot or settings.csv.with_name(f"{settings.csv.stem}-family.png")
    run(settings, "family", FAMILY, plot, Console())
