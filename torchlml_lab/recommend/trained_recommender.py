"""A run read back: its network with the weights of the best epoch, and the pairs it was trained on."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

from torch import nn

from torchlml_lab.engine import best_epoch
from torchlml_lab.errors import BadInput
from torchlml_lab.recommend.recommend_settings import RecommendSettings
from torchlml_lab.recommend.recommendation import EXPERIMENT, network
from torchlml_lab.recommend.user_items import Data, read


class Trained(NamedTuple):
    """A run, ready to recommend."""

    run: Path
    settings: RecommendSettings
    data: Data
    model: nn.Module
    epoch: int


def load(run: Path, moved: dict[str, Path | None], with_test: bool = True) -> Trained:
    """Read a run back.

    Args:
        run: Its folder.
        moved: Where `train` and `test` are now; None where nothing has moved.
        with_test: Whether the test's file is needed; without it, it may be gone.

    Returns:
        The run. Data that are nowhere, or not those it was trained on, raise `BadInput`.
    """
    best = best_epoch.find(EXPERIMENT, run)
    settings = best_epoch.read_moved(RecommendSettings, run, moved)
    data = read(settings if with_test or settings.test is None else dataclasses.replace(settings, test=None))
    model = network(settings, data)
    best.load(model)
    if int(model.get_buffer("fingerprint")) != data.fingerprint:
        raise BadInput(f"The run `{run}` was trained on other data than `{settings.train}` holds now.")
    return Trained(run, settings, data, model, best.epoch)
