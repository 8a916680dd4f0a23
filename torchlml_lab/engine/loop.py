"""The training loop: a task, a step, an epoch of steps, and how long they take."""

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
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
"""The mean loss of a model on a batch."""


@dataclass(frozen=True)
class Task:
    """What is trained, on what, and how it is judged."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    """Stepped once after every epoch."""
    training: Dataset[Any]
    """Its `__getitems__(indices)` gives a whole batch; its random choices come from torch's generator."""
    held_out: Mapping[str, Dataset[Any]]
    """`validation`, evaluated after every epoch, and `test`, if it is there, evaluated once with the best
    model. `train`, if it is there, is a part of the training data, also evaluated after every epoch."""
    loss: Loss
    measure: Callable[[nn.Module, Iterable[Any], Accelerator], dict[str, float]]
    """The measures of a model on batches, over all processes: shares from 0 to 1."""
    chosen_by: str
    """The measure whose highest value on `validation` chooses the best epoch."""
    printed: tuple[str, ...]
    """The measures that are printed after every epoch; all of them are recorded."""
    most_gradient: float | None = None
    """The norm to which a longer gradient is shortened; None leaves gradients as they are."""
    threads: int | None = None
    """How many threads suit its operators on a CPU; None: as many as there are."""
    patience: int | None = None
    """After so many epochs without a better one the training ends; None: all epochs are trained."""
    stored: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """JSON files that go into the run's folder before it begins, by name: what a prediction needs to know."""
    instead: str = ""
    """What to use where the training would take hours: a sentence."""


class EpochBatches(Sampler[list[int]]):
    """Batches of indices in an order that follows from the seed and the epoch alone."""

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
    """Forward, loss, backward, clipping and update on one batch.

    Args:
        model: The network, in training mode.
        optimizer: Of its parameters.
        loss: The mean loss of a batch.
        batch: What the loss takes.
        accelerator: Decides the precision and what processes share; None: one process, as it is.
        most_gradient: The norm to which a longer gradient is shortened; None leaves gradients as they are.

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
    """Train on every batch once; `step` is called after each, the other arguments are those of `train_step`.

    Returns:
        The sum of the batches' losses.
    """
    model.train()
    total = torch.zeros((), device=next(model.parameters()).device)
    for batch in batches:
        total += train_step(model, optimizer, loss, batch, accelerator, most_gradient)
        step()
    return total


LONG, VERY_LONG = 600.0, 3600.0  # seconds: shorter runs need no forecast, longer ones another way
FEW = 8  # samples that are enough to tell


def seconds_per_batch(task: Task, batch_size: int) -> float:
    """Time a forward and backward pass, on a copy of the network and of the random state.

    Args:
        task: What will be trained; nothing of it changes.
        batch_size: Samples per batch.

    Returns:
        The seconds of a batch, from a few samples where a whole batch would take long itself.
    """
    model = copy.deepcopy(task.model).train()

    def passes(count: int) -> float:
        start = time.perf_counter()
        task.loss(model, task.training.__getitems__(list(range(count)))).backward()  # type: ignore[attr-defined]
        return time.perf_counter() - start

    size = min(batch_size, len(task.training))  # type: ignore[arg-type]
    few = min(FEW, size)
    with torch.random.fork_rng(devices=[]):
        passes(few)  # the first pass also allocates and loads
        seconds = passes(few)
        return seconds * size / few if seconds > 0.2 else passes(size)


def forecast(task: Task, batch_size: int, epochs: int, batches: int) -> str | None:
    """The sentences to print before a long run; None before a short one.

    Args:
        task: What will be trained.
        batch_size: Samples per batch of this process.
        epochs: How many are left.
        batches: How many each of them has.
    """
    seconds = epochs * batches * seconds_per_batch(task, batch_size)
    if seconds < LONG:
        return None
    said = f"{epochs} epochs of {batches} batches will take about {in_words(seconds)} on this CPU."
    return f"{said} {task.instead}".rstrip() if seconds > VERY_LONG else said


def in_words(seconds: float) -> str:
    """A duration as one would say it: `25 minutes`, `3 hours`, `9 days`."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * size or (unit == "minute" and seconds >= size):
            count = round(seconds / size)
            return f"{count} {unit}{'s' * (count != 1)}"
    return f"{seconds:.0f} seconds"


Name = TypeVar("Name", bound=str)  # one of the losses of a task

MOST_SAMPLES = 1024  # of a step; a scene graph takes about 200 kB


def checked_size(settings: StepTimeSettings, usual: int) -> int:
    """The samples per step, `usual` by default; refuses what cannot be timed or would take all memory."""
    if settings.steps < 1:
        raise BadInput(f"`--steps` is {settings.steps}, and must be at least 1.")
    check_threads(settings.threads)
    size = usual if settings.batch_size is None else settings.batch_size
    if not 1 <= size <= MOST_SAMPLES:
        raise BadInput(f"`--batch-size` is {size}, and must be from 1 to {MOST_SAMPLES}.")
    return size


def compare_steps(
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
    console = new_console()
    with use_threads(settings.threads):
        seconds = measure_steps(tasks, size, settings.steps, console)
    console.print(step_table(seconds, names[0], f"{settings.steps} steps of {size} {what}"))


def measure_steps(
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


def step_table(seconds: Mapping[str, Sequence[float]], baseline: str, what: str) -> Table:
    """The median step of each task, and how much longer it is than that of the baseline."""
    shown = plain_table(f"{what}, medians", ("trained with", "ms per step", f"over {baseline}"))
    usual = median(seconds[baseline])
    for name, times in seconds.items():
        middle = median(times)
        shown.add_row(name, f"{1000 * middle:.1f}", f"{100 * (middle / usual - 1):+.1f}%")
    return shown
