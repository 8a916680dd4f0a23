"""The rows of a run: read, checked, and split into what is trained on, chosen by and tested on."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.labelled_files import read_labelled
from torchlml_lab.data.labelled_rows import LabelledRows, Matrix
from torchlml_lab.data.tables import Columns
from torchlml_lab.multilabel.losses import PADDING
from torchlml_lab.multilabel.settings import MultilabelSettings

FEWEST = 10  # rows with labels that something can be learned from
SPLIT_SEED = 1234  # the same rows are set aside for every seed


class Files(NamedTuple):
    """What was read, with all labels that the files have."""

    train: LabelledRows
    valid: LabelledRows | None
    test: LabelledRows | None
    columns: Columns | None
    notes: list[str]


class Data(NamedTuple):
    """The rows of a run; the labels of all parts begin with those of the training file."""

    training: LabelledRows
    validation: LabelledRows
    test: LabelledRows | None
    columns: Columns | None
    notes: list[str]
    """What a person should know about the files, in sentences."""


def read(settings: MultilabelSettings) -> Data:
    """The rows to train on, to choose by and to test on; what cannot be used raises `BadInput`."""
    return split(settings, read_files(settings))


def split(settings: MultilabelSettings, files: Files) -> Data:
    """The rows of a run, with those for validation set aside and only the labels that are kept."""
    rows = replace(files.train, labels=kept_labels(files.train.labels, settings.keep, settings.seed))
    training, validation = set_aside(rows) if files.valid is None else (rows, files.valid)
    return Data(training, validation, files.test, files.columns, files.notes)


def read_files(settings: MultilabelSettings) -> Files:
    """Read all files of a run; what cannot be used raises `BadInput`."""
    assert settings.train is not None
    rows, columns = _read(
        settings, "train", Columns(settings.texts, settings.numbers, settings.labels, settings.separator)
    )
    notes: list[str] = []
    if len(rows.names) < 2:
        named = f"the label `{rows.names[0]}` alone" if rows.names else "no label"
        raise BadInput(f"`--train` names `{settings.train}`, which has {named}: at least two are needed.")
    rows = _labelled_only(rows, settings.train, notes)
    bare = int(_without_inputs(rows).sum())
    if bare:
        notes.append(
            f"`{settings.train}`: {bare} of {len(rows)} rows have no feature and no word; only the frequency "
            "of their labels is learned."
        )
    if len(rows) < FEWEST:
        raise BadInput(
            f"`--train` names `{settings.train}`, which has {len(rows)} rows with labels: at least "
            f"{FEWEST} are needed."
        )
    known = columns or Columns()
    others: dict[str, LabelledRows | None] = {}
    for name in ("valid", "test"):
        path = getattr(settings, name)
        if path is None:
            others[name] = None
            continue
        other, its_columns = _read(settings, name, known)
        if (columns is None) != (its_columns is None):
            a_table, no_table = (path, settings.train) if columns is None else (settings.train, path)
            raise BadInput(
                f"`{a_table}` is a table, but `{no_table}` is none: a run needs files of one kind."
            )
        other = aligned(_labelled_only(other, path, notes), rows.names, path, notes)
        if not len(other):
            raise BadInput(f"`--{name}` names `{path}`, where no row has a label.")
        others[name] = other
    return Files(rows, others["valid"], others["test"], columns, notes)


def _read(settings: MultilabelSettings, name: str, columns: Columns) -> tuple[LabelledRows, Columns | None]:
    return read_labelled(
        getattr(settings, name),
        f"--{name}",
        columns=columns,
        labels=getattr(settings, f"{name}_labels"),
        label_names=settings.label_names,
    )


def _labelled_only(rows: LabelledRows, path: Path, notes: list[str]) -> LabelledRows:
    """The rows that have labels; how many have none is a note."""
    there = rows.counts > 0
    if not there.all():
        notes.append(f"`{path}`: {(~there).sum()} of {len(rows)} rows have no label and are left out.")
    return rows.take(there)


def _without_inputs(rows: LabelledRows) -> npt.NDArray[np.bool_]:
    """Which rows have neither a feature nor a text; a table's number is a feature, whatever it is."""
    if rows.columns:
        return np.isnan(rows.features.toarray()).all(axis=1) & _blank(rows)
    return (np.diff(rows.features.indptr) == 0) & _blank(rows)


def _blank(rows: LabelledRows) -> npt.NDArray[np.bool_]:
    if rows.texts is None:
        return np.ones(len(rows), dtype=bool)
    return np.array([not text.strip() for text in rows.texts], dtype=bool)


def aligned(rows: LabelledRows, names: Sequence[str], path: Path, notes: list[str]) -> LabelledRows:
    """The rows with the labels of the training data first; how many others there are is a note."""
    rows = rows.with_labels(names)
    more = len(rows.names) - len(names)
    if more:
        one = more == 1
        notes.append(
            f"`{path}`: {more} label{'' if one else 's'} {'is' if one else 'are'} in no training row (`"
            f"{rows.names[len(names)]}`{'' if one else ' is the first'}) and cannot be predicted; every row "
            "that has one counts it as missed."
        )
    return rows


def set_aside(rows: LabelledRows) -> tuple[LabelledRows, LabelledRows]:
    """A tenth of the rows for validation, at least 5 and at most 5000, and before it the rest."""
    order = np.random.default_rng(SPLIT_SEED).permutation(len(rows))
    count = min(5000, max(5, len(rows) // 10))
    return rows.take(np.sort(order[count:])), rows.take(np.sort(order[:count]))


def kept_labels(labels: Matrix, keep: float | Literal["one"], seed: int) -> Matrix:
    """Only a part of each row's labels, drawn anew for every seed.

    Args:
        labels: CSR, at least one in each row.
        keep: The chance of each label to be kept; of each row one more label stays, whatever its chance.
        seed: The choice follows from it alone.

    Returns:
        The labels that are kept.
    """
    if keep == 1:
        return labels
    drawn = np.random.default_rng(seed).random(len(labels.indices))
    least = np.minimum.reduceat(drawn, labels.indptr[:-1])
    stays = drawn == np.repeat(least, np.diff(labels.indptr))
    if keep != "one":
        stays |= drawn < keep
    thinner = labels.copy()
    thinner.data = stays.astype(np.int8)
    thinner.eliminate_zeros()
    return thinner


class Inputs(NamedTuple):
    """Sparse rows: row i has `values[starts[i]:starts[i + 1]]` in the columns of the same places."""

    columns: Tensor
    values: Tensor
    starts: Tensor


class Batch(NamedTuple):
    """Rows of a batch: their labels, and their inputs."""

    labels: Tensor
    """int64 (R, L), filled up with `PADDING`."""
    inputs: Inputs


class Batches(Dataset[Batch]):
    """Inputs and labels as the engine reads them: whole batches.

    Args:
        inputs: CSR float32 (rows, inputs).
        labels: CSR (rows, labels).
    """

    def __init__(self, inputs: Matrix, labels: Matrix) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return int(self.inputs.shape[0])

    def __getitem__(self, row: int) -> Batch:
        return self.__getitems__([row])

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        chosen = np.asarray(rows)
        x = self.inputs[chosen]
        inputs = Inputs(_long(x.indices), torch.from_numpy(x.data), _long(x.indptr))
        return Batch(label_lists(self.labels[chosen]), inputs)


def label_lists(labels: Matrix) -> Tensor:
    """The labels of each row as int64 (R, L), L at least 1, filled up with `PADDING`."""
    counts = np.diff(labels.indptr)
    lists = np.full((len(counts), max(1, counts.max(initial=0))), PADDING, dtype=np.int64)
    lists[np.arange(lists.shape[1]) < counts[:, None]] = labels.indices
    return torch.from_numpy(lists)


def _long(values: Any) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))
