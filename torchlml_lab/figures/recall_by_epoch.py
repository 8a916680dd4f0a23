"""`torchlml figures scene-graph`: recall against epochs, and the tables of the paper, from a sweep."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from torchlml_lab.engine.table import markdown_table, spread
from torchlml_lab.errors import BadInput
from torchlml_lab.figures import find_csv as sources
from torchlml_lab.figures.options import CsvFigureSettings, read_options, write_tables
from torchlml_lab.studies.scene_graph import recall_rows
from torchlml_lab.studies.scene_graph.methods import find_method, parse_method
from torchlml_lab.studies.scene_graph.recall_rows import FREQUENCY, Record, column, title_of
from torchlml_lab.studies.scene_graph.recalls import KS, RECALLS
from torchlml_lab.style import GREY, METHODS, ORANGE, PAGE, new_figure

# One's own sweep, or that of the study.
USUAL = (Path("runs/scene-graph-sweep/results.csv"), Path("results/scene-graph/vg.csv"))
_MODES = (("", "constrained"), ("ng-", "unconstrained"))
_LINES = {20: "-", 50: "--", 100: ":"}
_SPLITS = ("train", "validation")


@dataclass(frozen=True)
class SceneGraphFigureSettings(CsvFigureSettings):
    """Draw the recall curves of `torchlml sweep scene-graph` as the paper does; tables (.md) go beside it."""

    methods: tuple[str, ...] = ("softmax", "truncated-entropy-20", "lml-20")
    """The methods whose curves are drawn; the tables have all."""


def main(arguments: Sequence[str]) -> None:
    """Read the options and draw."""
    settings = read_options(SceneGraphFigureSettings, "scene-graph", arguments)
    path, rows = sources.read_sweep(settings.csv, USUAL, "scene-graph", recall_rows.TABLE)
    trained = [row for row in rows if row.method != FREQUENCY]
    sources.refuse_tuning(path, ((row.method, (row.learning_rate, row.variant)) for row in trained))
    missing = [name for name in settings.methods if not any(row.method == name for row in trained)]
    if missing:
        raise BadInput(f"`--csv` names `{path}`, which has no run of `{missing[0]}`.")
    draw(rows, settings.methods, settings.out)
    write_tables(page_of(rows), settings.out)


def draw(rows: Sequence[Record], methods: Sequence[str], picture: Path) -> None:
    """Draw a panel for train and one for validation, with the graph constraint and without it.

    Args:
        rows: The evaluations, one recipe for each method.
        methods: Which curves; each is a mean over the seeds.
        picture: The PNG or SVG to write.
    """
    with new_figure(picture, PAGE, 5.0) as figure:
        grid = figure.subplots(2, 2, sharex=True, sharey="row")
        for panels, (mode, title) in zip(grid, _MODES, strict=True):
            for axes, split in zip(panels, _SPLITS, strict=True):
                _draw_panel(axes, rows, methods, mode, split)
                axes.set_title(f"{split}, {title}")
            panels[0].set_ylabel("recall (%)")
        for axes in grid[1]:
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        handles, labels = grid[0][1].get_legend_handles_labels()  # the frequencies alone are on validation
        figure.legend(handles, labels, loc="outside lower center", ncols=len(methods) + 1)


def _draw_panel(axes: Axes, rows: Sequence[Record], methods: Sequence[str], mode: str, split: str) -> None:
    for method in methods:
        colour = ORANGE if method == "softmax" else METHODS[parse_method(method).objective][0]
        for k in KS:
            values: dict[int, list[float]] = defaultdict(list)
            for row in rows:
                if (row.method, row.split) == (method, split):
                    values[row.epoch].append(getattr(row, column(f"{mode}R@{k}")))
            epochs = sorted(values)
            recall = [100 * mean(values[epoch]) for epoch in epochs]
            axes.plot(epochs, recall, _LINES[k], color=colour, label=f"{method}, R@{k}")
    for row in rows:
        if (row.method, row.split) == (FREQUENCY, split):
            for k in KS:
                level = 100 * getattr(row, column(f"{mode}R@{k}"))
                axes.axhline(
                    level, color=GREY, linestyle=_LINES[k], linewidth=0.8, label=f"{FREQUENCY}, R@{k}"
                )
    axes.grid()


def page_of(rows: Sequence[Record]) -> str:
    """The tables of the paper in Markdown: the best epoch on validation, and its test."""
    parts = []
    heads = ["method", "seeds", *(f"{title} R@{k}" for _, title in _MODES for k in KS)]
    for split in ("validation", "test"):
        groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
        for row in rows:
            if row.split == split and row.chosen:
                groups[row.method, row.variant].append(row)
        lines = []
        for (method, variant), group in sorted(groups.items(), key=lambda item: _place(item[0][0])):
            cells = [spread([getattr(row, column(name)) for row in group], 1) for name in RECALLS]
            name = f"{method} ({variant})" if variant else method
            lines.append((name, str(len(group)), *cells))
        parts.append(markdown_table(title_of(rows, split), heads, lines))
    return "\n\n".join(parts) + "\n"


def _place(method: str) -> tuple[int, str, int]:
    """The order of the paper: what is known, softmax, then by name and k."""
    found = find_method(method)
    if found is None or found.k is None:
        return ((FREQUENCY, "softmax").index(method) if method in (FREQUENCY, "softmax") else 2, method, 0)
    return 2, found.objective, found.k
