"""The picture of a run: the share of what users took later that is found among k recommendations."""

from collections.abc import Mapping
from pathlib import Path

from torchlml_lab.style import BLUE, COLUMN, GREY, new_figure


def draw(curves: Mapping[str, Mapping[str, float]], picture: Path) -> None:
    """Draw recall against k.

    Args:
        curves: The measures of the run first, then those of baselines, by their names in the legend.
        picture: The PNG or SVG to write.
    """
    with new_figure(picture, COLUMN, 2.6) as figure:
        axes = figure.subplots()
        for (name, found), (colour, marker) in zip(curves.items(), ((BLUE, "o"), (GREY, "s")), strict=False):
            points = {
                int(key.removeprefix("recall@")): value
                for key, value in found.items()
                if key.startswith("recall@")
            }
            axes.plot(list(points), list(points.values()), color=colour, marker=marker, label=name)
            ks = list(points)
        axes.set_xscale("log")
        axes.set_xticks(ks, [str(k) for k in ks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}")
        axes.set_xlabel("recommended items k")
        axes.set_ylabel("recall@k (%)")
        axes.set_title("Found of what users took later")
        axes.grid()
        axes.legend(loc="upper left")
