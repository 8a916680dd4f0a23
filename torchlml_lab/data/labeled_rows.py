"""Samples with features or texts and named labels, as returned by all readers of labeled data.

This module also parses the labels in table cells and replaces texts with embeddings from an encoder.
"""

import ast
import hashlib
import re
import zipfile
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.files import read_content, replacing, shown

Matrix = Any
"""A scipy CSR array. scipy has no type annotations."""
_SEPARATORS = (",", ";", "|", "\t")
_FLAGS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
_LIST = re.compile(r"\[.*\]", re.DOTALL)
_LISTED = 6  # the maximum number of columns to list in a message


@dataclass(frozen=True)
class LabeledRows:
    """The samples in a file: numbers, texts or both, and the labels of each sample."""

    features: Matrix
    """CSR float32 (rows, features), possibly without columns. Missing numbers are NaN."""
    labels: Matrix
    """CSR int8 (rows, labels): 1 where a sample has a label."""
    names: list[str]
    """The distinct names of the labels."""
    texts: list[str] | None = None
    columns: tuple[str, ...] | None = None
    """The names of the features, or None if the features have no names."""

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """int64 (rows,): the number of labels of each sample."""
        return np.diff(self.labels.indptr).astype(np.int64)

    def take(self, rows: npt.NDArray[Any]) -> "LabeledRows":
        """Select samples by index or by a boolean mask."""
        chosen = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        texts = None if self.texts is None else [self.texts[row] for row in chosen]
        return replace(self, features=self.features[chosen], labels=self.labels[chosen], texts=texts)

    def with_labels(self, names: Sequence[str]) -> "LabeledRows":
        """Reorder the labels to match `names`. Labels that are not in `names` come last.

        Args:
            names: The labels of a model, in the order of its outputs.

        Returns:
            The samples. Their `names` are the given names followed by all other names.
        """
        place = {name: number for number, name in enumerate(names)}
        unknown = [name for name in self.names if name not in place]
        every = [*names, *unknown]
        place |= {name: len(names) + number for number, name in enumerate(unknown)}
        to = np.array([place[name] for name in self.names], dtype=np.int32)
        columns = to[self.labels.indices] if len(self.names) else self.labels.indices
        labels = sparse.csr_array(
            (self.labels.data, columns, self.labels.indptr), shape=(len(self), len(every))
        )
        labels.sort_indices()
        return replace(self, labels=labels, names=every)


@dataclass(frozen=True)
class Columns:
    """The roles of the columns in a table of samples."""

    texts: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    """If neither `texts` nor `numbers` is given, columns that contain only numbers become `numbers`, and all
    other columns become `texts`."""
    labels: tuple[str, ...] = ()
    """One column with all labels of a sample, or a column of 0s and 1s for each label. An empty tuple means
    that label columns are detected automatically, or that the file has no labels."""
    separator: str | None = None
    """The separator between labels in a cell. By default, the most common of `, ; |` and tab is used. It is
    None if each label has its own column."""

    def __str__(self) -> str:
        parts = [("texts", self.texts), ("numbers", self.numbers)]
        said = [f"{what} from {', '.join(f'`{name}`' for name in names)}" for what, names in parts if names]
        if len(self.labels) == 1:
            said.append(f"labels from `{self.labels[0]}`, separated by {self.separator!r}")
        elif self.labels:
            said.append(f"{len(self.labels)} labels, each in a column of 0s and 1s: {listed(self.labels)}")
        return ", ".join(said)


class Encoder:
    """A sentence encoder that replaces the texts of samples with embeddings.

    Args:
        name: The directory or the name of a sentence-transformers model.
        cache: A file written by `save`. It is ignored if it is missing or was written for another model.
    """

    def __init__(self, name: str, cache: Path | None = None) -> None:
        self.name = name
        self.known: dict[bytes, npt.NDArray[np.float32]] = {}
        if cache is not None and cache.exists():
            self._load(cache)

    def encode(self, rows: LabeledRows) -> LabeledRows:
        """Replace the texts of samples with embeddings, which are placed before the existing features.

        Texts that were encoded before are not encoded again. Samples without texts raise `BadInput`.
        """
        if rows.texts is None:
            raise BadInput("`--encoder` needs texts, but the samples have none.")
        keys = [hashlib.sha256(text.encode()).digest() for text in rows.texts]
        new = {key: text for key, text in zip(keys, rows.texts, strict=True) if key not in self.known}
        if new:
            model = _encoder(self.name)
            found = model.encode([*new.values()], normalize_embeddings=True, show_progress_bar=False)
            self.known.update(zip(new, np.asarray(found, dtype=np.float32), strict=True))
        vectors = sparse.csr_array(
            np.array([self.known[key] for key in keys]).reshape(len(keys), -1 if keys else 0)
        )
        features = sparse.csr_array(sparse.hstack([vectors, rows.features], format="csr"), dtype=np.float32)
        named = tuple(f"embedding {place}" for place in range(vectors.shape[1]))
        return replace(rows, features=features, texts=None, columns=(*named, *(rows.columns or ())))

    def save(self, path: Path) -> None:
        """Write all embeddings to a file that an `Encoder` of the same model can use as its `cache`."""
        keys = np.frombuffer(b"".join(self.known), dtype=np.uint8).reshape(len(self.known), -1)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, name=np.array(self.name), keys=keys, vectors=np.array([*self.known.values()]))

    def _load(self, path: Path) -> None:
        try:
            # Open the file here, because numpy does not close a damaged file.
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                keys, vectors = stored["keys"], stored["vectors"]
                if str(stored["name"]) == self.name:
                    self.known = {key.tobytes(): row for key, row in zip(keys, vectors, strict=True)}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            said = "is damaged. Delete it to compute the embeddings again"
            raise BadInput(f"`{path}` {said}.") from error


@lru_cache(maxsize=1)
def _encoder(name: str) -> Any:
    """Load a sentence-transformers model."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise BadInput(
            "`--encoder` needs the package `sentence-transformers`. Run `pip install 'torchlml[encoder]'`."
        ) from error
    try:
        return SentenceTransformer(name, device="cpu")
    except Exception as error:  # the package raises errors from several dependencies
        raise BadInput(
            "`--encoder` must be the directory or the name of a sentence-transformers model, but "
            f"`{name}` cannot be loaded: {' '.join(str(error).split())[:200].rstrip('.')}."
        ) from error


def label_order(names: Collection[str]) -> list[str]:
    """Sort distinct label names: by number if all are numbers, otherwise alphabetically."""
    numbers = all(name.isascii() and name.isdigit() for name in names)
    return sorted(names, key=(lambda name: (int(name), name)) if numbers else None)


class LabelLists:
    """Collects the labels of samples, and stores them compactly as integers."""

    def __init__(self) -> None:
        self._place: dict[str, int] = {}
        self._starts, self._columns = array("q", [0]), array("i")

    def add(self, lists: Iterable[Sequence[str]]) -> None:
        """Add the labels of more samples. Duplicates within a sample are ignored."""
        place = self._place
        for row in lists:
            self._columns.extend(dict.fromkeys(place.setdefault(name, len(place)) for name in row))
            self._starts.append(len(self._columns))

    def matrix(self) -> tuple[Matrix, list[str]]:
        """Return a matrix like `LabeledRows.labels`, and the sorted names of its columns."""
        names = label_order(self._place)
        to = np.empty(len(names), dtype=np.int32)
        to[[self._place[name] for name in names]] = np.arange(len(names), dtype=np.int32)
        found = to[np.array(self._columns, dtype=np.int32)]
        ones = np.ones(len(found), np.int8)
        shape = (len(self._starts) - 1, len(names))
        starts = np.array(self._starts, dtype=np.int32 if len(found) < 2**31 else np.int64)
        matrix = sparse.csr_array((ones, found, starts), shape=shape)
        matrix.sort_indices()
        return matrix, names


def label_matrix(lists: Iterable[Sequence[str]]) -> tuple[Matrix, list[str]]:
    """Convert lists of label names to a matrix and the names of its columns, using `LabelLists`."""
    found = LabelLists()
    found.add(lists)
    return found.matrix()


def stacked(blocks: list[Matrix], columns: int) -> Matrix:
    """Stack the rows of CSR matrices into one matrix with the given number of columns.

    The list is emptied block by block, because two copies of a large matrix may not fit in memory.
    """
    rows, entries = sum(block.shape[0] for block in blocks), sum(block.nnz for block in blocks)
    index = np.int32 if max(entries, columns) <= np.iinfo(np.int32).max else np.int64
    indices, starts = np.empty(entries, dtype=index), np.zeros(rows + 1, dtype=index)
    data = np.empty(entries, dtype=blocks[0].dtype if blocks else np.float32)
    blocks.reverse()
    row = entry = 0
    while blocks:
        block = blocks.pop()
        row_end, entry_end = row + block.shape[0], entry + block.nnz
        indices[entry:entry_end], data[entry:entry_end] = block.indices, block.data
        starts[row + 1 : row_end + 1] = block.indptr[1:]
        starts[row + 1 : row_end + 1] += index(entry)
        row, entry = row_end, entry_end
    return sparse.csr_array((data, indices, starts), shape=(rows, columns))


def rename(rows: LabeledRows, path: Path | None, option: str) -> LabeledRows:
    """Replace label numbers with names from a file. Line i, counting from 0, contains the name of label i.

    Args:
        rows: The samples.
        path: The file with one name per line. None keeps the numbers.
        option: The command-line option that gave the path, for error messages.

    Returns:
        The samples with names. A label without a name, or a duplicate name, raises `BadInput`.
    """
    if path is None:
        return rows
    names = [name.strip() for name in read_content(path, option).decode().removesuffix("\n").split("\n")]
    line_of: dict[str, int] = {}
    for line, name in enumerate(names, 1):
        if not name or name in line_of:
            said = f"the name `{name}` is also on line {line_of[name]}" if name else "the name is empty"
            raise BadInput(f"`{path}`, line {line}: {said}, but label names must be unique and not empty.")
        line_of[name] = line
    for label in rows.names:
        if not (label.isascii() and label.isdigit() and int(label) < len(names)):
            raise BadInput(
                f"`{option}` must contain a name for every label, but `{path}` contains {len(names)} names, "
                f"for labels 0 to {len(names) - 1}, and a sample has the label `{label}`."
            )
    return replace(rows, names=[names[int(label)] for label in rows.names])


def parse_flag(cell: Any) -> bool | None:
    """Parse a cell that indicates whether a sample has a label. Return None for any other content."""
    return _FLAGS.get(str(cell).strip().lower())


def split_labels(cells: Sequence[Any], separator: str) -> Iterator[list[str]]:
    """Yield the labels of each cell.

        >>> list(split_labels(["x; y", "", None, ["z", None]], ";"))
        [['x', 'y'], [], [], ['z']]
        >>> list(split_labels(["['x', 'y']", "[]"], ","))
        [['x', 'y'], []]

    Args:
        cells: Strings, or lists as in Parquet and JSON files. If all strings are Python list literals, they
            are parsed.
        separator: The string between two labels.

    Yields:
        The names without surrounding spaces. Missing and empty names are dropped.
    """
    for cell in _parsed_lists(cells) or cells:
        parts = cell if isinstance(cell, list) else [cell] if is_missing(cell) else str(cell).split(separator)
        yield [name for part in parts if not is_missing(part) and (name := str(part).strip())]


def _parsed_lists(cells: Sequence[Any]) -> list[Any] | None:
    """Parse cells that are all empty or list literals such as `['a', 'b']`. Return None for other cells."""
    texts = (cell.strip() for cell in cells if isinstance(cell, str) and cell.strip())
    first = next(texts, None)
    if first is None or not all(map(_LIST.fullmatch, chain([first], texts))):
        return None
    try:
        return [
            ast.literal_eval(cell.strip()) if isinstance(cell, str) and cell.strip() else cell
            for cell in cells
        ]
    except (ValueError, SyntaxError):
        return None


def usual_separator(cells: Sequence[Any]) -> str:
    """Return the separator that occurs in the most cells, or a comma if no separator occurs."""
    return max(_SEPARATORS, key=lambda mark: sum(isinstance(cell, str) and mark in cell for cell in cells))


def is_missing(cell: Any) -> bool:
    """Whether a cell is null or NaN."""
    return cell is None or bool(cell != cell)


def listed(names: Iterable[str]) -> str:
    """Format the first few column names for a message."""
    every = [f"`{shown(name)}`" for name in names]
    more = len(every) - _LISTED
    return ", ".join(every) if more <= 0 else f"{', '.join(every[:_LISTED])} and {more} more"
