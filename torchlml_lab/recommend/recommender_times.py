"""`torchlml step-time RUN` of a recommendation: what a training step of each loss costs beside softmax's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from torchlml_lab.cli import parse_settings
from torchlml_lab.engine import best_epoch, step_times
from torchlml_lab.recommend.recommend_settings import RecommendSettings
from torchlml_lab.recommend.recommendation import task
from torchlml_lab.recommend.user_items import read
from torchlml_lab.tasks.label_losses import LossName

LOSSES: tuple[LossName, ...] = ("softmax", "lml", "bce", "truncated-entropy")


@dataclass(frozen=True)
class LossTimesSettings(step_times.StepTimeSettings):
    """Time whole training steps of all losses in turns, on the same users, with the settings of a run."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/recommend")
    """The folder of the run."""
    train: Path | None = None
    """The training data, where they have moved."""


def main(arguments: Sequence[str]) -> None:
    """Read the options, time, and print a table."""
    settings = parse_settings(LossTimesSettings, "step-time", arguments, LossTimesSettings())
    run = replace(
        best_epoch.read_moved(RecommendSettings, settings.run, {"train": settings.train}), k=None, test=None
    )
    size = step_times.checked_size(settings, run.batch_size)
    data = read(run)
    what = f"users and {len(data.training.items)} items, {run.model}"
    step_times.compare(LOSSES, lambda loss: task(replace(run, loss=loss), data), settings, size, what)
