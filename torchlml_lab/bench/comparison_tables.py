"""What a comparison with peers says: tables in Markdown, and a picture."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from torchlml_lab.bench.competitors import BASELINE
from torchlml_lab.bench.measurements import Measurement
from torchlml_lab.bench.peer_behaviour import ABILITIES, EXACTNESS
from torchlml_lab.bench.peers import PEERS
from torchlml_lab.bench.report import three_digits
from torchlml_lab.style import BLUE, GREY, INK, ORANGE, PAGE, new_figure

OPERATOR, INSTALLED = "peers", "installed"
_ORDER = [peer.name for peer in PEERS]

Values = dict[tuple[str, str, str, int], Measurement]  # by method, mode, metric and n


def markdown(rows: Sequence[Measurement]) -> str:
    """Write the tables: what each method works with, then one for each length of a row.

    Args:
        rows: Those of one run, or of a CSV; the last of each measurement counts.

    Returns:
        Markdown, padded so that it can be read as it is.
    """
    values = _values(rows)
    parts = _table(("method", *ABILITIES), _uses(values))
    for case in _cases(rows):
        n, k, batch, scale, dtype, threads = case
        base = values[BASELINE, "forward", "time", n].p50
        said = f"n = {n}: {batch} rows, k = {k}, scale {scale:g}, {dtype}, threads: {threads}; "
        said += f"softmax forward takes {base:,.0f} µs"
        heads = ("method", "forward", "forward + backward", "MiB", *EXACTNESS)
        parts += ["", said, "", *_table(heads, _measures(values, n))]
    return "\n".join(parts)


def draw(rows: Sequence[Measurement], plot: Path) -> None:
    """Draw the times of every method beside softmax, one panel per length, and what it works with.

    Args:
        rows: As for `markdown`.
        plot: The picture to write.
    """
    values = _values(rows)
    sizes = [case[0] for case in _cases(rows)]
    timed = {name for name, _, metric, _ in values if metric == "time"}
    names = [name for name in _ORDER if name in timed][::-1]
    with new_figure(plot, PAGE, 1.2 + 0.2 * len(names)) as figure:
        widths = [1.0] * len(sizes) + [1.2]
        panels = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
        for panel, n in zip(panels, sizes, strict=False):
            _draw_times(panel, values, names, n)
        right = max(panel.get_xlim()[1] for panel in panels[:-1])
        for panel in panels[:-1]:
            panel.set_xlim(0.5, right)
        _draw_uses(panels[-1], values, names, sizes)
        panels[0].set_yticks(range(len(names)), names)
        panels[0].set_ylim(-0.6, len(names) - 0.4)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=2, fontsize=7)
        figure.supxlabel(f"{rows[-1].machine}, torch {rows[-1].torch}", fontsize=6.5, color=GREY)


def _values(rows: Sequence[Measurement]) -> Values:
    ours = [row for row in rows if row.operator == OPERATOR]
    return {(row.provider, row.mode, row.metric, row.n): row for row in ours}


def _cases(rows: Sequence[Measurement]) -> list[tuple[int, int, int, float, str, int]]:
    """The problems on which time was taken, from the shortest rows on."""
    return sorted({row.case for row in rows if (row.operator, row.metric) == (OPERATOR, "time")})


def _uses(values: Values) -> Iterator[list[str]]:
    found = {(name, metric): row.p50 for (name, _, metric, _), row in values.items()}
    for name in _ORDER:
        if found.get((name, INSTALLED)) == 0:
            yield [name, *("not installed" for _ in ABILITIES)]
        elif (name, ABILITIES[0]) in found:
            yield [name, *("yes" if found[name, ability] else "no" for ability in ABILITIES)]


def _measures(values: Values, n: int) -> Iterator[list[str]]:
    """The lines of one length: the methods that were measured there."""

    def cell(name: str, mode: str, metric: str, write: Callable[[Measurement], str]) -> str:
        row = values.get((name, mode, metric, n))
        return "-" if row is None else "fails" if math.isnan(row.p50) else write(row)

    for name in (BASELINE, *_ORDER):
        cells = [
            cell(name, "forward", "time", lambda row: three_digits(row.ratio_p50)),
            cell(name, "forward+backward", "time", lambda row: three_digits(row.ratio_p50)),
            cell(name, "forward+backward", "memory", lambda row: f"{row.p50:.1f}"),
            *(cell(name, "behaviour", metric, _exact) for metric in EXACTNESS),
        ]
        if set(cells) != {"-"}:
            yield [name, *cells]


def _exact(row: Measurement) -> str:
    """A count as it is; an error with the one digit that means something."""
    if math.isinf(row.p50):
        return "zero"
    if row.p50 == 0 or row.metric == EXACTNESS[1]:
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
    for mode, colour, marker, up in marks:
        there = [(place, values.get((name, mode, "time", n))) for place, name in enumerate(names)]
        points = [(row.ratio_p50, place + up) for place, row in there if row is not None]
        if points:
            panel.plot(*zip(*points, strict=True), marker, color=colour, label=mode)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}x")
    panel.grid(axis="both")
    panel.set_xlabel("time / softmax")
    panel.set_title(f"n = {n:,}")


def _draw_uses(panel: Axes, values: Values, names: Sequence[str], sizes: Sequence[int]) -> None:
    """A dot where something works; a hollow one where it does not."""
    works = {(name, metric): row.p50 == 1 for (name, _, metric, _), row in values.items()}
    inside = EXACTNESS[1]
    for place, name in enumerate(names):
        counts = [values[key].p50 for n in sizes if (key := (name, "behaviour", inside, n)) in values]
        marks = [all(count == 0 for count in counts), *(works[name, ability] for ability in ABILITIES)]
        for column, mark in enumerate(marks):
            face = INK if mark else "none"
            panel.plot(column, place, "o", markerfacecolor=face, markeredgecolor=INK if mark else GREY)
    heads = ("in [0, 1]", *ABILITIES)
    panel.set_xticks(range(len(heads)), heads, rotation=45, ha="right", fontsize=7)
    panel.set_xlim(-0.6, len(heads) - 0.4)
    panel.set_title("full: works")
