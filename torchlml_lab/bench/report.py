"""Presentation of benchmark results: tables of ratios that fit the terminal, and a plot from the CSV."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchlml_lab import plots
from torchlml_lab.bench.cases import BASELINE
from torchlml_lab.bench.measurements import Key, Measurement, RowFile, latest
from torchlml_lab.bench.settings import MODES
from torchlml_lab.cli_errors import reason
from torchlml_lab.engine.output import plain_table

_CASE = ("n", "k", "batch", "scale", "dtype", "threads")
# A smaller relative change of a ratio is noise, and is not colored.
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

# The width of a column in addition to its longest cell.
_BETWEEN = 2

Column = tuple[str, Sequence[str | Text]]  # the head and the cells


def tables(rows: Sequence[Measurement], earlier: Mapping[Key, Measurement], width: int) -> list[Table | str]:
    """Build the tables for each metric and mode: a row per case, with ratios to softmax.

    Args:
        rows: The measurements.
        earlier: The measurements of an earlier run. Ratios in both runs are shown together.
        width: The width of the terminal. Competitors that do not fit are shown in another table.

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
        title = f"{mode}: {metric} relative to {BASELINE}, which is in {unit}{same}"
        case_columns, ratios = _columns(group, unit, [name for name in _CASE if name not in fixed], earlier)
        parts = _fitting(case_columns, ratios, width)
        shown += [title, *(_table([*case_columns, *part]) for part in parts)]
    return shown


def _columns(
    rows: Sequence[Measurement], unit: str, varying: Sequence[str], earlier: Mapping[Key, Measurement]
) -> tuple[list[Column], list[Column]]:
    """Return the columns that identify a case and the time of softmax, and a column of ratios per method."""
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
    """Split the columns into parts that fit next to the left ones, with at least one in each part."""
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


def three_digits(ratio: float) -> str:
    """Format a ratio with about three digits."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


def finish(file: RowFile, plot: Path, draw: Callable[[], None] | None, console: Console) -> None:
    """Draw the plot and print which files were written. Anything that could not be written raises.

    Args:
        file: The CSV.
        plot: The picture that `draw` writes.
        draw: Draws the plot, or None if there is nothing to draw.
        console: The console to print to.
    """
    lacks = file.lacks()
    problems = [lacks] if lacks else []
    if draw:
        try:
            draw()
            console.print(f"Plot written to {plot}.", soft_wrap=True)
        except OSError as error:
            problems.append(f"`{plot}` could not be written: {reason(error)}.")
    if not lacks:
        console.print(f"Results written to {file.path}.", soft_wrap=True)
    if problems:
        raise RuntimeError(" ".join(problems))


def draw(rows: Sequence[Measurement], plot: Path, csv: Sequence[Path] = ()) -> None:
    """Draw time relative to softmax over the row length: one panel per mode, one line per provider.

    A line is the median over the problems (k, scale, batch, threads) that all providers of the panel share,
    or over all problems if they share none. A vertical bar is the range over all problems of the provider.

    Args:
        rows: Times of one benchmark. The last row of each measurement on the last machine is used, and only
            rows with the dtype of the first one.
        plot: The picture to write.
        csv: The CSV file with the rows. Its name is stored in the picture's metadata.
    """
    wanted = (rows[-1].machine, rows[0].dtype)
    here = [row for row in latest(rows).values() if (row.machine, row.dtype) == wanted]
    modes = [mode for mode in MODES if any(row.mode == mode for row in here)]
    with plots.new_figure(plot, plots.PAGE, 3.1, csv) as figure:
        panels = figure.subplots(1, len(modes), sharex=True, sharey=True, squeeze=False)[0]
        ends = [
            # The backward pass of a copy is empty.
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


def conditions(rows: Sequence[Measurement]) -> str:
    """Return the machine and the settings of measurements, for the line under a figure."""
    threads = " and ".join(str(number) for number in sorted({row.threads for row in rows}))
    plural = "" if threads == "1" else "s"
    return f"{rows[-1].machine}, {threads} thread{plural}, {rows[-1].dtype}, torch {rows[-1].torch}"


def _draw_panel(panel: Axes, rows: Sequence[Measurement]) -> list[tuple[float, str, str]]:
    """Draw the lines of a mode. Returns the last height, the name and the color of each."""
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
            if name != "copy":  # it depends neither on k nor on the scale
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
