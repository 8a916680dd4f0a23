"""`torchlml figures multilabel`, `recommend` and `missing-labels`: losses compared on labels and items."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from matplotlib.axes import Axes

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import markdown_table, spread
from torchlml_lab.figures import files as sources
from torchlml_lab.figures.files import write_tables
from torchlml_lab.figures.settings import (
    MissingLabelsFigureSettings,
    MultilabelFigureSettings,
    RecommendFigureSettings,
)
from torchlml_lab.files import check_picture
from torchlml_lab.multilabel import sweep
from torchlml_lab.multilabel.losses import named
from torchlml_lab.multilabel.sweep import LabelRecord
from torchlml_lab.plots import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    METHODS,
    ORANGE,
    PAGE,
    PURPLE,
    SKY,
    VERMILION,
    label_lines,
    new_figure,
    note,
)
from torchlml_lab.recommend import sweep as ranking_sweep
from torchlml_lab.recommend.sweep import RankingRecord
from torchlml_lab.studies.missing_labels import study
from torchlml_lab.studies.missing_labels.data import FOLDERS
from torchlml_lab.studies.missing_labels.methods import METHODS as ONE_LABEL
from torchlml_lab.studies.missing_labels.study import ResultRecord

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
    found = sources.read_sweeps(settings.csv, OWN, STUDY, "multilabel", sweep.TABLE)
    for path, read in found:
        trained = (row for row in read if row.loss != BASELINE)
        sources.check_not_tuning(path, ((f"{row.data} {row.loss}", row.learning_rate) for row in trained))
        rows += read
    draw(rows, settings.out, [path for path, _ in found])
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


def draw(rows: Sequence[LabelRecord], picture: Path, csv: Sequence[Path] = ()) -> None:
    """Draw a panel for each data set, with standard deviations of the differences over the seeds.

    Losses far below the others are named below the panels with their range, so that the rest stays readable.

    Args:
        rows: The runs, with one learning rate per loss.
        picture: The PNG or SVG file to write.
        csv: The CSV files with the rows. Their names are stored in the picture's metadata.
    """
    groups = grouped(rows)
    points = {data: _points(by_keep) for data, by_keep in groups.items()}
    lines = [[y for _, y, _ in line] for by_loss in points.values() for line in by_loss.values()]
    lowest = min([0.0, *(min(line) for line in lines if max(line) >= _LOWEST)]) - 0.5
    with new_figure(picture, PAGE, 2.9, csv) as figure:
        panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
        for axes, (data, by_keep) in zip(panels, groups.items(), strict=True):
            keeps = [keep for keep in _KEEPS if keep in by_keep]
            ends = _draw_panel(axes, points[data], lowest)
            axes.set_xticks(range(len(keeps)), [_KEPT[keep] for keep in keeps])
            axes.set_title(data)
            axes.set_xlabel("training labels kept")
        panels[0].set_ylim(bottom=lowest)
        label_lines(panels[-1], ends, 0.075)
        panels[0].set_ylabel("nDCG@5 minus softmax (points)")
        seeds = len({row.seed for row in rows})
        note(figure, f"means and standard deviations of the differences over {seeds} seeds")


_KEPT = {"1.0": "all", "0.5": "half", "0.3": "30%", "one": "one"}
# Losses that are always more than this many points below softmax are not drawn.
_LOWEST = -3.0

Points = dict[str, list[tuple[int, float, float]]]
"""By loss: the place of the kept labels, the mean difference from softmax in points, and its deviation."""


def _points(by_keep: dict[str, dict[str, Group]]) -> Points:
    points: Points = defaultdict(list)
    for place, keep in enumerate(keep for keep in _KEEPS if keep in by_keep):
        for loss in _LOOKS:
            found = difference(by_keep[keep][loss], by_keep[keep][REFERENCE], "ndcg5")
            if found and loss != REFERENCE:
                deviation = 100 * stdev(found) if len(found) > 1 else 0.0
                points[loss].append((place, 100 * mean(found), deviation))
    return points


def _draw_panel(axes: Axes, points: Points, lowest: float) -> list[tuple[float, str, str]]:
    """Draw the lines of a data set. Returns the last height, the name and the color of each."""
    axes.axhline(0, color=_LOOKS[REFERENCE][0], linewidth=1.2)
    ends = [(0.0, REFERENCE, _LOOKS[REFERENCE][0])]
    for number, (loss, (color, marker)) in enumerate(_LOOKS.items()):
        line = points.get(loss, [])
        heights = [y for _, y, _ in line]
        if line and max(heights) < lowest:
            text = f"{loss}: {min(heights):.1f} to {max(heights):.1f}"
            axes.text(0.02, 0.02, text, color=color, fontsize=7, transform=axes.transAxes)
        elif line:
            # Shifted slightly, so that error bars do not overlap.
            apart = [x + 0.08 * (number - 2.5) for x, *_ in line]
            bars = [deviation for *_, deviation in line]
            axes.errorbar(apart, heights, bars, color=color, marker=marker, linewidth=1.2, capsize=2)
            ends.append((heights[-1], loss, color))
    axes.grid()
    return ends


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
            parts.append(_table(f"{data}, {_HEADS[name]} by share of training labels kept", keeps, cells))
        cells = {
            f"{loss} minus {REFERENCE}": [
                _difference(by_keep[keep][loss], by_keep[keep][REFERENCE]) for keep in keeps
            ]
            for loss in losses
            if loss != REFERENCE
        }
        parts.append(_table(f"{data}, differences in nDCG@5 between runs with the same seed", keeps, cells))
    return "\n\n".join(parts) + "\n"


def _cell(group: Group, measure: str) -> str:
    return spread([getattr(row, measure) for row in group.values()], 1) if group else "–"


def _difference(one: Group, other: Group) -> str:
    found = difference(one, other, "ndcg5")
    return f"{'+' if mean(found) >= 0 else ''}{spread(found, 1)}" if found else "–"


def _table(title: str, heads: Sequence[str], cells: dict[str, list[str]]) -> str:
    lines = [(name, *row) for name, row in cells.items()]
    return markdown_table(f"{title}: in %, mean±standard deviation over the seeds", ("", *heads), lines)


# The user's own sweep, or those of the study.
OWN_RANKING = Path("runs/recommend-sweep/results.csv")
RANKING_STUDY = tuple(
    Path(f"results/recommend/{model}.csv") for model in ("autoencoder", "matrix-factorisation")
)
# Published Recall@20 and nDCG@20 on Gowalla with LightGCN's split.
PUBLISHED = {
    "ItemCF": (0.157, 0.121),
    "MF, BPR": (0.163, 0.138),
    "MF, softmax": (0.176, 0.140),
    "EASE": (0.177, 0.147),
    "LightGCN": (0.182, 0.155),
    "MF, BSL": (0.188, 0.158),
}
_MEASURES = ("test_recall20", "test_ndcg20")
_MARKERS = {"autoencoder": "o", "matrix-factorisation": "s"}
_MODELS = {"autoencoder": "autoencoder", "matrix-factorisation": "matrix factorization"}


def recommend(settings: RecommendFigureSettings) -> None:
    """Draw the figure, write the table, and print their paths."""
    check_picture(settings.out)
    rows: list[RankingRecord] = []
    found = sources.read_sweeps(settings.csv, OWN_RANKING, RANKING_STUDY, "recommend", ranking_sweep.TABLE)
    for path, read in found:
        sources.check_not_tuning(path, ((row.method, row.recipe) for row in read))
        rows += read
    if len(users := {row.users for row in rows}) > 1:
        raise BadInput(f"`--csv` mixes different numbers of users: {', '.join(map(str, sorted(users)))}.")
    published = settings.published or path in RANKING_STUDY
    draw_recommend(rows, PUBLISHED if published else {}, settings.out, [path for path, _ in found])
    write_tables(ranking_table(rows, PUBLISHED if published else {}), settings.out)


def draw_recommend(
    rows: Sequence[RankingRecord],
    published: dict[str, tuple[float, float]],
    picture: Path,
    csv: Sequence[Path] = (),
) -> None:
    """Draw a panel for each metric and a line for each method, the best Recall@20 first.

    Args:
        rows: The runs, with one set of hyperparameters per model and loss.
        published: Published Recall@20 and nDCG@20 by name.
        picture: The PNG or SVG file to write.
        csv: The CSV files with the rows. Their names are stored in the picture's metadata.
    """
    lines = [
        (f"published: {name}", GREY, "|", [[value] for value in pair]) for name, pair in published.items()
    ]
    for (model, loss), group in by_method(rows).items():
        values = [[getattr(row, measure) for row in group] for measure in _MEASURES]
        lines.append((f"{_MODELS[model]}, {loss}", _color(loss), _MARKERS[model], values))
    lines.sort(key=lambda line: -mean(line[3][0]))
    with new_figure(picture, PAGE, 0.8 + 0.2 * len(lines), csv) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for place, (axes, title) in enumerate(zip(panels, ("Recall@20 (%)", "nDCG@20 (%)"), strict=True)):
            for at, (_, color, marker, values) in enumerate(lines):
                percent = [100 * value for value in values[place]]
                error = stdev(percent) if len(percent) > 1 else None
                size = 8 if marker == "|" else 4
                axes.errorbar(
                    mean(percent), at, xerr=error, fmt=marker, color=color, capsize=2, ms=size, mew=1.3
                )
            axes.set_title(title)
            axes.grid()
        panels[0].set_yticks(range(len(lines)), [name for name, *_ in lines])
        panels[0].set_ylim(len(lines) - 0.5, -0.5)
        for tick, (_, color, *_) in zip(panels[0].get_yticklabels(), lines, strict=True):
            tick.set_color(color)
        note(figure, f"ours: means and standard deviations over {len({row.seed for row in rows})} seeds")


def by_method(rows: Sequence[RankingRecord]) -> dict[tuple[str, str], list[RankingRecord]]:
    """Group the runs by model and loss, in increasing order of Recall@20 within a model."""
    groups: dict[tuple[str, str], list[RankingRecord]] = defaultdict(list)
    for row in rows:
        groups[row.model, row.loss].append(row)

    def place(method: tuple[str, str]) -> tuple[str, float]:
        return method[0], mean(row.test_recall20 for row in groups[method])

    return {method: groups[method] for method in sorted(groups, key=place)}


def ranking_table(rows: Sequence[RankingRecord], published: dict[str, tuple[float, float]]) -> str:
    """Format the table in Markdown."""
    heads = ["model", "loss", "learning rate", "temperature or dropout", "seeds", "best epoch"]
    heads += ["Recall@5", "Recall@20", "Recall@100", "nDCG@20"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for name, (recall, ndcg) in published.items():
        lines.append(f"| {name} (published) | | | | | | | {100 * recall:.1f} | | {100 * ndcg:.1f} |")
    for (model, loss), group in by_method(rows).items():
        one = group[0]
        tuned = one.dropout if model == "autoencoder" else one.temperature
        epochs = ", ".join(f"{row.best_epoch}" for row in sorted(group, key=lambda row: row.seed))
        measures = ("test_recall5", "test_recall20", "test_recall100", "test_ndcg20")
        cells = [spread([getattr(row, measure) for row in group]) for measure in measures]
        words = (
            model,
            loss,
            f"{one.learning_rate:g}",
            f"{tuned:g}",
            str(len(group)),
            f"{epochs} of {one.epochs}",
        )
        lines.append(f"| {' | '.join((*words, *cells))} |")
    return "\n".join(lines) + "\n"


def _color(loss: str) -> str:
    name = named(loss).name
    return ORANGE if name == "softmax" else METHODS[name][0]


OWN_ONE_LABEL = Path("torchlml-missing-labels/results.csv")
ONE_LABEL_STUDY = Path("results/missing-labels/results.csv")
_ONE_LABEL_HEADS = {
    "map": "mAP",
    "recall": "recall at round(k)",
    "brier": "Brier score",
    "ece": "calibration error",
    "f1": "F1 of p > 0.5",
    "fitted_brier": "recalibrated Brier score",
    "fitted_ece": "recalibrated calibration error",
    "fitted_f1": "recalibrated F1 of p > 0.5",
    "threshold_f1": "recalibrated F1, fitted threshold",
}
_FAR = -6.0  # points of mAP; the left end of the figure
_LOW = ("brier", "ece", "fitted_brier", "fitted_ece")  # lower is better
_HEAD_TITLES = {"linear": "linear head", "hidden": "one hidden layer"}
_DATASET_LOOKS = dict(
    zip(
        FOLDERS,
        ((BLUE, "o"), (VERMILION, "s"), (GREEN, "D"), (PURPLE, "^"), (SKY, "v"), (ORANGE, "P"), (GREY, "X")),
        strict=True,
    )
)

Cells = dict[tuple[str, str], dict[int, ResultRecord]]
"""The runs with random labels by data set and method, and then by seed."""


def missing_labels(settings: MissingLabelsFigureSettings) -> None:
    """Draw the figure, write the tables, and print their paths."""
    check_picture(settings.out)
    path = sources.find(settings.csv, (OWN_ONE_LABEL, ONE_LABEL_STUDY), "torchlml missing-labels")
    rows = study.RESULTS.read(path, "--csv")
    head = next(name for name in study.HEADS if any(row.head == name for row in rows))
    draw_missing_labels(cells_of(rows, head), settings.out, [path])
    write_tables(missing_labels_page(rows), settings.out)


def cells_of(rows: Sequence[ResultRecord], head: str) -> Cells:
    """Group the runs of a head."""
    groups: Cells = defaultdict(dict)
    for row in rows:
        if row.head == head and row.draw == "random":
            groups[row.dataset, row.method][row.seed] = row
    return groups


def best_competitor(groups: Cells, dataset: str, measure: str) -> str | None:
    """Return the best alternative to LML that learns from the same data, by its mean over the seeds."""
    sign = -1 if measure in _LOW else 1
    means = {
        method: sign * mean(getattr(row, measure) for row in found.values())
        for (name, method), found in groups.items()
        if name == dataset and ONE_LABEL[method].competitor
    }
    return max(means, key=lambda method: means[method]) if means else None


def draw_missing_labels(groups: Cells, picture: Path, csv: Sequence[Path] = ()) -> None:
    """Draw mAP on the left and the Brier score on the right, relative to training with all labels.

    Args:
        groups: The runs of one head.
        picture: The PNG or SVG file to write.
        csv: The CSV file with the runs. Its name is stored in the picture's metadata.
    """
    names = [name for name in ONE_LABEL if name != "bce-all" and any(key[1] == name for key in groups)]
    with new_figure(picture, PAGE, 1.1 + 0.22 * len(names), csv) as figure:
        panels = figure.subplots(1, 2, sharey=True)
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
                    if measure == "map" and x < _FAR:  # outside of the panel: an arrow with the value
                        axes.plot(_FAR, place + apart, marker="<", color=color, clip_on=False)
                        axes.text(_FAR + 0.2, place + apart, f"{x:.0f}", color=color, va="center")
        panels[0].axvline(0, color=GREY, linewidth=0.8)
        panels[1].axvline(1, color=GREY, linewidth=0.8)
        panels[0].set_title("mAP minus that with all labels (points)")
        panels[1].set_title("Brier score relative to all labels")
        panels[0].set_xlabel("higher is better")
        panels[1].set_xlabel("lower is better")
        panels[1].set_xscale("log", base=2)
        panels[1].xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panels[0].set_xlim(left=max(_FAR, panels[0].get_xlim()[0]))
        panels[0].set_yticks(range(len(names)), [ONE_LABEL[name].title for name in names])
        panels[0].set_ylim(len(names) - 0.5, -0.5)
        for label, name in zip(panels[0].get_yticklabels(), names, strict=True):
            label.set_fontweight("bold" if name.startswith("lml") else "normal")
        for axes in panels:
            axes.grid(axis="x")
            for place in range(1, len(names), 2):
                axes.axhspan(place - 0.5, place + 0.5, color=FAINT, linewidth=0, zorder=0)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), labelcolor="linecolor")
        seeds = sorted({len(found) for found in groups.values()})
        count = "–".join(str(number) for number in dict.fromkeys((seeds[0], seeds[-1])))
        note(figure, f"means over {count} seeds")


def missing_labels_page(rows: Sequence[ResultRecord]) -> str:
    """Format all tables in Markdown: each measure, paired differences, and the chosen configurations."""
    parts = ["# One observed label per sample: all tables"]
    for head in study.HEADS:
        groups = cells_of(rows, head)
        datasets = [name for name in FOLDERS if any(key[0] == name for key in groups)]
        if not datasets:
            continue
        parts.append(f"## {_HEAD_TITLES[head].capitalize()}")
        for measure, title in _ONE_LABEL_HEADS.items():
            low = "lower" if measure in _LOW else "higher"
            said = f"× 100, mean ± standard deviation over the seeds, {low} is better:"
            parts.append(markdown_table(said, (title, *datasets), _measure_lines(groups, datasets, measure)))
        for method in ("lml", "lml-predicted"):
            said = (
                f"{ONE_LABEL[method].title} minus the best competitor in each measure, × 100, by seed: "
                "mean ± standard deviation."
            )
            lines = [(name, *_differences(groups, name, method)) for name in datasets]
            heads = (f"{ONE_LABEL[method].title} minus", *_ONE_LABEL_HEADS.values())
            parts.append(markdown_table(said, heads, lines))
        lines = [
            (ONE_LABEL[method].title, *(_recipe(groups.get((name, method), {})) for name in datasets))
            for method in ONE_LABEL
        ]
        parts.append(markdown_table("Chosen configurations:", ("learning rate, weight", *datasets), lines))
    published = [row for row in rows if row.draw == "published"]
    if published:
        parts.append("## Published draw of VOC 2012")
        for head in study.HEADS:
            lines = [
                (
                    ONE_LABEL[row.method].title,
                    *(f"{100 * getattr(row, name):.1f}" for name in _ONE_LABEL_HEADS),
                )
                for row in published
                if row.head == head
            ]
            said = f"{_HEAD_TITLES[head].capitalize()}, × 100:"
            parts += [markdown_table(said, (head, *_ONE_LABEL_HEADS.values()), lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def _measure_lines(groups: Cells, datasets: Sequence[str], measure: str) -> list[tuple[str, ...]]:
    """Format a line for each method. The best method that does not read all labels is bold."""
    best = {}
    for dataset in datasets:
        means = {
            method: mean(getattr(row, measure) for row in found.values())
            for (name, method), found in groups.items()
            if name == dataset and ONE_LABEL[method].labels != "all"
        }
        if means:
            best[dataset] = (min if measure in _LOW else max)(means, key=lambda method: means[method])
    lines = []
    for method, about in ONE_LABEL.items():
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
    for measure in _ONE_LABEL_HEADS:
        other = best_competitor(groups, dataset, measure)
        one = groups.get((dataset, method), {})
        if other is None or not one:
            cells.append("–")
            continue
        rival = groups[dataset, other]
        seeds = sorted({*one} & {*rival})
        found = [getattr(one[seed], measure) - getattr(rival[seed], measure) for seed in seeds]
        text = spread(found, 2 if measure in _LOW else 1).replace("±", " ± ")
        cells.append(f"{'+' if mean(found) >= 0 else ''}{text} ({ONE_LABEL[other].title})")
    return cells


def _recipe(found: dict[int, ResultRecord]) -> str:
    if not found:
        return "–"
    one = next(iter(found.values()))
    return f"{one.learning_rate:g}" + (f", {one.weight:g}" if ONE_LABEL[one.method].weights else "")
