"""`torchlml figures recommend`: Recall@20 and nDCG@20 of a sweep, next to published results."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import spread
from torchlml_lab.figures import files as sources
from torchlml_lab.figures.files import write_tables
from torchlml_lab.figures.settings import RecommendFigureSettings
from torchlml_lab.files import check_picture
from torchlml_lab.multilabel.losses import named
from torchlml_lab.plots import GREY, METHODS, ORANGE, PAGE, new_figure
from torchlml_lab.recommend import sweep
from torchlml_lab.recommend.sweep import RankingRecord

# The user's own sweep, or those of the study.
OWN = Path("runs/recommend-sweep/results.csv")
STUDY = tuple(Path(f"results/recommend/{model}.csv") for model in ("autoencoder", "matrix-factorisation"))
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


def main(settings: RecommendFigureSettings) -> None:
    """Draw the figure, write the table, and print their paths."""
    check_picture(settings.out)
    rows: list[RankingRecord] = []
    for path, read in sources.read_sweeps(settings.csv, OWN, STUDY, "recommend", sweep.TABLE):
        sources.check_not_tuning(path, ((row.method, row.recipe) for row in read))
        rows += read
    if len(users := {row.users for row in rows}) > 1:
        raise BadInput(f"`--csv` mixes different numbers of users: {', '.join(map(str, sorted(users)))}.")
    published = settings.published or path in STUDY
    draw(rows, PUBLISHED if published else {}, settings.out)
    write_tables(table_of(rows, PUBLISHED if published else {}), settings.out)


def draw(rows: Sequence[RankingRecord], published: dict[str, tuple[float, float]], picture: Path) -> None:
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


def table_of(rows: Sequence[RankingRecord], published: dict[str, tuple[float, float]]) -> str:
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
