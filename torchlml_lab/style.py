"""The one look of all figures: sizes, colours and type, and how a figure becomes a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from torchlml_lab.errors import BadInput
from torchlml_lab.files import check_file, replacing

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
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        picture.parent.mkdir(parents=True, exist_ok=True)
        kind = picture.suffix[1:]
        with replacing(picture) as temporary:
            figure.savefig(temporary, format=kind, metadata={"Date": None} if kind == "svg" else {})


def check_picture(picture: Path, option: str = "--out") -> None:
    """Refuse a path that a picture cannot be written to."""
    if picture.suffix not in (".png", ".svg") and not picture.is_dir():
        raise BadInput(f"`{option}` names `{picture}`, which must end in `.png` or `.svg`.")
    check_file(option, picture)
