"""A run read back: its settings, with data that may have moved, and the weights of its best epoch."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

from torchlml_lab.engine.folder import RunFolder
from torchlml_lab.engine.settings import SETTINGS_FILE, TrainSettings, from_json
from torchlml_lab.errors import BadInput

Settings = TypeVar("Settings", bound=TrainSettings)


class BestEpoch(NamedTuple):
    """Where the weights of a run's best epoch are."""

    epoch: int
    weights: Path

    def load(self, model: nn.Module) -> None:
        """Read the weights into a network that is ready to predict afterwards.

        A file of another model, or with weights that are NaN or infinite, raises `BadInput`.
        """
        try:
            load_model(model, str(self.weights))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise BadInput(f"`{self.weights}` is damaged or of another model.") from error
        for name, values in model.named_parameters():
            wrong = values[~values.isfinite()]
            if wrong.numel():
                raise BadInput(f"`{self.weights}` is damaged: `{name}` holds {wrong[0].item()}.")
        model.eval()


def find(experiment: str, run: Path) -> BestEpoch:
    """The best epoch of a run so far; a folder without a run or a whole epoch raises `BadInput`."""
    folder = RunFolder(run, experiment)
    folder.check()
    state = folder.state()
    if state is None:
        raise BadInput(f"`{run}` has no finished epoch yet.")
    return BestEpoch(state.best_epoch, folder.checkpoint(state.best) / "model.safetensors")


def read_moved(kind: type[Settings], run: Path, moved: dict[str, Path | None]) -> Settings:
    """The settings of a run, with the paths of data that have moved since.

    Args:
        kind: The task's settings.
        run: The folder of the run.
        moved: New paths by the names of the settings; None where nothing has moved.

    Returns:
        The settings. Data that the run did not use, or that are nowhere, raise `BadInput`.
    """
    settings = from_json(kind, run / SETTINGS_FILE)
    for name, path in moved.items():
        option = "--" + name.replace("_", "-")
        stored = getattr(settings, name)
        if path is not None and stored is None:
            raise BadInput(f"`{option}` is given, but the run `{run}` was started without it.")
        if path is None and stored is not None and not stored.exists():
            raise BadInput(
                f"The run `{run}` was started with `{option} {stored}`, which is not there any more: "
                f"say with `{option}` where it is now."
            )
    changes: dict[str, Any] = {name: path for name, path in moved.items() if path is not None}
    return dataclasses.replace(settings, **changes)
