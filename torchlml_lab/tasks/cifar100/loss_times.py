"""`torchlml step-time RUN` of CIFAR-100: what a training step of each loss costs beside cross-entropy's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console

from torchlml_lab.cli import parse_settings
from torchlml_lab.engine import best_epoch, step_times
from torchlml_lab.engine.loop import Task
from torchlml_lab.engine.threads import use_threads
from torchlml_lab.tasks.cifar100.classification import LOSSES, Cifar100Settings, model_name, read, task


@dataclass(frozen=True)
class StepTimeSettings:
    """Time whole training steps of all losses in turns, on the same samples, with the settings of a run."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/cifar100")
    """The folder of the run."""
    data: Path | None = None
    """The official images, where they have moved."""
    features: Path | None = None
    """The frozen features, where they have moved."""
    batch_size: int | None = None
    """Samples per step, at most 1024; by default the run's."""
    steps: int = 30
    """How many batches each loss is timed on, at least 1."""
    threads: int = 1
    """How many threads torch may use, from 1 to the cores."""


def main(arguments: Sequence[str]) -> None:
    """Read the options, time, and print a table."""
    settings = parse_settings(StepTimeSettings, "step-time", arguments, StepTimeSettings())
    moved = {"data": settings.data, "features": settings.features}
    run = best_epoch.read_moved(Cifar100Settings, settings.run, moved)
    size = run.batch_size if settings.batch_size is None else settings.batch_size
    step_times.check(settings.steps, settings.threads, size)
    parts = read(run.data, run.features)
    tasks: dict[str, Task] = {}
    for loss in LOSSES:
        torch.manual_seed(0)
        tasks[loss] = task(replace(run, loss=loss), *parts)
    console = Console()
    with use_threads(settings.threads):
        seconds = step_times.measure(tasks, size, settings.steps, console)
    what = f"{settings.steps} steps of {size} samples, {model_name(run)}"
    console.print(step_times.table(seconds, "cross-entropy", what))
