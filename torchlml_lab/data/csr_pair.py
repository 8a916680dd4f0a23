"""A pair of scipy's `.npz` files: sparse features, and sparse labels beside them."""

import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import sparse

from torchlml_lab.data.labelled_rows import LabelledRows, Matrix
from torchlml_lab.errors import BadInput, reason


def read_csr_pair(path: Path, option: str, labels: Path | None, labels_option: str) -> LabelledRows:
    """Read what `scipy.sparse.save_npz` wrote.

    Args:
        path: The features (rows, features), sparse in any of scipy's formats.
        option: The option that named them, for the sentences.
        labels: The labels (rows, labels): every entry above 0 is a label. None: the rows have none.
        labels_option: The option that named these.

    Returns:
        The rows; the labels' names are the numbers of their columns. What is wrong raises `BadInput`.
    """
    features = _read(path, option).astype(np.float32)
    features.sum_duplicates()
    finite = np.isfinite(features.data)
    if not finite.all():
        raise BadInput(f"`{path}`, row {_row(features, finite)}: a feature is not a finite number.")
    if labels is None:
        none = sparse.csr_array((features.shape[0], 0), dtype=np.int8)
        return LabelledRows(features, none, [])
    found = _read(labels, labels_option)
    if found.shape[0] != features.shape[0]:
        raise BadInput(f"`{path}` has {features.shape[0]} rows, but `{labels}` has {found.shape[0]}.")
    positive = found.data >= 0  # False for NaN too
    if not positive.all():
        value = found.data[np.argmin(positive)]
        raise BadInput(
            f"`{labels}`, row {_row(found, positive)}: an entry is {value:g}, but a label is a number above "
            "0, and what is no label is 0 or left out."
        )
    found = (found != 0).astype(np.int8).tocsr()
    used = np.flatnonzero(np.bincount(found.indices, minlength=found.shape[1]))
    return LabelledRows(features, found[:, used], [str(column) for column in used])


def _row(matrix: Matrix, right: npt.NDArray[np.bool_]) -> int:
    """The row of the first stored entry that is not right."""
    return int(np.searchsorted(matrix.indptr, np.argmin(right), "right")) - 1


def _read(path: Path, option: str) -> Matrix:
    try:
        with path.open("rb") as file:
            stored = sparse.load_npz(file)
        if stored.format in ("csr", "csc", "bsr"):
            stored.check_format(full_check=True)  # scipy reads memory of others where a number is too large
        matrix = sparse.csr_array(stored)
    except OSError as error:
        raise BadInput(f"`{option}` names `{path}`, which cannot be read: {reason(error)}.") from error
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        said = f"`{option}` names `{path}`, which is no whole file of `scipy.sparse.save_npz`."
        raise BadInput(said) from error
    if not matrix.shape[0] or not matrix.shape[1]:
        raise BadInput(f"`{option}` names `{path}`, which is empty: its shape is {matrix.shape}.")
    if matrix.dtype.kind not in "biuf":
        raise BadInput(f"`{option}` names `{path}`, whose entries are {matrix.dtype}, not numbers.")
    return matrix
