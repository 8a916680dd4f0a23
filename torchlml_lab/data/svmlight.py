"""Multi-label svmlight, and the text format of the extreme-classification repository, plain or gzipped.

A line is `label,label,... feature:value feature:value ...`. The repository's files begin with a line of three
numbers: how many rows, features and labels there are.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt
from scipy import sparse

from torchlml_lab.data.content import read_content, shown
from torchlml_lab.data.labelled_rows import LabelledRows, Matrix, label_matrix
from torchlml_lab.errors import BadInput

_LARGEST = 2**31 - 1
_MOST = float(np.finfo(np.float32).max)


def read_svmlight(path: Path, option: str) -> LabelledRows:
    """Read a file of sparse rows with labels.

    Args:
        path: The file.
        option: The option that named it, for the sentences.

    Returns:
        The rows; features keep the numbers they have in the file. What is wrong raises `BadInput`, which
        names the file and the line.
    """
    lines = read_content(path, option).replace(b"\t", b" ").split(b"\n")
    if not lines[-1]:
        lines.pop()
    header = _header(lines[0])
    if header is not None and header[1] > _LARGEST + 1:
        raise BadInput(f"`{path}`, line 1: {header[1]} features, but at most {_LARGEST + 1} can be read.")
    at, heads, tails = _divide(lines, header is not None)
    if header is not None and len(at) != header[0]:
        raise BadInput(
            f"`{path}`, line {len(lines)}: the file ends after {len(at)} rows, but its first line promises "
            f"{header[0]}."
        )
    try:
        features = _features(tails)
    except ValueError:
        _explain(path, at, tails)
    _check_features(path, at, features, header)
    labels, names = label_matrix(_labels(path, at, heads, header))
    shape = (len(at), header[1] if header else features.shape[1])
    return LabelledRows(sparse.csr_array(features, shape=shape), labels, names)


def _header(line: bytes) -> tuple[int, int, int] | None:
    words = line.split()
    if len(words) != 3 or not all(word.isdigit() for word in words):
        return None
    rows, features, labels = map(int, words)
    return rows, features, labels


def _divide(lines: Sequence[bytes], header: bool) -> tuple[list[int], list[bytes], list[bytes]]:
    """For each row the number of its line, the text of its labels and that of its features."""
    at, heads, tails = [], [], []
    for number, line in enumerate(lines[1:] if header else lines, 2 if header else 1):
        if b"#" in line:
            line = line.partition(b"#")[0]
        head, _, tail = line.partition(b" ")
        if b":" in head:  # a row without labels may begin with its features
            head, tail = b"", line
        if head or tail.strip() or header:  # without a header an empty line is no row
            at.append(number)
            heads.append(head)
            tails.append(tail)
    return at, heads, tails


def _features(tails: Sequence[bytes]) -> Matrix:
    """All features at once; ValueError where a line is wrong."""
    rows = [tail.split() for tail in tails]
    pairs = [word.split(b":") for words in rows for word in words]
    if not pairs:
        return sparse.csr_array((len(tails), 0), dtype=np.float32)
    # numpy would read `1_0` as 10.
    if any(len(pair) != 2 for pair in pairs) or any(b"_" in tail for tail in tails):
        raise ValueError
    columns = np.array([pair[0] for pair in pairs]).astype(np.int64)
    values = np.array([pair[1] for pair in pairs]).astype(np.float64)
    small = np.abs(values) <= _MOST  # False for NaN
    if columns.min() < 0 or columns.max() > _LARGEST or not small.all():
        raise ValueError
    starts = np.cumsum([0, *map(len, rows)])
    return sparse.csr_array(
        (values.astype(np.float32), columns, starts), shape=(len(tails), columns.max() + 1)
    )


def _explain(path: Path, at: Sequence[int], tails: Sequence[bytes]) -> NoReturn:
    """Find the line that could not be read, and say what is wrong with it."""
    for line, tail in zip(at, tails, strict=True):
        for word in tail.split():
            feature, colon, value = word.partition(b":")
            said = shown(word.decode())
            if not colon:
                raise BadInput(f"`{path}`, line {line}: `{said}` is no `feature:value`.")
            if not feature.isdigit() or int(feature) > _LARGEST:
                accepted = f"a whole number from 0 to {_LARGEST}"
                raise BadInput(f"`{path}`, line {line}: the feature of `{said}` is not {accepted}.")
            try:
                finite = b"_" not in value and abs(float(value)) <= _MOST
            except ValueError:
                finite = False
            if not finite:
                raise BadInput(f"`{path}`, line {line}: the value of `{said}` is not a finite number.")
    raise BadInput(f"`{path}` cannot be read as rows of `label,label feature:value ...`.")


def _check_features(
    path: Path, at: Sequence[int], features: Matrix, header: tuple[int, int, int] | None
) -> None:
    row_of: npt.NDArray[np.int64] = np.repeat(np.arange(len(at)), np.diff(features.indptr))
    features.sort_indices()
    columns = features.indices
    twice = np.flatnonzero((columns[1:] == columns[:-1]) & (row_of[1:] == row_of[:-1]))
    if len(twice):
        first = twice[0]
        raise BadInput(f"`{path}`, line {at[row_of[first]]}: feature {columns[first]} comes twice.")
    if header is not None and features.shape[1] > header[1]:
        first = int(np.argmax(columns >= header[1]))
        raise BadInput(
            f"`{path}`, line {at[row_of[first]]}: feature {columns[first]}, but the first line promises "
            f"{header[1]} features, from 0 to {header[1] - 1}."
        )


def _labels(
    path: Path, at: Sequence[int], heads: Sequence[bytes], header: tuple[int, int, int] | None
) -> list[list[str]]:
    lists = []
    for line, head in zip(at, heads, strict=True):
        names = head.decode().split(",") if head else []
        if "" in names:
            raise BadInput(f"`{path}`, line {line}: `{shown(head.decode())}` has a label without a name.")
        if header is not None:
            for name in names:
                if not (name.isascii() and name.isdigit()) or int(name) >= header[2]:
                    raise BadInput(
                        f"`{path}`, line {line}: label `{shown(name)}`, but the first line promises "
                        f"{header[2]} labels, from 0 to {header[2] - 1}."
                    )
        lists.append(names)
    return lists
