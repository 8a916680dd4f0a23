"""`torchlml figures multilabel` and `recommend`: losses on labels and on user–item data, from sweeps."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from matplotlib.axes import Axes

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import markdown_table, spread
from torchlml_lab.figures import files as sources
from torchlml_lab.figures.files import write_tables
from torchlml_lab.figures.settings import MultilabelFigureSettings, RecommendFigureSettings
from torchlml_lab.files import check_picture
from torchlml_lab.multilabel import sweep
from torchlml_lab.multilabel.losses import named
from torchlml_lab.multilabel.sweep import LabelRecord
from torchlml_lab.plots import GREY, METHODS, ORANGE, PAGE, PURPLE, VERMILION, new_figure
from torchlml_lab.recommend import sweep as ranking_sweep
from torchlml_lab.recommend.sweep import RankingRecord

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


def recommend(settings: RecommendFigureSettings) -> None:
    """Draw the figure, write the table, and print their paths."""
    check_picture(settings.out)
    rows: list[RankingRecord] = []
    for path, read in sources.read_sweeps(
        settings.csv, OWN_RANKING, RANKING_STUDY, "recommend", ranking_sweep.TABLE
    ):
        sources.check_not_tuning(path, ((row.method, row.recipe) for row in read))
        rows += read
    if len(users := {row.users for row in rows}) > 1:
        raise BadInput(f"`--csv` mixes different numbers of users: {', '.join(map(str, sorted(users)))}.")
    published = settings.published or path in RANKING_STUDY
    draw_recommend(rows, PUBLISHED if published else {}, settings.out)
    write_tables(ranking_table(rows, PUBLISHED if published else {}), settings.out)


def draw_recommend(
    rows: Sequence[RankingRecord], published: dict[str, tuple[float, float]], picture: Path
) -> None:
    """Draw a panel for each metric and a row for each method, with standard deviations over the seeds.

    Args:
        rows: The runs, with one set of hyperparameters per model and loss.
        published: Published Recall@20 and nDCG@20 by name.
        picture: The PNG or SVG file to write.
    """
    groups = by_method(rows)
    names = [*published, *(f"{model}, {loss}" for model, loss in groups)]
    with new_figure(picture, PAGE, 0.6 + 0.2 * len(names)) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for place, (axes, measure) in enumerate(zip(panels, _MEASURES, strict=True)):
            for at, values in enumerate(published.values()):
                axes.plot(values[place], at, "|", color=GREY, markersize=8, markeredgewidth=1.5)
            for at, ((model, loss), group) in enumerate(groups.items(), len(published)):
                values_here = [getattr(row, measure) for row in group]
                error = stdev(values_here) if len(values_here) > 1 else None
                axes.errorbar(
                    mean(values_here), at, xerr=error, fmt=_MARKERS[model], color=_color(loss), capsize=2
                )
            axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g}")
            axes.grid()
        panels[0].set_yticks(range(len(names)), names)
        panels[0].set_ylim(len(names) - 0.5, -0.5)
        for label in panels[0].get_yticklabels()[: len(published)]:
            label.set_color(GREY)
        panels[0].set_title("Recall@20 (%)")
        panels[1].set_title("nDCG@20 (%)")


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
