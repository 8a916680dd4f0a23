"""What the paper's timing study says: the times, and whether each claim of the paper holds in the numbers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.table import Table

from torchlml_lab.bench.measurements import Measurement
from torchlml_lab.engine.table import plain_table

OPERATOR = "paper"
NAMES = {
    "smooth-svm-summation": "Smooth SVM by summation",
    "smooth-svm": "Smooth SVM by divide and conquer",
    "truncated-entropy": "truncated entropy",
    "lml-algorithm-1": "LML by Algorithm 1",
    "lml": "LML by our kernel",
}
# The backward pass of LML starts from nu and does not ask who found it; that of the Smooth SVM is timed for
# the algorithm that is fast enough to train with.
BACKWARD = ("smooth-svm", "truncated-entropy", "lml")

Problem = tuple[int, int, int]  # threads, n, k

# From here on a time grows with k; below, noise and the cache explain it.
_GROWS = 1.5


def times(rows: Sequence[Measurement]) -> Table:
    """Show the median times in milliseconds: a line for each competitor, a column for each problem."""
    problems = sorted({(row.threads, row.n, row.k) for row in rows})
    heads = [
        f"n {n}\nk {k}" + (f"\nthreads {threads}" if problems[0][0] != problems[-1][0] else "")
        for threads, n, k in problems
    ]
    table = plain_table("median of a call, ms", ("", *heads))
    taken = {(row.provider, row.mode, (row.threads, row.n, row.k)): row.p50 / 1e3 for row in rows}
    for provider, name in NAMES.items():
        for mode in ("forward", "backward") if provider in BACKWARD else ("forward",):
            cells = (taken[provider, mode, problem] for problem in problems)
            table.add_row(f"{name}, {mode}", *(f"{t:.3g}" if t < 1000 else f"{t:,.0f}" for t in cells))
    return table


class Claim(NamedTuple):
    """A claim of the paper about a competitor, the ratios that decide on it, and what they must be."""

    says: str
    ratios: list[float]
    holds: Callable[[float], bool]


def claims(rows: Sequence[Measurement]) -> Table:
    """Show what the paper claims of the forward passes, the numbers, and whether they agree.

    Args:
        rows: Those of one study. Times are compared by their ratios to one baseline, taken in the same round.

    Returns:
        A line for each claim and competitor: the range of the ratio over lengths and threads, and a verdict.
    """
    table = plain_table("the paper's claims about the forward passes", ("claim", "ratio of times", "holds"))
    for claim in claims_of(rows):
        table.add_row(claim.says, span(claim.ratios), verdict(claim))
    return table


def claims_of(rows: Sequence[Measurement]) -> Iterator[Claim]:
    """List the claims with their ratios: of the largest k to the smallest, and to the truncated entropy."""
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
                says, holds = f"{name} stays, from k = {ks[0]} to {ks[-1]}", _stays
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
    """The time for the largest k over that for the smallest, for every other setting."""
    settings = sorted({(threads, n) for threads, n, _ in taken})
    of_k = [{k: time for (*other, k), time in taken.items() if tuple(other) == one} for one in settings]
    return [by_k[max(by_k)] / by_k[min(by_k)] for by_k in of_k]


def span(ratios: Sequence[float]) -> str:
    """Write the smallest and the largest ratio with two digits, once where they are the same."""
    ends = (f"{end:.0f}" if end >= 10 else f"{end:.2g}" for end in (min(ratios), max(ratios)))
    return " to ".join(dict.fromkeys(ends))


def verdict(claim: Claim) -> str:
    """Say whether a claim holds: in all cases, in some, or in none."""
    held = sum(claim.holds(ratio) for ratio in claim.ratios)
    if held in (0, len(claim.ratios)):
        return "yes" if held else "no"
    return f"in {held} of {len(claim.ratios)}"
