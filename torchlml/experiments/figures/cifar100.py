"""`torchlml figures cifar100`: top-1 and top-k accuracy against label noise, from the CSV of a sweep."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from torchlml.cli import BadInput, parse_settings
from torchlml.experiments.cifar100 import records
from torchlml.experiments.cifar100.records import Record
from torchlml.files import replacing

# Okabe and Ito's palette, which people with any colour vision can tell apart, and a marker each.
LOOK = {
    "cross-entropy": ("#E69F00", "o"),
    "bce": ("#56B4E9", "^"),
    "smooth-svm": ("#CC79A7", "s"),
    "truncated-entropy": ("#009E73", "D"),
    "lml": ("#0072B2", "P"),
}


@dataclass(frozen=True)
class Cifar100FigureSettings:
    """Draw the accuracies of a sweep against the label noise, with the spread over the seeds."""

    csv: Path = Path("runs/cifar100-sweep/results.csv")
    """The CSV that `torchlml sweep cifar100` wrote."""
    out: Path = Path("torchlml-figures/cifar100.png")
    """The PNG to write; its folder is made when it is missing."""


def main(arguments: Sequence[str]) -> None:
    """Reads the options and draws."""
    default = Cifar100FigureSettings()
    settings = parse_settings(Cifar100FigureSettings, "figures cifar100", arguments, default)
    rows = records.read(settings.csv, "--csv")
    for loss in {row.loss for row in rows}:
        if len({row.recipe for row in rows if row.loss == loss}) > 1:
            raise BadInput(
                f"`--csv` names `{settings.csv}`, where `{loss}` has several recipes: it is a tuning."
            )
    if len({(row.source, row.k) for row in rows}) > 1:
        raise BadInput(f"`--csv` names `{settings.csv}`, which mixes networks or values of k.")
    if settings.out.is_dir():
        raise BadInput(f"`--out` names `{settings.out}`, which is a folder: give a file.")
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    draw(rows, settings.out)
    Console().print(f"The figure is {settings.out}.", soft_wrap=True)


def draw(rows: Sequence[Record], picture: Path) -> None:
    """Draws one panel for top-1 and one for top-k; bars are standard deviations over the seeds.

    Args:
        rows: The runs, one recipe for each loss.
        picture: The PNG to write.
    """
    figure = Figure(figsize=(10.5, 4.4), dpi=140, layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, measure, title in zip(
        panels, ("test_top1", "test_topk"), ("top-1", f"top-{rows[0].k}"), strict=True
    ):
        _draw_panel(axes, rows, measure)
        axes.set_title(f"{title} accuracy on the test set", loc="left", fontweight="bold", fontsize=11)
        axes.set_xlabel("label noise p")
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#E8E8E8", linewidth=0.8)
        axes.set_axisbelow(True)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(LOOK), frameon=False)
    with replacing(picture) as temporary:
        figure.savefig(temporary, format="png")


def _draw_panel(axes: Axes, rows: Sequence[Record], measure: str) -> None:
    names = [loss for loss in LOOK if any(row.loss == loss for row in rows)]
    for place, loss in enumerate(names):
        values: dict[float, list[float]] = defaultdict(list)
        for row in rows:
            if row.loss == loss:
                values[row.noise].append(getattr(row, measure))
        noises = sorted(values)
        colour, marker = LOOK[loss]
        axes.errorbar(
            # Set a little apart, so that bars at one noise level do not cover one another.
            [noise + 0.006 * (place - (len(names) - 1) / 2) for noise in noises],
            [mean(values[noise]) for noise in noises],
            [stdev(values[noise]) if len(values[noise]) > 1 else 0.0 for noise in noises],
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=1.6,
            capsize=2.5,
            label=loss,
        )
