"""`torchlml figures timing`: the timing study of the paper's section 5.1, from the CSV of `bench paper`."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from torchlml_lab.bench.measurements import Measurement, latest, read
from torchlml_lab.bench.paper_tables import OPERATOR
from torchlml_lab.errors import BadInput
from torchlml_lab.figures import find_csv as sources
from torchlml_lab.figures.options import CsvFigureSettings, read_options, say_where
from torchlml_lab.style import INK, METHODS, PAGE, VERMILION, new_figure

USUAL = (Path("torchlml-paper-timing.csv"), Path("results/paper-timing.csv"))

_SVM, _SVM_MARKER = METHODS["smooth-svm"]
_ENTROPY, _ENTROPY_MARKER = METHODS["truncated-entropy"]
_LML, _LML_MARKER = METHODS["lml"]
# Forward solid, backward dashed; the two ways to compute one loss differ in colour or marker.
LOOK = {
    ("smooth-svm-summation", "forward"): ("Smooth SVM, summation", VERMILION, "^", "-"),
    ("smooth-svm", "forward"): ("Smooth SVM, divide and conquer", _SVM, _SVM_MARKER, "-"),
    ("smooth-svm", "backward"): ("Smooth SVM, backward", _SVM, _SVM_MARKER, "--"),
    ("truncated-entropy", "forward"): ("truncated entropy", _ENTROPY, _ENTROPY_MARKER, "-"),
    ("truncated-entropy", "backward"): ("truncated entropy, backward", _ENTROPY, _ENTROPY_MARKER, "--"),
    ("lml-algorithm-1", "forward"): ("LML, Algorithm 1", INK, "o", "-"),
    ("lml", "forward"): ("LML, our kernel", _LML, _LML_MARKER, "-"),
    ("lml", "backward"): ("LML, backward", _LML, _LML_MARKER, "--"),
}


def main(arguments: Sequence[str]) -> None:
    """Read the options and draw."""
    about = "Draw the times of `torchlml bench paper` against k, one panel for each length of a row."
    settings = read_options(CsvFigureSettings, "timing", arguments, about)
    path = sources.find(settings.csv, USUAL, "torchlml bench paper")
    rows = of_study(read(path, "--csv"))
    if not rows:
        raise BadInput(f"`--csv` names `{path}`, which has no row of `torchlml bench paper`.")
    draw(rows, settings.out)
    say_where(settings.out)


def of_study(rows: Sequence[Measurement]) -> list[Measurement]:
    """Pick the rows of the study from those of all benchmarks."""
    return [row for row in rows if row.operator == OPERATOR]


def draw(rows: Sequence[Measurement], picture: Path) -> None:
    """Draw one panel for each length of a row; a point is the median, its band the 20th to 80th percentile.

    Args:
        rows: What `torchlml bench paper` measured; where a case was measured twice, the last counts.
        picture: The PNG or SVG to write.
    """
    shown = [row for row in latest(rows).values() if row.threads == rows[-1].threads]
    sizes = sorted({row.n for row in shown})
    with new_figure(picture, PAGE, 3.4) as figure:
        panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
        for axes, n in zip(panels, sizes, strict=True):
            _draw_panel(axes, [row for row in shown if row.n == n])
            axes.set_title(f"n = {n:,}")
        panels[0].set_ylabel("time of a call (ms)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=7)
        last = rows[-1]
        threads = f"{last.threads} thread" + ("s" if last.threads > 1 else "")
        where = f"{last.machine}, {threads}, batch {last.batch}, {last.dtype}, torch {last.torch}"
        figure.supxlabel(where, fontsize=6.5, color="#555555")


def _draw_panel(axes: Axes, rows: Sequence[Measurement]) -> None:
    for (provider, mode), (label, colour, marker, line) in LOOK.items():
        series = sorted((r for r in rows if (r.provider, r.mode) == (provider, mode)), key=lambda r: r.k)
        if series:
            ks = [row.k for row in series]
            low, high = [row.p20 / 1e3 for row in series], [row.p80 / 1e3 for row in series]
            axes.fill_between(ks, low, high, color=colour, alpha=0.2, linewidth=0)
            middle = [row.p50 / 1e3 for row in series]
            axes.plot(ks, middle, line, marker=marker, color=colour, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xticks(sorted({row.k for row in rows}))
    axes.set_xlabel("k")
    axes.grid()
