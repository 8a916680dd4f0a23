"""Benchmarks on a grid of cases: every function of the logits and k, with times relative to softmax."""

import gc
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import cast

from rich.console import Console

from torchlml_lab.bench import report
from torchlml_lab.bench.cases import BASELINE, DTYPES, FAMILY, LAYER, Case, Provider, call_of, case_grid
from torchlml_lab.bench.measurements import Measurement, RowFile, latest, measured, read
from torchlml_lab.bench.settings import (
    METRICS,
    MODES,
    ConstrainedSettings,
    GridBenchmarkSettings,
    LayerSettings,
    Mode,
    check_choices,
    check_numbers,
    check_timing,
)
from torchlml_lab.bench.timing import PAGE_BYTES, Quantiles, added_bytes, measurable, race
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import ProgressBar, new_console
from torchlml_lab.engine.settings import cores, use_threads
from torchlml_lab.files import check_file, check_picture


def run(
    settings: GridBenchmarkSettings,
    operator: str,
    competitors: Sequence[Provider],
    plot: Path,
    console: Console,
) -> None:
    """Measure every case, and append its rows to the CSV immediately.

    Args:
        settings: The settings. Invalid values raise `BadInput` before anything is measured.
        operator: The name of the benchmark in the CSV.
        competitors: All functions that the settings can name.
        plot: The picture to draw.
        console: The console for the progress, the tables and the list of files.
    """
    providers = _checked(settings, competitors)
    cases = case_grid(
        settings.sizes, settings.ks, settings.batches, settings.scales, settings.dtypes, settings.threads
    )
    check_picture(plot, "--plot")
    earlier = latest(read(settings.compare, "--compare")) if settings.compare else {}
    file = RowFile(settings.csv)
    jobs = list(product(cases, cast(tuple[Mode, ...], tuple(dict.fromkeys(settings.modes)))))
    turns = f"Comparing {len(providers)} functions in {len(jobs)} measurements"
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
        console.print(f"{settings.compare} contains none of these measurements.", soft_wrap=True)
    times = [row for row in (*file.earlier, *file.new) if (row.operator, row.metric) == (operator, "time")]
    report.finish(file, plot, (lambda: report.draw(times, plot, [settings.csv])) if times else None, console)


def _measure(
    providers: Sequence[Provider], case: Case, mode: Mode, settings: GridBenchmarkSettings, operator: str
) -> Iterator[Measurement]:
    calls = {provider.name: call_of(provider, case, mode) for provider in providers}
    if "time" in settings.metrics:
        for name, timing in race(calls, BASELINE, settings.repetitions, settings.seconds).items():
            micro = timing.seconds.times(1e6)
            yield measured(operator, name, mode, case, micro, timing.ratio, timing.rounds)
    if "memory" in settings.metrics:
        gc.collect()
        added = {name: added_bytes(call) / 2**20 for name, call in calls.items()}
        # In the smallest cases softmax may add less than a page, so the ratio is bounded.
        one = max(added[BASELINE], PAGE_BYTES / 2**20)
        for name, size in added.items():
            value, ratio = Quantiles.of([size]), Quantiles.of([size / one])
            yield measured(operator, name, mode, case, value, ratio, 1, metric="memory", unit="MiB")


def _checked(settings: GridBenchmarkSettings, competitors: Sequence[Provider]) -> list[Provider]:
    """Return the providers that were named, softmax first, or raise `BadInput`."""
    known = {provider.name: provider for provider in competitors}
    named = settings.providers or [provider.name for provider in competitors if provider.absent() is None]
    check_choices("--providers", named, known)
    check_choices("--modes", settings.modes, MODES)
    check_choices("--metrics", settings.metrics, METRICS)
    check_choices("--dtypes", settings.dtypes, DTYPES)
    check_numbers("--sizes", settings.sizes, 2)
    check_numbers("--batches", settings.batches, 1)
    check_numbers("--scales", settings.scales, 0)
    check_numbers("--threads", settings.threads, 1, cores())
    check_timing(settings)
    for name in named:
        if (why := known[name].absent()) is not None:
            raise BadInput(f"`--providers` names `{name}`, which cannot run here: {why}.")
    if "memory" in settings.metrics and not measurable():
        raise BadInput("`--metrics` names `memory`, which requires Linux and the GNU C library.")
    return [known[name] for name in dict.fromkeys((BASELINE, *named))]


def layer(settings: LayerSettings) -> None:
    """Run `torchlml bench layer`."""
    check_file("--csv", settings.csv)
    plot = settings.plot or settings.csv.with_suffix(".png")
    run(settings, "projection", LAYER, plot, new_console())


def constrained(settings: ConstrainedSettings) -> None:
    """Run `torchlml bench constrained`."""
    check_file("--csv", settings.csv)
    plot = settings.plot or settings.csv.with_name(f"{settings.csv.stem}-constrained.png")
    run(settings, "family", FAMILY, plot, new_console())
