"""`torchlml figures cifar100`: top-1 and top-k accuracy against label noise, from the CSV of a sweep."""

from collections import defaultdict
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import mean, stdev

from matplotlib.axes import Axes

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.figures import files as sources
from torchlml_lab.figures.files import say_where
from torchlml_lab.figures.settings import NoiseFigureSettings
from torchlml_lab.files import check_picture
from torchlml_lab.plots import METHODS, PAGE, new_figure
from torchlml_lab.studies.cifar100 import sweep
from torchlml_lab.studies.cifar100.sweep import AccuracyRecord

# The user's own sweep, or that of the study.
USUAL = (Path("runs/cifar100-sweep/results.csv"), Path("results/cifar100/features.csv"))


def main(settings: NoiseFigureSettings) -> None:
    """Draw the figure, and print its path."""
    check_picture(settings.out)
    path, rows = sources.read_sweep(settings.csv, USUAL, "cifar100", sweep.TABLE)
    sources.check_not_tuning(path, ((row.loss, row.recipe) for row in rows))
    if len({(row.source, row.k) for row in rows}) > 1:
        raise BadInput(f"`--csv` names `{path}`, which mixes several networks or values of k.")
    draw(rows, settings.out)
    say_where(settings.out)


def draw(rows: Sequence[AccuracyRecord], picture: Path) -> None:
    """Draw one panel for top-1 and one for top-k accuracy, with standard deviations over the seeds.

    Args:
        rows: The runs, with one set of hyperparameters per loss. If they include the accuracy of the last
            epoch, two more panels show top-k on clean labels and on the noisy training labels.
        picture: The PNG or SVG file to write.
    """
    top = f"top-{rows[0].k}"
    measures = {"test_top1": "top-1, test", "test_topk": f"{top}, test"}
    if all(isfinite(row.last_topk) for row in rows):
        measures["last_topk"] = f"{top}, last epoch, validation"
        measures["train_topk"] = f"{top}, last epoch, noisy training labels"
    lines = len(measures) // 2
    with new_figure(picture, PAGE, 0.5 + 2.4 * lines) as figure:
        panels = figure.subplots(lines, 2, squeeze=False)
        for axes, (measure, title) in zip(panels.flat, measures.items(), strict=True):
            _draw_panel(axes, rows, measure)
            axes.set_title(title)
            axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}")
            axes.grid()
        for axes in panels[:, 0]:
            axes.set_ylabel("accuracy (%)")
        for axes in panels[-1]:
            axes.set_xlabel("label noise p")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(METHODS))


def _draw_panel(axes: Axes, rows: Sequence[AccuracyRecord], measure: str) -> None:
    names = [loss for loss in METHODS if any(row.loss == loss for row in rows)]
    for place, loss in enumerate(names):
        values: dict[float, list[float]] = defaultdict(list)
        for row in rows:
            if row.loss == loss:
                values[row.noise].append(getattr(row, measure))
        noises = sorted(values)
        color, marker = METHODS[loss]
        axes.errorbar(
            # Shifted slightly, so that error bars at the same noise level do not overlap.
            [noise + 0.006 * (place - (len(names) - 1) / 2) for noise in noises],
            [mean(values[noise]) for noise in noises],
            [stdev(values[noise]) if len(values[noise]) > 1 else 0.0 for noise in noises],
            color=color,
            marker=marker,
            linewidth=1.2,
            capsize=2,
            label=loss,
        )
