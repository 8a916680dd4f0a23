"""What a training step of several tasks costs, in turns on the same samples."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.loop import Task, train_step
from torchlml_lab.engine.progress import ProgressBar
from torchlml_lab.engine.settings import check_threads, use_threads
from torchlml_lab.engine.table import plain_table

Name = TypeVar("Name", bound=str)  # one of the losses of a task

MOST_SAMPLES = 1024  # of a step; a scene graph takes about 200 kB


@dataclass(frozen=True)
class StepTimeSettings:
    """How steps are timed; a task's own settings are a subclass, which adds where its data are."""

    batch_size: int | None = None
    """Samples per step, at most 1024; by default as many as in training."""
    steps: int = 30
    """How many batches each loss is timed on, at least 1."""
    threads: int = 1
    """How many threads torch may use, from 1 to the cores."""


def checked_size(settings: StepTimeSettings, usual: int) -> int:
    """The samples per step, `usual` by default; refuses what cannot be timed or would take all memory."""
    if settings.steps < 1:
        raise BadInput(f"`--steps` is {settings.steps}, and must be at least 1.")
    check_threads(settings.threads)
    size = usual if settings.batch_size is None else settings.batch_size
    if not 1 <= size <= MOST_SAMPLES:
        raise BadInput(f"`--batch-size` is {size}, and must be from 1 to {MOST_SAMPLES}.")
    return size


def compare(
    names: Sequence[Name], build: Callable[[Name], Task], settings: StepTimeSettings, size: int, what: str
) -> None:
    """Time a step of each task, and print a table of them beside the first.

    Args:
        names: What is timed, the baseline first.
        build: Makes the task of a name. Each is made from the same seed, so that they differ in it alone.
        settings: How many steps, and on how many threads.
        size: Samples per step.
        what: What the samples are, for the table's title.
    """
    tasks: dict[str, Task] = {}
    for name in names:
        torch.manual_seed(0)
        tasks[name] = build(name)
    console = Console()
    with use_threads(settings.threads):
        seconds = measure(tasks, size, settings.steps, console)
    console.print(table(seconds, names[0], f"{settings.steps} steps of {size} {what}"))


def measure(
    tasks: Mapping[str, Task], batch_size: int, steps: int, console: Console
) -> dict[str, list[float]]:
    """The seconds of each step (batch, forward, loss, backward, clipping, update) by task.

    Args:
        tasks: What is timed; all of them are trained on the same data.
        batch_size: Samples per step.
        steps: How many steps are timed; one before them is not.
        console: Where the progress bar goes.

    Returns:
        The seconds; the i-th number of every task is for the same samples.
    """
    accelerator = Accelerator(cpu=True)
    count = len(next(iter(tasks.values())).training)  # type: ignore[arg-type]
    order = torch.randint(count, (steps + 1, batch_size))
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    with ProgressBar(console) as progress:
        bar = progress.add_task("steps", total=len(order) * len(tasks))
        for chosen in order.tolist():
            for name, task in tasks.items():
                task.model.train()
                start = time.perf_counter()
                batch = task.training.__getitems__(chosen)  # type: ignore[attr-defined]
                train_step(task.model, task.optimizer, task.loss, batch, accelerator, task.most_gradient)
                seconds[name].append(time.perf_counter() - start)
                progress.advance(bar)
    return {name: times[1:] for name, times in seconds.items()}


def table(seconds: Mapping[str, Sequence[float]], baseline: str, what: str) -> Table:
    """The median step of each task, and how much longer it is than that of the baseline."""
    shown = plain_table(f"{what}, medians", ("trained with", "ms per step", f"over {baseline}"))
    usual = median(seconds[baseline])
    for name, times in seconds.items():
        middle = median(times)
        shown.add_row(name, f"{1000 * middle:.1f}", f"{100 * (middle / usual - 1):+.1f}%")
    return shown
