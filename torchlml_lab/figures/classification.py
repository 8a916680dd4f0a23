"""Figures for two studies: accuracy against label noise on CIFAR-100, and the effect of a wrong k."""

from collections import defaultdict
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.axes import Axes

from torchlml_lab import plots
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import markdown_table, spread
from torchlml_lab.figures.settings import NoiseFigureSettings, WhichKFigureSettings
from torchlml_lab.files import check_picture
from torchlml_lab.plots import check_not_tuning, find_csv, read_sweep, say_where, write_tables
from torchlml_lab.studies.cifar100 import sweep
from torchlml_lab.studies.cifar100.sweep import AccuracyRecord
from torchlml_lab.studies.digits.model import SCALED
from torchlml_lab.studies.digits.which_k import (
    AT_MOST,
    BCE,
    EXACTLY,
    PREDICTED,
    SITUATIONS,
    SOFTMAX,
    TABLE,
    TRUE_K,
    WhichKRecord,
)

# The CSV file of the user's own sweep and, if it does not exist, that of the study.
BY_NOISE = (Path("runs/cifar100-sweep/results.csv"), Path("results/cifar100/features.csv"))


def by_noise(settings: NoiseFigureSettings) -> None:
    """Draw accuracy against label noise, and print the path of the figure."""
    check_picture(settings.out)
    path, rows = read_sweep(settings.csv, BY_NOISE, "cifar100", sweep.TABLE)
    check_not_tuning(path, ((row.loss, row.recipe) for row in rows))
    if len({(row.source, row.k) for row in rows}) > 1:
        raise BadInput(f"`{path}` (`--csv`) must contain one network and one k, but it contains several.")
    draw_by_noise(rows, settings.out, [path])
    say_where(settings.out)


def draw_by_noise(rows: Sequence[AccuracyRecord], picture: Path, csv: Sequence[Path] = ()) -> None:
    """Draw accuracies minus those of a reference loss against label noise, in panels for top-1 and top-k.

    The reference is cross-entropy or, without runs of it, the first loss in `plots.METHODS` that has runs.

    Args:
        rows: The runs, with one set of hyperparameters per loss. If they include results of the last epoch,
            two more panels show its top-k accuracy on clean validation labels and on noisy training labels.
        picture: The PNG or SVG file to write.
        csv: The CSV file with the rows. Its name is stored in the picture's metadata.
    """
    top = f"top-{rows[0].k}"
    measures = {"test_top1": "top-1, test", "test_topk": f"{top}, test"}
    if all(isfinite(row.last_topk) for row in rows):
        measures["last_topk"] = f"{top}, last epoch, validation"
        measures["train_topk"] = f"{top}, last epoch, noisy training labels"
    reference = next(loss for loss in plots.METHODS if any(row.loss == loss for row in rows))
    lines = len(measures) // 2
    with plots.new_figure(picture, plots.PAGE, 0.5 + 2.5 * lines, csv) as figure:
        panels = figure.subplots(lines, 2, squeeze=False)
        for axes, (measure, title) in zip(panels.flat, measures.items(), strict=True):
            ends = _draw_noise_panel(axes, rows, measure, reference)
            axes.set_title(title)
            axes.grid()
            if axes in list(panels[:, 1]):
                plots.label_lines(axes, ends, 0.075)
        for axes in panels[:, 0]:
            axes.set_ylabel(f"minus {reference} (points)")
        for axes in panels[-1]:
            axes.set_xlabel(f"label noise p, and accuracy of {reference} (%)")
        seeds = len({row.seed for row in rows})
        plots.note(figure, f"means and standard deviations of the differences over {seeds} seeds")


def _draw_noise_panel(
    axes: Axes, rows: Sequence[AccuracyRecord], measure: str, reference: str
) -> list[tuple[float, str, str]]:
    """Draw the lines of a panel, and return each line's last y-value, name and color."""
    values: dict[tuple[str, float], dict[int, float]] = defaultdict(dict)
    for row in rows:
        values[row.loss, row.noise][row.seed] = 100 * float(getattr(row, measure))
    noises = sorted({row.noise for row in rows if row.loss == reference})
    names = [loss for loss in plots.METHODS if loss != reference and any(row.loss == loss for row in rows)]
    axes.axhline(0, color=plots.METHODS[reference][0], linewidth=1.2)
    ends = [(0.0, reference, plots.METHODS[reference][0])]
    for place, loss in enumerate(names):
        color, marker = plots.METHODS[loss]
        points = []
        for at, noise in enumerate(noises):
            mine, others = values[loss, noise], values[reference, noise]
            if found := [mine[seed] - others[seed] for seed in sorted({*mine} & {*others})]:
                # Shift the points slightly, so that error bars at the same noise level do not overlap.
                apart = at + 0.05 * (place - (len(names) - 1) / 2)
                points.append((apart, mean(found), stdev(found) if len(found) > 1 else 0.0))
        if points:
            places, heights, bars = zip(*points, strict=True)
            axes.errorbar(places, heights, bars, color=color, marker=marker, linewidth=1.2, capsize=2)
            ends.append((points[-1][1], loss, color))
    levels = [f"{noise:g}\n{mean(values[reference, noise].values()):.1f}" for noise in noises]
    axes.set_xticks(range(len(noises)), levels)
    return ends


BY_K = (Path("torchlml-which-k.csv"), Path("results/which-k/which-k.csv"))
_MEASURES = {
    "recall": "recall",
    "top_set": "exact top-m sets",
    "exact": "exact sets, p > 0.5",
    "calibration_error": "calibration error",
}
# The second line is dashed, because it covers the first one for small k.
_BY_K = {EXACTLY: (plots.BLUE, "P-"), AT_MOST: (plots.VERMILION, "1--")}
_LEVELS = {
    TRUE_K: (plots.GREEN, "-"),
    PREDICTED: (plots.PURPLE, "--"),
    SOFTMAX: (plots.ORANGE, "-."),
    SCALED: (plots.DARK_ORANGE, (0, (1, 3))),
    BCE: (plots.SKY, ":"),
}


def by_k(settings: WhichKFigureSettings) -> None:
    """Plot the results against k, write the tables, and print the paths of the files."""
    check_picture(settings.out)
    path = find_csv(settings.csv, BY_K, "torchlml which-k")
    rows = TABLE.read(path, "--csv")
    draw_by_k(rows, settings.out, [path])
    write_tables(page_of(rows), settings.out)


def draw_by_k(rows: Sequence[WhichKRecord], picture: Path, csv: Sequence[Path] = ()) -> None:
    """Draw means over the seeds in a grid of panels, with a column per setting and a row per metric.

    Args:
        rows: The results of all networks.
        picture: The PNG or SVG file to write.
        csv: The CSV file with the rows. Its name is stored in the picture's metadata.
    """
    with plots.new_figure(picture, plots.PAGE, 7.6, csv) as figure:
        grid = figure.subplots(len(_MEASURES), len(SITUATIONS), sharex=True, sharey="row")
        for column, (digits, named) in enumerate(SITUATIONS):
            here = [row for row in rows if (row.digits, row.named) == (digits, named)]
            for axes, measure in zip(grid[:, column], _MEASURES, strict=True):
                _draw_k_panel(axes, here, measure)
            grid[0, column].set_title(f"{digits}, {named} labeled")
            grid[-1, column].set_xlabel("k")
        for axes, title in zip(grid[:, 0], _MEASURES.values(), strict=True):
            axes.set_ylabel(f"{title} (%)")
        everything = [row for row in rows if (row.digits, row.named) == SITUATIONS[-1]]
        for axes, measure in zip(grid[:, -1], _MEASURES, strict=True):
            plots.label_lines(axes, _k_ends(everything, measure), 0.09)
        seeds = len({row.seed for row in rows})
        plots.note(figure, f"means over {seeds} seeds; horizontal lines: methods without a fixed k")


def _levels(rows: Sequence[WhichKRecord], measure: str) -> dict[str, tuple[str, Any]]:
    """Return the colors and line styles of the methods that a panel shows as horizontal lines."""
    there = {row.method for row in rows}
    if measure in ("recall", "top_set"):  # the ranking does not change if p is multiplied by k
        there.discard(SCALED)
    return {method: look for method, look in _LEVELS.items() if method in there}


def _percent(rows: Sequence[WhichKRecord], measure: str, method: str, k: int | None = None) -> float:
    return 100 * mean(
        getattr(row, measure) for row in rows if row.method == method and (k is None or row.k == k)
    )


def _k_ends(rows: Sequence[WhichKRecord], measure: str) -> list[tuple[float, str, str]]:
    """Return the last y-value, name and color of each line in a panel."""
    there = {row.method for row in rows}
    ends = [
        (_percent(rows, measure, method, max(row.k for row in rows if row.method == method)), method, color)
        for method, (color, _) in _BY_K.items()
        if method in there
    ]
    return ends + [
        (_percent(rows, measure, method), method, color)
        for method, (color, _) in _levels(rows, measure).items()
    ]


def _draw_k_panel(axes: Axes, rows: Sequence[WhichKRecord], measure: str) -> None:
    for method, (color, line) in _levels(rows, measure).items():
        axes.axhline(_percent(rows, measure, method), color=color, linestyle=line, linewidth=1.2)
    for method, (color, look) in _BY_K.items():
        if ks := sorted({row.k for row in rows if row.method == method}):
            means = [_percent(rows, measure, method, k) for k in ks]
            axes.plot(ks, means, look, color=color, linewidth=1.0)
    axes.grid()


def page_of(rows: Sequence[WhichKRecord]) -> str:
    """Format one Markdown table per setting, with means and standard deviations over the seeds."""
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
        title = (
            f"The table shows metrics in % (mean ± standard deviation over seeds) for images with {digits}, "
            f"{named} of them labeled. The last column is the mean number of digits with p > 0.5."
        )
        parts.append(markdown_table(title, heads, lines))
    return "\n\n".join(parts) + "\n"
