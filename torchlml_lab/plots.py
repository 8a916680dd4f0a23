"""Plots: the common look of all figures, and the plot of a report: recall against k, and calibration."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torchlml_lab.files import check_picture, replacing

# Inches: the width of a page. Type is 8 points at this size.
PAGE = 7.0

# Okabe and Ito's palette, which people with any colour vision can tell apart.
ORANGE, SKY, GREEN, BLUE = "#E69F00", "#56B4E9", "#009E73", "#0072B2"
VERMILION, PURPLE = "#D55E00", "#CC79A7"
DARK_ORANGE = "#946200"  # for words in orange
INK, GREY, FAINT = "#222222", "#8A8A8A", "#E4E4E4"

# A method keeps its colour and its marker in every figure.
METHODS = {
    "cross-entropy": (ORANGE, "o"),
    "bce": (SKY, "^"),
    "smooth-svm": (PURPLE, "s"),
    "truncated-entropy": (GREEN, "D"),
    "lml": (BLUE, "P"),
}

_LOOK: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "savefig.dpi": 200,
    "svg.hashsalt": "torchlml",  # with no date in it, the same figure is the same file
}


@contextmanager
def new_figure(picture: Path, width: float, height: float) -> Iterator[Figure]:
    """Give an empty figure in the common look, and write it when the block ends well.

        with new_figure(Path("line.png"), PAGE, 2) as figure:
            figure.subplots().plot([0, 1])

    Args:
        picture: The PNG or SVG to write, by its suffix. Its folder is made when it is missing.
        width: In inches, usually `PAGE`.
        height: In inches.

    Yields:
        The figure to draw on.
    """
    check_picture(picture)
    with matplotlib.rc_context(_LOOK):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        picture.parent.mkdir(parents=True, exist_ok=True)
        kind = picture.suffix[1:]
        with replacing(picture) as temporary:
            figure.savefig(temporary, format=kind, metadata={"Date": None} if kind == "svg" else {})


def draw_recall_and_calibration(
    recalls: Mapping[str, Mapping[int, float]],
    calibration: Sequence[tuple[float, float]],
    picture: Path,
    *,
    title: str,
    rare: bool = False,
) -> None:
    """Draw recall against k on the left, and on the right the share that is right against the probability.

    Args:
        recalls: By their names in the legend: the recalls of the run by k, then those of a baseline.
        calibration: Mean probability and share that is right, of answers with similar probabilities.
        picture: The PNG or SVG to write.
        title: That of the left panel.
        rare: Most of what is to be found is not found and most probabilities are far below a percent, so the
            scales end where the points do, and those of the calibration are logarithmic.
    """
    with new_figure(picture, PAGE, 2.9) as figure:
        left, right = figure.subplots(1, 2)
        for (name, found), (colour, marker) in zip(recalls.items(), ((BLUE, "P"), (GREY, "o")), strict=True):
            percent = [100 * share for share in found.values()]
            left.plot(list(found), percent, color=colour, marker=marker, label=name)
        left.set_xscale("log")
        left.set_xticks(list(found), [str(k) for k in found])
        left.minorticks_off()
        left.set_ylim(0, None if rare else 100)
        left.set_title(title, parse_math=False)  # the title may name a user's file
        left.set_xlabel("k")
        left.set_ylabel("found among the k best (%)")
        left.legend()
        left.grid()
        _draw_calibration(right, [(100 * p, 100 * share) for p, share in calibration], rare)


def _draw_calibration(axes: Axes, percent: Sequence[tuple[float, float]], logarithmic: bool) -> None:
    axes.set_title("Calibration")
    axes.set_xlabel("predicted probability (%)")
    axes.set_ylabel("of these are right (%)")
    ends = (0.0, 100.0)
    if logarithmic:
        percent = [pair for pair in percent if min(pair) > 0]
        if not percent:
            axes.text(0.5, 0.5, "nothing with a probability is right", ha="center", transform=axes.transAxes)
            return
        ends = min(min(pair) for pair in percent), max(max(pair) for pair in percent)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter(lambda value, _: "")
    axes.plot(ends, ends, color=GREY, linestyle=":", label="calibrated")
    axes.plot(
        [p for p, _ in percent], [share for _, share in percent], color=BLUE, marker="P", label="this run"
    )
    axes.legend()
    axes.grid()
