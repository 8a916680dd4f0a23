"""The demo's plots: recall and exact sets as bars, and what p means as reliability curves."""

from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torchlml_lab.files import replacing
from torchlml_lab.studies.digits.images import CONDITIONS
from torchlml_lab.studies.digits.measures import Results, spread, values
from torchlml_lab.style import DARK_ORANGE, GREY, METHODS

# A method looks as in every other figure; those that only the demo has are shades of their relatives.
LOOK = {
    "cross-entropy": METHODS["cross-entropy"],
    "cross-entropy x k": (DARK_ORANGE, "s"),
    "sigmoid likelihood": (GREY, "v"),
    "sigmoid BCE": METHODS["bce"],
    "truncated entropy": METHODS["truncated-entropy"],
    "LML": METHODS["lml"],
}


def draw_scores(results: Results, k: int, picture: Path) -> None:
    """Bars with the spread over the seeds: recall of the hidden digits, and how many sets are exactly right.

    Args:
        results: All measurements.
        k: How many digits an image shows.
        picture: The PNG to write.
    """
    panels = (
        ("hidden_recall", f"recall@{k} of the digits nobody named", k / 10),
        ("exact", "images whose set {p > 0.5} is exactly right", None),
    )
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10.5, 6.4), dpi=130, layout="constrained")
        grid = figure.subplots(len(panels), len(CONDITIONS), sharey=True, sharex=True)
        for axes_row, (measure, title, chance) in zip(grid, panels, strict=True):
            for axes, condition in zip(axes_row, CONDITIONS, strict=True):
                _bars(axes, results, condition, measure)
                axes.set_title(f"{title}\nlabel named: {condition}", loc="left", fontsize=10)
                if chance is not None:
                    axes.axvline(chance, color=GREY, linewidth=1, linestyle=(0, (4, 4)))
                    axes.text(chance + 0.01, 5.42, "chance", color=GREY, fontsize=8, va="center")
        _save(figure, picture)


def draw_calibration(results: Results, picture: Path) -> None:
    """Reliability curves: among the digits that got a p near this one, which share was in the image?

    Args:
        results: All measurements; the seeds are put together.
        picture: The PNG to write.
    """
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10.5, 4.9), dpi=130, layout="constrained")
        panels = figure.subplots(1, len(CONDITIONS), sharey=True)
        for axes, condition in zip(panels, CONDITIONS, strict=True):
            axes.plot((0, 1), (0, 1), color=GREY, linewidth=1.2, linestyle=(0, (4, 4)))
            for name, (colour, marker) in LOOK.items():
                said, present = _pooled(results, condition, name)
                axes.plot(said, present, color=colour, marker=marker, markersize=5, linewidth=1.6, label=name)
            axes.set_xlabel("p that the method gave")
            axes.set_xlim(-0.03, 1.03)
            axes.set_ylim(-0.03, 1.03)
            axes.set_title(f"label named: {condition}", loc="left", fontsize=10)
        panels[0].set_ylabel("share of these digits that were in the image")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(LOOK), frameon=False, fontsize=9)
        _save(figure, picture)


def _bars(axes: Axes, results: Results, condition: str, measure: str) -> None:
    for place, (name, (colour, _)) in enumerate(reversed(LOOK.items())):
        middle, deviation = spread(values(results, condition, name, measure))
        axes.barh(
            place, middle, xerr=deviation, color=colour, height=0.7, error_kw={"capsize": 3, "linewidth": 1}
        )
        axes.text(middle + deviation + 0.015, place, f"{middle:.2f}", va="center", fontsize=9)
    axes.set_yticks(range(len(LOOK)), list(reversed(LOOK)))
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.08)


def _pooled(results: Results, condition: str, method: str) -> tuple[list[float], list[float]]:
    """The bins of all seeds together; those with fewer than 50 pairs of image and digit say too little."""
    number, said, present = torch.stack([m.reliability for m in results[condition, method]]).unbind(1)
    total = number.sum(0)
    keep = total >= 50
    means = [torch.nan_to_num(number * part).sum(0) / total for part in (said, present)]
    return means[0][keep].tolist(), means[1][keep].tolist()


def _save(figure: Figure, picture: Path) -> None:
    with replacing(picture) as temporary:
        figure.savefig(temporary, format="png")
