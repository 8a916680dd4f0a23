"""`torchlml bench paper`: the timing study in section 5.1 of the paper.

The paper timed the Smooth SVM (the forward pass with two algorithms, and the backward pass), the truncated
entropy and LML, with a minibatch of 256 and 50 trials. Here every method computes a loss with one label per
row, so that all of them solve the same problem.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table
from torch import Tensor

import torchlml
from torchlml_lab.bench.cases import Case
from torchlml_lab.bench.measurements import (
    Measurement,
    RowFile,
    conditions,
    finish,
    latest,
    machine,
    measured,
    read,
)
from torchlml_lab.bench.settings import PaperSettings, check_numbers
from torchlml_lab.bench.timing import Stopped, Timing, race
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import ProgressBar, new_console, plain_table
from torchlml_lab.engine.settings import cores, use_threads
from torchlml_lab.figures.settings import TimingFigureSettings
from torchlml_lab.files import check_picture
from torchlml_lab.plots import (
    INK,
    METHODS,
    PAGE,
    VERMILION,
    find_csv,
    label_lines,
    new_figure,
    note,
    say_where,
)

OPERATOR = "paper"
NAMES = {
    "smooth-svm-summation": "Smooth SVM by summation",
    "smooth-svm": "Smooth SVM by divide and conquer",
    "truncated-entropy": "truncated entropy",
    "lml-algorithm-1": "LML by Algorithm 1",
    "lml": "LML by our kernel",
}
# The methods whose backward pass is timed. For LML, it starts from nu and does not depend on the forward
# algorithm. For the Smooth SVM, only the algorithm that is fast enough for training is timed.
BACKWARD = ("smooth-svm", "truncated-entropy", "lml")

# After a slow method, caches are cold and memory has been released to the system. Long samples make this
# effect negligible.
SAMPLE_SECONDS = 10e-3


class Entry(NamedTuple):
    """One item to time: a problem, a method and a mode."""

    case: Case
    provider: str
    mode: str


def main(settings: PaperSettings) -> None:
    """Run the study."""
    run(settings, new_console())


def run(settings: PaperSettings, console: Console) -> None:
    """Time all row lengths, then print the tables of times and claims, and draw the figure.

    Args:
        settings: The settings. Invalid values raise `BadInput` before anything is measured.
        console: The console for the progress bar and the tables.
    """
    groups = _groups(settings)
    file = RowFile(settings.csv)
    plot = settings.plot or settings.csv.with_suffix(".png")
    check_picture(plot, "--plot")
    kept = [_kept(file.earlier, group, settings.trials) if settings.resume else [] for group in groups]
    todo = [group for group, rows in zip(groups, kept, strict=True) if not rows]
    plan = f"Timing {len(todo)} of {len(groups)} row lengths with {settings.trials} trials each"
    file.announce(plan, console)
    with ProgressBar(console) as progress:
        task = progress.add_task("", total=len(todo) * settings.trials)
        for done, group in enumerate(todo):
            progress.update(task, description=f"{group[0].batch} x {group[0].n}, trials")
            try:
                with use_threads(group[0].threads):
                    file.add(measure(group, settings.trials, lambda: progress.advance(task)))
            except KeyboardInterrupt as stop:
                if isinstance(stop, Stopped):
                    file.add(_rows(stop.timings, device()))
                complete = len(groups) - len(todo) + done
                raise KeyboardInterrupt(
                    f"Interrupted: {complete} of {len(groups)} row lengths are complete. "
                    f"Rows added to {settings.csv}: {len(file.new)}. Continue with `--resume`."
                ) from None
    rows = [row for part in kept for row in part] + file.new
    console.print(times(rows))
    console.print(claims(rows))
    everything = of_study([*file.earlier, *file.new])
    finish(file, plot, lambda: draw(everything, plot, [file.path]), console)


def device() -> torch.device:
    """Return the device for the study: a GPU if available, as in the paper, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(cases: Sequence[Case], trials: int, after_trial: Callable[[], object]) -> Iterator[Measurement]:
    """Time every method `trials` times on problems that differ only in k, alternating between problems.

    Args:
        cases: The problems. Each round includes all of them, so that times for different k are comparable.
        trials: The number of times each method is timed on each problem.
        after_trial: Called after each round, for a progress bar.

    Returns:
        A row for each problem, method and mode. Ratios are relative to the forward pass of the truncated
        entropy on the first problem.
    """
    where = device()
    calls = {entry: call for case in cases for entry, call in _calls(case, where).items()}
    baseline = Entry(cases[0], "truncated-entropy", "forward")
    return _rows(race(calls, baseline, trials, float("inf"), after_trial, SAMPLE_SECONDS), where)


def losses(target: Tensor, k: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the methods. Each computes the mean loss for logits (batch, n) with one label per row."""

    def by_algorithm_1(x: Tensor) -> Tensor:
        log_y = torch.nn.functional.logsigmoid(x + torchlml.lml_bracketing(x, k).unsqueeze(-1))
        return -log_y.gather(1, target.unsqueeze(1)).mean()

    return {
        "smooth-svm-summation": lambda x: smooth_svm_by_summation(x, target, k),
        "smooth-svm": lambda x: torchlml.smooth_topk_svm_loss(x, target, k),
        "truncated-entropy": lambda x: torchlml.truncated_entropy_loss(x, target, k),
        "lml-algorithm-1": by_algorithm_1,
        "lml": lambda x: torchlml.lml_loss(x, target, k),
    }


def smooth_svm_by_summation(x: Tensor, target: Tensor, k: int) -> Tensor:
    """Compute the mean of `smooth_topk_svm_loss` by the paper's summation, one class at a time."""
    label = target.unsqueeze(1)
    own, others = x.gather(1, label) / k, x.scatter(1, label, -torch.inf).double() / k
    nu = torchlml.lml_dual(others.detach(), k - 0.5).unsqueeze(1)
    success, failure = torch.sigmoid(others + nu), torch.sigmoid(-others - nu)
    # The probabilities P[S = 0] to P[S = k], where S is the number of successes among the classes so far.
    chances = torch.eye(1, k + 1, dtype=success.dtype, device=x.device).expand(x.shape[0], k + 1)
    for won, lost in zip(success.unsqueeze(-1).unbind(1), failure.unsqueeze(-1).unbind(1), strict=True):
        chances = torch.addcmul(chances * lost, torch.nn.functional.pad(chances[:, :-1], (1, 0)), won)
    less, more = chances[:, k - 1 :].log().unbind(-1)
    ratio = (more - less).unsqueeze(1) - nu
    return -torch.nn.functional.logsigmoid(own - ratio - 1).mean()


def _groups(settings: PaperSettings) -> list[list[Case]]:
    """Return groups of problems that differ only in k, one for each number of threads and row length."""
    check_numbers("--sizes", settings.sizes, 2)
    check_numbers("--ks", settings.ks, 1)
    check_numbers("--batch", (settings.batch,), 1)
    check_numbers("--threads", settings.threads, 1, cores())
    check_numbers("--trials", (settings.trials,), 1)
    if max(settings.ks) >= min(settings.sizes):
        most = min(settings.sizes)
        raise BadInput(
            f"`--ks` must be below {most}, the smallest of `--sizes`, but it contains {max(settings.ks)}."
        )
    return [
        [Case(n, k, settings.batch, 1.0, "float32", threads) for k in dict.fromkeys(settings.ks)]
        for threads in dict.fromkeys(settings.threads)
        for n in dict.fromkeys(settings.sizes)
    ]


def _kept(earlier: Sequence[Measurement], group: Sequence[Case], trials: int) -> list[Measurement]:
    """Return the rows for these problems from an interrupted study, or an empty list if any is missing."""
    where = device()
    here = (machine_of(where), str(torch.__version__), torchlml.__version__)
    wanted = {entry for case in group for entry in _entries(case)}
    found: dict[Entry, Measurement] = {}
    for row in earlier:
        entry = Entry(Case(*row.case), row.provider, row.mode)
        same = row.operator == OPERATOR and (row.machine, row.torch, row.torchlml) == here
        if same and entry in wanted and json.loads(row.config)["rounds"] == trials:
            found[entry] = row
    return list(found.values()) if len(found) == len(wanted) else []


def machine_of(where: torch.device) -> str:
    """Return the name of the device as it is written to the CSV."""
    return torch.cuda.get_device_name(where) if where.type == "cuda" else machine()


def _rows(timings: Mapping[Entry, Timing], where: torch.device) -> Iterator[Measurement]:
    gpu = machine_of(where) if where.type == "cuda" else None
    for (case, provider, mode), timing in timings.items():
        micro = timing.seconds.times(1e6)
        yield measured(OPERATOR, provider, mode, case, micro, timing.ratio, timing.rounds, gpu=gpu)


def _entries(case: Case) -> list[Entry]:
    names = losses(torch.empty(0), case.k)
    return [Entry(case, name, "forward") for name in names] + [
        Entry(case, name, "backward") for name in BACKWARD
    ]


def _calls(case: Case, where: torch.device) -> dict[Entry, Callable[[], object]]:
    x = case.logits().to(where)
    labels = torch.randint(case.n, (case.batch,), generator=torch.Generator().manual_seed(case.n))
    calls: dict[Entry, Callable[[], object]] = {}
    for name, loss in losses(labels.to(where), case.k).items():
        calls[Entry(case, name, "forward")] = _forward(loss, x)
        if name in BACKWARD:
            calls[Entry(case, name, "backward")] = _backward(loss, x.clone().requires_grad_())
    if where.type == "cuda":  # calls are asynchronous
        return {entry: _finished(call) for entry, call in calls.items()}
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


Problem = tuple[int, int, int]  # threads, n, k

# A time counts as growing with k if it grows by at least this factor. Noise and caches cause smaller changes.
_GROWS = 1.5


def times(rows: Sequence[Measurement]) -> Table:
    """Tabulate the median times in milliseconds, with a row for each method and a column for each problem."""
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
    """A claim in the paper about a method, the measured ratios, and the condition that they must satisfy."""

    says: str
    ratios: list[float]
    holds: Callable[[float], bool]


def claims(rows: Sequence[Measurement]) -> Table:
    """Tabulate the paper's claims about the times of forward passes, and whether the measurements agree.

    Args:
        rows: The rows of one study. Times are compared by their ratios to a baseline in the same round.

    Returns:
        A table with a row for each claim: the claim, the range of measured ratios over row lengths and thread
        counts, and the verdict.
    """
    table = plain_table("the paper's claims about forward times", ("claim", "ratio of times", "holds"))
    for claim in claims_of(rows):
        table.add_row(claim.says, span(claim.ratios), verdict(claim))
    return table


def claims_of(rows: Sequence[Measurement]) -> Iterator[Claim]:
    """Yield the paper's claims with the measured time ratios.

    A ratio compares the largest k with the smallest k, or a method with truncated entropy.
    """
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
    """Return the time at the largest k divided by that at the smallest k, for each n and thread count."""
    settings = sorted({(threads, n) for threads, n, _ in taken})
    of_k = [{k: time for (*other, k), time in taken.items() if tuple(other) == one} for one in settings]
    return [by_k[max(by_k)] / by_k[min(by_k)] for by_k in of_k]


def span(ratios: Sequence[float]) -> str:
    """Format the smallest and largest ratios, or one value if both are formatted the same.

    Ratios below 10 have at most two significant digits. Larger ratios are rounded to integers.
    """
    ends = (f"{end:.0f}" if end >= 10 else f"{end:.2g}" for end in (min(ratios), max(ratios)))
    return " to ".join(dict.fromkeys(ends))


def verdict(claim: Claim) -> str:
    """Return `yes`, `no`, or in how many cases a claim holds."""
    held = sum(claim.holds(ratio) for ratio in claim.ratios)
    if held in (0, len(claim.ratios)):
        return "yes" if held else "no"
    return f"in {held} of {len(claim.ratios)}"


USUAL = (Path("torchlml-paper-timing.csv"), Path("results/paper-timing.csv"))

_SVM, _SVM_MARKER = METHODS["smooth-svm"]
_ENTROPY, _ENTROPY_MARKER = METHODS["truncated-entropy"]
_LML, _LML_MARKER = METHODS["lml"]
# Forward passes are solid, and backward passes are dashed. Algorithms for the same loss differ in color or
# marker.
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


def timing_figure(settings: TimingFigureSettings) -> None:
    """Draw the times against k from a CSV, and print the path of the figure."""
    check_picture(settings.out)
    path = find_csv(settings.csv, USUAL, "torchlml bench paper")
    rows = of_study(read(path, "--csv"))
    if not rows:
        raise BadInput(f"`{path}` (`--csv`) has no results from `torchlml bench paper`.")
    draw(rows, settings.out, [path])
    say_where(settings.out)


def of_study(rows: Sequence[Measurement]) -> list[Measurement]:
    """Select the rows that belong to the study."""
    return [row for row in rows if row.operator == OPERATOR]


def draw(rows: Sequence[Measurement], picture: Path, csv: Sequence[Path] = ()) -> None:
    """Draw one panel per row length, with medians as points and 20th to 80th percentiles as bands.

    Args:
        rows: The results from `torchlml bench paper`. Only those with the number of threads of the last row
            are used. If a measurement was repeated, its last row is used.
        picture: The PNG or SVG file to write.
        csv: The CSV files with the rows. Their names are stored in the picture's metadata.
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
        # The lines have the same order in all panels, so labels next to the last panel suffice.
        label_lines(panels[-1], ends[-1], 0.05)
        panels[0].set_ylabel("time per call (ms)")
        note(figure, f"batch {rows[-1].batch}, {conditions(shown)}, forward unless stated otherwise")


def _draw_panel(axes: Axes, rows: Sequence[Measurement]) -> list[tuple[float, str, str]]:
    """Draw the lines for one row length, and return each line's last y-value, name and color."""
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
