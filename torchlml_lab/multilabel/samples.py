"""The samples of a run: read, validated, and split into training, validation and test."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.labeled_rows import Encoder, LabeledRows, Matrix
from torchlml_lab.data.several_files import in_words, is_table_of, read_samples
from torchlml_lab.data.tables import Columns
from torchlml_lab.multilabel import preparation
from torchlml_lab.multilabel.losses import PADDING
from torchlml_lab.multilabel.preparation import LaterInputs
from torchlml_lab.multilabel.settings import MultilabelSettings

FEWEST = 10  # labeled samples needed for training
EMBEDDINGS = "embeddings.npz"  # in the run directory
SPLIT_SEED = 1234  # fixed, so that every seed has the same validation samples


class Files(NamedTuple):
    """The files of a run, with all their labels."""

    train: LabeledRows
    valid: LabeledRows | None
    test: LabeledRows | None
    columns: Columns | None
    notes: list[str]
    encoder: Encoder | None = None


class Data(NamedTuple):
    """The splits of a run; their label lists start with the labels of the training file."""

    training: LabeledRows
    validation: LabeledRows
    test: LabeledRows | None
    columns: Columns | None
    notes: list[str]
    """Sentences about the files that the user should see."""
    encoder: Encoder | None = None
    """The encoder that replaced the texts with embeddings, if there is one."""


def read(settings: MultilabelSettings) -> Data:
    """Read the training, validation and test samples; raise `BadInput` if a file cannot be used."""
    return split(settings, read_files(settings))


def split(settings: MultilabelSettings, files: Files) -> Data:
    """Hold out validation samples if there is no validation file, and apply `keep` to the training labels."""
    rows = replace(files.train, labels=kept_labels(files.train.labels, settings.keep, settings.seed))
    training, validation = set_aside(rows) if files.valid is None else (rows, files.valid)
    return Data(training, validation, files.test, files.columns, files.notes, files.encoder)


def read_files(settings: MultilabelSettings) -> Files:
    """Read all files of a run; raise `BadInput` if one cannot be used."""
    assert settings.train is not None
    source = in_words(settings.train)
    known = Columns(settings.texts, settings.numbers, settings.labels, settings.separator)
    earlier = None if settings.continue_from is None else preparation.stored(settings.continue_from)
    if earlier is not None:
        if known != Columns():
            raise BadInput(
                "The columns are those of `--continue-from`: omit `--labels`, `--texts` and `--numbers`."
            )
        if is_table_of(settings.train, "--train") != (earlier.columns is not None):
            format_ = "sparse features" if earlier.columns is None else "a table"
            raise BadInput(f"`--train` must be {format_}, as in `{settings.continue_from}`.")
        known = earlier.columns or known
    rows, columns = _read(settings, "train", known)
    if earlier is not None:
        rows = rows.with_labels(earlier.labels)
    notes: list[str] = []
    if len(rows.names) < 2:
        named = f"only the label `{rows.names[0]}`" if rows.names else "no labels"
        raise BadInput(f"`--train` must have at least two labels, but `{source}` has {named}.")
    keep = keeps_unlabeled(settings, columns)
    rows = _checked_labels(rows, source, keep, notes)
    bare = int(_without_inputs(rows).sum())
    if bare:
        notes.append(
            f"`{source}`: {bare} of {len(rows)} samples have no features and no words; only the "
            "frequencies of their labels are learned."
        )
    labeled = int((rows.counts > 0).sum())
    if labeled < FEWEST:
        raise BadInput(
            f"`--train` must have at least {FEWEST} samples with labels, but `{source}` has {labeled}."
        )
    known = columns or Columns()
    others: dict[str, LabeledRows | None] = {}
    for name in ("valid", "test"):
        if getattr(settings, name) is None:
            others[name] = None
            continue
        its_source = in_words(getattr(settings, name))
        other, its_columns = _read(settings, name, known)
        if (columns is None) != (its_columns is None):
            a_table, no_table = (its_source, source) if columns is None else (source, its_source)
            raise BadInput(
                f"All files of a run must have the same format, but `{a_table}` is a table and "
                f"`{no_table}` is not."
            )
        other = aligned(_checked_labels(other, its_source, keep, notes), rows.names, its_source, notes)
        if not other.counts.any():
            raise BadInput(f"`--{name}` must have samples with labels, but `{its_source}` has none.")
        others[name] = other
    files = Files(rows, others["valid"], others["test"], columns, notes)
    return files if settings.encoder is None else _encoded(files, settings)


def _encoded(files: Files, settings: MultilabelSettings) -> Files:
    """Replace all texts with embeddings. Those stored in an existing run directory are reused."""
    assert settings.encoder is not None
    encoder = Encoder(settings.encoder, (settings.resume or settings.out) / EMBEDDINGS)
    train, valid, test = (
        None if rows is None else encoder.encode(rows) for rows in (files.train, files.valid, files.test)
    )
    assert train is not None
    return files._replace(train=train, valid=valid, test=test, encoder=encoder)


def _read(settings: MultilabelSettings, name: str, columns: Columns) -> tuple[LabeledRows, Columns | None]:
    return read_samples(
        getattr(settings, name),
        f"--{name}",
        columns=columns,
        labels=getattr(settings, f"{name}_labels"),
        label_names=settings.label_names,
    )


def keeps_unlabeled(settings: MultilabelSettings, columns: Columns | None) -> bool:
    """Whether samples without labels are examples that no label applies to.

    A row of zeros in columns of 0 and 1 means this. In other files, the labels may simply be missing.
    """
    if settings.unlabeled == "auto":
        return columns is not None and len(columns.labels) > 1
    return settings.unlabeled == "keep"


def _checked_labels(rows: LabeledRows, source: str, keep: bool, notes: list[str]) -> LabeledRows:
    """Keep or drop the samples without labels, and add a note if there are any."""
    there = rows.counts > 0
    if there.all():
        return rows
    some = f"`{source}`: {(~there).sum()} of {len(rows)} samples have no labels"
    if keep:
        notes.append(f"{some} and are kept as examples that no label applies to.")
        return rows
    notes.append(f"{some} and were skipped. `--unlabeled keep` trains on them.")
    return rows.take(there)


def _without_inputs(rows: LabeledRows) -> npt.NDArray[np.bool_]:
    """Return a mask of the samples with neither features nor text. Numbers in a table are features."""
    if rows.columns:
        return np.isnan(rows.features.toarray()).all(axis=1) & _blank(rows)
    return (np.diff(rows.features.indptr) == 0) & _blank(rows)


def _blank(rows: LabeledRows) -> npt.NDArray[np.bool_]:
    if rows.texts is None:
        return np.ones(len(rows), dtype=bool)
    return np.array([not text.strip() for text in rows.texts], dtype=bool)


def aligned(rows: LabeledRows, names: Sequence[str], source: str, notes: list[str]) -> LabeledRows:
    """Put the labels of the training data first, and add a note if there are others."""
    rows = rows.with_labels(names)
    more = len(rows.names) - len(names)
    if more:
        one = more == 1
        notes.append(
            f"`{source}`: {more} label{'' if one else 's'} {'does' if one else 'do'} not occur in the "
            f"training data ({'' if one else 'the first is '}`{rows.names[len(names)]}`) and cannot be "
            f"predicted; {'it counts' if one else 'they count'} as false negatives."
        )
    return rows


def set_aside(rows: LabeledRows) -> tuple[LabeledRows, LabeledRows]:
    """Split into training and validation.

    The validation part is a tenth of the samples, but at least 200 if that is at most a third of them, and at
    most 5000.
    Samples with and without labels are split in the same proportion.
    """
    order = np.random.default_rng(SPLIT_SEED).permutation(len(rows))
    count = min(5000, max(5, len(rows) // 10, min(200, len(rows) // 3)))
    there = rows.counts[order] > 0
    labeled, others = order[there], order[~there]
    if len(others):
        first = max(1, round(count * len(labeled) / len(rows)))
        rest = count - first
        order = np.concatenate([labeled[:first], others[:rest], labeled[first:], others[rest:]])
    return rows.take(np.sort(order[count:])), rows.take(np.sort(order[:count]))


def kept_labels(labels: Matrix, keep: float | Literal["one"], seed: int) -> Matrix:
    """Keep a random subset of each row's labels, resampled for every seed.

    Args:
        labels: CSR. Rows without labels are not changed.
        keep: The probability that a label is kept. At least one label of each row is always kept; with `one`,
            exactly one is.
        seed: The seed of the subset.

    Returns:
        The kept labels.
    """
    if keep == 1:
        return labels
    drawn = np.random.default_rng(seed).random(len(labels.indices))
    counts = np.diff(labels.indptr)
    least = np.minimum.reduceat(drawn, labels.indptr[:-1][counts > 0])
    stays = drawn == np.repeat(least, counts[counts > 0])
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
        inputs: CSR float32 (rows, inputs), or an object that computes some rows of it.
        labels: CSR (rows, labels).
    """

    def __init__(self, inputs: Matrix | LaterInputs, labels: Matrix) -> None:
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
    """Return the labels of each row as int64 (R, L), L at least 1, padded with `PADDING`."""
    counts = np.diff(labels.indptr)
    lists = np.full((len(counts), max(1, counts.max(initial=0))), PADDING, dtype=np.int64)
    lists[np.arange(lists.shape[1]) < counts[:, None]] = labels.indices
    return torch.from_numpy(lists)


def _long(values: Any) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))
