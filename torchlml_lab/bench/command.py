"""`torchlml bench`: reads the options, runs the cases, writes the CSV, shows tables and the plot."""

import gc
import json
import math
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import torchlml
from torchlml_lab.bench import losses, memory, paper, records, report
from torchlml_lab.bench.cases import BASELINE, FAMILY, MODES, PROJECTION, Case, Mode, Provider, call_of
from torchlml_lab.bench.records import Record
from torchlml_lab.bench.timing import Quantiles, race
from torchlml_lab.cli import parse_settings
from torchlml_lab.errors import BadInput
from torchlml_lab.info import kernel

DTYPES = ("float32", "float64", "bfloat16", "float16")
METRICS = ("time", "memory")
MOST_ENTRIES = 4_000_000


@dataclass(frozen=True)
class BenchSettings:
    """Time lml beside softmax, topk, sort and sigmoid, in turn, so that ratios hold on a noisy machine."""

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
    providers: tuple[str, ...] = tuple(p.name for p in PROJECTION if p.absent() is None)
    """Who competes; by default all that can run here. Softmax always takes part: the ratios are to it."""
    modes: tuple[str, ...] = MODES
    """What is measured: forward without a graph, backward alone, forward+backward through autograd."""
    metrics: tuple[str, ...] = METRICS if memory.measurable() else METRICS[:1]
    """`time` of a call, or `memory` (Linux): what a call adds to the process at its highest, result too."""
    repetitions: int = 100
    """Rounds; in each one every provider is timed once, and the ratios are formed."""
    seconds: float = 4.0
    """Time for one case and mode, shared fairly by the providers; the slowest may be timed only once."""
    csv: Path = Path("torchlml-bench.csv")
    """The CSV that the rows are appended to; it is made when it is missing."""
    plot: Path | None = None
    """The PNG of the times in the whole CSV; by default beside the CSV, with its name."""
    compare: Path | None = None
    """The CSV of an earlier run, whose ratios are shown beside the new ones."""
    family: bool = False
    """Time the relatives of lml instead: limits on the sum, other regularisers, hard and random choices."""
    losses: bool = False
    """Time the losses instead, on their own problems; only threads, repetitions, seconds and csv count."""
    paper: bool = False
    """Repeat the paper's timing study; only sizes, ks, batches, threads, repetitions, csv and plot count."""
    quick: bool = False
    """Begin from a small selection that takes well under a minute; other options still change it."""


QUICK = BenchSettings(
    sizes=(100, 1000, 10_000), ks=("5",), batches=(64,), scales=(3.0,), metrics=("time",), seconds=1.0
)
# Section 5.1 of the paper; in the small selection the numbers of trials and of long rows are smaller.
PAPER = BenchSettings(
    sizes=(1000, 10_000),
    ks=("5", "50", "100"),
    scales=(1.0,),
    repetitions=50,
    csv=Path("torchlml-paper-timing.csv"),
)
QUICK_PAPER = replace(PAPER, sizes=(1000,), repetitions=5)


def main(arguments: Sequence[str]) -> None:
    """Reads the options and runs the benchmark."""
    quick = "--quick" in arguments
    default = QUICK if quick else BenchSettings()
    if "--paper" in arguments:
        default = QUICK_PAPER if quick else PAPER
    if "--family" in arguments:
        default = replace(default, providers=tuple(provider.name for provider in FAMILY))
    # Without a terminal rich assumes 80 columns, and would fold the tables of a log.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    run(parse_settings(BenchSettings, "bench", arguments, default), console)


def run(settings: BenchSettings, console: Console) -> None:
    """Measures every case, appending its rows to the CSV as soon as it is done.

    Args:
        settings: What to measure; wrong values raise `BadInput` before anything is measured.
        console: Where the progress, the tables and what was written go.
    """
    providers, cases = _checked(settings)
    if settings.losses:
        if settings.csv.exists():
            records.read(settings.csv, "--csv")
        losses.run(settings.threads, settings.repetitions, settings.seconds, settings.csv, console)
        return
    if settings.paper:
        plot = settings.plot or settings.csv.with_suffix(".png")
        paper.run(cases, settings.repetitions, settings.csv, plot, console)
        return
    plot = settings.plot or settings.csv.with_suffix(".png")
    earlier = records.latest(records.read(settings.compare, "--compare")) if settings.compare else {}
    if settings.csv.exists():
        records.read(settings.csv, "--csv")
    for path in (settings.csv, plot):
        path.parent.mkdir(parents=True, exist_ok=True)
    measured: list[Record] = []
    jobs = list(product(cases, cast(tuple[Mode, ...], tuple(dict.fromkeys(settings.modes)))))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    before = torch.get_num_threads()
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=len(jobs))
            for case, mode in jobs:
                label = f"{mode}, {case.batch} x {case.n}, k {case.k}, {case.dtype}"
                progress.update(task, description=label)
                torch.set_num_threads(case.threads)
                new = list(_measure(providers, case, mode, settings))
                records.append(settings.csv, new)
                measured += new
                progress.advance(task)
    finally:
        torch.set_num_threads(before)
    for table in report.tables(measured, earlier):
        console.print(table)
    if settings.compare and not any(record.key in earlier for record in measured):
        console.print(f"Nothing that was measured now is in {settings.compare}.", soft_wrap=True)
    written = records.read(settings.csv, "--csv")
    if any(record.metric == "time" for record in written):
        report.draw(written, plot)
        console.print(f"The plot is {plot}.", soft_wrap=True)
    console.print(f"The rows are in {settings.csv}.", soft_wrap=True)


def _measure(
    providers: Sequence[Provider], case: Case, mode: Mode, settings: BenchSettings
) -> Iterator[Record]:
    calls = {provider.name: call_of(provider, case, mode) for provider in providers}
    common = {
        **vars(case),
        "operator": "family" if settings.family else "projection",
        "mode": mode,
        "machine": records.machine(),
        "torch": str(torch.__version__),
        "torchlml": torchlml.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if "time" in settings.metrics:
        for name, timing in race(calls, BASELINE, settings.repetitions, settings.seconds).items():
            scaled = Quantiles(*(1e6 * value for value in vars(timing.seconds).values()))
            yield _record(common, name, "time", "us", scaled, timing.ratio, timing.rounds)
    if "memory" in settings.metrics:
        gc.collect()
        added = {name: memory.added_bytes(call) / 2**20 for name, call in calls.items()}
        # The tiniest cases may add less than a page for softmax; their ratio says little.
        unit = max(added[BASELINE], memory.PAGE / 2**20)
        for name, size in added.items():
            yield _record(common, name, "memory", "MiB", Quantiles.of([size]), Quantiles.of([size / unit]), 1)


def _record(
    common: dict[str, Any], name: str, metric: str, unit: str, value: Quantiles, ratio: Quantiles, rounds: int
) -> Record:
    return Record(
        **common,
        provider=name,
        metric=metric,
        unit=unit,
        **vars(value),
        ratio_p20=ratio.p20,
        ratio_p50=ratio.p50,
        ratio_p80=ratio.p80,
        config=json.dumps({"rounds": rounds, "kernel": kernel()}),
    )


def _checked(settings: BenchSettings) -> tuple[list[Provider], list[Case]]:
    """The providers and the cases; every wrong option is refused here, before anything runs."""
    known = {provider.name: provider for provider in (FAMILY if settings.family else PROJECTION)}
    _check_choices("--providers", settings.providers, known)
    _check_choices("--modes", settings.modes, MODES)
    _check_choices("--metrics", settings.metrics, METRICS)
    _check_choices("--dtypes", settings.dtypes, DTYPES)
    _check_numbers("--sizes", settings.sizes, 2, math.inf)
    _check_numbers("--batches", settings.batches, 1, math.inf)
    _check_numbers("--scales", settings.scales, 0, math.inf)
    _check_numbers("--threads", settings.threads, 1, os.cpu_count() or 1)
    _check_numbers("--repetitions", (settings.repetitions,), 1, math.inf)
    _check_numbers("--seconds", (settings.seconds,), 0, math.inf)
    for name in settings.providers:
        if (reason := known[name].absent()) is not None:
            raise BadInput(f"`--providers` names `{name}`, which cannot run here: {reason}.")
    if "memory" in settings.metrics and not memory.measurable():
        raise BadInput("`--metrics` names `memory`, which needs Linux and the GNU C library.")
    for option, path in (("--csv", settings.csv), ("--plot", settings.plot)):
        if path is not None and path.is_dir():
            raise BadInput(f"`{option}` names `{path}`, which is a folder: give a file.")
    if settings.paper:
        _check_paper(settings)
    cases = list(_cases(settings))
    if not cases:
        given = " ".join(settings.ks)
        raise BadInput(f"`--ks` is {given}, and none of it lies between 1 and n - 1 for any of `--sizes`.")
    return [known[name] for name in dict.fromkeys((BASELINE, *settings.providers))], cases


def _check_paper(settings: BenchSettings) -> None:
    for option in ("batches", "scales", "dtypes"):
        if len(set(getattr(settings, option))) > 1:
            raise BadInput(f"`--{option}` has several values, and `--paper` takes one.")
    if not all(k.isdecimal() and 0 < int(k) < min(settings.sizes) for k in settings.ks):
        raise BadInput("With `--paper`, `--ks` must be numbers from 1 to below the smallest of `--sizes`.")


def _check_choices(option: str, values: Sequence[str], known: Collection[str]) -> None:
    if not values:
        raise BadInput(f"`{option}` needs at least one value.")
    for value in values:
        if value not in known:
            raise BadInput(f"`{option}` names `{value}`, which is none of {', '.join(known)}.")


def _check_numbers(option: str, values: Sequence[float], least: float, most: float) -> None:
    if not values:
        raise BadInput(f"`{option}` needs at least one value.")
    for value in values:
        if not (least <= value <= most and math.isfinite(value)):
            limit = f"from {least:g} to {most:g}" if math.isfinite(most) else f"finite and at least {least:g}"
            raise BadInput(f"`{option}` has {value}, and must be {limit}.")


def _cases(settings: BenchSettings) -> Iterator[Case]:
    """Every combination, once."""
    seen: set[Case] = set()
    grid = product(
        settings.threads, settings.dtypes, settings.scales, settings.batches, settings.sizes, settings.ks
    )
    for threads, dtype, scale, batch, n, text in grid:
        k = _k(text, n)
        case = Case(n, k, min(batch, max(1, MOST_ENTRIES // n)), scale, dtype, threads)
        if 0 < k < n and case not in seen:
            seen.add(case)
            yield case


def _k(text: str, n: int) -> int:
    """`5`, `n/2` or `n-1` for a row of n."""
    found = re.fullmatch(r"(?:n([/-]))?(\d{1,18})", text)
    if found is None:
        raise BadInput(f"`--ks` has `{text}`, which is neither a number nor `n/NUMBER` nor `n-NUMBER`.")
    sign, number = found[1], int(found[2])
    if sign == "/":
        return n // number if number else 0
    return n - number if sign == "-" else number
