"""Figures for the scene-graph study: recall by epoch and by type of frequency bias."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import markdown_table, spread
from torchlml_lab.figures.settings import BiasFigureSettings, SceneGraphFigureSettings
from torchlml_lab.files import check_picture
from torchlml_lab.plots import (
    GREY,
    METHODS,
    ORANGE,
    PAGE,
    check_not_tuning,
    label_lines,
    new_figure,
    note,
    read_sweep,
    write_tables,
)
from torchlml_lab.studies.scene_graph import sweep
from torchlml_lab.studies.scene_graph.objectives import find_method, parse_method
from torchlml_lab.studies.scene_graph.sweep import FREQUENCY, RecallRecord, column, title_of
from torchlml_lab.studies.scene_graph.task import KS, MODES, RECALLS

# The CSV file of the user's own sweep and, if it does not exist, that of the study.
BY_EPOCH = (Path("runs/scene-graph-sweep/results.csv"), Path("results/scene-graph/vg.csv"))
_MODES = (("", "constrained"), ("ng-", "unconstrained"))
_LINES = {20: "-", 50: "--", 100: ":"}
_SPLITS = ("train", "validation")


def by_epoch(settings: SceneGraphFigureSettings) -> None:
    """Draw recall by epoch, write the tables, and print the paths of the files."""
    check_picture(settings.out)
    path, rows = read_sweep(settings.csv, BY_EPOCH, "scene-graph", sweep.TABLE)
    trained = [row for row in rows if row.method != FREQUENCY]
    check_not_tuning(path, ((row.method, (row.learning_rate, row.variant)) for row in trained))
    missing = [name for name in settings.methods if not any(row.method == name for row in trained)]
    if missing:
        raise BadInput(f"`{path}` (`--csv`) has no run with the method `{missing[0]}`.")
    draw_by_epoch(rows, settings.methods, settings.out, [path])
    write_tables(page_by_epoch(rows), settings.out)


def draw_by_epoch(
    rows: Sequence[RecallRecord], methods: Sequence[str], picture: Path, csv: Sequence[Path] = ()
) -> None:
    """Draw each method's recall minus that of the first method, on training and validation images.

    Args:
        rows: The evaluations, with one set of hyperparameters per method.
        methods: The methods to draw, the reference first. Each curve is a mean over the seeds.
        picture: The PNG or SVG file to write.
        csv: The CSV file with the rows. Its name is stored in the picture's metadata.
    """
    reference, *others = methods
    with new_figure(picture, PAGE, 5.0, csv) as figure:
        grid = figure.subplots(2, 2, sharex=True, sharey="row")
        for panels, (mode, title) in zip(grid, _MODES, strict=True):
            ends = []
            for axes, split in zip(panels, _SPLITS, strict=True):
                ends = _draw_epoch_panel(axes, rows, reference, others, mode, split)
                axes.set_title(f"{split}, {title}")
            label_lines(panels[-1], [(0.0, reference, _color(reference)), *ends], 0.065)
            panels[0].set_ylabel(f"recall minus {reference} (points)")
        for axes in grid[1]:
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        seeds = len({row.seed for row in rows if row.method in methods})
        note(figure, f"means over {seeds} seed{'s' if seeds > 1 else ''}")


def _draw_epoch_panel(
    axes: Axes, rows: Sequence[RecallRecord], reference: str, others: Sequence[str], mode: str, split: str
) -> list[tuple[float, str, str]]:
    """Draw the lines of a panel, and return each line's last y-value, name and color."""
    axes.axhline(0, color=_color(reference), linewidth=1.2)
    ends = []
    for method in others:
        color = _color(method)
        for k in KS:
            mine, theirs = (
                _by_epoch(rows, name, split, column(f"{mode}R@{k}")) for name in (method, reference)
            )
            epochs = sorted({*mine} & {*theirs})
            gaps = [mine[epoch] - theirs[epoch] for epoch in epochs]
            axes.plot(epochs, gaps, _LINES[k], color=color)
            if gaps:
                ends.append((gaps[-1], f"{method}, R@{k}", color))
    axes.grid()
    return ends


def _color(method: str) -> str:
    return ORANGE if method == "softmax" else METHODS[parse_method(method).objective][0]


def _by_epoch(rows: Sequence[RecallRecord], method: str, split: str, measure: str) -> dict[int, float]:
    """Return the recall in percent by epoch, averaged over the seeds."""
    values: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if (row.method, row.split) == (method, split):
            values[row.epoch].append(100 * getattr(row, measure))
    return {epoch: mean(found) for epoch, found in values.items()}


def page_by_epoch(rows: Sequence[RecallRecord]) -> str:
    """Format Markdown tables like those in the paper, with validation and test recalls at the best epochs."""
    parts = []
    heads = ["method", "seeds", *(f"{title} R@{k}" for _, title in _MODES for k in KS)]
    for split in ("validation", "test"):
        groups: dict[tuple[str, str], list[RecallRecord]] = defaultdict(list)
        for row in rows:
            if row.split == split and row.chosen:
                groups[row.method, row.variant].append(row)
        lines = []
        for (method, variant), group in sorted(groups.items(), key=lambda item: _place(item[0][0])):
            cells = [spread([getattr(row, column(name)) for row in group], 1) for name in RECALLS]
            name = f"{method} ({variant})" if variant else method
            lines.append((name, str(len(group)), *cells))
        parts.append(markdown_table(title_of(rows, split), heads, lines))
    return "\n\n".join(parts) + "\n"


def _place(method: str) -> tuple[int, str, int]:
    """Return a sort key for the paper's order: the baseline, softmax, then other methods by name and k."""
    found = find_method(method)
    if found is None or found.k is None:
        return ((FREQUENCY, "softmax").index(method) if method in (FREQUENCY, "softmax") else 2, method, 0)
    return 2, found.objective, found.k


BY_BIAS = (Path("runs/scene-graph-sweep/results.csv"), Path("results/scene-graph/vg-bias.csv"))
# The variants in a sweep over `--biases`, and their names in the figure. The first variant reveals most about
# a training image, because the counts include the image itself. The last variant has no frequency bias.
BIASES = {"": "counted", "leave-one-out": "leave-one-out", "counts": "outside", "without-bias": "none"}


def by_bias(settings: BiasFigureSettings) -> None:
    """Draw recall by frequency bias, write the tables, and print the paths of the files."""
    check_picture(settings.out)
    path, rows = read_sweep(settings.csv, BY_BIAS, "scene-graph", sweep.TABLE)
    trained = [row for row in rows if row.method != FREQUENCY]
    check_not_tuning(path, ((f"{row.method} {row.variant}".strip(), row.learning_rate) for row in trained))
    draw_by_bias(rows, settings.out, [path])
    write_tables(page_by_bias(rows), settings.out)


def cells(rows: Sequence[RecallRecord], split: str) -> dict[tuple[str, str], list[RecallRecord]]:
    """Group the best epochs by method and variant: the frequency baseline first, then methods by name."""
    found: dict[tuple[str, str], list[RecallRecord]] = defaultdict(list)
    for row in rows:
        if row.split == split and row.chosen and row.variant in BIASES:
            found[row.method, row.variant].append(row)
    order = list(BIASES)
    return dict(
        sorted(found.items(), key=lambda one: (one[0][0] != FREQUENCY, one[0][0], order.index(one[0][1])))
    )


def draw_by_bias(rows: Sequence[RecallRecord], picture: Path, csv: Sequence[Path] = ()) -> None:
    """Draw a panel for each recall metric on the test images, with standard deviations over the seeds.

    Args:
        rows: The evaluations, with one set of hyperparameters per method and bias.
        picture: The PNG or SVG file to write.
        csv: The CSV file with the rows. Its name is stored in the picture's metadata.
    """
    groups = cells(rows, "test")
    biases = [one for one in BIASES if any(variant == one and name != FREQUENCY for name, variant in groups)]
    with new_figure(picture, PAGE, 4.6, csv) as figure:
        grid = figure.subplots(2, len(KS), sharex=True)
        for panels, mode, names in zip(grid, MODES, (RECALLS[: len(KS)], RECALLS[len(KS) :]), strict=True):
            for axes, name, k in zip(panels, names, KS, strict=True):
                _draw_bias_panel(axes, groups, biases, column(name))
                axes.set_title(f"R@{k}, {mode}")
            panels[0].set_ylabel("recall (%)")
        for axes in grid[1]:
            axes.set_xticks(range(len(biases)), [BIASES[one] for one in biases], rotation=20)
            axes.set_xlabel("frequency bias")
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), labelcolor="linecolor")
        seeds = sorted({len(group) for (name, _), group in groups.items() if name != FREQUENCY})
        count = "–".join(str(number) for number in dict.fromkeys((seeds[0], seeds[-1])))
        note(figure, f"means and standard deviations over {count} seeds")


def _draw_bias_panel(
    axes: Axes, groups: dict[tuple[str, str], list[RecallRecord]], biases: Sequence[str], measure: str
) -> None:
    methods = list(dict.fromkeys(name for name, _ in groups if name != FREQUENCY))
    for place, method in enumerate(methods):
        color, marker = (ORANGE, "o") if method == "softmax" else METHODS[parse_method(method).objective]
        known = [one for one in biases if (method, one) in groups]
        values = [[100 * getattr(row, measure) for row in groups[method, one]] for one in known]
        axes.errorbar(
            # Draw methods side by side, so that error bars for the same bias do not overlap.
            [biases.index(one) + 0.16 * (place - (len(methods) - 1) / 2) for one in known],
            [mean(found) for found in values],
            [stdev(found) if len(found) > 1 else 0.0 for found in values],
            color=color,
            marker=marker,
            linestyle="none",
            elinewidth=1.0,
            capsize=2,
            label=method,
        )
    for (name, variant), (row, *_) in groups.items():
        if name == FREQUENCY and variant in biases:
            level, place = 100 * getattr(row, measure), biases.index(variant)
            axes.hlines(
                level, place - 0.3, place + 0.3, color=GREY, label="" if variant else "frequencies alone"
            )
    axes.grid(axis="y")


def page_by_bias(rows: Sequence[RecallRecord]) -> str:
    """Format Markdown tables of learning rates and of validation and test recalls at the best epochs."""
    parts = []
    heads = ["method", "bias", "learning rate", "seeds", "mean of the six recalls"]
    heads += [f"{mode} R@{k}" for mode in MODES for k in KS]
    for split in ("validation", "test"):
        lines = []
        for (method, variant), group in cells(rows, split).items():
            found = [
                spread([getattr(row, column(name)) for row in group], 1) for name in ("recall", *RECALLS)
            ]
            rate = f"{group[0].learning_rate:g}" if method != FREQUENCY else "-"
            seeds = str(len(group)) if method != FREQUENCY else "-"
            lines.append((method, BIASES[variant], rate, seeds, *found))
        parts.append(markdown_table(title_of(rows, split), heads, lines))
    return "\n\n".join(parts) + "\n"
