"""How long a run will take on this CPU, said before it begins."""

import copy
import time

import torch

from torchlml_lab.engine.loop import Task

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
