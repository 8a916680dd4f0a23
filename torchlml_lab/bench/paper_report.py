"""The paper's claims about speed, compared with the measured times, and the figure of these times."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from rich.table import Table

from torchlml_lab.bench.measurements import Measurement, latest, read
from torchlml_lab.bench.report import conditions
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import plain_table
from torchlml_lab.figures import files as sources
from torchlml_lab.figures.files import say_where
from torchlml_lab.figures.settings import TimingFigureSettings
from torchlml_lab.files import check_picture
from torchlml_lab.plots import INK, METHODS, PAGE, VERMILION, label_lines, new_figure, note

OPERATOR = "paper"
NAMES = {
    "smooth-svm-summation": "Smooth SVM by summation",
    "smooth-svm": "Smooth SVM by divide and conquer",
    "truncated-entropy": "truncated entropy",
    "lml-algorithm-1": "LML by Algorithm 1",
    "lml": "LML by our kernel",
}
# The backward pass of LML starts from nu, so it does not depend on the forward algorithm. That of the Smooth
# SVM is timed for the algorithm that is fast enough for training.
BACKWARD = ("smooth-svm", "truncated-entropy", "lml")

Problem = tuple[int, int, int]  # threads, n, k

# A time counts as growing with k from this ratio on. Smaller ratios are explained by noise and caches.
_GROWS = 1.5


def times(rows: Sequence[Measurement]) -> Table:
    """Tabulate the median times in milliseconds: a row for each method, a column for each problem."""
    problems = sorted({(row.threads, row.n, row.k) for row in rows})
    heads = [
        f"n {n}\nk {k}" + (f"\nthreads {threads}" if problems[0][0] != problems[-1][0] else "")
        for threads, n, k in problems
    ]
    table = plain_table("median time per call, ms", ("", *heads))
    taken = {(row.provider, row.mode, (row.threads, row.n, row.k)): row.p50 / 1e3 for row in rows}
    for provider, name in NAMES.items():
        for mode in ("forward", "backward") if provider in BACKWARD else ("forward",):
            cells = (taken[provider, mode, problem] for problem in problems)
            table.add_row(f"{name}, {mode}", *(f"{t:.3g}" if t < 1000 else f"{t:,.0f}" for t in cells))
    return table


class Claim(NamedTuple):
    """A claim of the paper about a method, the ratios that decide it, and the condition on them."""

    says: str
    ratios: list[float]
    holds: Callable[[float], bool]


def claims(rows: Sequence[Measurement]) -> Table:
    """Tabulate the paper's claims about the forward passes, the measured ratios, and whether they agree.

    Args:
        rows: The rows of one study. Times are compared by their ratios to a baseline in the same round.

    Returns:
        A row for each claim and method: the range of the ratio over lengths and threads, and a verdict.
    """
    table = plain_table("the paper's claims about the forward passes", ("claim", "ratio of times", "holds"))
    for claim in claims_of(rows):
        table.add_row(claim.says, span(claim.ratios), verdict(claim))
    return table


def claims_of(rows: Sequence[Measurement]) -> Iterator[Claim]:
    """Yield the claims with their ratios: largest to smallest k, and relative to the truncated entropy."""
    forward: dict[str, dict[Problem, float]] = {name: {} for name in NAMES}
    for row in rows:
        if row.mode == "forward":
            forward[row.provider][row.threads, row.n, row.k] = row.ratio_p50
    ks = sorted({row.k for row in rows})
    if len(ks) > 1:
        for provider, name in NAMES.items():
            if provider.startswith("smooth-svm"):
                says, holds = f"{name} grows from k = {ks[0]} to {ks[-1]}", _grows
            else:
                says, holds = f"{name} does not grow from k = {ks[0]} to {ks[-1]}", _stays
            yield Claim(says, _growth(forward[provider]), holds)
    unit = forward.pop("truncated-entropy")
    for provider, taken in forward.items():
        says = f"{NAMES[provider]} is slower than truncated entropy"
        yield Claim(says, [time / unit[problem] for problem, time in taken.items()], _slower)


def _grows(ratio: float) -> bool:
    return ratio >= _GROWS


def _stays(ratio: float) -> bool:
    return ratio < _GROWS


def _slower(ratio: float) -> bool:
    return ratio > 1


def _growth(taken: Mapping[Problem, float]) -> list[float]:
    """Return the ratio of the time at the largest k to that at the smallest, for all other settings."""
    settings = sorted({(threads, n) for threads, n, _ in taken})
    of_k = [{k: time for (*other, k), time in taken.items() if tuple(other) == one} for one in settings]
    return [by_k[max(by_k)] / by_k[min(by_k)] for by_k in of_k]


def span(ratios: Sequence[float]) -> str:
    """Format the smallest and the largest ratio with two digits, or one value if they are equal."""
    ends = (f"{end:.0f}" if end >= 10 else f"{end:.2g}" for end in (min(ratios), max(ratios)))
    return " to ".join(dict.fromkeys(ends))


def verdict(claim: Claim) -> str:
    """Return whether a claim holds in all cases, in some, or in none."""
    held = sum(claim.holds(ratio) for ratio in claim.ratios)
    if held in (0, len(claim.ratios)):
        return "yes" if held else "no"
    return f"in {held} of {len(claim.ratios)}"


USUAL = (Path("torchlml-paper-timing.csv"), Path("results/paper-timing.csv"))

_SVM, _SVM_MARKER = METHODS["smooth-svm"]
_ENTROPY, _ENTROPY_MARKER = METHODS["truncated-entropy"]
_LML, _LML_MARKER = METHODS["lml"]
# Forward passes are solid, backward passes dashed. Two algorithms for a loss differ in color or marker.
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


def main(settings: TimingFigureSettings) -> None:
    """Draw the figure, and print its path."""
    check_picture(settings.out)
    path = sources.find(settings.csv, USUAL, "torchlml bench paper")
    rows = of_study(read(path, "--csv"))
    if not rows:
        raise BadInput(f"`--csv` names `{path}`, which has no rows of `torchlml bench paper`.")
    draw(rows, settings.out, [path])
    say_where(settings.out)


def of_study(rows: Sequence[Measurement]) -> list[Measurement]:
    """Select the rows of the study from those of all benchmarks."""
    return [row for row in rows if row.operator == OPERATOR]


def draw(rows: Sequence[Measurement], picture: Path, csv: Sequence[Path] = ()) -> None:
    """Draw one panel per row length, with medians as points and 20th to 80th percentiles as bands.

    Args:
        rows: The results of `torchlml bench paper`. The last row of each measurement is used.
        picture: The PNG or SVG file to write.
        csv: The CSV file with the rows. Its name is stored in the picture's metadata.
    """
    shown = [row for row in latest(rows).values() if row.threads == rows[-1].threads]
    sizes = sorted({row.n for row in shown})
    with new_figure(picture, PAGE, 3.4, csv) as figure:
        panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
        ends = [
            _draw_panel(axes, [row for row in shown if row.n == n])
            for axes, n in zip(panels, sizes, strict=True)
        ]
        for axes, n in zip(panels, sizes, strict=True):
            axes.set_title(f"n = {n:,}")
        # The lines have the same order in all panels, so the names at the last one suffice.
        label_lines(panels[-1], ends[-1], 0.05)
        panels[0].set_ylabel("time per call (ms)")
        note(figure, f"batch {rows[-1].batch}, {conditions(shown)}, forward unless stated otherwise")


def _draw_panel(axes: Axes, rows: Sequence[Measurement]) -> list[tuple[float, str, str]]:
    """Draw the lines of a length. Returns the last height, the name and the color of each."""
    ends = []
    for (provider, mode), (label, color, marker, line) in LOOK.items():
        series = sorted((r for r in rows if (r.provider, r.mode) == (provider, mode)), key=lambda r: r.k)
        if series:
            ks = [row.k for row in series]
            low, high = [row.p20 / 1e3 for row in series], [row.p80 / 1e3 for row in series]
            axes.fill_between(ks, low, high, color=color, alpha=0.2, linewidth=0)
            middle = [row.p50 / 1e3 for row in series]
            axes.plot(ks, middle, line, marker=marker, color=color)
            ends.append((middle[-1], label, color))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xticks(sorted({row.k for row in rows}))
    axes.set_xlabel("k")
    axes.grid()
    return ends
