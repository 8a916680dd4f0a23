"""Benchmarks that compare functions with softmax on a grid of cases, with tables and a plot."""

import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import cast

from matplotlib.axes import Axes
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchlml_lab import plots
from torchlml_lab.bench.cases import BASELINE, DTYPES, FAMILY, LAYER, Case, Provider, call_of, case_grid
from torchlml_lab.bench.measurements import (
    Key,
    Measurement,
    RowFile,
    conditions,
    finish,
    latest,
    measured,
    read,
    three_digits,
)
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
from torchlml_lab.engine.output import ProgressBar, new_console, plain_table
from torchlml_lab.engine.settings import cores, use_threads
from torchlml_lab.files import check_file, check_picture


def run(
    settings: GridBenchmarkSettings,
    operator: str,
    competitors: Sequence[Provider],
    plot: Path,
    console: Console,
) -> None:
    """Measure every case, append its rows to the CSV immediately, print the tables, and draw the plot.

    Args:
        settings: The settings. Invalid values raise `BadInput` before anything is measured.
        operator: The name of the benchmark in the CSV.
        competitors: The functions that the settings can select.
        plot: The picture to draw.
        console: The console for the progress bar, the tables and the names of the written files.
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
    for part in tables(file.new, earlier, console.width):
        console.print(part, highlight=False)
    if settings.compare and not any(row.key in earlier for row in file.new):
        console.print(f"{settings.compare} contains none of these measurements.", soft_wrap=True)
    times = [row for row in (*file.earlier, *file.new) if (row.operator, row.metric) == (operator, "time")]
    finish(file, plot, (lambda: draw(times, plot, [settings.csv])) if times else None, console)


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
        # In the smallest cases, softmax may add less than a page of memory. Counting at least one page bounds
        # the ratio.
        one = max(added[BASELINE], PAGE_BYTES / 2**20)
        for name, size in added.items():
            value, ratio = Quantiles.of([size]), Quantiles.of([size / one])
            yield measured(operator, name, mode, case, value, ratio, 1, metric="memory", unit="MiB")


def _checked(settings: GridBenchmarkSettings, competitors: Sequence[Provider]) -> list[Provider]:
    """Return the requested providers, softmax first, or raise `BadInput`."""
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
            raise BadInput(f"`--providers` contains `{name}`, which is not available: {why}.")
    if "memory" in settings.metrics and not measurable():
        raise BadInput("`--metrics` contains `memory`, which requires Linux and the GNU C library.")
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


_CASE = ("n", "k", "batch", "scale", "dtype", "threads")
# Relative changes of a ratio that are smaller than this are noise and are not colored.
_NOTABLE = 0.05

_LOOK = {
    "copy": ("copy", plots.GREY, "."),
    "lml-native": ("lml, compiled", plots.BLUE, "o"),
    "lml": ("lml", plots.BLUE, "o"),
    "lml-torch": ("lml, pure PyTorch", plots.SKY, "s"),
    "lml-at-most": ("lml, at most k", plots.SKY, "s"),
    "lml-bracketing": ("lml, Algorithm 1", plots.PURPLE, "D"),
    "lml-value": ("value of lml", plots.PURPLE, "D"),
    "sigmoid": ("sigmoid", plots.GREY, "v"),
    "sample-subset": ("sample-subset", plots.GREY, "v"),
    "topk": ("topk", plots.ORANGE, "^"),
    "topk-mask": ("topk-mask", plots.ORANGE, "^"),
    "sort": ("sort", plots.VERMILION, "X"),
    "entmax": ("entmax", plots.GREEN, "P"),
    "constrained-softmax": ("constrained softmax", plots.GREEN, "P"),
    "constrained-sparsemax": ("constrained sparsemax", plots.DARK_ORANGE, "*"),
}

# The padding of a column: its width minus the length of its longest cell.
_BETWEEN = 2

Column = tuple[str, Sequence[str | Text]]  # the header and the cells


def tables(rows: Sequence[Measurement], earlier: Mapping[Key, Measurement], width: int) -> list[Table | str]:
    """Build the tables for each metric and mode, with one row per case and ratios to softmax.

    Args:
        rows: The measurements.
        earlier: The measurements from an earlier run, whose ratios are shown next to the new ones.
        width: The width of the terminal. Columns that do not fit are moved to another table.

    Returns:
        Titles, each followed by its tables. Properties that all cases share are part of the title.
    """
    groups: dict[tuple[str, str, str], list[Measurement]] = defaultdict(list)
    for row in rows:
        groups[row.metric, row.mode, row.unit].append(row)
    values = {name: {getattr(row, name) for row in rows} for name in _CASE}
    fixed = {name: value for name, (value, *others) in values.items() if not others}
    same = "".join(f", {name} {value}" for name, value in fixed.items())
    shown: list[Table | str] = []
    for (metric, mode, unit), group in groups.items():
        title = f"{mode}: {metric} relative to {BASELINE}, whose {metric} is in {unit}{same}"
        case_columns, ratios = _columns(group, unit, [name for name in _CASE if name not in fixed], earlier)
        parts = _fitting(case_columns, ratios, width)
        shown += [title, *(_table([*case_columns, *part]) for part in parts)]
    return shown


def _columns(
    rows: Sequence[Measurement], unit: str, varying: Sequence[str], earlier: Mapping[Key, Measurement]
) -> tuple[list[Column], list[Column]]:
    """Return the columns with the case and the softmax value, and a column of ratios per other provider."""
    by_case: dict[object, dict[str, Measurement]] = defaultdict(dict)
    for row in rows:
        by_case[row.case][row.provider] = row
    bases = [by_provider[BASELINE] for by_provider in by_case.values()]
    left: list[Column] = [(name, [f"{getattr(base, name)}" for base in bases]) for name in varying]
    left.append((f"{BASELINE}, {unit}", [f"{base.p50:,.4g}" for base in bases]))
    names = [name for name in dict.fromkeys(row.provider for row in rows) if name != BASELINE]
    ratios: list[Column] = [
        (name, [_ratio(case[name], earlier) for case in by_case.values()]) for name in names
    ]
    return left, ratios


def _fitting(left: Sequence[Column], columns: Sequence[Column], width: int) -> Iterator[list[Column]]:
    """Split the columns into groups that fit to the right of `left`, with at least one column per group."""
    part: list[Column] = []
    for column in columns:
        if part and sum(_width(one) + _BETWEEN for one in (*left, *part, column)) > width:
            yield part
            part = []
        part.append(column)
    yield part


def _width(column: Column) -> int:
    head, cells = column
    return max(len(head), *(cell_len(str(cell)) for cell in cells))


def _table(columns: Sequence[Column]) -> Table:
    table = plain_table("", [head for head, _ in columns], left=0)
    table.title = None
    for cells in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*cells)
    return table


def _ratio(row: Measurement, earlier: Mapping[Key, Measurement]) -> Text:
    now = three_digits(row.ratio_p50)
    if row.key not in earlier:
        return Text(now)
    then = earlier[row.key].ratio_p50
    color = "default"
    if row.ratio_p50 < then * (1 - _NOTABLE):
        color = "green"
    elif row.ratio_p50 > then * (1 + _NOTABLE):
        color = "red"
    return Text.assemble((now, color), " ", (f"(was {three_digits(then)})", "dim"))


def draw(rows: Sequence[Measurement], plot: Path, csv: Sequence[Path] = ()) -> None:
    """Plot time relative to softmax against row length, with one panel per mode and one line per provider.

    A line shows the median over the problems (k, scale, batch, threads) that all providers in the panel
    share, or over all problems if they share none. A vertical bar shows the range over all problems.

    Args:
        rows: The times of one benchmark. Only those from the machine of the last row and with the dtype of
            the first row are used. If a measurement was repeated, its last row is used.
        plot: The picture to write.
        csv: The CSV files with the rows. Their names are stored in the picture's metadata.
    """
    wanted = (rows[-1].machine, rows[0].dtype)
    here = [row for row in latest(rows).values() if (row.machine, row.dtype) == wanted]
    modes = [mode for mode in MODES if any(row.mode == mode for row in here)]
    with plots.new_figure(plot, plots.PAGE, 3.1, csv) as figure:
        panels = figure.subplots(1, len(modes), sharex=True, sharey=True, squeeze=False)[0]
        ends = [
            # A copy is drawn only in the forward panel, because its backward pass does nothing.
            _draw_panel(
                panel, [r for r in here if r.mode == mode and (mode == "forward" or r.provider != "copy")]
            )
            for panel, mode in zip(panels, modes, strict=True)
        ]
        for panel, mode, lines in zip(panels, modes, ends, strict=True):
            panel.set_title(mode.replace("+", " + "))
            plots.label_lines(panel, lines, 0.055)
        panels[0].set_ylabel("time / time of softmax")
        plots.note(figure, conditions(here))


def _draw_panel(panel: Axes, rows: Sequence[Measurement]) -> list[tuple[float, str, str]]:
    """Draw the lines for one mode, and return each line's last y-value, name and color."""
    cases: dict[str, dict[object, Measurement]] = defaultdict(dict)
    for row in rows:
        cases[row.provider][row.case] = row
    shared = set.intersection(*({*by_case} for by_case in cases.values()))
    panel.axhline(1, color=plots.INK, linewidth=1.2)
    ends = [(1.0, BASELINE, plots.INK)]
    for name, (shown, color, marker) in _LOOK.items():
        ratios: dict[int, list[float]] = defaultdict(list)
        common: dict[int, list[float]] = defaultdict(list)
        for case, row in cases.get(name, {}).items():
            ratios[row.n].append(row.ratio_p50)
            if case in shared or not shared:
                common[row.n].append(row.ratio_p50)
        if ratios:
            if name != "copy":  # the time of a copy depends neither on k nor on the scale
                low, high = map(min, ratios.values()), map(max, ratios.values())
                panel.vlines(list(ratios), list(low), list(high), color=color, alpha=0.35, linewidth=4)
            sizes = sorted(common)
            middle = [median(common[n]) for n in sizes]
            panel.plot(sizes, middle, color=color, marker=marker, markersize=3)
            ends.append((middle[-1], shown, color))
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}x")
    panel.grid()
    panel.set_xlabel("row length n")
    return ends
