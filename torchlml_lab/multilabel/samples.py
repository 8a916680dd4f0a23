"""The samples of a run: read, validated, and split into training, validation and test."""

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
from torchlml_lab.data.labelled_rows import Encoder, LabelledRows, Matrix
from torchlml_lab.data.tables import Columns, is_table
from torchlml_lab.multilabel import preparation
from torchlml_lab.multilabel.losses import PADDING
from torchlml_lab.multilabel.settings import MultilabelSettings

FEWEST = 10  # labeled samples needed for training
EMBEDDINGS = "embeddings.npz"  # in the run directory
SPLIT_SEED = 1234  # fixed, so that every seed has the same validation samples


class Files(NamedTuple):
    """The files of a run, with all their labels."""

    train: LabelledRows
    valid: LabelledRows | None
    test: LabelledRows | None
    columns: Columns | None
    notes: list[str]
    encoder: Encoder | None = None


class Data(NamedTuple):
    """The splits of a run; their label lists start with the labels of the training file."""

    training: LabelledRows
    validation: LabelledRows
    test: LabelledRows | None
    columns: Columns | None
    notes: list[str]
    """Sentences about the files that the user should see."""
    encoder: Encoder | None = None
    """The encoder that has replaced the texts by features, if there is one."""


def read(settings: MultilabelSettings) -> Data:
    """Read the training, validation and test samples; raise `BadInput` if a file cannot be used."""
    return split(settings, read_files(settings))


def split(settings: MultilabelSettings, files: Files) -> Data:
    """Split off validation samples if no file was given, and apply `keep` to the training labels."""
    rows = replace(files.train, labels=kept_labels(files.train.labels, settings.keep, settings.seed))
    training, validation = set_aside(rows) if files.valid is None else (rows, files.valid)
    return Data(training, validation, files.test, files.columns, files.notes, files.encoder)


def read_files(settings: MultilabelSettings) -> Files:
    """Read all files of a run; raise `BadInput` if one cannot be used."""
    assert settings.train is not None
    known = Columns(settings.texts, settings.numbers, settings.labels, settings.separator)
    earlier = None if settings.continue_from is None else preparation.stored(settings.continue_from)
    if earlier is not None:
        if known != Columns():
            raise BadInput(
                "The columns are those of `--continue-from`: omit `--labels`, `--texts` and `--numbers`."
            )
        if is_table(settings.train) != (earlier.columns is not None):
            format_ = "sparse features" if earlier.columns is None else "a table"
            raise BadInput(f"`--train` must be {format_}, as in `{settings.continue_from}`.")
        known = earlier.columns or known
    rows, columns = _read(settings, "train", known)
    if earlier is not None:
        rows = rows.with_labels(earlier.labels)
    notes: list[str] = []
    if len(rows.names) < 2:
        named = f"only the label `{rows.names[0]}`" if rows.names else "no labels"
        raise BadInput(f"`--train` must have at least two labels, but `{settings.train}` has {named}.")
    rows = _labelled_only(rows, settings.train, notes)
    bare = int(_without_inputs(rows).sum())
    if bare:
        notes.append(
            f"`{settings.train}`: {bare} of {len(rows)} samples have no features and no words; only the "
            "frequencies of their labels are learned."
        )
    if len(rows) < FEWEST:
        raise BadInput(
            f"`--train` must have at least {FEWEST} samples with labels, but `{settings.train}` has "
            f"{len(rows)}."
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
                f"All files of a run must have the same format, but `{a_table}` is a table and "
                f"`{no_table}` is not."
            )
        other = aligned(_labelled_only(other, path, notes), rows.names, path, notes)
        if not len(other):
            raise BadInput(f"`--{name}` must have samples with labels, but `{path}` has none.")
        others[name] = other
    files = Files(rows, others["valid"], others["test"], columns, notes)
    return files if settings.encoder is None else _encoded(files, settings)


def _encoded(files: Files, settings: MultilabelSettings) -> Files:
    """Replace all texts by embeddings. Those of a run that exists are read from its directory."""
    assert settings.encoder is not None
    encoder = Encoder(settings.encoder, (settings.resume or settings.out) / EMBEDDINGS)
    train, valid, test = (
        None if rows is None else encoder.encode(rows) for rows in (files.train, files.valid, files.test)
    )
    assert train is not None
    return files._replace(train=train, valid=valid, test=test, encoder=encoder)


def _read(settings: MultilabelSettings, name: str, columns: Columns) -> tuple[LabelledRows, Columns | None]:
    return read_labelled(
        getattr(settings, name),
        f"--{name}",
        columns=columns,
        labels=getattr(settings, f"{name}_labels"),
        label_names=settings.label_names,
    )


def _labelled_only(rows: LabelledRows, path: Path, notes: list[str]) -> LabelledRows:
    """Drop the samples without labels, and add a note if there are any."""
    there = rows.counts > 0
    if not there.all():
        notes.append(f"`{path}`: {(~there).sum()} of {len(rows)} samples have no labels and were skipped.")
    return rows.take(there)


def _without_inputs(rows: LabelledRows) -> npt.NDArray[np.bool_]:
    """A mask of the samples with neither features nor text; any number in a table counts as a feature."""
    if rows.columns:
        return np.isnan(rows.features.toarray()).all(axis=1) & _blank(rows)
    return (np.diff(rows.features.indptr) == 0) & _blank(rows)


def _blank(rows: LabelledRows) -> npt.NDArray[np.bool_]:
    if rows.texts is None:
        return np.ones(len(rows), dtype=bool)
    return np.array([not text.strip() for text in rows.texts], dtype=bool)


def aligned(rows: LabelledRows, names: Sequence[str], path: Path, notes: list[str]) -> LabelledRows:
    """Put the labels of the training data first, and add a note if there are others."""
    rows = rows.with_labels(names)
    more = len(rows.names) - len(names)
    if more:
        one = more == 1
        notes.append(
            f"`{path}`: {more} label{'' if one else 's'} {'does' if one else 'do'} not occur in the training "
            f"data ({'' if one else 'the first is '}`{rows.names[len(names)]}`) and cannot be predicted; "
            f"{'it counts' if one else 'they count'} as false negatives."
        )
    return rows


def set_aside(rows: LabelledRows) -> tuple[LabelledRows, LabelledRows]:
    """Split into training and validation.

    A tenth is for validation, but at least 200 samples if these are at most a third, and at most 5000.
    """
    order = np.random.default_rng(SPLIT_SEED).permutation(len(rows))
    count = min(5000, max(5, len(rows) // 10, min(200, len(rows) // 3)))
    return rows.take(np.sort(order[count:])), rows.take(np.sort(order[:count]))


def kept_labels(labels: Matrix, keep: float | Literal["one"], seed: int) -> Matrix:
    """Keep a random subset of each row's labels, resampled for every seed.

    Args:
        labels: CSR, with at least one label in each row.
        keep: The probability that a label is kept. At least one label of each row always is; with `one`,
            exactly one.
        seed: The seed of the subset.

    Returns:
        The kept labels.
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
    """Sparse rows: row i has `values[starts[i]:starts[i + 1]]` in the corresponding `columns`."""

    columns: Tensor
    values: Tensor
    starts: Tensor


class Batch(NamedTuple):
    """The labels and inputs of a batch."""

    labels: Tensor
    """int64 (R, L), padded with `PADDING`."""
    inputs: Inputs


class Batches(Dataset[Batch]):
    """Inputs and labels as a dataset that returns whole batches.

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
    """The labels of each row as int64 (R, L), L at least 1, padded with `PADDING`."""
    counts = np.diff(labels.indptr)
    lists = np.full((len(counts), max(1, counts.max(initial=0))), PADDING, dtype=np.int64)
    lists[np.arange(lists.shape[1]) < counts[:, None]] = labels.indices
    return torch.from_numpy(lists)


def _long(values: Any) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))
