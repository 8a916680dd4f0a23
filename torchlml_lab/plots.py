"""Shared code for figures: style, input and output files, and the figure in a run's report."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import StudyTable, new_console
from torchlml_lab.files import check_picture, replacing

# The page width in inches. The font size is 8 points at this width.
PAGE = 7.0

# Colors based on the Okabe-Ito palette, which is distinguishable with any type of color vision. They were
# adjusted to a contrast ratio of about 3 or more against both white and the site's dark background, because
# the figures are transparent.
ORANGE, SKY, GREEN, BLUE = "#C98500", "#3E9FD6", "#009E73", "#2B7BBD"
VERMILION, PURPLE = "#D55E00", "#C2709D"
DARK_ORANGE = "#946200"  # for orange text
INK, GREY, FAINT = "#7A7E85", "#8A8E95", "#80808038"

# The color and marker of each loss. Figures with several variants of a loss, or with several models, use
# other colors or markers for some of them.
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
    "savefig.transparent": True,
    "svg.hashsalt": "torchlml",  # fixed, so that identical figures give identical files
}


@contextmanager
def new_figure(picture: Path, width: float, height: float, sources: Sequence[Path] = ()) -> Iterator[Figure]:
    """Yield an empty figure in the common style, and write it if the block succeeds.

        with new_figure(Path("line.png"), PAGE, 2) as figure:
            figure.subplots().plot([0, 1])

    Args:
        picture: The PNG or SVG file to write, depending on its suffix. A missing directory is created.
        width: The width in inches, usually `PAGE`.
        height: The height in inches.
        sources: The CSV files with the data. Their names and digests are stored in the picture's metadata
            (`Source`), so that a picture older than its data can be detected.

    Yields:
        The figure to draw on.
    """
    check_picture(picture)
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        picture.parent.mkdir(parents=True, exist_ok=True)
        kind = picture.suffix[1:]
        metadata: dict[str, str | None] = {"Date": None} if kind == "svg" else {}
        if sources:
            metadata["Source"] = digests(sources)
        with replacing(picture) as temporary:
            figure.savefig(temporary, format=kind, metadata=metadata)


def digests(sources: Iterable[Path]) -> str:
    """Return the names of files with the SHA-256 of their contents, as stored in a picture's metadata."""
    return ", ".join(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in sources)


def label_lines(
    axes: Axes, labels: Iterable[tuple[float, str, str]], apart: float = 0.07, size: float = 7
) -> None:
    """Write the names of lines to the right of the axes, at the heights of their last points.

    Call this after the axis limits are final. Names that would overlap are moved apart.

    Args:
        axes: The axes.
        labels: The height in data coordinates, the text and the color of each label.
        apart: The minimum distance between two labels, as a fraction of the height of the axes.
        size: The font size in points.
    """
    to_axes = axes.transScale + axes.transLimits
    left = axes.get_xlim()[0]
    known = sorted(
        # A line that ends outside the axes is labeled at the edge of the axes.
        (min(max(float(to_axes.transform((left, y))[1]), 0.0), 1.0), text, color)
        for y, text, color in labels
    )
    for height, (_, text, color) in zip(spread_out([y for y, *_ in known], apart), known, strict=True):
        axes.text(1.02, height, text, color=color, transform=axes.transAxes, va="center", fontsize=size)


def spread_out(places: Sequence[float], apart: float) -> list[float]:
    """Move sorted positions until neighbors are at least `apart` apart, minimizing the sum of squared moves.

    >>> [round(place, 2) for place in spread_out([0.0, 0.5, 0.5, 0.54], 0.1)]
    [0.0, 0.41, 0.51, 0.61]
    """
    # After subtracting i * apart, the positions must not decrease. Neighbors that violate this are pooled, as
    # in isotonic regression.
    pools: list[tuple[float, int]] = []
    for i, place in enumerate(places):
        pools.append((place - i * apart, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((m * a + n * b) / (m + n), m + n)]
    flat = [value for value, count in pools for _ in range(count)]
    return [value + i * apart for i, value in enumerate(flat)]


def note(figure: Figure, text: str) -> None:
    """Write small text under a figure, such as the name of the machine or the number of seeds."""
    figure.supxlabel(text, fontsize=6.5, color=GREY)


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
        recalls: The recall at each k for the run and for a baseline, in this order. The keys are the names in
            the legend.
        calibration: The mean probability and the fraction of correct predictions, for each group of
            predictions with similar probabilities.
        picture: The PNG or SVG file to write.
        title: The title of the left panel.
        rare: Whether recall is low and most probabilities are far below one percent. If so, the axes are
            fitted to the data, and the calibration plot has logarithmic axes.
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
        left.set_title(title, parse_math=False)  # the title may contain the name of a user's file
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


def draw_only(draw: Callable[[Path], None], picture: Path) -> None:
    """Draw a figure that has no tables, and print its path."""
    check_picture(picture)
    draw(picture)
    say_where(picture)


def say_where(picture: Path) -> None:
    """Print the path of the picture, as the last line of the command's output."""
    new_console().print(f"Figure written to {picture}.", soft_wrap=True)


def write_tables(text: str, picture: Path) -> None:
    """Write a figure's tables as Markdown next to its picture, and print both paths."""
    page = picture.with_suffix(".md")
    with replacing(page) as temporary:
        temporary.write_text(text, encoding="utf-8")
    new_console().print(f"Tables written to {page}.", soft_wrap=True)
    say_where(picture)


Row = TypeVar("Row")


class NotMadeYet(BadInput):
    """Raised if a figure's CSV does not exist. The message names the command that creates it."""


def find_csv(named: Path | None, usual: Sequence[Path], command: str) -> Path:
    """Find the CSV file for a figure.

    Args:
        named: The value of `--csv`, if given.
        usual: The default locations, in order.
        command: The command that creates the file.

    Returns:
        The first path that exists. If none does, `NotMadeYet` is raised.
    """
    places = usual if named is None else [named]
    for path in places:
        if path.exists():
            return path
    raise NotMadeYet(f"`{places[0]}` does not exist. Create it with `{command}`.")


def read_sweep(
    named: Path | None, usual: Sequence[Path], task: str, table: StudyTable[Row]
) -> tuple[Path, list[Row]]:
    """Find the CSV written by `torchlml sweep TASK`, as `find_csv` does, and return its path and rows."""
    path = find_csv(named, usual, f"torchlml sweep {task}")
    return path, table.read(path, "--csv")


def read_sweeps(
    named: Sequence[Path], own: Path, study: Sequence[Path], task: str, table: StudyTable[Row]
) -> list[tuple[Path, list[Row]]]:
    """Read sweep CSVs for a task: `named` if given, else `own` if it exists, else those in `study`."""
    found = named or ((own,) if own.exists() else [path for path in study if path.exists()])
    return [read_sweep(path, (), task, table) for path in found or (own,)]


def check_not_tuning(path: Path, recipes: Iterable[tuple[str, object]]) -> None:
    """Raise `BadInput` if a method was run with several sets of hyperparameters.

    The results of different hyperparameters must not be averaged.

    Args:
        path: The CSV, for error messages.
        recipes: The method and the hyperparameters of each run.
    """
    only: dict[str, object] = {}
    for method, recipe in recipes:
        if only.setdefault(method, recipe) != recipe:
            raise BadInput(
                f"`{path}` (`--csv`) must contain one set of hyperparameters per method, but it is a "
                f"tuning sweep, in which `{method}` was run with several settings."
            )
