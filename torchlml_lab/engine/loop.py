"""The training loop: tasks, training steps, epochs, and the time that they take."""

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import ProgressBar, new_console, plain_table
from torchlml_lab.engine.settings import StepTimeSettings, check_threads, use_threads

Loss = Callable[[nn.Module, Any], Tensor]
"""A function that returns the mean loss of a model on a batch."""


@dataclass(frozen=True)
class Task:
    """A training task: the model, the data, the loss and the metrics."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    """Stepped once after every epoch."""
    training: Dataset[Any]
    """`__getitems__(indices)` returns a whole batch. Random choices use torch's global generator."""
    held_out: Mapping[str, Dataset[Any]]
    """`validation` is evaluated after every epoch. `test`, if present, is evaluated once with the best model.
    `train`, if present, is a subset of the training data that is also evaluated after every epoch."""
    loss: Loss
    measure: Callable[[nn.Module, Iterable[Any], Accelerator], dict[str, float]]
    """The metrics of a model on batches, aggregated over all processes, as fractions from 0 to 1."""
    chosen_by: str
    """The metric whose highest value on `validation` determines the best epoch."""
    printed: tuple[str, ...]
    """The metrics that are printed after every epoch. All metrics are recorded."""
    most_gradient: float | None = None
    """The maximum gradient norm for clipping. None disables clipping."""
    threads: int | None = None
    """The number of CPU threads that suits the task's operators. None means all available threads."""
    patience: int | None = None
    """Training stops after this many epochs without improvement. None trains all epochs."""
    stored: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """JSON files, by name, that are written to the run directory at the start, for use in prediction."""
    combine: Callable[[nn.Module], None] | None = None
    """Called with the model of the best epoch after training. The validation metrics are then measured again,
    because it may change the model."""
    refit: Callable[[nn.Module, Path | None], None] | None = None
    """Called after that, to fit parts of the model on all samples before the test. The second argument is the
    run directory in the first process, and None in the others."""
    instead: str = ""
    """A sentence that recommends a faster alternative if training would take hours."""


class EpochBatches(Sampler[list[int]]):
    """Batches of indices in an order that depends only on the seed and the epoch."""

    def __init__(self, count: int, batch_size: int, seed: int, shuffle: bool) -> None:
        self.count, self.batch_size, self.seed, self.shuffle = count, batch_size, seed, shuffle
        self.drop_last = False
        self.epoch = 0

    def __len__(self) -> int:
        return math.ceil(self.count / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.count)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed * 2**20 + self.epoch)
            order = torch.randperm(self.count, generator=generator)
        for start in range(0, self.count, self.batch_size):
            yield order[start : start + self.batch_size].tolist()


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    batch: Any,
    accelerator: Accelerator | None = None,
    most_gradient: float | None = None,
) -> Tensor:
    """Run one training step: forward, loss, backward, gradient clipping and update.

    Args:
        model: The network, in training mode.
        optimizer: The optimizer of its parameters.
        loss: The mean loss of a batch.
        batch: The argument of the loss.
        accelerator: Controls the precision and synchronizes processes. None means a single process.
        most_gradient: The maximum gradient norm for clipping. None disables clipping.

    Returns:
        The loss before the update, detached.
    """
    with nullcontext() if accelerator is None else accelerator.autocast():
        value = loss(model, batch)
    optimizer.zero_grad()
    if accelerator is None:
        value.backward()
    else:
        accelerator.backward(value)
    if most_gradient is not None:
        clip = nn.utils.clip_grad_norm_ if accelerator is None else accelerator.clip_grad_norm_
        clip(model.parameters(), most_gradient)
    optimizer.step()
    return value.detach()


def train_epoch(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    batches: Iterable[Any],
    accelerator: Accelerator | None = None,
    most_gradient: float | None = None,
    step: Callable[[], None] = lambda: None,
) -> Tensor:
    """Train on every batch once. `step` is called after each batch. See `train_step` for other arguments.

    Returns:
        The sum of the losses of all batches.
    """
    model.train()
    total = torch.zeros((), device=next(model.parameters()).device)
    for batch in batches:
        total += train_step(model, optimizer, loss, batch, accelerator, most_gradient)
        step()
    return total


LONG, VERY_LONG = 600.0, 3600.0  # seconds: above these, print an estimate, and also an alternative
FEW = 8  # samples that suffice for an estimate


def seconds_per_batch(task: Task, batch_size: int) -> float:
    """Time a forward and backward pass, on a copy of the network and of the random state.

    Args:
        task: The task to time. It is not modified.
        batch_size: Samples per batch.

    Returns:
        The seconds per batch, extrapolated from a few samples if a whole batch is slow.
    """
    model = copy.deepcopy(task.model).train()

    def passes(count: int) -> float:
        start = time.perf_counter()
        task.loss(model, task.training.__getitems__(list(range(count)))).backward()  # type: ignore[attr-defined]
        return time.perf_counter() - start

    size = min(batch_size, len(task.training))  # type: ignore[arg-type]
    few = min(FEW, size)
    with torch.random.fork_rng(devices=[]):
        passes(few)  # the first pass includes allocation and lazy loading
        seconds = passes(few)
        return seconds * size / few if seconds > 0.2 else passes(size)


def forecast(task: Task, batch_size: int, epochs: int, batches: int) -> str | None:
    """Return an estimate of the training time to print before a long run, or None before a short one.

    Args:
        task: The task to train.
        batch_size: Samples per batch of this process.
        epochs: The number of epochs left.
        batches: The number of batches per epoch.
    """
    seconds = epochs * batches * seconds_per_batch(task, batch_size)
    if seconds < LONG:
        return None
    said = f"{epochs} epochs of {batches} batches will take about {in_words(seconds)} on this CPU."
    return f"{said} {task.instead}".rstrip() if seconds > VERY_LONG else said


def in_words(seconds: float) -> str:
    """Format a duration in words: `25 minutes`, `3 hours`, `9 days`."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * size or (unit == "minute" and seconds >= size):
            count = round(seconds / size)
            return f"{count} {unit}{'s' * (count != 1)}"
    return f"{seconds:.0f} seconds"


Name = TypeVar("Name", bound=str)  # the name of a loss of a task

MOST_SAMPLES = 1024  # samples per step, because a scene graph takes about 200 kB


def checked_size(settings: StepTimeSettings, usual: int) -> int:
    """Return the samples per step, `usual` by default, after checking that the step can be timed."""
    if settings.steps < 1:
        raise BadInput(f"`--steps` must be at least 1, but it is {settings.steps}.")
    check_threads(settings.threads)
    size = usual if settings.batch_size is None else settings.batch_size
    if not 1 <= size <= MOST_SAMPLES:
        raise BadInput(f"`--batch-size` must be from 1 to {MOST_SAMPLES}, but it is {size}.")
    return size


def compare_steps(
    names: Sequence[Name], build: Callable[[Name], Task], settings: StepTimeSettings, size: int, what: str
) -> None:
    """Time a training step of each task, and print a table relative to the first.

    Args:
        names: The names of the tasks to time, the baseline first.
        build: Builds the task of a name. The same seed is set before each call.
        settings: The number of steps and threads.
        size: Samples per step.
        what: A description of the samples, for the title of the table.
    """
    tasks: dict[str, Task] = {}
    for name in names:
        torch.manual_seed(0)
        tasks[name] = build(name)
    console = new_console()
    with use_threads(settings.threads):
        seconds = measure_steps(tasks, size, settings.steps, console)
    console.print(step_table(seconds, names[0], f"{settings.steps} steps of {size} {what}"))


def measure_steps(
    tasks: Mapping[str, Task], batch_size: int, steps: int, console: Console
) -> dict[str, list[float]]:
    """Measure the seconds of each step (data, forward, loss, backward, clipping, update) by task.

    Args:
        tasks: The tasks to time. All of them use the same data.
        batch_size: Samples per step.
        steps: The number of timed steps, after one untimed warm-up step.
        console: The console for the progress bar.

    Returns:
        The seconds. The i-th values of all tasks refer to the same samples.
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


def step_table(seconds: Mapping[str, Sequence[float]], baseline: str, what: str) -> Table:
    """Tabulate the median time per step of each task, and its difference from the baseline."""
    shown = plain_table(f"{what}, medians", ("loss", "ms per step", f"vs. {baseline}"))
    usual = median(seconds[baseline])
    for name, times in seconds.items():
        middle = median(times)
        shown.add_row(name, f"{1000 * middle:.1f}", f"{100 * (middle / usual - 1):+.1f}%")
    return shown
