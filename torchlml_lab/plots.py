"""The common style of all figures, and the figure of a report: recall against k, and calibration."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torchlml_lab.files import check_picture, replacing

# The width of a page in inches. The font size is 8 points at this width.
PAGE = 7.0

# The palette of Okabe and Ito, which is distinguishable with any type of color vision.
ORANGE, SKY, GREEN, BLUE = "#E69F00", "#56B4E9", "#009E73", "#0072B2"
VERMILION, PURPLE = "#D55E00", "#CC79A7"
DARK_ORANGE = "#946200"  # for orange text
INK, GREY, FAINT = "#222222", "#8A8A8A", "#E4E4E4"

# A method has the same color and marker in every figure.
METHODS = {
    "cross-entropy": (ORANGE, "o"),
    "bce": (SKY, "^"),
    "smooth-svm": (PURPLE, "s"),
    "truncated-entropy": (GREEN, "D"),
    "lml": (BLUE, "P"),
}

LOOK: dict[Any, Any] = {
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
    "svg.hashsalt": "torchlml",  # fixed, and without a date, so that equal figures give equal files
}


@contextmanager
def new_figure(picture: Path, width: float, height: float) -> Iterator[Figure]:
    """Yield an empty figure in the common style, and write it if the block succeeds.

        with new_figure(Path("line.png"), PAGE, 2) as figure:
            figure.subplots().plot([0, 1])

    Args:
        picture: The PNG or SVG file to write, depending on its suffix. A missing directory is created.
        width: In inches, usually `PAGE`.
        height: In inches.

    Yields:
        The figure to draw on.
    """
    check_picture(picture)
    with matplotlib.rc_context(LOOK):
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
    """Draw recall against k on the left, and accuracy against predicted probability on the right.

    Args:
        recalls: The recall by k of the run and then of a baseline, by their names in the legend.
        calibration: Mean probability and fraction of correct predictions, for predictions of similar
            probability.
        picture: The PNG or SVG file to write.
        title: The title of the left panel.
        rare: Whether recall is low and most probabilities are far below one percent. The axes then end at
            the data, and those of the calibration plot are logarithmic.
    """
    with new_figure(picture, PAGE, 2.9) as figure:
        left, right = figure.subplots(1, 2)
        for (name, found), (color, marker) in zip(recalls.items(), ((BLUE, "P"), (GREY, "o")), strict=True):
            percent = [100 * share for share in found.values()]
            left.plot(list(found), percent, color=color, marker=marker, label=name)
        left.set_xscale("log")
        left.set_xticks(list(found), [str(k) for k in found])
        left.minorticks_off()
        left.set_ylim(0, None if rare else 100)
        left.set_title(title, parse_math=False)  # the title may name a user's file
        left.set_xlabel("k")
        left.set_ylabel("recall at k (%)")
        left.legend()
        left.grid()
        _draw_calibration(right, [(100 * p, 100 * share) for p, share in calibration], rare)


def _draw_calibration(axes: Axes, percent: Sequence[tuple[float, float]], logarithmic: bool) -> None:
    axes.set_title("Calibration")
    axes.set_xlabel("predicted probability (%)")
    axes.set_ylabel("fraction correct (%)")
    ends = (0.0, 100.0)
    if logarithmic:
        percent = [pair for pair in percent if min(pair) > 0]
        if not percent:
            axes.text(0.5, 0.5, "no correct predictions", ha="center", transform=axes.transAxes)
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
