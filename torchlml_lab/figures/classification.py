"""Figures of the CIFAR-100 study, accuracy against label noise, and of the study of k."""

from collections import defaultdict
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import mean, stdev

from matplotlib.axes import Axes

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import markdown_table, spread
from torchlml_lab.figures import files as sources
from torchlml_lab.figures.files import say_where, write_tables
from torchlml_lab.figures.settings import NoiseFigureSettings, WhichKFigureSettings
from torchlml_lab.files import check_picture
from torchlml_lab.plots import BLUE, GREEN, METHODS, ORANGE, PAGE, PURPLE, SKY, VERMILION, new_figure
from torchlml_lab.studies.cifar100 import sweep
from torchlml_lab.studies.cifar100.sweep import AccuracyRecord
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

# The user's own sweep, or that of the study.
BY_NOISE = (Path("runs/cifar100-sweep/results.csv"), Path("results/cifar100/features.csv"))


def by_noise(settings: NoiseFigureSettings) -> None:
    """Draw the figure, write the tables, and print their paths."""
    check_picture(settings.out)
    path, rows = sources.read_sweep(settings.csv, BY_NOISE, "cifar100", sweep.TABLE)
    sources.check_not_tuning(path, ((row.loss, row.recipe) for row in rows))
    if len({(row.source, row.k) for row in rows}) > 1:
        raise BadInput(f"`--csv` names `{path}`, which mixes networks or values of k.")
    draw_by_noise(rows, settings.out)
    say_where(settings.out)


def draw_by_noise(rows: Sequence[AccuracyRecord], picture: Path) -> None:
    """Draw one panel for top-1 and one for top-k; bars are standard deviations over the seeds.

    Args:
        rows: The runs, one recipe for each loss. If they include the accuracy after the last epoch, two more
            panels show it: top-k on clean labels and on noisy training labels.
        picture: The PNG or SVG to write.
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
            _draw_noise_panel(axes, rows, measure)
            axes.set_title(title)
            axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}")
            axes.grid()
        for axes in panels[:, 0]:
            axes.set_ylabel("accuracy (%)")
        for axes in panels[-1]:
            axes.set_xlabel("label noise p")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(METHODS))


def _draw_noise_panel(axes: Axes, rows: Sequence[AccuracyRecord], measure: str) -> None:
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


BY_K = (Path("torchlml-which-k.csv"), Path("results/which-k/which-k.csv"))
_MEASURES = {"recall": "recall", "exact": "exact sets", "calibration_error": "calibration error"}
_LEVELS = {OF_ROW: (GREEN, "-"), PREDICTED: (PURPLE, "--"), SOFTMAX: (ORANGE, "-."), BCE: (SKY, ":")}


def by_k(settings: WhichKFigureSettings) -> None:
    """Draw the figure, write the tables, and print their paths."""
    check_picture(settings.out)
    path = sources.find(settings.csv, BY_K, "torchlml which-k")
    rows = TABLE.read(path, "--csv")
    draw_by_k(rows, settings.out)
    write_tables(page_of(rows), settings.out)


def draw_by_k(rows: Sequence[WhichKRecord], picture: Path) -> None:
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
                _draw_k_panel(axes, here, measure)
            grid[0, column].set_title(f"{digits}, {named} named")
            grid[-1, column].set_xlabel("k")
        for axes, title in zip(grid[:, 0], _MEASURES.values(), strict=True):
            axes.set_ylabel(title)
        handles, labels = grid[0, 1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)


def _draw_k_panel(axes: Axes, rows: Sequence[WhichKRecord], measure: str) -> None:
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
        title = f"Images of {digits}, {named} labeled: in %, and the number of digits with p > 0.5"
        parts.append(markdown_table(title, heads, lines))
    return "\n\n".join(parts) + "\n"
