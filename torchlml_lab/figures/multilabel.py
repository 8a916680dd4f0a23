"""`torchlml figures multilabel`: losses against the fraction of training labels kept, with tables."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from matplotlib.axes import Axes

from torchlml_lab.engine.output import markdown_table, spread
from torchlml_lab.figures import files as sources
from torchlml_lab.figures.files import write_tables
from torchlml_lab.figures.settings import MultilabelFigureSettings
from torchlml_lab.files import check_picture
from torchlml_lab.multilabel import sweep
from torchlml_lab.multilabel.sweep import LabelRecord
from torchlml_lab.plots import GREY, METHODS, PAGE, PURPLE, VERMILION, new_figure

# The user's own sweep, or those of the study, with the baseline.
OWN = Path("runs/multilabel-sweep/results.csv")
STUDY = tuple(
    Path(f"results/multilabel/{name}.csv") for name in ("bibtex", "delicious", "corel5k", "one-vs-rest")
)
BASELINE = "one-vs-rest"
REFERENCE = "softmax"
_LOOKS = {
    "bce": METHODS["bce"],
    "softmax": METHODS["cross-entropy"],
    "truncated-entropy-1": METHODS["truncated-entropy"],
    "lml-labels": METHODS["lml"],
    "lml-5": (PURPLE, "s"),
    "lml-20": (VERMILION, "v"),
}
_KEEPS = ("1.0", "0.5", "0.3", "one")
_HEADS = {"p1": "P@1", "p3": "P@3", "p5": "P@5", "ndcg5": "nDCG@5", "psp5": "PSP@5", "r5": "R@5"}

Group = dict[int, LabelRecord]
"""The runs of a loss by seed."""


def main(settings: MultilabelFigureSettings) -> None:
    """Draw the figure, write the tables, and print their paths."""
    check_picture(settings.out)
    rows: list[LabelRecord] = []
    for path, read in sources.read_sweeps(settings.csv, OWN, STUDY, "multilabel", sweep.TABLE):
        trained = (row for row in read if row.loss != BASELINE)
        sources.check_not_tuning(path, ((f"{row.data} {row.loss}", row.learning_rate) for row in trained))
        rows += read
    draw(rows, settings.out)
    write_tables(page_of(rows), settings.out)


def grouped(rows: Sequence[LabelRecord]) -> dict[str, dict[str, dict[str, Group]]]:
    """Group the runs by data, kept labels and loss."""
    groups: dict[str, dict[str, dict[str, Group]]] = {}
    for row in rows:
        by_loss = groups.setdefault(row.data, {}).setdefault(row.keep, defaultdict(dict))
        by_loss[row.loss][row.seed] = row
    return groups


def difference(one: Group, other: Group, measure: str) -> list[float]:
    """Return the difference of two losses in a metric, for each seed that both have."""
    return [getattr(one[seed], measure) - getattr(other[seed], measure) for seed in sorted({*one} & {*other})]


def draw(rows: Sequence[LabelRecord], picture: Path) -> None:
    """Draw a panel for each data set, with standard deviations of the differences over the seeds.

    Args:
        rows: The runs, with one learning rate per loss.
        picture: The PNG or SVG file to write.
    """
    groups = grouped(rows)
    with new_figure(picture, PAGE, 2.9) as figure:
        panels = figure.subplots(1, len(groups), squeeze=False)[0]
        for axes, (data, by_keep) in zip(panels, groups.items(), strict=True):
            _draw_panel(axes, by_keep)
            axes.set_title(data)
            axes.set_xlabel("training labels kept")
        panels[0].set_ylabel("nDCG@5 minus softmax (points)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(_LOOKS))


def _draw_panel(axes: Axes, by_keep: dict[str, dict[str, Group]]) -> None:
    keeps = [keep for keep in _KEEPS if keep in by_keep]
    axes.axhline(0, color=GREY, linewidth=0.8)
    for place, (loss, (color, marker)) in enumerate(_LOOKS.items()):
        points = []
        for x, keep in enumerate(keeps):
            found = difference(by_keep[keep][loss], by_keep[keep][REFERENCE], "ndcg5")
            if found and loss != REFERENCE:
                points.append((x, 100 * mean(found), 100 * stdev(found) if len(found) > 1 else 0.0))
        if points:
            xs, ys, bars = zip(*points, strict=True)
            # Shifted slightly, so that error bars do not overlap.
            apart = [x + 0.08 * (place - 2.5) for x in xs]
            axes.errorbar(apart, ys, bars, color=color, marker=marker, linewidth=1.2, capsize=2, label=loss)
    names = {"1.0": "all", "0.5": "half", "0.3": "30%", "one": "one"}
    axes.set_xticks(range(len(keeps)), [names[keep] for keep in keeps])
    axes.grid()


def page_of(rows: Sequence[LabelRecord]) -> str:
    """Format the Markdown tables: all metrics with all labels, some with fewer labels, and differences."""
    parts = []
    for data, by_keep in grouped(rows).items():
        keeps = [keep for keep in _KEEPS if keep in by_keep]
        losses = [loss for loss in (*_LOOKS, BASELINE) if any(by_keep[keep][loss] for keep in keeps)]
        if keeps[0] == "1.0":
            cells = {loss: [_cell(by_keep["1.0"][loss], name) for name in _HEADS] for loss in losses}
            parts.append(_table(f"{data}, all training labels", list(_HEADS.values()), cells))
        for name in ("p1", "r5", "ndcg5"):
            cells = {loss: [_cell(by_keep[keep][loss], name) for keep in keeps] for loss in losses}
            parts.append(_table(f"{data}, {_HEADS[name]} by the training labels kept", keeps, cells))
        cells = {
            f"{loss} minus {REFERENCE}": [
                _difference(by_keep[keep][loss], by_keep[keep][REFERENCE]) for keep in keeps
            ]
            for loss in losses
            if loss != REFERENCE
        }
        parts.append(_table(f"{data}, nDCG@5 seed by seed", keeps, cells))
    return "\n\n".join(parts) + "\n"


def _cell(group: Group, measure: str) -> str:
    return spread([getattr(row, measure) for row in group.values()], 1) if group else "–"


def _difference(one: Group, other: Group) -> str:
    found = difference(one, other, "ndcg5")
    return f"{'+' if mean(found) >= 0 else ''}{spread(found, 1)}" if found else "–"


def _table(title: str, heads: Sequence[str], cells: dict[str, list[str]]) -> str:
    lines = [(name, *row) for name, row in cells.items()]
    return markdown_table(f"{title}: in %, mean±standard deviation over the seeds", ("", *heads), lines)
