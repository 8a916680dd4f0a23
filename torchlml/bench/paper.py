"""The timing study of the paper's section 5.1: `torchlml bench --paper`.

The paper timed the forward pass of the Smooth SVM by two algorithms, its backward pass, the truncated entropy
and LML, for a minibatch of 256 and 50 trials. Here every competitor is the loss of one label per row, so that
they answer the same question.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone

import torch
from rich.table import Table
from torch import Tensor

import torchlml
from torchlml.bench import records
from torchlml.bench.cases import Case
from torchlml.bench.records import Record
from torchlml.bench.timing import race
from torchlml.info import kernel

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

# The slow competitors leave cold caches and returned memory behind; a sample is long enough to forget them.
SAMPLE_SECONDS = 10e-3
# From here on a time "grows with k"; below, noise and the cache explain it.
_GROWS = 1.5


def device() -> torch.device:
    """Where the study runs: on the GPU if there is one, as in the paper."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(cases: Sequence[Case], trials: int, after_trial: Callable[[], object]) -> Iterator[Record]:
    """Times every competitor on problems that differ in k alone, in turn, `trials` times.

    Args:
        cases: The problems; all of them take part in each round, so that times for different k compare.
        trials: How often each competitor is timed on each problem.
        after_trial: Called after each round, for a progress bar.

    Yields:
        A record for each problem, competitor and mode; ratios are to the forward pass of the truncated
        entropy on the first problem.
    """
    where = device()
    calls = {
        f"{i} {name}": call for i, case in enumerate(cases) for name, call in _calls(case, where).items()
    }
    baseline = "0 truncated-entropy forward"
    for key, timing in race(calls, baseline, trials, float("inf"), after_trial, SAMPLE_SECONDS).items():
        number, provider, mode = key.split(" ")
        yield Record(
            operator=OPERATOR,
            provider=provider,
            mode=mode,
            metric="time",
            unit="us",
            **vars(cases[int(number)]),
            **{quantile: 1e6 * value for quantile, value in vars(timing.seconds).items()},
            **{f"ratio_{quantile}": value for quantile, value in vars(timing.ratio).items()},
            config=json.dumps({"rounds": timing.rounds, "kernel": kernel(), "device": where.type}),
            machine=torch.cuda.get_device_name(where) if where.type == "cuda" else records.machine(),
            torch=str(torch.__version__),
            torchlml=torchlml.__version__,
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )


def losses(target: Tensor, k: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """The competitors, each the mean loss of logits (batch, n) for one label per row."""

    def by_algorithm_1(x: Tensor) -> Tensor:
        log_y = torchlml.log_lml(x, k, solver="bracketing")
        return -log_y.gather(1, target.unsqueeze(1)).mean()

    return {
        "smooth-svm-summation": lambda x: torchlml.smooth_topk_svm_loss(x, target, k, algorithm="summation"),
        "smooth-svm": lambda x: torchlml.smooth_topk_svm_loss(x, target, k),
        "truncated-entropy": lambda x: torchlml.truncated_entropy_loss(x, target, k),
        "lml-algorithm-1": by_algorithm_1,
        "lml": lambda x: torchlml.lml_loss(x, target, k),
    }


def _calls(case: Case, where: torch.device) -> dict[str, Callable[[], object]]:
    x = case.logits().to(where)
    labels = torch.randint(case.n, (case.batch,), generator=torch.Generator().manual_seed(case.n))
    calls: dict[str, Callable[[], object]] = {}
    for name, loss in losses(labels.to(where), case.k).items():
        calls[f"{name} forward"] = _forward(loss, x)
        if name in BACKWARD:
            calls[f"{name} backward"] = _backward(loss, x.clone().requires_grad_())
    if where.type == "cuda":  # a call returns before its work is done
        return {name: _finished(call) for name, call in calls.items()}
    return calls


def _forward(loss: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    return lambda: loss(x)


def _backward(loss: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    value = loss(x)
    return lambda: torch.autograd.grad(value, x, retain_graph=True)


def _finished(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        call()
        torch.cuda.synchronize()

    return run


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
            cells = [f"{times[provider, mode, problem]:.3g}" for problem in problems]
            shown.add_row(f"{name}, {mode}", *cells)
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
