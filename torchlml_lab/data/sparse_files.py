"""Readers for sparse samples: svmlight files, extreme-classification files, and pairs of .npz files."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt
from scipy import sparse

from torchlml_lab.cli_errors import BadInput, reason
from torchlml_lab.data.labeled_rows import LabeledRows, LabelLists, Matrix, stacked
from torchlml_lab.files import read_blocks, shown

_LARGEST = 2**31 - 1  # the largest feature index
_MOST = float(np.finfo(np.float32).max)  # the largest magnitude of a feature value


def read_svmlight(path: Path, option: str) -> LabeledRows:
    """Read sparse samples with labels from an svmlight or extreme-classification text file.

    Args:
        path: The file.
        option: The command-line option that gave the path, for error messages.

    Returns:
        The samples. Features are numbered as in the file. Invalid input raises `BadInput`, which names
        the file and the line.
    """
    blocks, labels = list[Matrix](), LabelLists()
    header, before = None, 0  # `before` is the number of lines before a block
    for block in read_blocks(path, option):
        lines = block.replace(b"\t", b" ").removesuffix(b"\n").split(b"\n")
        first = before + 1
        if not before and (header := _header(lines[0])) is not None:
            if header[1] > _LARGEST + 1:
                said = f"at most {_LARGEST + 1} features are supported, but {header[1]} are declared"
                raise BadInput(f"`{path}`, line 1: {said}.")
            lines, first = lines[1:], 2
        at, heads, tails = _divide(lines, first, header is not None)
        try:
            features = _features(tails)
        except ValueError:
            _explain(path, at, tails)
        _check_features(path, at, features, header)
        blocks.append(features)
        labels.add(_labels(path, at, heads, header))
        before = first + len(lines) - 1
    rows = sum(features.shape[0] for features in blocks)
    if header is not None and rows != header[0]:
        raise BadInput(
            f"`{path}`, line {before}: the file ends after {rows} rows, but its first line declares "
            f"{header[0]}."
        )
    columns = header[1] if header else max(features.shape[1] for features in blocks)
    return LabeledRows(stacked(blocks, columns), *labels.matrix())


def declared_features(path: Path, option: str) -> int | None:
    """Return the number of features in the header or the shape of an `.npz` matrix, or None if unknown."""
    if path.suffix == ".npz":
        return int(_read(path, option).shape[1])
    header = _header(next(read_blocks(path, option)).partition(b"\n")[0])
    return None if header is None else header[1]


def _header(line: bytes) -> tuple[int, int, int] | None:
    words = line.split()
    if len(words) != 3 or not all(word.isdigit() for word in words):
        return None
    rows, features, labels = map(int, words)
    return rows, features, labels


def _divide(lines: Sequence[bytes], first: int, header: bool) -> tuple[list[int], list[bytes], list[bytes]]:
    """Return the line number, the label text and the feature text of each row.

    Args:
        lines: The lines, without the header.
        first: The number of the first line.
        header: Whether the file has a header.
    """
    at, heads, tails = [], [], []
    for number, line in enumerate(lines, first):
        if b"#" in line:
            line = line.partition(b"#")[0]
        head, _, tail = line.partition(b" ")
        if b":" in head:  # a row without labels may start with its features
            head, tail = b"", line
        if head or tail.strip() or header:  # without a header, empty lines are skipped
            at.append(number)
            heads.append(head)
            tails.append(tail)
    return at, heads, tails


def _features(tails: Sequence[bytes]) -> Matrix:
    """Parse all features at once, or raise ValueError if any line is invalid."""
    text = b" ".join(tails)
    words = text.split()
    if not words:
        return sparse.csr_array((len(tails), 0), dtype=np.float32)
    parts = text.replace(b":", b" ").split()
    # Each word must consist of two parts separated by one colon. Underscores are rejected, because numpy
    # would parse `1_0` as 10.
    one_colon = text.count(b":") == len(words) and all(b":" in word for word in words)
    if not one_colon or len(parts) != 2 * len(words) or b"_" in text:
        raise ValueError
    columns = np.array(parts[::2]).astype(np.int64)
    values = np.array(parts[1::2]).astype(np.float64)
    small = np.abs(values) <= _MOST  # False for NaN
    if columns.min() < 0 or columns.max() > _LARGEST or not small.all():
        raise ValueError
    starts = np.cumsum([0, *(tail.count(b":") for tail in tails)])
    return sparse.csr_array(
        (values.astype(np.float32), columns, starts), shape=(len(tails), columns.max() + 1)
    )


def _explain(path: Path, at: Sequence[int], tails: Sequence[bytes]) -> NoReturn:
    """Find the line that could not be parsed, and raise an error that explains it."""
    for line, tail in zip(at, tails, strict=True):
        for word in tail.split():
            feature, colon, value = word.partition(b":")
            said = shown(word.decode())
            if not colon:
                raise BadInput(f"`{path}`, line {line}: `{said}` is not of the form `feature:value`.")
            if not feature.isdigit() or int(feature) > _LARGEST:
                accepted = f"an integer from 0 to {_LARGEST}"
                raise BadInput(f"`{path}`, line {line}: the feature in `{said}` is not {accepted}.")
            try:
                finite = b"_" not in value and abs(float(value)) <= _MOST
            except ValueError:
                finite = False
            if not finite:
                raise BadInput(
                    f"`{path}`, line {line}: the value in `{said}` is not a finite number in float32."
                )
    raise BadInput(f"`{path}` cannot be read as lines of the form `label,label feature:value ...`.")


def _check_features(
    path: Path, at: Sequence[int], features: Matrix, header: tuple[int, int, int] | None
) -> None:
    row_of: npt.NDArray[np.int64] = np.repeat(np.arange(len(at)), np.diff(features.indptr))
    features.sort_indices()
    columns = features.indices
    twice = np.flatnonzero((columns[1:] == columns[:-1]) & (row_of[1:] == row_of[:-1]))
    if len(twice):
        first = twice[0]
        raise BadInput(f"`{path}`, line {at[row_of[first]]}: feature {columns[first]} occurs twice.")
    if header is not None and features.shape[1] > header[1]:
        first = int(np.argmax(columns >= header[1]))
        raise BadInput(
            f"`{path}`, line {at[row_of[first]]}: feature {columns[first]} is out of range, because the "
            f"first line declares {header[1]} features, from 0 to {header[1] - 1}."
        )


def _labels(
    path: Path, at: Sequence[int], heads: Sequence[bytes], header: tuple[int, int, int] | None
) -> list[list[str]]:
    lists = []
    for line, head in zip(at, heads, strict=True):
        names = head.decode().split(",") if head else []
        if "" in names:
            raise BadInput(f"`{path}`, line {line}: `{shown(head.decode())}` contains an empty label.")
        if header is not None:
            for name in names:
                if not (name.isascii() and name.isdigit()) or int(name) >= header[2]:
                    raise BadInput(
                        f"`{path}`, line {line}: label `{shown(name)}` must be an integer from 0 to "
                        f"{header[2] - 1}, because the first line declares {header[2]} labels."
                    )
        lists.append(names)
    return lists


def read_csr_pair(path: Path, option: str, labels: Path | None, labels_option: str) -> LabeledRows:
    """Read samples from sparse matrices that were written by `scipy.sparse.save_npz`.

    Args:
        path: The file with the features (rows, features), in any SciPy sparse format.
        option: The command-line option that gave the path, for error messages.
        labels: The file with the labels (rows, labels). Each positive entry is a label. None means no labels.
        labels_option: The command-line option that gave the path of the labels.

    Returns:
        The samples. The names of the labels are their column numbers. Invalid input raises `BadInput`.
    """
    features = _read(path, option).astype(np.float32)
    features.sum_duplicates()
    finite = np.isfinite(features.data)
    if not finite.all():
        raise BadInput(
            f"`{path}`, row {_row(features, finite)}: a feature is not a finite number in float32."
        )
    if labels is None:
        none = sparse.csr_array((features.shape[0], 0), dtype=np.int8)
        return LabeledRows(features, none, [])
    found = _read(labels, labels_option)
    if found.shape[0] != features.shape[0]:
        raise BadInput(f"`{path}` has {features.shape[0]} rows, but `{labels}` has {found.shape[0]}.")
    positive = found.data >= 0  # also False for NaN
    if not positive.all():
        value = found.data[np.argmin(positive)]
        raise BadInput(
            f"`{labels}`, row {_row(found, positive)}: an entry is {value:g}, but entries must be positive "
            "for labels, and 0 or absent otherwise."
        )
    found = (found != 0).astype(np.int8).tocsr()
    used = np.flatnonzero(np.bincount(found.indices, minlength=found.shape[1]))
    return LabeledRows(features, found[:, used], [str(column) for column in used])


def _row(matrix: Matrix, right: npt.NDArray[np.bool_]) -> int:
    """Return the row of the first invalid entry."""
    return int(np.searchsorted(matrix.indptr, np.argmin(right), "right")) - 1


def _read(path: Path, option: str) -> Matrix:
    try:
        with path.open("rb") as file:
            stored = sparse.load_npz(file)
        if stored.format in ("csr", "csc", "bsr"):
            stored.check_format(full_check=True)  # an invalid index would cause an out-of-bounds read
        matrix = sparse.csr_array(stored)
    except OSError as error:
        raise BadInput(f"`{path}` (`{option}`) cannot be read: {reason(error)}.") from error
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        said = f"`{path}` (`{option}`) is not a complete file written by `scipy.sparse.save_npz`."
        raise BadInput(said) from error
    if not matrix.shape[0] or not matrix.shape[1]:
        raise BadInput(f"`{path}` (`{option}`) is empty: its shape is {matrix.shape}.")
    if matrix.dtype.kind not in "biuf":
        raise BadInput(
            f"The entries of `{path}` (`{option}`) must be numbers, but their dtype is {matrix.dtype}."
        )
    return matrix
