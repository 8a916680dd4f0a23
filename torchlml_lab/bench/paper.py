"""`torchlml bench paper`: the timing study of the paper's section 5.1.

The paper timed the forward pass of the Smooth SVM with two algorithms, its backward pass, the truncated
entropy and LML, for a minibatch of 256 and 50 trials. Here every method computes a loss with one label per
row, so that all of them solve the same problem.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

import torchlml
from torchlml_lab.bench import paper_report, report
from torchlml_lab.bench.cases import Case
from torchlml_lab.bench.measurements import Measurement, RowFile, machine, measured
from torchlml_lab.bench.paper_report import BACKWARD, OPERATOR
from torchlml_lab.bench.settings import PaperSettings, check_numbers
from torchlml_lab.bench.timing import Stopped, Timing, race
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import ProgressBar, new_console
from torchlml_lab.engine.settings import cores, use_threads
from torchlml_lab.files import check_picture

# Slow methods leave cold caches and released memory behind. Samples are long enough to make that negligible.
SAMPLE_SECONDS = 10e-3


class Entry(NamedTuple):
    """An item to time: a method in a mode on a problem."""

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
        console: The console for the progress and the tables.
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
                raise KeyboardInterrupt(
                    f"Interrupted: {len(groups) - len(todo) + done} of {len(groups)} lengths are done and "
                    f"{len(file.new)} rows are in {settings.csv}. Continue with `--resume`."
                ) from None
    rows = [row for part in kept for row in part] + file.new
    console.print(paper_report.times(rows))
    console.print(paper_report.claims(rows))
    everything = paper_report.of_study([*file.earlier, *file.new])
    report.finish(file, plot, lambda: paper_report.draw(everything, plot, [file.path]), console)


def device() -> torch.device:
    """Return the device of the study: the GPU if there is one, as in the paper."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(cases: Sequence[Case], trials: int, after_trial: Callable[[], object]) -> Iterator[Measurement]:
    """Time every method on problems that differ only in k, alternating between them, `trials` times.

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
    """Return the methods. Each computes the mean loss of logits (batch, n) with one label per row."""

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
    """Compute the mean of `smooth_topk_svm_loss` by the paper's summation over one class at a time."""
    label = target.unsqueeze(1)
    own, others = x.gather(1, label) / k, x.scatter(1, label, -torch.inf).double() / k
    nu = torchlml.lml_dual(others.detach(), k - 0.5).unsqueeze(1)
    success, failure = torch.sigmoid(others + nu), torch.sigmoid(-others - nu)
    # P[S = 0] to P[S = k], where S is the number of successes among the classes so far.
    chances = torch.eye(1, k + 1, dtype=success.dtype, device=x.device).expand(x.shape[0], k + 1)
    for won, lost in zip(success.unsqueeze(-1).unbind(1), failure.unsqueeze(-1).unbind(1), strict=True):
        chances = torch.addcmul(chances * lost, torch.nn.functional.pad(chances[:, :-1], (1, 0)), won)
    less, more = chances[:, k - 1 :].log().unbind(-1)
    ratio = (more - less).unsqueeze(1) - nu
    return -torch.nn.functional.logsigmoid(own - ratio - 1).mean()


def _groups(settings: PaperSettings) -> list[list[Case]]:
    """Return the problems that differ only in k, for each number of threads and each length."""
    check_numbers("--sizes", settings.sizes, 2)
    check_numbers("--ks", settings.ks, 1)
    check_numbers("--batch", (settings.batch,), 1)
    check_numbers("--threads", settings.threads, 1, cores())
    check_numbers("--trials", (settings.trials,), 1)
    if max(settings.ks) >= min(settings.sizes):
        most = min(settings.sizes)
        raise BadInput(
            f"`--ks` must be below {most}, the smallest of `--sizes`, but it has {max(settings.ks)}."
        )
    return [
        [Case(n, k, settings.batch, 1.0, "float32", threads) for k in dict.fromkeys(settings.ks)]
        for threads in dict.fromkeys(settings.threads)
        for n in dict.fromkeys(settings.sizes)
    ]


def _kept(earlier: Sequence[Measurement], group: Sequence[Case], trials: int) -> list[Measurement]:
    """Return the rows of these problems from an interrupted study, if they are complete."""
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
    """Return the name of the device, as in the CSV."""
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
