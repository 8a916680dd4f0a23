"""Reading, validation and splitting of the samples of a run, and their conversion to batches."""

import glob
import hashlib
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
from torchlml_lab.data.labeled_rows import (
    Columns,
    Encoder,
    LabeledRows,
    Matrix,
    label_order,
    listed,
    rename,
    stacked,
)
from torchlml_lab.data.sparse_files import declared_features, read_csr_pair, read_svmlight
from torchlml_lab.data.tables import column_names, read_table
from torchlml_lab.files import file_kind
from torchlml_lab.multilabel import preparation
from torchlml_lab.multilabel.losses import PADDING
from torchlml_lab.multilabel.preparation import LaterInputs
from torchlml_lab.multilabel.settings import MultilabelSettings

FEWEST = 10  # the minimum number of labeled samples in `--train`
EMBEDDINGS = "embeddings.npz"  # in the run directory
TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
_HASHED = 2**20  # the number of array entries that are hashed at once
SPLIT_SEED = 1234  # independent of `--seed`, so that all runs have the same validation samples


Paths = Path | tuple[Path, ...]
"""The value of an option: files, directories or glob patterns."""


def is_table(path: Path) -> bool:
    """Whether a file is a table, according to its name."""
    return file_kind(path) in TABLES


def files_of(given: Paths, option: str) -> list[Path]:
    """List the files that are given as the value of an option.

    Args:
        given: Files, directories (all files in them except hidden ones), and patterns like `part-*.csv`.
        option: The name of the option, for error messages.

    Returns:
        At least one file. The files of a directory or a pattern are in alphabetical order. An empty
        directory, a pattern without a match or a repeated file raises `BadInput`.
    """
    found = list[Path]()
    for path in _all(given):
        if path.is_dir():
            inside = sorted(one for one in path.iterdir() if one.is_file() and not one.name.startswith("."))
            if not inside:
                raise BadInput(f"The directory `{path}` (`{option}`) contains no files.")
        elif path.exists() or not glob.has_magic(str(path)):
            inside = [path]  # a missing file is reported when it is read
        else:
            matches = map(Path, sorted(glob.glob(str(path), recursive=True)))
            inside = [one for one in matches if one.is_file()]
            if not inside:
                raise BadInput(f"`{path}` (`{option}`) matches no files.")
        found += inside
    if not found:
        raise BadInput(f"`{option}` requires at least one file.")
    twice = next((path for place, path in enumerate(found) if path in found[:place]), None)
    if twice is not None:
        raise BadInput(f"`{option}` contains `{twice}` twice.")
    return found


def _all(given: Paths) -> tuple[Path, ...]:
    return given if isinstance(given, tuple) else (given,)


def in_words(given: Paths | None) -> str:
    """Format the value of an option for a message.

    >>> in_words(Path("a.csv")), in_words((Path("a.csv"), Path("b.csv"), Path("c.csv")))
    ('a.csv', 'a.csv and 2 more')
    """
    if given is None:
        return ""
    first, *more = _all(given) or (Path(),)
    return f"{first} and {len(more)} more" if more else str(first)


def short_name(given: Paths) -> str:
    """Return the name of the first file without its suffixes, to identify the data in a table of results."""
    return _all(given)[0].name.partition(".")[0]


def is_table_of(given: Paths, option: str) -> bool:
    """Whether the files given by an option are tables, according to the name of the first file."""
    return is_table(files_of(given, option)[0])


def read_samples(
    given: Paths,
    option: str,
    *,
    columns: Columns | None = None,
    labels: Paths | None = None,
    label_names: Path | None = None,
    labeled: bool = True,
) -> tuple[LabeledRows, Columns | None]:
    """Read the samples in all files given as the value of an option.

    Args:
        given: The files. All of them must have the same format and the same columns.
        option: The name of the option, for error messages.
        columns: The known roles of the columns of a table. All other roles are detected from the first file.
        labels: If the files are `.npz` files, the files with their sparse labels, in the same order.
        label_names: A file with the names of numbered labels.
        labeled: Whether labels are required.

    Returns:
        The samples in the order of the files and, for tables, the columns. Invalid input raises `BadInput`.
    """
    files = files_of(given, option)
    label_files: Sequence[Path | None] = [None] * len(files)
    if labels is not None:
        label_files = files_of(labels, f"{option}-labels")
        if len(label_files) != len(files):
            raise BadInput(
                f"`{option}-labels` must contain as many files as `{option}` ({len(files)}), but it contains "
                f"{len(label_files)}."
            )
    tables = is_table(files[0])
    if len(files) > 1:
        _check_formats(files, option, columns, labeled)
    # With several files, numbered labels are merged in numerical order before they are named.
    early = label_names if tables or len(files) == 1 else None
    parts = list[LabeledRows]()
    for path, its_labels in zip(files, label_files, strict=True):
        rows, columns = read_labeled(
            path, option, columns=columns, labels=its_labels, label_names=early, labeled=labeled
        )
        parts.append(rows)
    if len(parts) == 1:
        return parts[0], columns
    return rename(_joined(parts), label_names if labeled and not tables else None, "--label-names"), columns


def _check_formats(files: Sequence[Path], option: str, columns: Columns | None, labeled: bool) -> None:
    """Raise `BadInput` if the files differ in their format, their columns or their number of features."""
    first = files[0]
    for path in files[1:]:
        if _format(path) != _format(first):
            raise BadInput(
                f"All `{option}` files must have the same format, but `{first}` is {_format(first)} and "
                f"`{path}` is {_format(path)}."
            )
    known = columns or Columns()
    if is_table(first) and labeled and not (known.labels and (known.texts or known.numbers)):
        usual = column_names(first, option)
        for path in files[1:]:
            names = column_names(path, option)
            if names is not None and usual is not None and set(names) != set(usual):
                missing = [name for name in usual if name not in names]
                more = [name for name in names if name not in usual]
                has, lacks = (first, path) if missing else (path, first)
                raise BadInput(
                    f"All `{option}` files must have the same columns, but `{has}` has "
                    f"{listed(missing or more)}, and `{lacks}` does not."
                )
    if not is_table(first):
        count = declared_features(first, option)
        for path in files[1:]:
            if (other := declared_features(path, option)) != count:
                raise BadInput(
                    f"All `{option}` files must have the same number of features, but `{first}` declares "
                    f"{count or 'no number'} and `{path}` declares {other or 'no number'}."
                )


def _format(path: Path) -> str:
    return "a table" if is_table(path) else "an .npz file" if path.suffix == ".npz" else "svmlight text"


def _joined(parts: list[LabeledRows]) -> LabeledRows:
    """Concatenate samples, with the union of their labels. `parts` is cleared to save memory."""
    names = label_order({name for part in parts for name in part.names})
    width = max(part.features.shape[1] for part in parts)
    texts = None if parts[0].texts is None else [text for part in parts for text in part.texts or ()]
    first = parts[0]
    labels = stacked([part.with_labels(names).labels for part in parts], len(names))
    blocks = [part.features for part in parts]
    parts.clear()
    return replace(first, features=stacked(blocks, width), labels=labels, names=names, texts=texts)


def read_labeled(
    path: Path,
    option: str,
    *,
    columns: Columns | None = None,
    labels: Path | None = None,
    label_names: Path | None = None,
    labeled: bool = True,
) -> tuple[LabeledRows, Columns | None]:
    """Read the samples in a file.

    Args:
        path: The file. `*.csv`, `*.tsv`, `*.jsonl`, `*.ndjson` and `*.parquet` are tables, and `*.npz` are
            sparse features. Any other file is read as svmlight, or as the text format of the extreme
            classification repository. Text files may be gzipped.
        option: The name of the option that contains the path, for error messages.
        columns: The known roles of the columns of a table.
        labels: If the file is an `.npz` file, the file with its sparse labels.
        label_names: A file with the names of numbered labels.
        labeled: Whether labels are required.

    Returns:
        The samples and, for a table, its columns. Invalid input raises `BadInput`.
    """
    if labels is not None and path.suffix != ".npz":
        raise BadInput(f"`{option}-labels` is for `.npz` files, but `{option}` is `{path}`.")
    if is_table(path):
        if label_names is not None:
            raise BadInput(f"`--label-names` is for numbered labels, but `{path}` already has label names.")
        return read_table(path, option, columns or Columns(), labeled)
    if columns is not None and columns != Columns():
        raise BadInput(
            f"`{path}` (`{option}`) must be a table with the required columns, but it is {_format(path)}."
        )
    if path.suffix == ".npz":
        if labeled and labels is None:
            raise BadInput(
                f"`{path}` (`{option}`) has no labels. "
                f"Pass a second `.npz` file with the labels as `{option}-labels`."
            )
        rows = read_csr_pair(path, option, labels, f"{option}-labels")
    else:
        rows = read_svmlight(path, option)
    return rename(rows, label_names if labeled else None, "--label-names"), None


class Files(NamedTuple):
    """The samples that are read from the files of a run, before they are split."""

    train: LabeledRows
    valid: LabeledRows | None
    test: LabeledRows | None
    columns: Columns | None
    notes: list[str]
    encoder: Encoder | None = None


class Data(NamedTuple):
    """The training, validation and test samples of a run. In each set, the labels of `--train` come first."""

    training: LabeledRows
    validation: LabeledRows
    test: LabeledRows | None
    columns: Columns | None
    notes: list[str]
    """Sentences about the files, to be shown to the user."""
    encoder: Encoder | None = None
    """The encoder that replaced the texts with embeddings, if there is one."""


def read(settings: MultilabelSettings) -> Data:
    """Read the training, validation and test samples. Invalid files raise `BadInput`."""
    return split(settings, read_files(settings))


def split(settings: MultilabelSettings, files: Files) -> Data:
    """Apply `--keep` to the labels of `--train` and, without `--valid`, hold out validation samples."""
    rows = replace(files.train, labels=kept_labels(files.train.labels, settings.keep, settings.seed))
    training, validation = set_aside(rows) if files.valid is None else (rows, files.valid)
    return Data(training, validation, files.test, files.columns, files.notes, files.encoder)


def read_files(settings: MultilabelSettings) -> Files:
    """Read all files of a run. Invalid files raise `BadInput`."""
    assert settings.train is not None
    source = in_words(settings.train)
    known = Columns(settings.texts, settings.numbers, settings.labels, settings.separator)
    earlier = None if settings.continue_from is None else preparation.stored(settings.continue_from)
    if earlier is not None:
        if known != Columns():
            raise BadInput(
                "`--continue-from` determines the columns. Omit `--labels`, `--separator`, `--texts` and "
                "`--numbers`."
            )
        if is_table_of(settings.train, "--train") != (earlier.columns is not None):
            format_ = "contain sparse features" if earlier.columns is None else "be a table"
            raise BadInput(f"`--train` must {format_}, as in `{settings.continue_from}`.")
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
            f"`{source}`: {bare} of {len(rows)} samples {'has' if bare == 1 else 'have'} no features and no "
            "words. The model can learn only label frequencies from such samples."
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
    """Replace all texts with embeddings, reusing those that are stored in the run directory."""
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
    """Whether samples without labels are kept, as examples to which no label applies.

    If every label has its own column of 0s and 1s, no label applies to a row of zeros. In other files, an
    empty list of labels may mean that the labels are missing.
    """
    if settings.unlabeled == "auto":
        return columns is not None and len(columns.labels) > 1
    return settings.unlabeled == "keep"


def _checked_labels(rows: LabeledRows, source: str, keep: bool, notes: list[str]) -> LabeledRows:
    """Keep or drop the samples without labels, and add a note if there are any."""
    there = rows.counts > 0
    if there.all():
        return rows
    one = (~there).sum() == 1
    some = f"`{source}`: {(~there).sum()} of {len(rows)} samples {'has' if one else 'have'} no labels"
    if keep:
        examples = "is kept as an example" if one else "are kept as examples"
        notes.append(f"{some} and {examples} to which no label applies.")
        return rows
    skipped = "was skipped" if one else "were skipped"
    notes.append(f"{some} and {skipped}. Use `--unlabeled keep` to include such samples.")
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
    """Put the labels of the training data first. Add a note if the samples have any other labels."""
    rows = rows.with_labels(names)
    more = len(rows.names) - len(names)
    if more:
        one = more == 1
        notes.append(
            f"`{source}`: {more} label{'' if one else 's'} {'does' if one else 'do'} not occur in the "
            f"training data ({'' if one else 'the first is '}`{rows.names[len(names)]}`) and cannot be "
            f"predicted. {'Its' if one else 'Their'} occurrences count as false negatives."
        )
    return rows


def set_aside(rows: LabeledRows) -> tuple[LabeledRows, LabeledRows]:
    """Split samples into a training set and a validation set.

    The validation set is a tenth of the samples, at most 5000. For small data sets, it is larger: 200
    samples, or a third of the samples if that is fewer than 200, but never fewer than 5. Samples with and
    without labels are split in the same proportion.
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


def digest(data: Data) -> str:
    """Return a hash of the training and validation samples, including their order."""
    found = hashlib.sha256("\0".join(data.training.names).encode())
    for rows in (data.training, data.validation):
        labels = rows.labels.sorted_indices()
        indices = (rows.features.indptr, rows.features.indices, labels.indptr, labels.indices)
        for values, kind in (*((one, np.int64) for one in indices), (rows.features.data, np.float32)):
            found.update(len(values).to_bytes(8, "little"))
            for start in range(0, len(values), _HASHED):
                found.update(values[start : start + _HASHED].astype(kind).tobytes())
        for text in rows.texts or ():
            found.update(f"{len(text)} {text}".encode())
    return found.hexdigest()


def kept_labels(labels: Matrix, keep: float | Literal["one"], seed: int) -> Matrix:
    """Keep a random subset of each row's labels.

    Args:
        labels: CSR (rows, labels). Rows without labels are not changed.
        keep: The probability that a label is kept. At least one label of each row is always kept. With `one`,
            exactly one label of each row is kept.
        seed: The seed for the random choice.

    Returns:
        The labels that are kept, CSR (rows, labels).
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
    """Sparse rows. Row i has the values `values[starts[i]:starts[i + 1]]` in the corresponding `columns`."""

    columns: Tensor
    values: Tensor
    starts: Tensor


class Batch(NamedTuple):
    """The labels and inputs of a batch."""

    labels: Tensor
    """int64 (R, L), padded with `PADDING`."""
    inputs: Inputs


class Batches(Dataset[Batch]):
    """A dataset of inputs and labels that returns whole batches.

    Args:
        inputs: CSR float32 (rows, inputs), or an object that computes the selected rows on demand.
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
    """Return the labels of each row as int64 (R, L), padded with `PADDING`. L is at least 1."""
    counts = np.diff(labels.indptr)
    lists = np.full((len(counts), max(1, counts.max(initial=0))), PADDING, dtype=np.int64)
    lists[np.arange(lists.shape[1]) < counts[:, None]] = labels.indices
    return torch.from_numpy(lists)


def _long(values: Any) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))
