"""The plots of a report: recall against k, and how often labels of a predicted probability are right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchlml_lab.style import BLUE, GREY, PAGE, new_figure

if TYPE_CHECKING:
    from torchlml_lab.tasks.multilabel.label_report import Report

FEWEST = 20  # labels of a bin: the share of fewer says little


def draw_report(report: Report, picture: Path) -> None:
    """Draw both panels.

    Args:
        report: What was measured.
        picture: The PNG or SVG to write.
    """
    with new_figure(picture, PAGE, 2.9) as figure:
        left, right = figure.subplots(1, 2)
        for recalls, name, colour, marker in (
            (report.recalls, "this run", BLUE, "P"),
            (report.popular_recalls, "most frequent labels", GREY, "o"),
        ):
            left.plot(
                list(recalls),
                [100 * share for share in recalls.values()],
                color=colour,
                marker=marker,
                label=name,
            )
        left.set_xscale("log")
        left.set_xticks(list(report.recalls), [str(k) for k in report.recalls])
        left.minorticks_off()
        left.set_ylim(0, 100)
        left.set_title(f"Recall on {report.rows} {report.what}")
        left.set_xlabel("k")
        left.set_ylabel("labels among the k best (%)")
        left.legend()
        left.grid()
        shown = [one for one in report.calibration if one[2] >= FEWEST]
        right.plot([0, 100], [0, 100], color=GREY, linestyle=":", label="calibrated")
        right.plot(
            [100 * one[0] for one in shown],
            [100 * one[1] for one in shown],
            color=BLUE,
            marker="P",
            label="this run",
        )
        right.set_title("Calibration")
        right.set_xlabel("predicted probability (%)")
        right.set_ylabel("of these labels are right (%)")
        right.legend()
        right.grid()
