"""The supported forms of `y`, which are used for training labels and for predictions."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import sparse
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, column_or_1d

Form = Literal["indicator", "sparse", "lists", "single"]
Matrix = Any  # a scipy CSR array; scipy has no type annotations
NO_LABELS = "`y` must contain labels, but no sample has any."


@dataclass(frozen=True)
class LabelForm:
    """The form of the training labels.

    `indicator` and `sparse` are dense and sparse matrices with a column for each label, `lists` is a list of
    names per sample, and `single` is one class per sample.
    """

    kind: Form
    classes: Any
    """(n,): the names of the labels; for a matrix, its column indices."""

    def read(self, labels: Any) -> Matrix:
        """Convert labels in this form to a CSR matrix, omitting names that are not in `classes`."""
        labels = _as_list(labels)
        if self.kind in ("indicator", "sparse"):
            matrix = _matrix(labels)
            if matrix.shape[1] != len(self.classes):
                raise ValueError(
                    f"`y` must have {len(self.classes)} columns, as in `fit`, but it has {matrix.shape[1]}."
                )
            return matrix
        rows = _rows_of_names(labels) if self.kind == "lists" else [[one] for one in column_or_1d(labels)]
        number = {name: i for i, name in enumerate(self.classes.tolist())}
        found = [sorted({number[name] for name in row if name in number}) for row in rows]
        starts = np.concatenate([[0], np.cumsum([len(row) for row in found], dtype=np.int64)])
        places = np.array([place for row in found for place in row], dtype=np.int64)
        shape = (len(found), len(self.classes))
        return sparse.csr_array((np.ones(len(places), dtype=np.int8), places, starts), shape=shape)

    def counts(self, labels: Any) -> Any:
        """Return the number of labels of each sample, including names that are not in `classes`."""
        labels = _as_list(labels)
        if self.kind == "lists":
            return np.array([len(set(row)) for row in _rows_of_names(labels)])
        if self.kind == "single":
            return np.ones(len(column_or_1d(labels)), dtype=np.int64)
        return np.diff(self.read(labels).indptr)

    def write(self, best: Any) -> Any:
        """Convert label indices (samples, k), best first, to the form of the training labels.

        Args:
            best: The label indices.

        Returns:
            A binary matrix, a list of names per sample, or, if each sample has one class, the best classes.
        """
        if self.kind == "single":
            return self.classes[best[:, 0]]
        if self.kind == "lists":
            return self.classes[best].tolist()
        count, k = best.shape
        ones = np.ones(best.size, dtype=np.int64)
        starts = np.arange(count + 1) * k
        shape = (count, len(self.classes))
        matrix = sparse.csr_array((ones, np.sort(best, axis=1).ravel(), starts), shape=shape)
        return matrix if self.kind == "sparse" else matrix.toarray()


def learn_form(labels: Any) -> LabelForm:
    """Determine the form of training labels. Unsupported labels raise ValueError."""
    labels = _as_list(labels)
    if sparse.issparse(labels):
        return LabelForm("sparse", np.arange(labels.shape[1]))
    if _is_lists(labels):
        return LabelForm("lists", _sorted_names(_rows_of_names(labels)))
    array = np.asarray(labels)
    if array.ndim == 2 and array.shape[1] == 0:
        raise ValueError(NO_LABELS)
    if array.ndim == 2 and array.shape[1] != 1:
        return LabelForm("indicator", np.arange(array.shape[1]))
    if isinstance(labels, (list, tuple)) and array.dtype.kind in "fO" and all(map(_is_integer, labels)):
        raise ValueError(
            "`y` must contain integers that fit in int64, but they range from "
            f"{min(labels)} to {max(labels)}. Pass them as strings."
        )
    check_classification_targets(column_or_1d(labels, warn=True))
    return LabelForm("single", np.unique(column_or_1d(labels)))


def _as_list(labels: Any) -> Any:
    """Convert a pandas or polars column to a list. Other values are returned unchanged."""
    return labels.to_list() if callable(getattr(labels, "to_list", None)) else labels


def _sorted_names(rows: list[list[Any]]) -> Any:
    """Return all names as a sorted array. Names of unsupported or mixed types raise ValueError."""
    for row in rows:
        for name in row:
            if not isinstance(name, (str, int, float)):
                raise ValueError(
                    "`y` must contain names that are strings or numbers, "
                    f"but it contains {name!r} of type {type(name).__name__}."
                )
            if name != name:
                raise ValueError("`y` must not contain NaN. Omit missing labels instead.")
    names = {name for row in rows for name in row}
    if not names:
        raise ValueError(NO_LABELS)
    if len({isinstance(name, str) for name in names}) > 1:
        kinds = sorted({type(name).__name__ for name in names})
        raise ValueError(f"`y` must contain names of one type, but their types are {' and '.join(kinds)}.")
    # numpy may convert a list with integers both below and above the maximum of int64 to floats.
    large = any(_is_integer(name) and not -(2**63) <= name < 2**63 for name in names)
    return np.array(sorted(names), dtype=object if large else None)


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer))


def _is_lists(labels: Any) -> bool:
    """Whether each sample has a list, tuple or set of names. Equally long lists of 0s and 1s are a matrix."""
    if isinstance(labels, np.ndarray) and labels.dtype != object:
        return False
    if hasattr(labels, "columns"):  # a pandas or polars table
        return False
    rows = list(labels) if isinstance(labels, Iterable) and not isinstance(labels, (str, bytes)) else []
    if not rows or not all(isinstance(row, (list, tuple, set, frozenset, np.ndarray)) for row in rows):
        return False
    same = {len(row) for row in rows}
    if same == {0}:
        return True
    return len(same) > 1 or not all(_is_bit(name) for row in rows for name in row)


def _is_bit(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_, int, float, np.number)) and value in (0, 1)


def _rows_of_names(labels: Any) -> list[list[Any]]:
    if not _is_lists(labels) and not all(isinstance(row, (list, tuple, set, frozenset)) for row in labels):
        raise ValueError("`y` must be a list of names for each sample, as in `fit`.")
    return [[name.item() if isinstance(name, np.generic) else name for name in row] for row in labels]


def _matrix(labels: Any) -> Matrix:
    matrix = check_array(labels, accept_sparse="csr", dtype=None, input_name="y")
    matrix = sparse.csr_array(matrix)
    if not np.isin(matrix.data, (0, 1)).all():
        raise ValueError(
            "`y` must be a matrix of 0s and 1s with a column for each label, but it contains other values."
        )
    matrix = matrix.astype(np.int8)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    return matrix
