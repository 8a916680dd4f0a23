"""A finished or unfinished run, read back: its settings, its images and its network with the best weights."""

from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_model

from torchlml_lab.engine.folder import RunFolder
from torchlml_lab.engine.settings import SETTINGS_FILE, from_json
from torchlml_lab.errors import BadInput
from torchlml_lab.tasks.scene_graph.command import (
    EXPERIMENT,
    SceneGraphSettings,
    network,
    read,
    read_regions,
)
from torchlml_lab.tasks.scene_graph.data import Splits
from torchlml_lab.tasks.scene_graph.model import MotifNet
from torchlml_lab.tasks.scene_graph.regions import RegionFeatures


class Trained(NamedTuple):
    """What a run was told, what it saw, and what it learned."""

    settings: SceneGraphSettings
    splits: Splits
    regions: RegionFeatures | None
    model: MotifNet
    epoch: int
    """The epoch the weights are of: the best on validation so far."""


def load(run: Path) -> Trained:
    """Reads a run back; its data are read again from where they were.

    Args:
        run: The folder of a run of `torchlml train scene-graph`; anything else raises `BadInput`.

    Returns:
        The run, with the network on the CPU and ready to predict.
    """
    folder = RunFolder(run, EXPERIMENT)
    folder.check()
    state = folder.state()
    if state is None:
        raise BadInput(f"`{run}` has no finished epoch yet.")
    settings = from_json(SceneGraphSettings, run / SETTINGS_FILE)
    splits = read(settings)
    regions = read_regions(settings, splits)
    model = network(settings, splits, regions)
    weights = folder.checkpoint(state.best) / "model.safetensors"
    try:
        load_model(model, str(weights))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise BadInput(f"`{weights}` is damaged or of another model.") from error
    return Trained(settings, splits, regions, model.eval(), state.best_epoch)
