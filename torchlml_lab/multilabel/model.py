"""The network, its measures, and a trained run read back: ready to score samples."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import pad

import torchlml
from torchlml.metrics import (
    PropensityScoredPrecision,
    TopKNDCG,
    TopKPrecision,
    TopKRecall,
    label_propensities,
)
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.labelled_files import read_labelled
from torchlml_lab.data.labelled_rows import LabelledRows, Matrix
from torchlml_lab.data.tables import is_table
from torchlml_lab.engine import run_directory
from torchlml_lab.engine.settings import SETTINGS_FILE, from_json
from torchlml_lab.files import read_json
from torchlml_lab.multilabel import preparation as prepare
from torchlml_lab.multilabel.losses import PADDING, LabelLoss, unlike_logits
from torchlml_lab.multilabel.preparation import Preparation
from torchlml_lab.multilabel.samples import Batch, Batches, Inputs
from torchlml_lab.multilabel.settings import EXPERIMENT, LossName, MultilabelSettings


class SparseLinear(nn.Module):
    """A linear layer of sparse rows.

    Args:
        inputs: How many columns a row has.
        outputs: How many numbers come out.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        # Rows have about length 1, however many columns there are.
        nn.init.normal_(self.weight, std=0.1)

    def forward(self, rows: Inputs) -> Tensor:
        """(R, outputs)."""
        total = nn.functional.embedding_bag(
            rows.columns,
            self.weight,
            rows.starts,
            mode="sum",
            per_sample_weights=rows.values.to(self.weight.dtype),
            include_last_offset=True,
        )
        return total + self.bias


class LabelNetwork(nn.Module):
    """A score for every label.

    Args:
        inputs: How many columns a row has.
        labels: How many labels there are.
        hidden: The size of the hidden layer; 0 for a linear model.
        dropout: The share of it that is left out in training.
    """

    def __init__(self, inputs: int, labels: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.first = SparseLinear(inputs, hidden or labels)
        if not hidden:
            nn.init.zeros_(self.first.weight)
        self.between = nn.Sequential(nn.ReLU(), nn.Dropout(dropout)) if hidden else None
        self.last = nn.Linear(hidden, labels) if hidden else None

    def forward(self, rows: Inputs, labels: Tensor | None = None, loss: LabelLoss | None = None) -> Tensor:
        """The logits (R, labels); or with labels and a loss their mean loss.

        The loss is computed here, and not from the logits, since that of `lml` never holds them all.
        """
        found = self.first(rows)
        if self.last is None or self.between is None:
            return found if loss is None or labels is None else loss(found.float(), labels)
        found = self.between(found)
        if loss is None or labels is None:
            return self.last(found)
        return loss.of_linear(found, self.last, labels)


TEMPERATURE = "calibration.json"
ROWS = 512  # scored at a time


class TrainedLabels(NamedTuple):
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


def load(run: Path) -> TrainedLabels:
    """Read a run; a folder that holds none, or a damaged one, raises `BadInput`."""
    best = run_directory.find_best_epoch(EXPERIMENT, run)
    settings = from_json(MultilabelSettings, run / SETTINGS_FILE)
    prepared = prepare.stored(run)
    network = LabelNetwork(prepared.inputs, len(prepared.labels), settings.hidden, settings.dropout)
    best.load(network)
    return TrainedLabels(settings, prepared, network, best.epoch, _temperature(run))


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
    trained: TrainedLabels, path: Path, labels: Path | None = None, labelled: bool = True
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


def prepared_rows(trained: TrainedLabels, rows: LabelledRows, path: Path) -> tuple[Matrix, list[str]]:
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


KS = (1, 3, 5)
NAMES = {"precision": "P", "ndcg": "nDCG", "psp": "PSP", "recall": "R"}
"""What the measures are called in tables."""


class Measures:
    """The measures of rows that come in batches; labels that the run does not know are never found.

    Args:
        preparation: The run's; its counts say how rare a label is.
        labels: How many labels the rows have, known and unknown.
        ks: How many of the best labels count.
    """

    def __init__(self, preparation: Preparation, labels: int, ks: Sequence[int] = KS) -> None:
        known = len(preparation.labels)
        self.more, self.ks = labels - known, tuple(k for k in ks if k <= known)
        counts = torch.tensor([*preparation.counts, *[0] * self.more])
        self.may_be_found = torch.arange(labels) < known
        self.metrics = [
            TopKPrecision(self.ks, sync_on_compute=False),
            TopKNDCG(self.ks, sync_on_compute=False),
            PropensityScoredPrecision(
                label_propensities(counts, preparation.rows), self.ks, sync_on_compute=False
            ),
            TopKRecall(self.ks, sync_on_compute=False),
        ]

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Count rows with scores (R, known labels) and lists of labels (R, L)."""
        scores = pad(scores, (0, self.more))
        labels = unlike_logits(labels, scores.shape[-1])
        mask = self.may_be_found.to(scores.device) if self.more else None
        for metric in self.metrics:
            metric.to(scores.device).update(scores, labels, mask=mask)

    def result(self) -> dict[str, float]:
        """All measures, from 0 to 1, by names like `ndcg@5`."""
        return {name: float(value) for metric in self.metrics for name, value in metric.compute().items()}


def measure(
    network: nn.Module,
    batches: Iterable[Batch],
    accelerator: Accelerator,
    preparation: Preparation,
    labels: int,
) -> dict[str, float]:
    """The measures of a network over the rows of all processes."""
    found = Measures(preparation, labels)
    for batch in batches:
        lists = accelerator.pad_across_processes(batch.labels, dim=1, pad_index=PADDING)
        found.update(*accelerator.gather_for_metrics((network(batch.inputs).float(), lists)))
    return found.result()


def popularity(preparation: Preparation, rows: Iterable[Tensor], labels: int) -> dict[str, float]:
    """The measures of saying the most frequent labels of the training rows to every row.

    Args:
        preparation: The run's.
        rows: Lists of labels (R, L) in batches.
        labels: How many labels the rows have, known and unknown.
    """
    found = Measures(preparation, labels)
    scores = torch.tensor(preparation.counts, dtype=torch.float32)
    for lists in rows:
        found.update(scores.expand(len(lists), -1), lists)
    return found.result()
