"""A run read back, ready to score rows: its best weights, and what its inputs and labels are."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import torchlml
from torchlml_lab.data.labelled_file import read_labelled
from torchlml_lab.data.labelled_rows import LabelledRows, Matrix
from torchlml_lab.data.tables import is_table
from torchlml_lab.engine import best_epoch
from torchlml_lab.engine.settings import SETTINGS_FILE, from_json
from torchlml_lab.errors import BadInput
from torchlml_lab.files import read_json
from torchlml_lab.multilabel import preparation as prepare
from torchlml_lab.multilabel.label_network import LabelNetwork
from torchlml_lab.multilabel.multilabel_settings import EXPERIMENT, MultilabelSettings
from torchlml_lab.multilabel.preparation import Preparation
from torchlml_lab.multilabel.run_rows import Batches
from torchlml_lab.tasks.label_losses import LossName

TEMPERATURE = "calibration.json"
ROWS = 512  # scored at a time


class Trained(NamedTuple):
    """A network that is ready to predict."""

    settings: MultilabelSettings
    preparation: Preparation
    network: LabelNetwork
    epoch: int
    temperature: float
    """What the logits are divided by for probabilities."""

    def scores(self, inputs: Matrix) -> Iterator[tuple[Tensor, slice]]:
        """The logits of prepared rows, some rows at a time, and which rows these are."""
        return scores(self.network, inputs)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probability of each label to be among the run's k."""
        return probabilities(logits, self.settings.loss, self.preparation.k, self.temperature)


def load(run: Path) -> Trained:
    """Read a run; a folder that holds none, or a damaged one, raises `BadInput`."""
    best = best_epoch.find(EXPERIMENT, run)
    settings = from_json(MultilabelSettings, run / SETTINGS_FILE)
    prepared = prepare.stored(run)
    network = LabelNetwork(prepared.inputs, len(prepared.labels), settings.hidden, settings.dropout)
    best.load(network)
    return Trained(settings, prepared, network, best.epoch, _temperature(run))


def scores(network: LabelNetwork, inputs: Matrix) -> Iterator[tuple[Tensor, slice]]:
    """The logits of rows, some rows at a time, and which rows these are."""
    data = Batches(inputs, inputs[:, :0])
    with torch.inference_mode():
        for start in range(0, len(data), ROWS):
            rows = slice(start, min(start + ROWS, len(data)))
            yield network(data.__getitems__(range(rows.start, rows.stop)).inputs), rows


def probabilities(logits: Tensor, loss: LossName, k: int, temperature: float = 1.0) -> Tensor:
    """The probability of each label to be among k: the LML projection of the logits.

    A network that was trained with `bce` has a probability of its own for each label, whatever k is.
    """
    logits = logits / temperature
    return logits.sigmoid() if loss == "bce" else torchlml.lml(logits, k)


def _temperature(run: Path) -> float:
    """The temperature of a run; 1 where none was chosen."""
    path = run / TEMPERATURE
    if not path.exists():
        return 1.0
    temperature = read_json(path, dict).get("temperature")
    if not isinstance(temperature, float) or not 0 < temperature < float("inf"):
        raise BadInput(f"`{path}` is damaged: its temperature is {temperature}.")
    return temperature


def read_rows(
    trained: Trained, path: Path, labels: Path | None = None, labelled: bool = True
) -> LabelledRows:
    """Read further rows for a run.

    Args:
        trained: The run.
        path: What `--data` named: a file like the one that the run was trained on.
        labels: Its labels, where it is an .npz.
        labelled: Whether labels are needed.

    Returns:
        The rows; a file of another kind raises `BadInput`, as does what cannot be read.
    """
    columns = trained.preparation.columns
    if columns is None and is_table(path):
        raise BadInput(f"`--data` names `{path}`, a table, but the run was trained on sparse features.")
    if columns is not None and not labelled:
        columns = replace(columns, labels=None)
    names = trained.settings.label_names
    rows, _ = read_labelled(
        path, "--data", columns=columns, labels=labels, label_names=names, labelled=labelled
    )
    return rows


def prepared_rows(trained: Trained, rows: LabelledRows, path: Path) -> tuple[Matrix, list[str]]:
    """The inputs of rows, and in sentences what of them the run does not know."""
    prepared = trained.preparation.apply(rows)
    notes = []
    if prepared.unknown:
        notes.append(
            f"`{path}`: {prepared.unknown} values are of features that no training row has, and are left out."
        )
    if prepared.empty:
        notes.append(
            f"`{path}`: {prepared.empty} of {len(rows)} rows have nothing that the run knows; what they get "
            "are the labels that are frequent in general."
        )
    return prepared.inputs, notes
