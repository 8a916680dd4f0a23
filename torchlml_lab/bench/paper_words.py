"""What the paper's timing study says, as a table and in sentences: every verdict follows from the numbers."""

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from torchlml_lab.bench.records import Record

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

# From here on a time "grows with k"; below, noise and the cache explain it.
_GROWS = 1.5


def table(rows: Sequence[Record]) -> Table:
    """The median times in milliseconds: a line for each competitor, a column for each problem."""
    problems = sorted({(row.threads, row.n, row.k) for row in rows})
    shown = Table(title="median of a call, ms", title_justify="left")
    shown.add_column("")
    for threads, n, k in problems:
        heading = f"n {n}\nk {k}" + (f"\nthreads {threads}" if problems[0][0] != problems[-1][0] else "")
        shown.add_column(heading, justify="right")
    times = {(row.provider, row.mode, (row.threads, row.n, row.k)): row.p50 / 1e3 for row in rows}
    for provider, name in NAMES.items():
        for mode in ("forward", "backward") if provider in BACKWARD else ("forward",):
            cells = (times[provider, mode, problem] for problem in problems)
            shown.add_row(f"{name}, {mode}", *(f"{t:.3g}" if t < 1000 else f"{t:,.0f}" for t in cells))
    return shown


def sentences(rows: Sequence[Record]) -> list[str]:
    """What the paper concluded, and whether the numbers say so too; every verdict is computed from them.

    Args:
        rows: Those of one run. Times are compared by their ratios to one baseline, taken in the same round.

    Returns:
        For each conclusion one line: the paper's, the numbers, the verdict.
    """
    forward: dict[str, dict[Problem, float]] = {name: {} for name in NAMES}
    for row in rows:
        if row.mode == "forward":
            forward[row.provider][row.threads, row.n, row.k] = row.ratio_p50
    ks = sorted({row.k for row in rows})
    said = []
    if len(ks) > 1:
        span = f"From k = {ks[0]} to k = {ks[-1]}"
        svm = {name: _growth(forward[name]) for name in ("smooth-svm-summation", "smooth-svm")}
        lml = {name: _growth(forward[name]) for name in ("lml-algorithm-1", "lml")}
        entropy = {"truncated-entropy": _growth(forward["truncated-entropy"])}
        said = [
            "The paper: the Smooth SVM becomes expensive as k grows. "
            f"{span} its time is multiplied by {_list(svm)}. {_verdict(svm, lambda ratio: ratio >= _GROWS)}",
            "The paper: the time of LML does not depend on k. "
            f"{span} it is multiplied by {_list(lml)}. {_verdict(lml, lambda ratio: ratio < _GROWS)}",
            "The paper: nor does that of the truncated entropy, which sorts there and selects here. "
            f"{span} it is multiplied by {_list(entropy)}. {_verdict(entropy, lambda ratio: ratio < _GROWS)}",
        ]
    unit = forward.pop("truncated-entropy")
    beside = {name: [times[at] / unit[at] for at in times] for name, times in forward.items()}
    said.append(
        "The paper: the truncated entropy significantly outperforms the Smooth SVM and LML. "
        f"Its forward pass taken as 1, the others take {_list(beside)}. {_fastest(beside)}"
    )
    return said


def _growth(times: Mapping[Problem, float]) -> list[float]:
    """The time for the largest k over that for the smallest, for every other setting."""
    settings = sorted({(threads, n) for threads, n, _ in times})
    of_k = [{k: time for (*other, k), time in times.items() if tuple(other) == one} for one in settings]
    return [by_k[max(by_k)] / by_k[min(by_k)] for by_k in of_k]


def _list(ratios: Mapping[str, Sequence[float]]) -> str:
    def span(values: Sequence[float]) -> str:
        ends = (f"{end:.0f}" if end >= 10 else f"{end:.2g}" for end in (min(values), max(values)))
        return " to ".join(dict.fromkeys(ends))

    return ", ".join(f"{span(values)} ({NAMES[name]})" for name, values in ratios.items())


def _verdict(ratios: Mapping[str, Sequence[float]], holds: Callable[[float], bool]) -> str:
    held = [holds(ratio) for values in ratios.values() for ratio in values]
    if all(held):
        return "It holds."
    return f"It holds in {sum(held)} of {len(held)} cases." if any(held) else "It does not hold."


def _fastest(beside: Mapping[str, Sequence[float]]) -> str:
    slower = [NAMES[name] for name, ratios in beside.items() if min(ratios) > 1]
    faster = [NAMES[name] for name, ratios in beside.items() if max(ratios) < 1]
    if len(slower) == len(beside):
        return "It holds."
    verdict = f"It holds against {', '.join(slower)}." if slower else "It does not hold."
    return verdict + "".join(f" {name} is faster than it in every case." for name in faster)
