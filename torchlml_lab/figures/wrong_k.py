"""`torchlml figures which-k`: recall, exact sets and calibration against k, from `torchlml which-k`."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes

from torchlml_lab.engine.table import markdown_table, spread
from torchlml_lab.figures import files as sources
from torchlml_lab.figures.files import write_tables
from torchlml_lab.figures.settings import WhichKFigureSettings
from torchlml_lab.files import check_picture
from torchlml_lab.plots import BLUE, GREEN, ORANGE, PAGE, PURPLE, SKY, VERMILION, new_figure
from torchlml_lab.studies.digits.which_k import (
    AT_MOST,
    BCE,
    EXACTLY,
    OF_ROW,
    PREDICTED,
    SITUATIONS,
    SOFTMAX,
    TABLE,
    WhichKRecord,
)

USUAL = (Path("torchlml-which-k.csv"), Path("results/which-k/which-k.csv"))
_MEASURES = {"recall": "recall", "exact": "exact sets", "calibration_error": "calibration error"}
_LEVELS = {OF_ROW: (GREEN, "-"), PREDICTED: (PURPLE, "--"), SOFTMAX: (ORANGE, "-."), BCE: (SKY, ":")}


def main(settings: WhichKFigureSettings) -> None:
    """Draw the figure, write the tables, and print their paths."""
    check_picture(settings.out)
    path = sources.find(settings.csv, USUAL, "torchlml which-k")
    rows = TABLE.read(path, "--csv")
    draw(rows, settings.out)
    write_tables(page_of(rows), settings.out)


def draw(rows: Sequence[WhichKRecord], picture: Path) -> None:
    """Draw a column of panels for each setting and a row for each metric, with means over the seeds.

    Args:
        rows: The results of the networks.
        picture: The PNG or SVG file to write.
    """
    with new_figure(picture, PAGE, 6.0) as figure:
        grid = figure.subplots(len(_MEASURES), len(SITUATIONS), sharex=True, sharey="row")
        for column, (digits, named) in enumerate(SITUATIONS):
            here = [row for row in rows if (row.digits, row.named) == (digits, named)]
            for axes, measure in zip(grid[:, column], _MEASURES, strict=True):
                _draw_panel(axes, here, measure)
            grid[0, column].set_title(f"{digits}, {named} named")
            grid[-1, column].set_xlabel("k")
        for axes, title in zip(grid[:, 0], _MEASURES.values(), strict=True):
            axes.set_ylabel(title)
        handles, labels = grid[0, 1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)


def _draw_panel(axes: Axes, rows: Sequence[WhichKRecord], measure: str) -> None:
    for method, color, marker in ((EXACTLY, BLUE, "P"), (AT_MOST, VERMILION, "v")):
        ks = sorted({row.k for row in rows if row.method == method})
        means = [
            mean(getattr(row, measure) for row in rows if (row.method, row.k) == (method, k)) for k in ks
        ]
        axes.plot(ks, means, color=color, marker=marker, linewidth=1.0, label=method)
    for method, (color, line) in _LEVELS.items():
        found = [getattr(row, measure) for row in rows if row.method == method]
        if found:
            axes.axhline(mean(found), color=color, linestyle=line, linewidth=1.2, label=method)
    axes.grid()


def page_of(rows: Sequence[WhichKRecord]) -> str:
    """Format one Markdown table per setting: means and standard deviations over the seeds."""
    parts = []
    heads = ("method", "k", "seeds", *_MEASURES.values(), "p > 0.5")
    for digits, named in SITUATIONS:
        lines = []
        groups: dict[tuple[str, int], list[WhichKRecord]] = defaultdict(list)
        for row in rows:
            if (row.digits, row.named) == (digits, named):
                groups[row.method, row.k].append(row)
        for (method, k), group in groups.items():
            cells = [spread([getattr(row, name) for row in group], 1) for name in _MEASURES]
            count = f"{mean(row.count for row in group):.2f}"
            lines.append((method, str(k or "-"), str(len(group)), *cells, count))
        title = f"Images of {digits}, {named} named; in %, and how many digits have p > 0.5"
        parts.append(markdown_table(title, heads, lines))
    return "\n\n".join(parts) + "\n"
