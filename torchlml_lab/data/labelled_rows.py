"""Rows with features or texts and labels that have names: what every reader of labelled data gives."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.files import read_content

Matrix = Any
"""A scipy CSR array; scipy has no types."""


@dataclass(frozen=True)
class LabelledRows:
    """Rows of a file: numbers, texts or both, and the labels of each."""

    features: Matrix
    """CSR float32 (rows, features), possibly of no columns; NaN for a number that is not there."""
    labels: Matrix
    """CSR int8 (rows, labels): 1 for every label that a row has."""
    names: list[str]
    """The names of the labels, each once."""
    texts: list[str] | None = None
    columns: tuple[str, ...] | None = None
    """The names of the features; None where they have only numbers."""

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """How many labels each row has."""
        return np.diff(self.labels.indptr).astype(np.int64)

    def take(self, rows: npt.NDArray[Any]) -> "LabelledRows":
        """Some of the rows, by their numbers or a bool for each."""
        chosen = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        texts = None if self.texts is None else [self.texts[row] for row in chosen]
        return replace(self, features=self.features[chosen], labels=self.labels[chosen], texts=texts)

    def with_labels(self, names: Sequence[str]) -> "LabelledRows":
        """The same rows with the labels numbered by other names; those that are not among them come after.

        Args:
            names: The labels that a model knows, in its order.

        Returns:
            The rows; `names` are those given and then the unknown ones.
        """
        place = {name: number for number, name in enumerate(names)}
        unknown = [name for name in self.names if name not in place]
        every = [*names, *unknown]
        place |= {name: len(names) + number for number, name in enumerate(unknown)}
        to = np.array([place[name] for name in self.names], dtype=np.int64)
        columns = to[self.labels.indices] if len(self.names) else self.labels.indices
        labels = sparse.csr_array(
            (self.labels.data, columns, self.labels.indptr), shape=(len(self), len(every))
        )
        labels.sort_indices()
        return replace(self, labels=labels, names=every)


def label_matrix(lists: Sequence[Sequence[str]]) -> tuple[Matrix, list[str]]:
    """Lists of label names as a matrix; numbers are in numerical order, other names in alphabetical.

    Args:
        lists: The labels of each row; one that comes twice counts once.

    Returns:
        The matrix of `LabelledRows.labels`, and the names of its columns.
    """
    first: dict[str, int] = {}
    starts, columns = [0], list[int]()
    for row in lists:
        columns += dict.fromkeys(first.setdefault(name, len(first)) for name in row)
        starts.append(len(columns))
    numbers = all(name.isascii() and name.isdigit() for name in first)
    names = sorted(first, key=(lambda name: (int(name), name)) if numbers else None)
    place = np.empty(len(names), dtype=np.int64)
    place[[first[name] for name in names]] = np.arange(len(names))
    found = place[np.array(columns, dtype=np.int64)] if columns else np.empty(0, np.int64)
    ones = np.ones(len(found), np.int8)
    matrix = sparse.csr_array((ones, found, np.array(starts)), shape=(len(lists), len(names)))
    matrix.sort_indices()
    return matrix, names


def rename(rows: LabelledRows, path: Path | None, option: str) -> LabelledRows:
    """Give labels that are numbers the names of a file: line i, from 0 on, is the name of label i.

    Args:
        rows: What was read.
        path: The file of names, a name per line; None leaves the numbers.
        option: The option that named it, for the sentences.

    Returns:
        The rows with names. A label beyond the file, or a name that comes twice, raises `BadInput`.
    """
    if path is None:
        return rows
    names = [name.strip() for name in read_content(path, option).decode().removesuffix("\n").split("\n")]
    line_of: dict[str, int] = {}
    for line, name in enumerate(names, 1):
        if not name or name in line_of:
            said = f"the name `{name}` is also in line {line_of[name]}" if name else "there is no name"
            raise BadInput(f"`{path}`, line {line}: {said}, but every label needs a name of its own.")
        line_of[name] = line
    for label in rows.names:
        if not (label.isascii() and label.isdigit() and int(label) < len(names)):
            raise BadInput(
                f"`{option}` names `{path}`, which has {len(names)} names, for labels from 0 to "
                f"{len(names) - 1}, but there is a label `{label}`."
            )
    return replace(rows, names=[names[int(label)] for label in rows.names])
