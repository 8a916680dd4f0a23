"""`torchlml figures multilabel` and `recommend`: compare losses for multi-label data and recommendation."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import get_args

from matplotlib.axes import Axes

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import markdown_table, spread
from torchlml_lab.figures.settings import MultilabelFigureSettings, RecommendFigureSettings
from torchlml_lab.files import check_picture
from torchlml_lab.multilabel import sweep
from torchlml_lab.multilabel.losses import named
from torchlml_lab.multilabel.sweep import LabelRecord
from torchlml_lab.plots import (
    GREY,
    METHODS,
    ORANGE,
    PAGE,
    PURPLE,
    VERMILION,
    check_not_tuning,
    label_lines,
    new_figure,
    note,
    read_sweeps,
    write_tables,
)
from torchlml_lab.recommend import sweep as ranking_sweep
from torchlml_lab.recommend.settings import ClosedForm
from torchlml_lab.recommend.sweep import Method, RankingRecord

# The CSV file of the user's own sweep and, if it does not exist, those of the study with the baseline.
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
"""The runs with one loss, keyed by seed."""


def main(settings: MultilabelFigureSettings) -> None:
    """Draw the figure, write the tables, and print their paths."""
    check_picture(settings.out)
    rows: list[LabelRecord] = []
    found = read_sweeps(settings.csv, OWN, STUDY, "multilabel", sweep.TABLE)
    for path, read in found:
        trained = (row for row in read if row.loss != BASELINE)
        check_not_tuning(path, ((f"{row.data} {row.loss}", row.learning_rate) for row in trained))
        rows += read
    draw(rows, settings.out, [path for path, _ in found])
    write_tables(page_of(rows), settings.out)


def grouped(rows: Sequence[LabelRecord]) -> dict[str, dict[str, dict[str, Group]]]:
    """Group the runs by data set, then by fraction of labels kept, and then by loss."""
    groups: dict[str, dict[str, dict[str, Group]]] = {}
    for row in rows:
        by_loss = groups.setdefault(row.data, {}).setdefault(row.keep, defaultdict(dict))
        by_loss[row.loss][row.seed] = row
    return groups


def difference(one: Group, other: Group, measure: str) -> list[float]:
    """Return the difference between two losses in a metric, for each seed that was run with both."""
    return [getattr(one[seed], measure) - getattr(other[seed], measure) for seed in sorted({*one} & {*other})]


def draw(rows: Sequence[LabelRecord], picture: Path, csv: Sequence[Path] = ()) -> None:
    """Draw each loss's nDCG@5 minus that of softmax, with a panel for each data set.

    Losses far below the others are not drawn, so that the other lines remain readable. Their names and ranges
    are written in the panels.

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
# Losses whose difference from softmax is always below this many points do not extend the y-axis. Such a loss
# is drawn only if its best point lies within the axis.
_LOWEST = -3.0

Points = dict[str, list[tuple[int, float, float]]]
"""By loss: the x position, the mean difference from softmax in points, and its standard deviation."""


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
    """Draw the lines of a data set, and return the last y-value, the name and the color of each line."""
    axes.axhline(0, color=_LOOKS[REFERENCE][0], linewidth=1.2)
    ends = [(0.0, REFERENCE, _LOOKS[REFERENCE][0])]
    for number, (loss, (color, marker)) in enumerate(_LOOKS.items()):
        line = points.get(loss, [])
        heights = [y for _, y, _ in line]
        if line and max(heights) < lowest:
            text = f"{loss}: {min(heights):.1f} to {max(heights):.1f}"
            axes.text(0.02, 0.02, text, color=color, fontsize=7, transform=axes.transAxes)
        elif line:
            # Shift the points slightly, so that error bars do not overlap.
            apart = [x + 0.08 * (number - 2.5) for x, *_ in line]
            bars = [deviation for *_, deviation in line]
            axes.errorbar(apart, heights, bars, color=color, marker=marker, linewidth=1.2, capsize=2)
            ends.append((heights[-1], loss, color))
    axes.grid()
    return ends


def page_of(rows: Sequence[LabelRecord]) -> str:
    """Format Markdown tables for each data set.

    They contain all metrics of training with all labels, three metrics by the share of labels kept, and the
    differences from the reference loss.
    """
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
    return markdown_table(f"{title} (in %, mean ± standard deviation over the seeds)", ("", *heads), lines)


# The CSV file of the user's own sweep and, if it does not exist, those of the study.
OWN_RANKING = Path("runs/recommend-sweep/results.csv")
RANKING_STUDY = tuple(
    Path(f"results/recommend/{name}.csv")
    for name in ("autoencoder", "matrix-factorization", "ease", "graph-filter", "default")
)
# Published Recall@20 and nDCG@20 on Gowalla with LightGCN's split.
PUBLISHED = {
    "ItemCF": (0.157, 0.121),
    "MF, BPR": (0.163, 0.138),
    "MF, softmax": (0.176, 0.140),
    "EASE": (0.177, 0.147),
    "LightGCN": (0.182, 0.155),
    "GF-CF": (0.185, 0.152),
    "MF, BSL": (0.188, 0.158),
    "BSPM": (0.192, 0.160),
}
_MEASURES = ("test_recall20", "test_ndcg20")
_MARKERS = {"autoencoder": "o", "matrix-factorization": "s", "ease": "D", "graph-filter": "^", "auto": "*"}
_MODELS = {
    "autoencoder": "autoencoder",
    "matrix-factorization": "matrix factorization",
    "ease": "EASE",
    "graph-filter": "graph filter",
    "auto": "default (combination)",
}


def recommend(settings: RecommendFigureSettings) -> None:
    """Draw the figure, write the table, and print their paths."""
    check_picture(settings.out)
    rows: list[RankingRecord] = []
    found = read_sweeps(settings.csv, OWN_RANKING, RANKING_STUDY, "recommend", ranking_sweep.TABLE)
    for path, read in found:
        check_not_tuning(path, ((row.method, row.recipe) for row in read))
        rows += read
    if len(users := {row.users for row in rows}) > 1:
        raise BadInput(
            "All runs in `--csv` must have the same number of users, but they have "
            f"{' and '.join(map(str, sorted(users)))}."
        )
    published = settings.published or path in RANKING_STUDY
    draw_recommend(rows, PUBLISHED if published else {}, settings.out, [path for path, _ in found])
    write_tables(ranking_table(rows, PUBLISHED if published else {}), settings.out)


def draw_recommend(
    rows: Sequence[RankingRecord],
    published: dict[str, tuple[float, float]],
    picture: Path,
    csv: Sequence[Path] = (),
) -> None:
    """Draw a panel for each metric, with a row for each method, sorted by decreasing Recall@20.

    Args:
        rows: The runs, with one set of hyperparameters per model and loss.
        published: Published Recall@20 and nDCG@20 by name.
        picture: The PNG or SVG file to write.
        csv: The CSV files with the rows. Their names are stored in the picture's metadata.
    """
    lines = [
        (f"published: {name}", GREY, "|", [[value] for value in pair]) for name, pair in published.items()
    ]
    for (model, layers, loss), group in by_method(rows).items():
        values = [[getattr(row, measure) for row in group] for measure in _MEASURES]
        graph = f", {layers} layers" if layers and model == "matrix-factorization" else ""
        name = _MODELS[model] + graph + (f", {loss}" if loss != ranking_sweep.OWN else "")
        lines.append((name, _color(loss), _MARKERS[model], values))
    lines.sort(key=lambda line: -mean(line[3][0]))
    with new_figure(picture, PAGE, 0.8 + 0.2 * len(lines), csv) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for place, (axes, title) in enumerate(zip(panels, ("Recall@20 (%)", "nDCG@20 (%)"), strict=True)):
            for at, (_, color, marker, values) in enumerate(lines):
                percent = [100 * value for value in values[place]]
                error = stdev(percent) if len(percent) > 1 else None
                size = 8 if marker in "|*" else 4
                axes.errorbar(
                    mean(percent), at, xerr=error, fmt=marker, color=color, capsize=2, ms=size, mew=1.3
                )
            axes.set_title(title)
            axes.grid()
        panels[0].set_yticks(range(len(lines)), [name for name, *_ in lines])
        panels[0].set_ylim(len(lines) - 0.5, -0.5)
        for tick, (_, color, *_) in zip(panels[0].get_yticklabels(), lines, strict=True):
            tick.set_color(color)
        note(figure, _seeds_in_words(rows))


def _seeds_in_words(rows: Sequence[RankingRecord]) -> str:
    """Return the note about the seeds. Closed-form models do not depend on the seed."""
    said = f"ours: means and standard deviations over {len({row.seed for row in rows})} seeds"
    once = [_MODELS[model] for model in get_args(ClosedForm) if any(row.model == model for row in rows)]
    return f"{said}; {' and '.join(once)}: one run, independent of the seed" if once else said


def by_method(rows: Sequence[RankingRecord]) -> dict[Method, list[RankingRecord]]:
    """Group the runs by model, number of layers and loss, and sort each model's losses by Recall@20."""
    groups: dict[Method, list[RankingRecord]] = defaultdict(list)
    for row in rows:
        groups[Method(row.model, row.layers, row.loss)].append(row)

    def place(method: Method) -> tuple[str, int, float]:
        return method.model, method.layers, mean(row.test_recall20 for row in groups[method])

    return {method: groups[method] for method in sorted(groups, key=place)}


def ranking_table(rows: Sequence[RankingRecord], published: dict[str, tuple[float, float]]) -> str:
    """Format the published results and our results as a Markdown table."""
    heads = ["model", "layers", "loss", "learning rate", "temperature or dropout", "seeds", "best epoch"]
    heads += ["Recall@5", "Recall@20", "Recall@100", "nDCG@20"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for name, (recall, ndcg) in published.items():
        lines.append(f"| {name} (published) | | | | | | | | {100 * recall:.1f} | | {100 * ndcg:.1f} |")
    for (model, layers, loss), group in by_method(rows).items():
        one = group[0]
        tuned = {"autoencoder": one.dropout, "matrix-factorization": one.temperature}.get(model)
        epochs = ", ".join(f"{row.best_epoch}" for row in sorted(group, key=lambda row: row.seed))
        measures = ("test_recall5", "test_recall20", "test_recall100", "test_ndcg20")
        cells = [spread([getattr(row, measure) for row in group]) for measure in measures]
        words = (
            model,
            "–" if model in get_args(ClosedForm) else str(layers),
            "–" if loss == ranking_sweep.OWN else loss,
            "–" if tuned is None else f"{one.learning_rate:g}",
            "–" if tuned is None else f"{tuned:g}",
            str(len(group)),
            "–" if tuned is None else f"{epochs} of {one.epochs}",
        )
        lines.append(f"| {' | '.join((*words, *cells))} |")
    return "\n".join(lines) + "\n"


def _color(loss: str) -> str:
    if loss == ranking_sweep.OWN:
        return PURPLE
    name = named(loss).name
    others = {"softmax": ORANGE, "topk-softmax": VERMILION}
    return others[name] if name in others else METHODS[name][0]
