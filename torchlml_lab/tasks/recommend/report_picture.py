"""The picture of a run: recall against k, and whether probabilities are what happens."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from torchlml_lab.style import BLUE, GREY, PAGE, new_figure


def draw(
    curves: Mapping[str, Mapping[str, float]], bins: Sequence[tuple[float, float]], picture: Path
) -> None:
    """Draw recall against k on the left, and on the right the share of labels against the probability.

    Args:
        curves: The measures of the run first, then those of a baseline, by their names in the legend.
        bins: Mean probability and share of labels of items with similar probabilities.
        picture: The PNG or SVG to write.
    """
    with new_figure(picture, PAGE, 2.6) as figure:
        left, right = figure.subplots(1, 2)
        for (name, found), (colour, marker) in zip(curves.items(), ((BLUE, "o"), (GREY, "s")), strict=True):
            ks = [int(key.removeprefix("recall@")) for key in found if key.startswith("recall@")]
            left.plot(ks, [found[f"recall@{k}"] for k in ks], color=colour, marker=marker, label=name)
        left.set_xscale("log")
        left.set_xticks(ks, [str(k) for k in ks])
        left.minorticks_off()
        left.set_ylim(bottom=0)
        left.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}")
        left.set_xlabel("recommended items k")
        left.set_ylabel("recall@k (%)")
        left.set_title("Found of what users took later")
        left.grid()
        left.legend(loc="upper left")
        _draw_calibration(right, bins)


def _draw_calibration(axes: Axes, bins: Sequence[tuple[float, float]]) -> None:
    shown = [(probability, share) for probability, share in bins if probability > 0 and share > 0]
    axes.set_title("Calibration")
    axes.set_xlabel("probability (%)")
    axes.set_ylabel("items that were taken (%)")
    if not shown:
        axes.text(0.5, 0.5, "no item with a probability was taken", ha="center", transform=axes.transAxes)
        return
    ends = min(min(pair) for pair in shown), max(max(pair) for pair in shown)
    axes.plot(ends, ends, color=GREY, linewidth=0.8)
    axes.plot([p for p, _ in shown], [share for _, share in shown], color=BLUE, marker="o")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda share, _: f"{100 * share:g}")
        axis.set_minor_formatter(lambda share, _: "")
    axes.grid()
