"""The forms in which labels of rows are given, and in which predictions are given back."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import sparse
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, column_or_1d

Form = Literal["indicator", "sparse", "lists", "single"]
Matrix = Any  # CSR of scipy, which has no types
NO_LABELS = "`y` must have labels, but no row has one."


@dataclass(frozen=True)
class LabelForm:
    """How the labels of the training rows were given.

    `indicator` and `sparse` are matrices with a column for each label, `lists` has a list of names for each
    row, `single` one class for each row.
    """

    kind: Form
    classes: Any
    """(n,): the names of the labels, for a matrix the numbers of its columns."""

    def read(self, labels: Any) -> Matrix:
        """Labels of other rows in the same form as a CSR matrix; names that are not known are left out."""
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
        """How many labels each row has, with the names that are not known."""
        labels = _as_list(labels)
        if self.kind == "lists":
            return np.array([len(set(row)) for row in _rows_of_names(labels)])
        if self.kind == "single":
            return np.ones(len(column_or_1d(labels)), dtype=np.int64)
        return np.diff(self.read(labels).indptr)

    def write(self, best: Any) -> Any:
        """The best labels (R, k), the best first, in the form of the training rows.

        Args:
            best: Numbers of labels.

        Returns:
            A matrix of 0 and 1, an array of lists of names, or where rows have one class the best class.
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
    """The form of the labels of training rows; what is none raises ValueError."""
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
            f"`y` must hold integers of at most 64 bits, but they range from {min(labels)} to {max(labels)}: "
            "give them as strings."
        )
    check_classification_targets(column_or_1d(labels, warn=True))
    return LabelForm("single", np.unique(column_or_1d(labels)))


def _as_list(labels: Any) -> Any:
    """A column of pandas or polars as a list; anything else as it is."""
    return labels.to_list() if callable(getattr(labels, "to_list", None)) else labels


def _sorted_names(rows: list[list[Any]]) -> Any:
    """All names in order, as an array; names that cannot be told apart or compared raise ValueError."""
    for row in rows:
        for name in row:
            if not isinstance(name, (str, int, float)):
                raise ValueError(
                    "`y` must hold names that are strings or numbers, "
                    f"but {name!r} is a {type(name).__name__}."
                )
            if name != name:
                raise ValueError("`y` must not hold NaN: leave a missing label out.")
    names = {name for row in rows for name in row}
    if not names:
        raise ValueError(NO_LABELS)
    if len({isinstance(name, str) for name in names}) > 1:
        kinds = sorted({type(name).__name__ for name in names})
        raise ValueError(f"`y` must hold names of one kind, but they are {' and '.join(kinds)}.")
    # Integers beyond 64 bits stay integers: numpy would make floats of them.
    large = any(_is_integer(name) and not -(2**63) <= name < 2**63 for name in names)
    return np.array(sorted(names), dtype=object if large else None)


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer))


def _is_lists(labels: Any) -> bool:
    """One list, tuple or set for each row, and not a matrix that is written as lists?"""
    if isinstance(labels, np.ndarray) and labels.dtype != object:
        return False
    if hasattr(labels, "columns"):  # a table of pandas or polars
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
        raise ValueError("`y` must be a list of names for each row, as in `fit`.")
    return [[name.item() if isinstance(name, np.generic) else name for name in row] for row in labels]


def _matrix(labels: Any) -> Matrix:
    matrix = check_array(labels, accept_sparse="csr", dtype=None, input_name="y")
    matrix = sparse.csr_array(matrix)
    if not np.isin(matrix.data, (0, 1)).all():
        raise ValueError("`y` must be a matrix of 0 and 1, a column for each label, but others are in it.")
    matrix = matrix.astype(np.int8)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    return matrix
