"""A run of scene graphs read back: its settings, its images and its network with the best weights."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from torchlml_lab.engine import best_epoch
from torchlml_lab.studies.scene_graph.graphs import Splits
from torchlml_lab.studies.scene_graph.model import MotifNet
from torchlml_lab.studies.scene_graph.predicate_classification import (
    EXPERIMENT,
    SceneGraphSettings,
    network,
    read,
    read_regions,
)
from torchlml_lab.studies.scene_graph.regions import RegionFeatures


@dataclass(frozen=True)
class MovedData:
    """Where the data of a run are now; an option is only needed for what is not where it was."""

    vg: Path | None = None
    """The folder with Visual Genome, where it has moved."""
    vrd: Path | None = None
    """The folder with VRD, where it has moved."""
    glove: Path | None = None
    """The GloVe vectors, where they have moved."""
    counts: Path | None = None
    """The counts of the frequency bias, where they have moved."""
    region_features: Path | None = None
    """The region features, where they have moved."""


class Trained(NamedTuple):
    """What a run was told, what it saw, and what it learned."""

    settings: SceneGraphSettings
    splits: Splits
    regions: RegionFeatures | None
    model: MotifNet
    epoch: int
    """The epoch the weights are of: the best on validation so far."""


def load(run: Path, moved: MovedData) -> Trained:
    """Read a run back; its data are read again.

    Args:
        run: The folder of a run of `torchlml train scene-graph`; anything else raises `BadInput`.
        moved: Where its data are now.

    Returns:
        The run, with the network on the CPU and ready to predict.
    """
    best = best_epoch.find(EXPERIMENT, run)
    paths = {field.name: getattr(moved, field.name) for field in fields(MovedData)}
    settings = best_epoch.read_moved(SceneGraphSettings, run, paths)
    splits = read(settings)
    regions = read_regions(settings, splits)
    model = network(settings, splits, regions)
    best.load(model)
    return Trained(settings, splits, regions, model, best.epoch)
