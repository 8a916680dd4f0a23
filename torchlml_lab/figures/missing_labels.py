"""`torchlml figures missing-labels`: the results of the study with one observed label per sample."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes

from torchlml_lab.engine.output import markdown_table, spread
from torchlml_lab.figures.settings import MissingLabelsFigureSettings
from torchlml_lab.files import check_picture
from torchlml_lab.plots import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    ORANGE,
    PAGE,
    PURPLE,
    SKY,
    VERMILION,
    find_csv,
    new_figure,
    note,
    write_tables,
)
from torchlml_lab.studies.missing_labels import study
from torchlml_lab.studies.missing_labels.data import FOLDERS
from torchlml_lab.studies.missing_labels.methods import METHODS
from torchlml_lab.studies.missing_labels.study import ResultRecord

OWN = Path("torchlml-missing-labels/results.csv")
STUDY = Path("results/missing-labels/results.csv")
_HEADS = {
    "map": "mAP",
    "recall": "recall at round(k)",
    "brier": "Brier score",
    "ece": "calibration error",
    "f1": "F1 at p > 0.5",
    "fitted_brier": "recalibrated Brier score",
    "fitted_ece": "recalibrated calibration error",
    "fitted_f1": "recalibrated F1 at p > 0.5",
    "threshold_f1": "recalibrated F1, fitted threshold",
}
_FAR = -10.0  # the lowest possible left limit of the mAP axis, in points
_LOW = ("brier", "ece", "fitted_brier", "fitted_ece")  # lower is better
_NETWORKS = {"linear": "linear head", "hidden": "one hidden layer"}
_DATASET_LOOKS = dict(
    zip(
        FOLDERS,
        ((BLUE, "o"), (VERMILION, "s"), (GREEN, "D"), (PURPLE, "^"), (SKY, "v"), (ORANGE, "P"), (GREY, "X")),
        strict=True,
    )
)

Cells = dict[tuple[str, str], dict[int, ResultRecord]]
"""The runs with randomly drawn labels, by data set and method, and then by seed."""


def main(settings: MissingLabelsFigureSettings) -> None:
    """Draw mAP and Brier scores by method, write the tables, and print the paths of the files."""
    check_picture(settings.out)
    path = find_csv(settings.csv, (OWN, STUDY), "torchlml missing-labels")
    rows = study.RESULTS.read(path, "--csv")
    draw({head: groups for head in study.HEADS if (groups := cells_of(rows, head))}, settings.out, [path])
    write_tables(page_of(rows), settings.out)


def cells_of(rows: Sequence[ResultRecord], head: str) -> Cells:
    """Group the runs with one head by data set and method, and then by seed."""
    groups: Cells = defaultdict(dict)
    for row in rows:
        if row.head == head and row.draw == "random":
            groups[row.dataset, row.method][row.seed] = row
    return groups


def best_competitor(groups: Cells, dataset: str, measure: str) -> str | None:
    """Return the competitor (see `Method.competitor`) with the best mean over the seeds, or None."""
    sign = -1 if measure in _LOW else 1
    means = {
        method: sign * mean(getattr(row, measure) for row in found.values())
        for (name, method), found in groups.items()
        if name == dataset and METHODS[method].competitor
    }
    return max(means, key=lambda method: means[method]) if means else None


def draw(heads: dict[str, Cells], picture: Path, csv: Sequence[Path] = ()) -> None:
    """Draw mAP on the left and the Brier score on the right, relative to training with all labels.

    Args:
        heads: The runs for each head. Each head has one row of panels.
        picture: The PNG or SVG file to write.
        csv: The CSV file with the runs. Its name is stored in the picture's metadata.
    """
    found = {key[1] for groups in heads.values() for key in groups} - {"bce-all"}
    names = [name for name in METHODS if name in found]
    with new_figure(picture, PAGE, 1.1 + (0.3 + 0.2 * len(names)) * len(heads), csv) as figure:
        panels = figure.subplots(len(heads), 2, sharex="col", squeeze=False)
        for (head, groups), pair in zip(heads.items(), panels, strict=True):
            _draw_head(groups, names, pair)
            pair[0].set_title(f"mAP, {_NETWORKS[head]}")
            pair[1].set_title(f"Brier score, {_NETWORKS[head]}")
        left, right = panels[-1]
        left.set_xlabel("points relative to all labels, higher is better")
        right.set_xlabel("ratio to all labels, lower is better")
        left.set_xlim(left=max(_FAR, left.get_xlim()[0]))
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), labelcolor="linecolor")
        seeds = sorted({len(runs) for groups in heads.values() for runs in groups.values()})
        count = "–".join(str(number) for number in dict.fromkeys((seeds[0], seeds[-1])))
        note(figure, f"means over {count} seeds")


def _draw_head(groups: Cells, names: Sequence[str], panels: Sequence[Axes]) -> None:
    """Draw the two panels for one head, with a row for each method and a marker for each data set."""
    far: dict[int, float] = defaultdict(float)
    for number, (dataset, (color, marker)) in enumerate(_DATASET_LOOKS.items()):
        reference = groups.get((dataset, "bce-all"))
        if not reference:
            continue
        for axes, measure in zip(panels, ("map", "brier"), strict=True):
            base = mean(getattr(row, measure) for row in reference.values())
            points = []
            for place, name in enumerate(names):
                if found := groups.get((dataset, name)):
                    value = mean(getattr(row, measure) for row in found.values())
                    points.append((100 * (value - base) if measure == "map" else value / base, place))
            apart = 0.09 * (number - (len(_DATASET_LOOKS) - 1) / 2)
            axes.plot(
                [x for x, _ in points],
                [place + apart for _, place in points],
                linestyle="",
                marker=marker,
                color=color,
                label=dataset,
            )
            for x, place in points:
                if measure == "map" and x < _FAR:  # outside the panel: draw an arrow with the value
                    axes.plot(_FAR, place + apart, marker="<", color=color, clip_on=False)
                    axes.text(_FAR + 0.2 + far[place], place, f"{x:.0f}", color=color, va="center")
                    far[place] += 0.9  # the next value goes to the right of this one
    panels[0].axvline(0, color=GREY, linewidth=0.8)
    panels[1].axvline(1, color=GREY, linewidth=0.8)
    panels[1].set_xscale("log", base=2)
    panels[1].xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panels[0].set_yticks(range(len(names)), [METHODS[name].title for name in names])
    panels[1].set_yticks(range(len(names)), [])
    for label, name in zip(panels[0].get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if name.startswith("lml") else "normal")
    for axes in panels:
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(axis="x")
        for place in range(1, len(names), 2):
            axes.axhspan(place - 0.5, place + 0.5, color=FAINT, linewidth=0, zorder=0)


def page_of(rows: Sequence[ResultRecord]) -> str:
    """Format all tables in Markdown: the metrics, paired differences, and chosen configurations."""
    parts = ["# One observed label per sample: all tables"]
    for head in study.HEADS:
        groups = cells_of(rows, head)
        datasets = [name for name in FOLDERS if any(key[0] == name for key in groups)]
        if not datasets:
            continue
        parts.append(f"## {_NETWORKS[head].capitalize()}")
        for measure, title in _HEADS.items():
            low = "lower" if measure in _LOW else "higher"
            said = f"Values × 100 (mean ± standard deviation over the seeds; {low} is better):"
            parts.append(markdown_table(said, (title, *datasets), _measure_lines(groups, datasets, measure)))
        for method, title in (("lml", "LML"), ("lml-predicted", "LML (predicted k)")):
            said = (
                f"{title} minus the best competitor in each metric, × 100, paired by seed "
                "(mean ± standard deviation):"
            )
            lines = [(name, *_differences(groups, name, method)) for name in datasets]
            heads = (f"{title} minus best competitor", *_HEADS.values())
            parts.append(markdown_table(said, heads, lines))
        lines = [
            (METHODS[method].title, *(_recipe(groups.get((name, method), {})) for name in datasets))
            for method in METHODS
        ]
        parts.append(markdown_table("Chosen configurations:", ("learning rate, weight", *datasets), lines))
    published = [row for row in rows if row.draw == "published"]
    if published:
        parts.append("## VOC 2012 with the published observed labels")
        for head in study.HEADS:
            lines = [
                (
                    METHODS[row.method].title,
                    *(f"{100 * getattr(row, name):.1f}" for name in _HEADS),
                )
                for row in published
                if row.head == head
            ]
            said = f"Values × 100 ({_NETWORKS[head]}):"
            parts += [markdown_table(said, ("method", *_HEADS.values()), lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def _measure_lines(groups: Cells, datasets: Sequence[str], measure: str) -> list[tuple[str, ...]]:
    """Format a row for each method. The best method among those that do not use all labels is in bold."""
    best = {}
    for dataset in datasets:
        means = {
            method: mean(getattr(row, measure) for row in found.values())
            for (name, method), found in groups.items()
            if name == dataset and METHODS[method].labels != "all"
        }
        if means:
            best[dataset] = (min if measure in _LOW else max)(means, key=lambda method: means[method])
    lines = []
    for method, about in METHODS.items():
        cells = []
        for dataset in datasets:
            found = groups.get((dataset, method), {})
            digits = 2 if measure in _LOW else 1
            text = spread([getattr(row, measure) for row in found.values()], digits) if found else "–"
            text = text.replace("±", " ± ")
            cells.append(f"**{text}**" if best.get(dataset) == method else text)
        lines.append((about.title, *cells))
    return lines


def _differences(groups: Cells, dataset: str, method: str) -> list[str]:
    cells = []
    for measure in _HEADS:
        other = best_competitor(groups, dataset, measure)
        one = groups.get((dataset, method), {})
        if other is None or not one:
            cells.append("–")
            continue
        rival = groups[dataset, other]
        seeds = sorted({*one} & {*rival})
        found = [getattr(one[seed], measure) - getattr(rival[seed], measure) for seed in seeds]
        text = spread(found, 2 if measure in _LOW else 1).replace("±", " ± ")
        cells.append(f"{'+' if mean(found) >= 0 else ''}{text} ({METHODS[other].title})")
    return cells


def _recipe(found: dict[int, ResultRecord]) -> str:
    if not found:
        return "–"
    one = next(iter(found.values()))
    return f"{one.learning_rate:g}" + (f", {one.weight:g}" if METHODS[one.method].weights else "")
