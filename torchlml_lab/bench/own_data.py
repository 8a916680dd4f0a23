"""`torchlml bench own-data`: compare `torchlml train multilabel` with other packages for tagging.

The methods are in `own_data_methods.py`.
"""

import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from torchlml_lab.bench.own_data_methods import METHODS, Problem
from torchlml_lab.bench.settings import OwnDataSettings, check_choices, check_numbers
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import StudyTable, markdown_table, new_console, plain_table, spread
from torchlml_lab.figures.settings import OwnDataFigureSettings
from torchlml_lab.files import check_file, check_picture
from torchlml_lab.multilabel import linear
from torchlml_lab.multilabel.samples import Files, read_files
from torchlml_lab.multilabel.settings import MultilabelSettings
from torchlml_lab.plots import (
    BLUE,
    DARK_ORANGE,
    GREEN,
    PAGE,
    PURPLE,
    SKY,
    find_csv,
    new_figure,
    note,
    write_tables,
)

SETS = {
    "bibtex": ("multilabel/bibtex.train.svm.gz", "multilabel/bibtex.test.svm.gz"),
    "corel5k": ("multilabel/corel5k.train.svm.gz", "multilabel/corel5k.test.svm.gz"),
    "delicious": ("multilabel/delicious.train.svm.gz", "multilabel/delicious.test.svm.gz"),
    "goemotions": ("goemotions/train.csv.gz", "goemotions/test.csv.gz"),
}
LABELS = {"goemotions": ("emotions",)}
OWN = "torchlml"


@dataclass(frozen=True)
class OwnDataRecord:
    """The results of one method on one data set with a given number of training samples and a seed."""

    data: str
    samples: int
    """The number of training samples."""
    method: str
    seed: int
    setting: str
    """`default`, or the settings that were chosen on validation samples."""
    ndcg5: float
    p1: float
    micro_f1: float
    exact: float
    """The fraction of samples whose label set is predicted exactly by the method's own decision rule."""
    predict_seconds: float
    """CPU seconds for prediction on the test samples."""
    seconds: float
    """CPU seconds for training, including any tuning on validation samples."""


TABLE = StudyTable(OwnDataRecord, lambda row: (row.data, row.samples, row.method, row.seed))
METRICS = {"ndcg5": "nDCG@5", "p1": "P@1", "micro_f1": "micro-F1", "exact": "exact sets"}
TARGETS = {"ndcg5": 0.2, "micro_f1": 0.0, "exact": 0.0}
"""The metrics that have a target. Each value is the number of percentage points by which torchlml may be
below the best other method."""


def main(settings: OwnDataSettings) -> None:
    """Run all comparisons that are not in the CSV yet, and print the table."""
    check_choices("--sets", settings.sets, SETS)
    check_choices("--methods", settings.methods, METHODS)
    check_numbers("--sizes", settings.sizes, 0)
    check_numbers("--seeds", settings.seeds, 0)
    for method in settings.methods:
        package = METHODS[method].package
        if importlib.util.find_spec(package) is None:
            raise BadInput(
                f"`--methods` contains `{method}`, which needs the package `{package}`. Run "
                "`pip install 'torchlml[competitors]'`, or leave the method out."
            )
    folder = settings.data or (Path(os.environ["TORCHLML_DATA"]) if "TORCHLML_DATA" in os.environ else None)
    if folder is None:
        raise BadInput("`--data` is missing. Pass the data directory, or set TORCHLML_DATA.")
    check_file("--csv", settings.csv)
    settings.csv.parent.mkdir(parents=True, exist_ok=True)
    console = new_console()
    rows = TABLE.read(settings.csv, "--csv") if settings.csv.exists() else []
    for row in _missing(settings, folder, rows, console):
        rows.append(row)
        TABLE.write(settings.csv, rows)
    console.print(table(rows))
    console.print(f"The results are in {settings.csv}.", soft_wrap=True)


def _missing(
    settings: OwnDataSettings, folder: Path, rows: Sequence[OwnDataRecord], console: Console
) -> Iterator[OwnDataRecord]:
    """Run the comparisons that `rows` does not contain yet, and yield their records."""
    done = {(row.data, row.samples, row.method, row.seed) for row in rows}
    for name in settings.sets:
        train_file, test_file = (folder / part for part in SETS[name])
        for file in (train_file, test_file):
            if not file.is_file():
                raise BadInput(f"`{folder}` (`--data`) does not contain `{file.relative_to(folder)}`.")
        files = read_files(MultilabelSettings(train=train_file, test=test_file, labels=LABELS.get(name, ())))
        for seed in settings.seeds:
            for size in settings.sizes:
                problem = _problem(files, size, seed)
                for method in settings.methods:
                    key = (name, len(problem.training), method, seed)
                    if key not in done:
                        done.add(key)
                        said = "{}, {} samples: {}, seed {}".format(*key)
                        console.print(said, highlight=False)
                        yield _compared(name, method, problem)


def _problem(files: Files, size: int, seed: int) -> Problem:
    """Select the training samples of a comparison. A size of 0, or one that is too large, selects all."""
    assert files.test is not None
    training = files.train
    if 0 < size < len(training):
        order = np.random.default_rng(seed).permutation(len(training))
        training = training.take(np.sort(order[:size]))
    return Problem(training, files.test, files.columns, seed)


def _compared(name: str, method: str, problem: Problem) -> OwnDataRecord:
    start = time.process_time()
    found = METHODS[method].predict(problem)
    end = time.process_time()
    true = problem.test.labels.toarray().astype(bool)
    labels = found.scores.shape[1]
    # Labels that no training sample has count as false negatives.
    sets = np.zeros_like(true)
    sets[:, :labels] = found.sets
    scores = np.full(true.shape, -np.inf, dtype=np.float32)
    scores[:, :labels] = found.scores
    best = found.scores.argmax(axis=1)
    return OwnDataRecord(
        data=name,
        samples=len(problem.training),
        method=method,
        seed=problem.seed,
        setting=found.setting,
        ndcg5=round(linear.ndcg(np.maximum(scores, np.float32(-1e30)), problem.test.labels), 5),
        p1=round(float(true[np.arange(len(true)), best].mean()), 5),
        micro_f1=round(float(2 * (sets & true).sum() / (sets.sum() + true.sum())), 5),
        exact=round(float((sets == true).all(axis=1).mean()), 5),
        predict_seconds=round(end - found.fitted, 3),
        seconds=found.fitted - start,
    )


Runs = dict[str, list[OwnDataRecord]]
"""The runs of each method on one data set with one number of samples, in the order of their seeds."""


def grouped(rows: Sequence[OwnDataRecord]) -> dict[tuple[str, int], Runs]:
    """Group the runs by data set and number of samples, and then by method."""
    found: dict[tuple[str, int], Runs] = {}
    for row in sorted(rows, key=TABLE.order):
        found.setdefault((row.data, row.samples), {}).setdefault(row.method, []).append(row)
    return found


def _numbers(runs: Sequence[OwnDataRecord]) -> tuple[str, ...]:
    """Format the means of the metrics and times of a method, with the standard deviations of the metrics."""
    metrics = (spread([getattr(row, name) for row in runs], 1) for name in METRICS)
    seconds = f"{mean(row.seconds for row in runs):.1f}"
    return *metrics, seconds, f"{mean(row.predict_seconds for row in runs):.2f}"


def table(rows: Sequence[OwnDataRecord]) -> Table:
    """Tabulate the results of all methods by data set and number of samples."""
    heads = ("data", "samples", "method", *METRICS.values(), "train s", "predict s")
    shown = plain_table("Metrics on test samples in percent, and CPU time in seconds", heads, left=3)
    for (data, samples), methods in grouped(rows).items():
        for method, runs in methods.items():
            shown.add_row(data, str(samples), method, *_numbers(runs))
    return shown


def best_other(methods: Runs, metric: str) -> str:
    """Return the method with the best mean of a metric, not counting torchlml."""
    others = (name for name in methods if name != OWN)
    return max(others, key=lambda name: mean(getattr(row, metric) for row in methods[name]))


def differences(methods: Runs, metric: str) -> list[float]:
    """Return the metric of torchlml minus that of the best other method, for each seed."""
    pairs = zip(methods[OWN], methods[best_other(methods, metric)], strict=True)
    return [getattr(own, metric) - getattr(other, metric) for own, other in pairs]


def summary(rows: Sequence[OwnDataRecord], metric: str) -> str:
    """Format a Markdown table that compares torchlml with the best other method by one of `METRICS`."""
    lines = []
    for (data, samples), methods in grouped(rows).items():
        best = best_other(methods, metric)
        values = (spread([getattr(row, metric) for row in methods[name]], 1) for name in (OWN, best))
        difference = differences(methods, metric)
        sign = "+" if mean(difference) >= 0 else ""
        lines.append((data, str(samples), *values, best, sign + spread(difference, 1)))
    heads = ("data", "samples", OWN, "best other score", "best other method", "difference")
    return markdown_table(f"{METRICS[metric]} on test samples, in percent:", heads, lines)


def details(rows: Sequence[OwnDataRecord], data: str) -> str:
    """Format a Markdown table of all methods on one data set."""
    heads = ("samples", "method", *METRICS.values(), "train s", "predict s")
    lines = [
        (str(samples), method, *_numbers(runs))
        for (name, samples), methods in grouped(rows).items()
        for method, runs in methods.items()
        if name == data
    ]
    return markdown_table(f"Metrics on {data} test samples in percent, CPU time in seconds:", heads, lines)


def targets(rows: Sequence[OwnDataRecord]) -> str:
    """Format a Markdown table of how often each target is met, and of the smallest difference."""
    lines = []
    for metric, slack in TARGETS.items():
        found = [
            (100 * mean(differences(methods, metric)), place) for place, methods in grouped(rows).items()
        ]
        met = sum(value >= -slack - 1e-9 for value, _ in found)
        least, (data, samples) = min(found)
        wanted = "at least the best other method" + (f" minus {slack:g}" if slack else "")
        cells = (METRICS[metric], wanted, f"{met} of {len(found)}", f"{least:+.1f} ({data}, {samples})")
        lines.append(cells)
    heads = ("metric", "target", "met", "smallest difference")
    title = (
        "The number of comparisons (a data set and a number of samples) that meet each of this project's "
        "targets:"
    )
    return markdown_table(title, heads, lines)


STUDY = (Path("own-data.csv"), Path("results/own-data/own-data.csv"))
_DRAWN = {
    OWN: (BLUE, "P"),
    "LinearSVC, tuned": (GREEN, "D"),
    "logistic, tuned": (SKY, "^"),
    "LibMultiLabel, tuned": (PURPLE, "s"),
    "napkinXC, tuned": (DARK_ORANGE, "o"),
}


def redraw(settings: OwnDataFigureSettings) -> None:
    """Draw the figure and write the tables from a CSV, and print their paths."""
    check_picture(settings.out)
    path = find_csv(settings.csv, STUDY, "torchlml bench own-data")
    rows = TABLE.read(path, "--csv")
    seeds = sorted({row.seed for row in rows})
    for (data, samples), methods in grouped(rows).items():
        for method in {*_DRAWN, *methods}:
            if [row.seed for row in methods.get(method, [])] != seeds:
                place = f"results for some seeds of `{method}` on {data} with {samples} samples are missing"
                raise BadInput(
                    f"`{path}` (`--csv`) is incomplete: {place}. Repeat `torchlml bench own-data`."
                )
    draw(rows, settings.out, [path])
    parts = [targets(rows), *(summary(rows, metric) for metric in METRICS)]
    parts += [details(rows, data) for data in sorted({row.data for row in rows})]
    write_tables("\n\n".join(parts) + "\n", settings.out)


def draw(rows: Sequence[OwnDataRecord], picture: Path, csv: Sequence[Path] = ()) -> None:
    """Draw nDCG@5 and micro-F1 against the number of training samples, with a column of panels per data set.

    Args:
        rows: The results of torchlml and of the tuned methods.
        picture: The PNG or SVG file to write.
        csv: The CSV files with the rows. Their names are stored in the picture's metadata.
    """
    names = sorted({row.data for row in rows})
    with new_figure(picture, PAGE, 3.6, csv) as figure:
        panels = figure.subplots(2, len(names), sharex="col", squeeze=False)
        for column, name in zip(panels.T, names, strict=True):
            for axes, metric in zip(column, ("ndcg5", "micro_f1"), strict=True):
                _draw_panel(
                    axes, {n: found for (data, n), found in grouped(rows).items() if data == name}, metric
                )
            column[0].set_title(name)
            column[1].set_xlabel("training samples")
        panels[0][0].set_ylabel("nDCG@5, percent")
        panels[1][0].set_ylabel("micro-F1, percent")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), labelcolor="linecolor")
        seeds = len({row.seed for row in rows})
        note(figure, f"means and standard deviations over {seeds} seeds, on test samples")


def _draw_panel(axes: Axes, found: dict[int, Runs], metric: str) -> None:
    sizes = sorted(found)
    for method, (color, marker) in _DRAWN.items():
        values = np.array([[100 * getattr(row, metric) for row in found[n][method]] for n in sizes])
        deviation = values.std(axis=1, ddof=1) if values.shape[1] > 1 else None
        axes.errorbar(
            sizes, values.mean(axis=1), deviation, color=color, marker=marker, label=method, elinewidth=0.8
        )
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{n / 1000:.2g}k" for n in sizes], fontsize=6.5)
    axes.minorticks_off()
    axes.grid(axis="y")
