"""What a training step of several tasks costs, in turns on the same samples."""

import time
from collections.abc import Mapping, Sequence
from statistics import median

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table

from torchlml_lab.engine.loop import Task, train_step
from torchlml_lab.engine.progress import ProgressBar
from torchlml_lab.engine.table import plain_table
from torchlml_lab.engine.threads import check_threads
from torchlml_lab.errors import BadInput

MOST_SAMPLES = 1024  # of a step; a scene graph takes about 200 kB


def check(steps: int, threads: int, batch_size: int) -> None:
    """Refuse what cannot be timed, or would take the machine's memory."""
    if steps < 1:
        raise BadInput(f"`--steps` is {steps}, and must be at least 1.")
    check_threads(threads)
    if not 1 <= batch_size <= MOST_SAMPLES:
        raise BadInput(f"`--batch-size` is {batch_size}, and must be from 1 to {MOST_SAMPLES}.")


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
