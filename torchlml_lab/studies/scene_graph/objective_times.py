"""`torchlml step-time`: what a training step of each scene-graph objective costs beside that of softmax."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from torchlml_lab.cli import parse_settings
from torchlml_lab.engine import best_epoch, step_times
from torchlml_lab.studies.scene_graph.objectives import OBJECTIVES
from torchlml_lab.studies.scene_graph.predicate_classification import SceneGraphSettings, check, read, task


@dataclass(frozen=True)
class ObjectiveTimesSettings(step_times.StepTimeSettings):
    """Time whole training steps of all objectives in turns, on the same images: a run's, or --vg or --vrd."""

    run: Annotated[Path | None, tyro.conf.Positional] = None
    """The folder of a run, whose data and settings are used; none is needed with --vg or --vrd."""
    vg: Path | None = None
    """The folder with Visual Genome, as for `torchlml train scene-graph`."""
    vrd: Path | None = None
    """The folder with VRD, as for `torchlml train scene-graph`."""
    k: int | None = None
    """The k of lml and truncated-entropy, at least 1; by default the run's, or 20."""


def main(arguments: Sequence[str]) -> None:
    """Read the options, time, and print a table."""
    settings = parse_settings(ObjectiveTimesSettings, "step-time", arguments, ObjectiveTimesSettings())
    common = SceneGraphSettings(vg=settings.vg, vrd=settings.vrd, validation=1)
    if settings.run is not None:
        moved = {"vg": settings.vg, "vrd": settings.vrd}
        common = best_epoch.read_moved(SceneGraphSettings, settings.run, moved)
    k = common.k if settings.k is None else settings.k
    size = step_times.checked_size(settings, common.batch_size)
    common = replace(common, k=k, batch_size=size)
    check(common)
    splits = read(common)
    step_times.compare(
        OBJECTIVES, lambda name: task(replace(common, objective=name), splits), settings, size, "images"
    )
