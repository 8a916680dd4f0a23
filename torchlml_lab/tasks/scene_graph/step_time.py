"""`torchlml step-time`: what a training step of each scene-graph objective costs beside that of softmax."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from torchlml_lab.cli import parse_settings
from torchlml_lab.engine.table import plain_table
from torchlml_lab.errors import BadInput
from torchlml_lab.tasks.scene_graph.command import SceneGraphSettings, check, read, task
from torchlml_lab.tasks.scene_graph.data import Splits
from torchlml_lab.tasks.scene_graph.objectives import OBJECTIVES


@dataclass(frozen=True)
class StepTimeSettings:
    """Time whole training steps of all objectives in turns, on the same batches; needs --vg or --vrd."""

    vg: Path | None = None
    """The folder with Visual Genome, as for `torchlml train scene-graph`."""
    vrd: Path | None = None
    """The folder with VRD, as for `torchlml train scene-graph`."""
    k: int = 20
    """The k of lml and truncated-entropy, at least 1."""
    batch_size: int = SceneGraphSettings.batch_size
    """Images per step."""
    steps: int = 30
    """How many batches each objective is timed on, at least 1."""
    threads: int = 1
    """How many threads torch may use, at least 1."""


def main(arguments: Sequence[str]) -> None:
    """Reads the options, times, and prints a table."""
    settings = parse_settings(StepTimeSettings, "step-time", arguments, StepTimeSettings())
    for name in ("steps", "threads", "batch_size"):
        if getattr(settings, name) < 1:
            option = "--" + name.replace("_", "-")
            raise BadInput(f"`{option}` is {getattr(settings, name)}, and must be at least 1.")
    common = SceneGraphSettings(
        vg=settings.vg, vrd=settings.vrd, k=settings.k, batch_size=settings.batch_size, validation=1
    )
    check(common)
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        seconds = measure(common, read(common), settings.steps)
    finally:
        torch.set_num_threads(before)
    Console().print(table(seconds, f"{settings.steps} steps of {settings.batch_size} images"))


def measure(common: SceneGraphSettings, splits: Splits, steps: int) -> dict[str, list[float]]:
    """The seconds of each step (batch, forward, loss, backward, clipping, update) by objective.

    Args:
        common: The settings of all objectives.
        splits: The images.
        steps: How many steps are timed; one before them is not.

    Returns:
        The seconds; the i-th number of every objective is for the same images.
    """
    # `splits` stays the same, so the networks differ in their objectives alone.
    tasks = {}
    for objective in OBJECTIVES:
        torch.manual_seed(0)
        tasks[objective] = task(replace(common, objective=objective), splits)
    order = torch.randint(len(splits.training), (steps + 1, common.batch_size))
    seconds: dict[str, list[float]] = {objective: [] for objective in OBJECTIVES}
    for chosen in order.tolist():
        for objective, one in tasks.items():
            one.model.train()
            start = time.perf_counter()
            loss = one.loss(one.model, one.training.__getitems__(chosen))  # type: ignore[attr-defined]
            one.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(one.model.parameters(), common.clip)
            one.optimizer.step()
            seconds[objective].append(time.perf_counter() - start)
    return {objective: times[1:] for objective, times in seconds.items()}


def table(seconds: dict[str, list[float]], what: str) -> Table:
    """The median step, and the median of its ratio to the softmax step on the same images."""
    shown = plain_table(f"{what}, medians", ("objective", "ms per step", "over softmax"))
    for objective, times in seconds.items():
        ratio = median(one / other for one, other in zip(times, seconds["softmax"], strict=True))
        shown.add_row(objective, f"{1000 * median(times):.1f}", f"{100 * (ratio - 1):+.1f}%")
    return shown
