"""The timing study of the paper's section 5.1: `torchlml bench --paper`.

The paper timed the forward pass of the Smooth SVM by two algorithms, its backward pass, the truncated entropy
and LML, for a minibatch of 256 and 50 trials. Here every competitor is the loss of one label per row, so that
they answer the same question.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import Tensor

import torchlml
from torchlml_lab.bench import paper_words, records
from torchlml_lab.bench.cases import Case
from torchlml_lab.bench.paper_words import BACKWARD, OPERATOR
from torchlml_lab.bench.records import Record
from torchlml_lab.bench.timing import race
from torchlml_lab.figures import timing as timing_figure
from torchlml_lab.figures.style import check_picture
from torchlml_lab.info import kernel

# The slow competitors leave cold caches and returned memory behind; a sample is long enough to forget them.
SAMPLE_SECONDS = 10e-3


def run(cases: Sequence[Case], trials: int, csv: Path, plot: Path, console: Console) -> None:
    """Measures everything; then writes all rows together, the figure, a table and what follows from it.

    Args:
        cases: The problems; those that differ in k alone stand together.
        trials: How often each competitor is timed on each problem.
        csv: The CSV that the rows are added to, whole or not at all.
        plot: The PNG of the figure, with an SVG beside it.
        console: Where the progress, the table and the sentences go.
    """
    check_picture(plot)
    if csv.exists():
        records.read(csv, "--csv")
    rows: list[Record] = []
    groups = [list(group) for _, group in groupby(cases, lambda case: replace(case, k=0))]
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    before = torch.get_num_threads()
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=len(groups) * trials)
            for group in groups:
                progress.update(task, description=f"{group[0].batch} x {group[0].n}")
                torch.set_num_threads(group[0].threads)
                rows += measure(group, trials, lambda: progress.advance(task))
    finally:
        torch.set_num_threads(before)
    csv.parent.mkdir(parents=True, exist_ok=True)
    records.append(csv, rows)
    timing_figure.draw(timing_figure.read(csv), plot)
    console.print(paper_words.table(rows))
    for said in paper_words.sentences(rows):
        console.print(f"- {said}", highlight=False)
    console.print(f"The rows are in {csv}, the figure is {plot}.", soft_wrap=True)


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
