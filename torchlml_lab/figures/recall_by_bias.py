"""`torchlml figures scene-graph-bias`: recall against the kind of frequency bias, from a sweep."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from matplotlib.axes import Axes

from torchlml_lab.engine.table import markdown_table, spread
from torchlml_lab.figures import find_csv as sources
from torchlml_lab.figures.options import CsvFigureSettings, read_options, write_tables
from torchlml_lab.studies.scene_graph import recall_rows
from torchlml_lab.studies.scene_graph.methods import parse_method
from torchlml_lab.studies.scene_graph.recall_rows import FREQUENCY, Record, column, title_of
from torchlml_lab.studies.scene_graph.recalls import KS, MODES, RECALLS
from torchlml_lab.style import GREY, METHODS, ORANGE, PAGE, new_figure

USUAL = (Path("runs/scene-graph-sweep/results.csv"), Path("results/scene-graph/vg-bias.csv"))
# The variants of a sweep over `--biases`, from the bias that knows the training images best to none.
BIASES = {"": "counted", "leave-one-out": "leave-one-out", "counts": "outside", "without-bias": "none"}


def main(arguments: Sequence[str]) -> None:
    """Read the options and draw."""
    about = (
        "Draw the test recall of `torchlml sweep scene-graph --biases ...` against the frequency bias, "
        "and write its tables (.md) beside the picture."
    )
    settings = read_options(CsvFigureSettings, "scene-graph-bias", arguments, about)
    path, rows = sources.read_sweep(settings.csv, USUAL, "scene-graph", recall_rows.TABLE)
    trained = [row for row in rows if row.method != FREQUENCY]
    sources.refuse_tuning(
        path, ((f"{row.method} {row.variant}".strip(), row.learning_rate) for row in trained)
    )
    draw(rows, settings.out)
    write_tables(page_of(rows), settings.out)


def cells(rows: Sequence[Record], split: str) -> dict[tuple[str, str], list[Record]]:
    """The chosen epochs of the runs by method and variant: the methods in the order of their names."""
    found: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for row in rows:
        if row.split == split and row.chosen and row.variant in BIASES:
            found[row.method, row.variant].append(row)
    order = list(BIASES)
    return dict(
        sorted(found.items(), key=lambda one: (one[0][0] != FREQUENCY, one[0][0], order.index(one[0][1])))
    )


def draw(rows: Sequence[Record], picture: Path) -> None:
    """Draw a panel for each recall on the test images; bars are standard deviations over the seeds.

    Args:
        rows: The evaluations, one recipe for each method with each bias.
        picture: The PNG or SVG to write.
    """
    groups = cells(rows, "test")
    biases = [one for one in BIASES if any(variant == one and name != FREQUENCY for name, variant in groups)]
    with new_figure(picture, PAGE, 4.6) as figure:
        grid = figure.subplots(2, len(KS), sharex=True)
        for panels, mode, names in zip(grid, MODES, (RECALLS[: len(KS)], RECALLS[len(KS) :]), strict=True):
            for axes, name, k in zip(panels, names, KS, strict=True):
                _draw_panel(axes, groups, biases, column(name))
                axes.set_title(f"R@{k}, {mode}")
            panels[0].set_ylabel("recall (%)")
        for axes in grid[1]:
            axes.set_xticks(range(len(biases)), [BIASES[one] for one in biases], rotation=20)
            axes.set_xlabel("frequency bias")
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def _draw_panel(
    axes: Axes, groups: dict[tuple[str, str], list[Record]], biases: Sequence[str], measure: str
) -> None:
    methods = list(dict.fromkeys(name for name, _ in groups if name != FREQUENCY))
    for place, method in enumerate(methods):
        colour, marker = (ORANGE, "o") if method == "softmax" else METHODS[parse_method(method).objective]
        known = [one for one in biases if (method, one) in groups]
        values = [[100 * getattr(row, measure) for row in groups[method, one]] for one in known]
        axes.errorbar(
            # Set a little apart, so that bars of one bias do not cover one another.
            [biases.index(one) + 0.1 * (place - (len(methods) - 1) / 2) for one in known],
            [mean(found) for found in values],
            [stdev(found) if len(found) > 1 else 0.0 for found in values],
            color=colour,
            marker=marker,
            linewidth=1.0,
            capsize=2,
            label=method,
        )
    for (name, variant), (row, *_) in groups.items():
        if name == FREQUENCY and variant in biases:
            level, place = 100 * getattr(row, measure), biases.index(variant)
            axes.hlines(
                level, place - 0.3, place + 0.3, color=GREY, label="" if variant else "frequencies alone"
            )
    axes.grid(axis="y")


def page_of(rows: Sequence[Record]) -> str:
    """The tables in Markdown: the best epoch on validation, and its test, with the rate that was tuned."""
    parts = []
    heads = ["method", "bias", "learning rate", "seeds", "mean of the six"]
    heads += [f"{mode} R@{k}" for mode in MODES for k in KS]
    for split in ("validation", "test"):
        lines = []
        for (method, variant), group in cells(rows, split).items():
            found = [
                spread([getattr(row, column(name)) for row in group], 1) for name in ("recall", *RECALLS)
            ]
            rate = f"{group[0].learning_rate:g}" if method != FREQUENCY else "-"
            seeds = str(len(group)) if method != FREQUENCY else "-"
            lines.append((method, BIASES[variant], rate, seeds, *found))
        parts.append(markdown_table(title_of(rows, split), heads, lines))
    return "\n\n".join(parts) + "\n"
