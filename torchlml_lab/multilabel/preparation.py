"""The conversion of samples to network inputs, fitted on the training samples and stored with the run."""

import dataclasses
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import sparse

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.labelled_rows import LabelledRows, Matrix
from torchlml_lab.data.tables import Columns
from torchlml_lab.files import read_record

FILE = "preparation.json"
MOST_TERMS = 50_000  # of each kind


class Prepared(NamedTuple):
    """Samples as network inputs."""

    inputs: Matrix
    """CSR float32 (rows, inputs)."""
    unknown: int
    """The number of feature values that the run does not know, not counting words."""
    empty: int
    """The number of samples without any known feature."""


@dataclass(frozen=True)
class Preparation:
    """The named inputs and outputs of a run's network."""

    labels: list[str]
    """The names of the network's outputs."""
    counts: list[int]
    """The number of training samples with each label."""
    rows: int
    """The number of training samples."""
    k: int
    """The number of labels that are predicted."""
    columns: Columns | None = None
    """The columns of the table, if the samples come from one."""
    words: list[str] = field(default_factory=list)
    """The words that are inputs."""
    pairs: list[str] = field(default_factory=list)
    """The pairs of consecutive words that are inputs, separated by a space."""
    pieces: list[str] = field(default_factory=list)
    """The pieces of words that are inputs, with punctuation; a space is the start or the end of a word."""
    idf: list[float] = field(default_factory=list)
    """The inverse document frequency of all words, pairs and pieces."""
    features: list[int] = field(default_factory=list)
    """The feature columns that are inputs."""
    means: list[float] = field(default_factory=list)
    """The mean that is subtracted from each of these features; 0 for sparse features."""
    scales: list[float] = field(default_factory=list)
    """The scale that each of these features is then divided by."""

    @property
    def inputs(self) -> int:
        """The number of network inputs."""
        return len(self.idf) + len(self.features)

    @property
    def mean_count(self) -> float:
        """The mean number of labels per training sample."""
        return sum(self.counts) / self.rows

    def apply(self, rows: LabelledRows) -> Prepared:
        """Compute the inputs of samples.

        Texts become TF-IDF vectors of norm 1, the numbers of a table are standardized, and sparse features
        are scaled to norm 1.
        """
        blocks = []
        if self.idf:
            assert rows.texts is not None
            blocks.append(self._of_texts(rows.texts))
        chosen = np.array(self.features, dtype=np.int64)
        there = rows.features
        unknown = int((~np.isin(there.indices, chosen)).sum())
        if self.columns is not None:
            numbers = (there[:, chosen].toarray() - np.array(self.means)) / np.array(self.scales)
            blocks.append(sparse.csr_array(np.nan_to_num(numbers, nan=0.0)))  # missing numbers get the mean
        elif self.features:
            known = _chosen_columns(there, chosen) @ sparse.diags_array(1 / np.array(self.scales))
            blocks.append(_normalized(known))
        inputs = sparse.csr_array(sparse.hstack(blocks, format="csr"), dtype=np.float32)
        inputs.eliminate_zeros()
        inputs.sort_indices()
        # If every number of a sample is the mean, all its inputs are 0, but they are not unknown.
        empty = 0 if self.columns is not None and self.features else int((np.diff(inputs.indptr) == 0).sum())
        return Prepared(inputs, unknown, empty)

    def _of_texts(self, texts: Sequence[str]) -> Matrix:
        """TF-IDF with a logarithmic term frequency; each kind of term has a fixed share of the norm."""
        kinds = (self.words, self.pairs, self.pieces)
        ends = np.cumsum([len(terms) for terms in kinds])[:-1]
        blocks = [
            weight * _normalized(_tf(_known_terms(found, terms)) @ sparse.diags_array(idf))
            for found, terms, idf, weight in zip(
                _all_terms(texts), kinds, np.split(np.array(self.idf), ends), WEIGHTS, strict=True
            )
        ]
        return _normalized(sparse.csr_array(sparse.hstack(blocks, format="csr")))

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return dataclasses.asdict(self)


def continued(earlier: Preparation, rows: LabelledRows, k: int) -> Preparation:
    """The inputs of an earlier run with the labels of other training samples, which start with its labels."""
    counts = np.bincount(rows.labels.indices, minlength=len(rows.names)).tolist()
    return dataclasses.replace(earlier, labels=rows.names, counts=counts, rows=len(rows), k=k)


def fit(
    training: LabelledRows,
    columns: Columns | None,
    k: int,
    rows: LabelledRows | None = None,
    rare: bool = False,
) -> Preparation:
    """Fit the inputs and the labels on training samples.

    Args:
        training: The training samples.
        columns: The columns of the table that they come from, if any.
        k: The number of labels to predict.
        rows: The samples that determine the inputs; by default the training samples.
        rare: Whether to give rare sparse features more weight, the square root of their inverse document
            frequency.

    Returns:
        The preparation. Samples without features or words raise `BadInput`.
    """
    rows = training if rows is None else rows
    terms, idf = _fit_texts(rows.texts) if rows.texts is not None else (([], [], []), [])
    if columns is not None:
        numbers = rows.features.toarray().astype(np.float64)
        used = np.flatnonzero(~np.isnan(numbers).all(axis=0))
        means = np.nanmean(numbers[:, used], axis=0) if len(used) else np.empty(0)
        scales = np.nanstd(numbers[:, used], axis=0) if len(used) else np.empty(0)
    else:
        used = np.unique(rows.features.indices)
        means = np.zeros(len(used))
        scales = np.empty(0)
        if len(used):
            chosen = _chosen_columns(rows.features, used)
            scales = abs(chosen).max(axis=0).toarray().ravel()
            if rare:
                scales = scales / np.sqrt(_idf(np.bincount(chosen.indices, minlength=len(used)), len(rows)))
    if not idf and not len(used):
        raise BadInput("The training samples must have features or words, but they have neither.")
    return Preparation(
        labels=training.names,
        counts=np.bincount(training.labels.indices, minlength=len(training.names)).tolist(),
        rows=len(training),
        k=k,
        columns=columns,
        words=terms[0],
        pairs=terms[1],
        pieces=terms[2],
        idf=idf,
        features=used.tolist(),
        means=means.tolist(),
        scales=np.where(scales > 0, scales, 1.0).tolist(),
    )


def _chosen_columns(matrix: Matrix, columns: npt.NDArray[np.int64]) -> Matrix:
    """Select columns in increasing order.

    The indexing of scipy would allocate memory for every possible column.
    """
    place = np.searchsorted(columns, matrix.indices)
    found = columns[np.minimum(place, len(columns) - 1)] == matrix.indices
    starts = np.concatenate([[0], np.cumsum(found)])[matrix.indptr]
    shape = (matrix.shape[0], len(columns))
    return sparse.csr_array((matrix.data[found], place[found], starts), shape=shape)


def stored(run: Path) -> Preparation:
    """Load the preparation of a run; raise `BadInput` if the file is damaged."""
    path = run / FILE
    found = read_record(path, Preparation)
    for several in (("labels", "counts"), ("features", "means", "scales")):
        lengths = [len(getattr(found, name)) for name in several]
        if len(set(lengths)) > 1:
            names = ", ".join(f"`{name}`" for name in several)
            raise BadInput(f"`{path}` is damaged: {names} must have equal lengths, but they have {lengths}.")
    for name in ("labels", "words", "pairs", "pieces"):
        if len(set(getattr(found, name))) < len(getattr(found, name)):
            raise BadInput(f"`{path}` is damaged: `{name}` contains a duplicate.")
    terms = len(found.words) + len(found.pairs) + len(found.pieces)
    if terms != len(found.idf):
        raise BadInput(f"`{path}` is damaged: it has {terms} terms, but {len(found.idf)} values of `idf`.")
    if terms and found.columns is None:
        raise BadInput(f"`{path}` is damaged: it has words, but not the `columns` they come from.")
    if not found.inputs or found.rows < 1 or len(found.labels) < 2 or not 1 <= found.k < len(found.labels):
        sizes = f"{found.inputs} inputs, {found.rows} samples, {len(found.labels)} labels and k = {found.k}"
        raise BadInput(f"`{path}` is damaged: it has {sizes}.")
    return found


def _normalized(rows: Matrix) -> Matrix:
    """Scale each row to norm 1; rows of zeros are unchanged."""
    length = np.sqrt(rows.multiply(rows).sum(axis=1))
    return sparse.csr_array(sparse.diags_array(1 / np.where(length > 0, length, 1)) @ rows)


# Single letters can be words ("C", "R").
_WORD = re.compile(r"\w+")
PIECES = (2, 3, 4)
"""The lengths of the pieces, which relate the forms of a word, including words that are new in prediction."""
WEIGHTS = (1.0, 0.5, 1.0)
"""The norms of words, pairs and pieces, before the whole vector is scaled to norm 1.

Pairs are many, so with the weight of their number they would outweigh the words of long texts.
"""


class _Terms(NamedTuple):
    """The terms of one kind in texts."""

    counts: Matrix
    """CSR (texts, terms), without duplicates."""
    names: Callable[[npt.NDArray[np.int64]], list[str]]
    """Returns the names of some columns."""
    least: int
    """The number of training texts that must contain a term of this kind to make it an input."""


def _all_terms(texts: Sequence[str]) -> tuple[_Terms, _Terms, _Terms]:
    """Count all words, pairs and pieces in texts."""
    words, row, ids = _numbered(_WORD.findall(text.lower()) for text in texts)
    within = row[1:] == row[:-1]
    keys, pair = np.unique(ids[:-1][within] * len(words) + ids[1:][within], return_inverse=True)

    def pair_names(columns: npt.NDArray[np.int64]) -> list[str]:
        first, second = np.divmod(keys[columns], max(1, len(words)))
        return [f"{words[a]} {words[b]}" for a, b in zip(first.tolist(), second.tolist(), strict=True)]

    # Here punctuation counts. Each distinct string between spaces is cut only once.
    strings, string_row, string_ids = _numbered(text.lower().split() for text in texts)
    pieces, of_string, piece_ids = _numbered(map(_pieces, strings))
    cut = _counted(of_string, piece_ids, (len(strings), len(pieces)))
    contents = _counted(string_row, string_ids, (len(texts), len(strings)))
    return (
        _Terms(_counted(row, ids, (len(texts), len(words))), _picker(words), least=1),
        _Terms(_counted(row[1:][within], pair, (len(texts), len(keys))), pair_names, least=2),
        _Terms(sparse.csr_array(contents @ cut), _picker(pieces), least=2),
    )


def _numbered(lists: Iterable[list[str]]) -> tuple[list[str], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The distinct strings of lists and, for each string of each list, the numbers of both."""
    place: defaultdict[str, int] = defaultdict()
    place.default_factory = place.__len__  # a new string gets the next number
    ids, lengths = array("q"), array("q")
    for strings in lists:
        ids.extend(map(place.__getitem__, strings))
        lengths.append(len(strings))
    rows = np.repeat(np.arange(len(lengths)), np.array(lengths, dtype=np.int64))
    return list(place), rows, np.array(ids, dtype=np.int64)


def _picker(names: list[str]) -> Callable[[npt.NDArray[np.int64]], list[str]]:
    return lambda columns: [names[column] for column in columns.tolist()]


def _counted(rows: npt.NDArray[Any], columns: npt.NDArray[Any], shape: tuple[int, int]) -> Matrix:
    """Count how often each place of a matrix is listed."""
    counts = sparse.coo_array((np.ones(len(rows), dtype=np.float32), (rows, columns)), shape=shape)
    return sparse.csr_array(counts)  # sums duplicates


def _pieces(word: str) -> list[str]:
    """The parts of a word with the lengths `PIECES`, including a space before and after it.

    >>> _pieces("cat")
    [' c', 'ca', 'at', 't ', ' ca', 'cat', 'at ', ' cat', 'cat ']
    """
    marked = f" {word} "
    return [marked[i : i + size] for size in PIECES for i in range(len(marked) - size + 1)]


def _tf(counts: Matrix) -> Matrix:
    """The logarithmic term frequency 1 + log(count)."""
    counts.data = 1 + np.log(counts.data)
    return counts


def _known_terms(terms: _Terms, known: list[str]) -> Matrix:
    """The counts of known terms, CSR (texts, known)."""
    place = {name: i for i, name in enumerate(known)}
    names = terms.names(np.arange(terms.counts.shape[1]))
    to = np.array([place.get(name, -1) for name in names], dtype=np.int64)
    there = to[terms.counts.indices]
    keep = there >= 0
    starts = np.concatenate([[0], np.cumsum(keep)])[terms.counts.indptr]
    shape = (terms.counts.shape[0], len(known))
    return sparse.csr_array((terms.counts.data[keep], there[keep], starts), shape=shape)


def _idf(frequency: npt.NDArray[Any], count: int) -> npt.NDArray[np.float64]:
    """The inverse document frequency of terms that occur in `frequency` of `count` samples."""
    return np.log((1 + count) / (1 + frequency.astype(np.float64))) + 1


def _fit_texts(texts: list[str]) -> tuple[tuple[list[str], list[str], list[str]], list[float]]:
    """The words, pairs and pieces that become inputs, and the weights of all of them."""
    kinds, idf = [], list[float]()
    for terms in _all_terms(texts):
        frequency = np.bincount(terms.counts.indices, minlength=terms.counts.shape[1])
        often = np.flatnonzero(frequency >= terms.least)
        if len(often) > MOST_TERMS:  # the most frequent ones; of equally frequent ones, the first
            often = np.sort(often[np.argsort(-frequency[often], kind="stable")[:MOST_TERMS]])
        kinds.append(terms.names(often))
        idf += [round(float(weight), 7) for weight in _idf(frequency[often], len(texts))]
    words, pairs, pieces = kinds
    return (words, pairs, pieces), idf
