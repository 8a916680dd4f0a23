"""The training loop: a task, a step, an epoch of steps, and an estimate of how long a run will take."""

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler

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
