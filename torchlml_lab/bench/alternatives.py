"""`torchlml bench alternatives`: compare lml with other top-k relaxations in accuracy, features and cost."""

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from rich.console import Console

from torchlml_lab.bench.alternative_operators import (
    ABILITIES,
    ALTERNATIVES,
    EXACTNESS,
    TRIAL,
    Alternative,
    abilities,
    abilities_in_plain_torch,
    exactness,
)
from torchlml_lab.bench.cases import BASELINE, LAYER, Case, Provider, call_of, case_grid
from torchlml_lab.bench.measurements import (
    Measurement,
    RowFile,
    conditions,
    finish,
    measured,
    read,
    three_digits,
)
from torchlml_lab.bench.settings import (
    ComparisonSettings,
    Mode,
    check_choices,
    check_numbers,
    check_timing,
)
from torchlml_lab.bench.timing import PAGE_BYTES, Quantiles, added_bytes, measurable, race
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import ProgressBar, new_console
from torchlml_lab.engine.settings import check_threads, use_threads
from torchlml_lab.figures.settings import AlternativesFigureSettings
from torchlml_lab.files import check_picture
from torchlml_lab.plots import BLUE, GREEN, GREY, INK, ORANGE, PAGE, find_csv, new_figure, note, say_where

OPERATOR, INSTALLED = "alternatives", "installed"
_ORDER = [method.name for method in ALTERNATIVES]
STUDY = (Path("torchlml-alternatives.csv"), Path("results/alternatives.csv"))

Values = dict[tuple[str, str, str, int], Measurement]  # by method, mode, metric and n


def markdown(rows: Sequence[Measurement]) -> str:
    """Format a table of supported features and one table of measurements for each row length.

    Args:
        rows: The rows of one run or of a CSV. If a measurement was repeated, its last row is used.

    Returns:
        Markdown, padded so that the source is readable.
    """
    values = _values(rows)
    parts = _table(("method", *ABILITIES), _use_cells(values))
    for case in _cases(rows):
        n, k, batch, scale, dtype, threads = case
        base = values[BASELINE, "forward", "time", n].p50
        logits = f"{batch} rows, scale {scale:g}" if scale else "one row of equal logits"
        said = f"n = {n}: {logits}, k = {k}, {dtype}, threads: {threads}; "
        said += f"the forward pass of softmax takes {base:,.0f} µs"
        heads = ("method", "forward", "forward + backward", "MiB", *EXACTNESS)
        parts += ["", said, "", *_table(heads, _measures(values, n))]
    return "\n".join(parts)


def draw(rows: Sequence[Measurement], plot: Path, csv: Sequence[Path] = ()) -> None:
    """Draw one panel per row length with every method's time relative to softmax, and a panel of features.

    The fastest method on the longest rows comes first. Methods that support only short rows come last.

    Args:
        rows: The rows of one run or of a CSV. If a measurement was repeated, its last row is used.
        plot: The picture to write.
        csv: The CSV files with the rows. Their names are stored in the picture's metadata.
    """
    values = _values(rows)
    sizes = [n for n, _, _, scale, *_ in _cases(rows) if scale]
    times = {
        name: [row.ratio_p50 for n in sizes if (row := values.get((name, "forward", "time", n)))]
        for name in _ORDER
    }
    # The order of the methods from the bottom to the top of the figure.
    names = sorted(
        (name for name in _ORDER if times[name]), key=lambda name: (len(times[name]), -times[name][-1])
    )
    with new_figure(plot, PAGE, 1.2 + 0.2 * len(names), csv) as figure:
        widths = [1.0] * len(sizes) + [1.2]
        panels = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
        for panel, n in zip(panels, sizes, strict=False):
            _draw_times(panel, values, names, n)
        right = max(panel.get_xlim()[1] for panel in panels[:-1])
        for panel in panels[:-1]:
            panel.set_xlim(0.5, right)
        _draw_uses(panels[-1], values, names)
        panels[0].set_yticks(range(len(names)), [_SHOWN.get(name, name) for name in names])
        panels[0].set_ylim(-0.6, len(names) - 0.4)
        for tick, name in zip(panels[0].get_yticklabels(), names, strict=True):
            tick.set_color(BLUE if name.startswith("lml") else INK)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=2, fontsize=7, labelcolor="linecolor")
        note(figure, conditions([row for row in rows if row.operator == OPERATOR]))


# The names of the methods in the figure.
_SHOWN = {
    "topk-straight-through": "top-k, straight-through",
    "softmax-times-k": "k × softmax",
    "successive-softmax": "k successive softmaxes",
    "bisection": "lml by 64 halvings",
    "bisection-50": "lml by 50 halvings",
    "lapsum": "LapSum",
    "dftopk": "DFTopK",
    "entmax": "entmax, budget",
    "torchsort": "torchsort, soft ranks",
    "difftopk": "difftopk, sorting network",
    "cvxpylayers": "cvxpylayers, convex solver",
    "paper-bracketing": "lml by Algorithm 1",
    "lml-torch": "lml, pure PyTorch",
    "lml-native": "lml, compiled",
}


def _values(rows: Sequence[Measurement]) -> Values:
    ours = [row for row in rows if row.operator == OPERATOR]
    return {(row.provider, row.mode, row.metric, row.n): row for row in ours}


def _cases(rows: Sequence[Measurement]) -> list[tuple[int, int, int, float, str, int]]:
    """Return the timed problems, shortest rows first."""
    return sorted({row.case for row in rows if (row.operator, row.metric) == (OPERATOR, "time")})


def _use_cells(values: Values) -> Iterator[list[str]]:
    found = {(name, metric): row.p50 for (name, _, metric, _), row in values.items()}
    for name in _ORDER:
        if found.get((name, INSTALLED)) == 0:
            yield [name, *("not installed" for _ in ABILITIES)]
        elif (name, ABILITIES[0]) in found:
            yield [name, *("yes" if found[name, ability] else "no" for ability in ABILITIES)]


def _measures(values: Values, n: int) -> Iterator[list[str]]:
    """Yield the table rows for row length n, one for each method that was measured at this length."""

    def cell(name: str, mode: str, metric: str, write: Callable[[Measurement], str]) -> str:
        row = values.get((name, mode, metric, n))
        return "-" if row is None else "fails" if math.isnan(row.p50) else write(row)

    for name in (BASELINE, *_ORDER):
        cells = [
            cell(name, "forward", "time", lambda row: three_digits(row.ratio_p50)),
            cell(name, "forward+backward", "time", lambda row: three_digits(row.ratio_p50)),
            cell(name, "forward+backward", "memory", lambda row: f"{row.p50:.1f}"),
            *(cell(name, "behavior", metric, _exact) for metric in EXACTNESS),
        ]
        if set(cells) != {"-"}:
            yield [name, *cells]


def _exact(row: Measurement) -> str:
    """Format a count or a large error as an integer, and a small error with one significant digit.

    An infinite gradient error means that the reference gradient is zero everywhere. It is shown as "zero".
    """
    if math.isinf(row.p50):
        return "zero"
    if row.p50 == 0 or row.p50 >= 100 or row.metric == EXACTNESS[1]:
        return f"{row.p50:,.0f}"
    return f"{row.p50:.0e}"


def _table(heads: Sequence[str], lines: Iterator[list[str]]) -> list[str]:
    cells = [list(heads), *lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = [
        [cell.ljust(width) if place == 0 else cell.rjust(width) for place, (cell, width) in enumerate(both)]
        for both in (list(zip(line, widths, strict=True)) for line in cells)
    ]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:])]


def _draw_times(panel: Axes, values: Values, names: Sequence[str], n: int) -> None:
    panel.axvline(1, color=INK, linewidth=1)
    marks = (("forward", ORANGE, "o", 0.13), ("forward+backward", BLUE, "D", -0.13))
    for mode, color, marker, up in marks:
        there = [(place, values.get((name, mode, "time", n))) for place, name in enumerate(names)]
        points = [(row.ratio_p50, place + up) for place, row in there if row is not None]
        if points:
            panel.plot(*zip(*points, strict=True), marker, color=color, label=mode)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}x")
    panel.grid(axis="both")
    panel.set_xlabel("time / softmax")
    panel.set_title(f"n = {n:,}")


# The largest error of a float32 sum that rounding can explain.
_SUM_ERROR = 1e-3


def _draw_uses(panel: Axes, values: Values, names: Sequence[str]) -> None:
    """Draw a check mark for each method and feature that works in all measurements, and a dash otherwise."""
    works = {(name, metric): row.p50 == 1 for (name, _, metric, _), row in values.items()}
    for place, name in enumerate(names):
        errors, counts = (
            [row.p50 for (method, _, kind, _), row in values.items() if (method, kind) == (name, metric)]
            for metric in EXACTNESS[:2]
        )
        marks = [max(errors) < _SUM_ERROR, max(counts) == 0, *(works[name, ability] for ability in ABILITIES)]
        for column, mark in enumerate(marks):
            text, color = ("✓", GREEN) if mark else ("–", GREY)
            panel.text(column, place, text, color=color, ha="center", va="center", fontsize=9)
    heads = ("sums to k", "in [0, 1]", *ABILITIES)
    panel.set_xticks(range(len(heads)), heads, rotation=45, ha="right", fontsize=7)
    panel.set_xlim(-0.6, len(heads) - 0.4)
    panel.set_title("supported")


def redraw(settings: AlternativesFigureSettings) -> None:
    """Draw the figure from a CSV, and print its path."""
    check_picture(settings.out)
    path = find_csv(settings.csv, STUDY, "torchlml bench alternatives")
    rows = read(path, "--csv")
    if not _cases(rows):
        raise BadInput(f"`{path}` (`--csv`) has no results from `torchlml bench alternatives`.")
    draw(rows, settings.out, [path])
    say_where(settings.out)


_MODES: tuple[Mode, ...] = ("forward", "forward+backward")
_SOFTMAX = next(provider for provider in LAYER if provider.name == BASELINE)


def main(settings: ComparisonSettings) -> None:
    """Run the comparison."""
    run(settings, new_console())


def run(settings: ComparisonSettings, console: Console) -> None:
    """Test each method's features, measure its accuracy and cost at each row length, and print tables.

    Args:
        settings: The settings. Invalid values raise `BadInput` before anything is measured.
        console: The console for the progress bar, the tables and the names of the written files.
    """
    methods = _checked(settings)
    cases = case_grid(
        settings.sizes,
        (str(settings.k),),
        (settings.batch,),
        (settings.scale,),
        ("float32",),
        (settings.threads,),
    )
    if settings.equal:
        cases.append(Case(settings.equal, settings.k, 1, 0.0, "float32", settings.threads))
    file = RowFile(settings.csv)
    plot = settings.plot or settings.csv.with_suffix(".png")
    check_picture(plot, "--plot")
    if missing := [why for method in ALTERNATIVES if (why := method.absent()) is not None]:
        said = (
            f"Some methods are not available: {', '.join(missing)}. To install missing packages, run "
            '`pip install "torchlml[alternatives]"`.'
        )
        console.print(said, soft_wrap=True, markup=False, highlight=False)
    file.announce(f"Comparing {len(methods)} methods on {len(cases)} row lengths", console)
    with ProgressBar(console) as progress, use_threads(settings.threads):
        task = progress.add_task("", total=len(methods) * (1 + len(cases)) + 2 * len(cases))
        try:
            file.add(_installed(method) for method in ALTERNATIVES)
            for method in methods:
                progress.update(task, description=f"features of {method.name}")
                file.add(_uses(method))
                progress.advance(task)
            for case in cases:
                able = []
                for method in methods:
                    progress.update(task, description=f"accuracy of {method.name}, n {case.n}")
                    found = _exactness(method, case)
                    file.add(_number(method, name, case, value) for name, value in found.items())
                    # A method that fails is not timed. The table shows the failure.
                    able += [method] if math.isfinite(found.get(EXACTNESS[0], math.nan)) else []
                    progress.advance(task)
                for mode in _MODES:
                    progress.update(task, description=f"{mode}, n {case.n}")
                    file.add(_costs(able, case, mode, settings))
                    progress.advance(task)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"Interrupted: completed measurements are in {settings.csv}.") from None
    console.print(markdown(file.new), soft_wrap=True, markup=False, highlight=False)
    finish(file, plot, lambda: draw(file.new, plot, [file.path]), console)


def _checked(settings: ComparisonSettings) -> list[Alternative]:
    """Return the requested methods in the order of `ALTERNATIVES`, or raise `BadInput`."""
    known = {method.name: method for method in ALTERNATIVES}
    names = settings.methods or [name for name, method in known.items() if method.absent() is None]
    check_choices("--methods", names, known)
    check_numbers("--sizes", settings.sizes, 2)
    check_numbers("--k", (settings.k,), 1, min(settings.sizes) - 1)
    check_numbers("--batch", (settings.batch,), 1)
    check_numbers("--scale", (settings.scale,), 0)
    check_numbers("--equal", (settings.equal,), 0)
    if 0 < settings.equal <= settings.k:
        raise BadInput(
            f"`--equal` must be 0 or greater than `--k` ({settings.k}), but it is {settings.equal}."
        )
    check_threads(settings.threads)
    check_timing(settings)
    for name in names:
        if (why := known[name].absent()) is not None:
            raise BadInput(f"`--methods` contains `{name}`, which is not available: {why}.")
    return [method for method in ALTERNATIVES if method.name in names]


def _installed(method: Alternative) -> Measurement:
    return _number(method, INSTALLED, TRIAL, float(method.absent() is None))


def _uses(method: Alternative) -> Iterator[Measurement]:
    # The features of lml depend on the loaded kernel, which cannot be changed within a process.
    found = abilities_in_plain_torch() if method.name == "lml-torch" else abilities(method.function)
    for name, works in found.items():
        yield _number(method, name, TRIAL, float(works))


def _exactness(method: Alternative, case: Case) -> Mapping[str, float]:
    if case.n > method.longest:
        return {}
    found = exactness(method.function, case)
    # The other errors are relative to float64, which a float32-only method does not support.
    return dict(list(found.items())[:2]) if method.float32_only else found


def _costs(
    methods: Sequence[Provider], case: Case, mode: Mode, settings: ComparisonSettings
) -> Iterator[Measurement]:
    calls = {method.name: call_of(method, case, mode) for method in (_SOFTMAX, *methods)}
    for name, timing in race(calls, BASELINE, settings.repetitions, settings.seconds).items():
        micro = timing.seconds.times(1e6)
        yield measured(OPERATOR, name, mode, case, micro, timing.ratio, timing.rounds)
    if mode == "forward" or not measurable():
        return
    gc.collect()
    added = {name: added_bytes(call) / 2**20 for name, call in calls.items()}
    for name, size in added.items():
        ratio = size / max(added[BASELINE], PAGE_BYTES / 2**20)
        value, relative = Quantiles(size, size, size), Quantiles(ratio, ratio, ratio)
        yield measured(OPERATOR, name, mode, case, value, relative, 1, metric="memory", unit="MiB")


def _number(method: Alternative, metric: str, case: Case, value: float) -> Measurement:
    """Return the CSV row of a measurement without a ratio to softmax."""
    once, none = Quantiles(value, value, value), Quantiles(math.nan, math.nan, math.nan)
    return measured(OPERATOR, method.name, "behavior", case, once, none, 1, metric=metric, unit="1")
