"""`torchlml step-time`: what a training step of each scene-graph objective costs beside that of softmax."""

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
from torchlml_lab.tasks.scene_graph.objectives import OBJECTIVES
from torchlml_lab.tasks.scene_graph.predicate_classification import SceneGraphSettings, check, read, task


@dataclass(frozen=True)
class StepTimeSettings:
    """Time whole training steps of all objectives in turns, on the same images: a run's, or --vg or --vrd."""

    run: Annotated[Path | None, tyro.conf.Positional] = None
    """The folder of a run, whose data and settings are used; none is needed with --vg or --vrd."""
    vg: Path | None = None
    """The folder with Visual Genome, as for `torchlml train scene-graph`."""
    vrd: Path | None = None
    """The folder with VRD, as for `torchlml train scene-graph`."""
    k: int | None = None
    """The k of lml and truncated-entropy, at least 1; by default the run's, or 20."""
    batch_size: int | None = None
    """Images per step, at most 1024; by default the run's, or 16."""
    steps: int = 30
    """How many batches each objective is timed on, at least 1."""
    threads: int = 1
    """How many threads torch may use, from 1 to the cores."""


def main(arguments: Sequence[str]) -> None:
    """Read the options, time, and print a table."""
    settings = parse_settings(StepTimeSettings, "step-time", arguments, StepTimeSettings())
    common = SceneGraphSettings(vg=settings.vg, vrd=settings.vrd, validation=1)
    if settings.run is not None:
        moved = {"vg": settings.vg, "vrd": settings.vrd}
        common = best_epoch.read_moved(SceneGraphSettings, settings.run, moved)
    k = common.k if settings.k is None else settings.k
    size = common.batch_size if settings.batch_size is None else settings.batch_size
    step_times.check(settings.steps, settings.threads, size)
    common = replace(common, k=k, batch_size=size)
    check(common)
    splits = read(common)
    # The images and the seed stay the same, so the networks differ in their objectives alone.
    tasks: dict[str, Task] = {}
    for objective in OBJECTIVES:
        torch.manual_seed(0)
        tasks[objective] = task(replace(common, objective=objective), splits)
    console = Console()
    with use_threads(settings.threads):
        seconds = step_times.measure(tasks, size, settings.steps, console)
    what = f"{settings.steps} steps of {size} images"
    console.print(step_times.table(seconds, "softmax", what))
