"""The picture of a run on own files: recall against k, and whether probabilities are what happens."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from torchlml_lab.style import BLUE, GREY, PAGE, new_figure


def draw(
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
