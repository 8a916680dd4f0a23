"""`torchlml step-time RUN` of CIFAR-100: what a training step of each loss costs beside cross-entropy's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from torchlml_lab.cli import parse_settings
from torchlml_lab.engine import best_epoch, step_times
from torchlml_lab.studies.cifar100.classification import LOSSES, Cifar100Settings, model_name, read, task


@dataclass(frozen=True)
class LossTimesSettings(step_times.StepTimeSettings):
    """Time whole training steps of all losses in turns, on the same samples, with the settings of a run."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/cifar100")
    """The folder of the run."""
    data: Path | None = None
    """The official images, where they have moved."""
    features: Path | None = None
    """The frozen features, where they have moved."""


def main(arguments: Sequence[str]) -> None:
    """Read the options, time, and print a table."""
    settings = parse_settings(LossTimesSettings, "step-time", arguments, LossTimesSettings())
    moved = {"data": settings.data, "features": settings.features}
    run = best_epoch.read_moved(Cifar100Settings, settings.run, moved)
    size = step_times.checked_size(settings, run.batch_size)
    parts = read(run.data, run.features)
    what = f"samples, {model_name(run)}"
    step_times.compare(LOSSES, lambda loss: task(replace(run, loss=loss), *parts), settings, size, what)
