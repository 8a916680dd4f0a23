"""Conversion of samples to network inputs. It is fitted on the training samples and stored with the run."""

import dataclasses
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import sparse

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.labeled_rows import Columns, LabeledRows, Matrix, stacked
from torchlml_lab.files import read_record

FILE = "preparation.json"
MOST_TERMS = 50_000  # the maximum number of words, of word pairs, and of character n-grams
ROWS, LETTERS = 2**14, 2**22  # the maximum numbers of samples and characters that are converted at once
MOST_BYTES = 2**30  # if the inputs of all texts would need more memory, they are computed for each batch
_ENTRIES = 2**20  # the maximum number of matrix entries that are processed at once


class Prepared(NamedTuple):
    """Samples that have been converted to network inputs."""

    inputs: Matrix
    """CSR float32 (rows, inputs)."""
    unknown: int
    """The number of nonzero values in features that are unknown to the run. Words are not counted."""
    empty: int
    """The number of samples without any known feature."""


@dataclass(frozen=True)
class Preparation:
    """The inputs and outputs of a run's network, and how samples are converted to inputs."""

    labels: list[str]
    """The names of the network's outputs."""
    counts: list[int]
    """The number of training samples with each label."""
    rows: int
    """The number of training samples."""
    k: int
    """The number of labels to predict."""
    columns: Columns | None = None
    """The columns of the table, if the samples come from a table."""
    words: list[str] = field(default_factory=list)
    """The words that are used as inputs."""
    pairs: list[str] = field(default_factory=list)
    """The pairs of consecutive words that are used as inputs. A space separates the words of a pair."""
    pieces: list[str] = field(default_factory=list)
    """The character n-grams that are used as inputs. They may include punctuation. A space marks the start or
    the end of a word."""
    idf: list[float] = field(default_factory=list)
    """The inverse document frequencies of all words, pairs and character n-grams."""
    features: list[int] = field(default_factory=list)
    """The indices of the feature columns that are used as inputs."""
    means: list[float] = field(default_factory=list)
    """The mean of each of these features, which is subtracted first. It is 0 for sparse features."""
    scales: list[float] = field(default_factory=list)
    """The scale of each of these features, by which the difference is divided."""
    digest: str = ""
    """A hash of the training and validation samples of the run (see `samples.digest`)."""

    @property
    def inputs(self) -> int:
        """The number of network inputs."""
        return len(self.idf) + len(self.features)

    @property
    def mean_count(self) -> float:
        """The mean number of labels per training sample."""
        return sum(self.counts) / self.rows

    def apply(self, rows: LabeledRows) -> Prepared:
        """Convert samples to network inputs.

        Texts become TF-IDF vectors of norm 1, numeric columns of a table are standardized, and sparse feature
        vectors are scaled to norm 1.
        """
        blocks, unknown, empty = list[Matrix](), 0, 0
        for some in _slices(len(rows), rows.texts):
            block = self._apply(rows.take(np.arange(some.start, some.stop)))
            blocks.append(block.inputs)
            unknown, empty = unknown + block.unknown, empty + block.empty
        return Prepared(stacked(blocks, self.inputs), unknown, empty)

    def apply_to_many(self, rows: LabeledRows) -> "Matrix | LaterInputs":
        """Convert training samples to inputs.

        If the inputs of all samples would need too much memory, they are computed for each batch instead.
        """
        if self.idf:
            some = next(_slices(len(rows), rows.texts))
            first = self._apply(rows.take(np.arange(some.stop))).inputs
            if first.nnz * 8 * len(rows) / some.stop > MOST_BYTES:
                return LaterInputs(self, rows)
        return self.apply(rows).inputs

    def _apply(self, rows: LabeledRows) -> Prepared:
        """Convert a few samples to inputs. This function allocates multiple temporary copies."""
        blocks = []
        if self.idf:
            assert rows.texts is not None
            blocks.append(self._of_texts(rows.texts))
        chosen = np.array(self.features, dtype=np.int64)
        there = rows.features
        unknown = int((~np.isin(there.indices, chosen)).sum())
        if self.columns is not None:
            numbers = (there[:, chosen].toarray() - np.array(self.means)) / np.array(self.scales)
            blocks.append(sparse.csr_array(np.nan_to_num(numbers, nan=0.0)))  # the mean replaces NaN
        elif self.features:
            known = _chosen_columns(there, chosen) @ sparse.diags_array(1 / np.array(self.scales))
            blocks.append(_normalized(known))
        inputs = sparse.csr_array(sparse.hstack(blocks, format="csr"), dtype=np.float32)
        inputs.eliminate_zeros()
        inputs.sort_indices()
        # A sample whose numbers all equal the means has only zero inputs, but its features are known.
        empty = 0 if self.columns is not None and self.features else int((np.diff(inputs.indptr) == 0).sum())
        return Prepared(inputs, unknown, empty)

    def _of_texts(self, texts: Sequence[str]) -> Matrix:
        """Compute TF-IDF vectors with logarithmic term frequencies and the norms in `WEIGHTS`."""
        blocks = [
            weight * _normalized(_tf(_known_terms(found, places)) @ sparse.diags_array(idf))
            for found, (places, idf), weight in zip(_all_terms(texts), self._known, WEIGHTS, strict=True)
        ]
        return _normalized(sparse.csr_array(sparse.hstack(blocks, format="csr")))

    @cached_property
    def _known(self) -> list[tuple[dict[str, int], npt.NDArray[np.float64]]]:
        """The indices and the IDF of all terms, separately for words, pairs and character n-grams."""
        kinds = (self.words, self.pairs, self.pieces)
        weights = np.split(np.array(self.idf), np.cumsum([len(terms) for terms in kinds])[:-1])
        return [
            ({name: number for number, name in enumerate(terms)}, idf)
            for terms, idf in zip(kinds, weights, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON types."""
        return dataclasses.asdict(self)


class LaterInputs:
    """The inputs of many texts, computed for each batch because together they may not fit in memory.

    A text has about three terms per character, and each term takes eight bytes.

    Args:
        preparation: The preparation.
        rows: The samples.
    """

    def __init__(self, preparation: Preparation, rows: LabeledRows) -> None:
        self.preparation, self.rows = preparation, rows
        self.shape = (len(rows), preparation.inputs)

    def __getitem__(self, chosen: npt.NDArray[np.int64]) -> Matrix:
        """Return the inputs of some samples, CSR float32."""
        return self.preparation._apply(self.rows.take(chosen)).inputs


def _slices(rows: int, texts: Sequence[str] | None) -> Iterator[slice]:
    """Split samples into chunks whose temporary copies fit in memory."""
    start = letters = 0
    for row in range(rows):
        letters += 0 if texts is None else len(texts[row])
        if row > start and (row - start >= ROWS or letters > LETTERS):
            yield slice(start, row)
            start, letters = row, 0 if texts is None else len(texts[row])
    if start < rows:
        yield slice(start, rows)


def continued(earlier: Preparation, rows: LabeledRows, k: int) -> Preparation:
    """Return the preparation of an earlier run, with added labels and the label counts of the new samples."""
    counts = np.bincount(rows.labels.indices, minlength=len(rows.names)).tolist()
    return dataclasses.replace(earlier, labels=rows.names, counts=counts, rows=len(rows), k=k)


def fit(
    training: LabeledRows,
    columns: Columns | None,
    k: int,
    more: LabeledRows | None = None,
    rare: bool = False,
) -> Preparation:
    """Determine the inputs and the labels from the training samples.

    Args:
        training: The training samples.
        columns: The columns of the table that the samples come from, if any.
        k: The number of labels to predict.
        more: Additional samples that are used to determine the inputs, but not the labels.
        rare: Whether to give more weight to rare sparse features, by multiplying each feature by the square
            root of its inverse document frequency.

    Returns:
        The preparation. If the samples have neither features nor words, `BadInput` is raised.
    """
    parts = [training] if more is None else [training, more]
    texts = None if training.texts is None else [text for part in parts for text in part.texts or ()]
    terms, idf = _fit_texts(texts) if texts is not None else (([], [], []), [])
    if columns is not None:
        numbers = np.concatenate([part.features.toarray() for part in parts]).astype(np.float64)
        used = np.flatnonzero(~np.isnan(numbers).all(axis=0))
        means = np.nanmean(numbers[:, used], axis=0) if len(used) else np.empty(0)
        scales = np.nanstd(numbers[:, used], axis=0) if len(used) else np.empty(0)
    else:
        used, frequency = np.unique(
            np.concatenate([part.features.indices for part in parts]), return_counts=True
        )
        means = np.zeros(len(used))
        scales = _largest([part.features for part in parts], used)
        if rare:
            scales = scales / np.sqrt(_idf(frequency, sum(map(len, parts))))
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


def _largest(parts: Sequence[Matrix], columns: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the largest absolute value in each column. `columns` must include all columns with entries."""
    found = np.zeros(len(columns), dtype=np.float32)
    for part in parts:
        for start in range(0, part.nnz, _ENTRIES):
            some = slice(start, start + _ENTRIES)
            np.maximum.at(found, np.searchsorted(columns, part.indices[some]), abs(part.data[some]))
    return found.astype(np.float64)


def _chosen_columns(matrix: Matrix, columns: npt.NDArray[np.int64]) -> Matrix:
    """Select columns, which must be in increasing order.

    Unlike SciPy's indexing, this function does not allocate memory for every possible column.
    """
    place = np.searchsorted(columns, matrix.indices)
    found = columns[np.minimum(place, len(columns) - 1)] == matrix.indices
    starts = np.concatenate([[0], np.cumsum(found)])[matrix.indptr]
    shape = (matrix.shape[0], len(columns))
    return sparse.csr_array((matrix.data[found], place[found], starts), shape=shape)


def stored(run: Path) -> Preparation:
    """Load the preparation of a run. A damaged file raises `BadInput`."""
    path = run / FILE
    found = read_record(path, Preparation)
    for several in (("labels", "counts"), ("features", "means", "scales")):
        lengths = [len(getattr(found, name)) for name in several]
        if len(set(lengths)) > 1:
            names = ", ".join(f"`{name}`" for name in several)
            raise BadInput(
                f"`{path}` is damaged: {names} must have the same length, but their lengths are {lengths}."
            )
    for name in ("labels", "words", "pairs", "pieces"):
        if len(set(getattr(found, name))) < len(getattr(found, name)):
            raise BadInput(f"`{path}` is damaged: `{name}` contains a duplicate.")
    terms = len(found.words) + len(found.pairs) + len(found.pieces)
    if terms != len(found.idf):
        raise BadInput(f"`{path}` is damaged: it has {terms} terms, but {len(found.idf)} values of `idf`.")
    if terms and found.columns is None:
        raise BadInput(f"`{path}` is damaged: it has words, but not the `columns` that they come from.")
    if not found.inputs or found.rows < 1 or len(found.labels) < 2 or not 1 <= found.k < len(found.labels):
        sizes = f"{found.inputs} inputs, {found.rows} samples, {len(found.labels)} labels and k = {found.k}"
        raise BadInput(f"`{path}` is damaged: it has {sizes}.")
    return found


def _normalized(rows: Matrix) -> Matrix:
    """Scale each row to norm 1. Rows of zeros remain unchanged."""
    length = np.sqrt(rows.multiply(rows).sum(axis=1))
    return sparse.csr_array(sparse.diags_array(1 / np.where(length > 0, length, 1)) @ rows)


# Single letters can be words ("C", "R").
_WORD = re.compile(r"\w+")
PIECES = (2, 3, 4)
"""The lengths of the character n-grams.

With these n-grams, different forms of a word share features, including forms that do not occur in the
training texts.
"""
WEIGHTS = (1.0, 0.5, 1.0)
"""The norms of the features of words, of pairs and of character n-grams. The whole vector is then scaled to
norm 1.

Without fixed norms, the numerous pairs would outweigh the words in long texts.
"""


class _Terms(NamedTuple):
    """The terms of one kind (words, pairs or character n-grams) in a list of texts."""

    counts: Matrix
    """CSR (texts, terms), the number of occurrences of each term in each text, without duplicate entries."""
    names: Callable[[npt.NDArray[np.int64]], list[str]]
    """Returns the terms in the given columns of `counts`."""
    least: int
    """The minimum number of training texts that must contain a term for it to become an input."""
    keys: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
    """For each pair, the first word's index times the number of words, plus the second word's index."""


def _all_terms(texts: Sequence[str]) -> tuple[_Terms, _Terms, _Terms]:
    """Count all words, pairs and character n-grams in texts."""
    words, row, ids = _numbered(_WORD.findall(text.lower()) for text in texts)
    within = row[1:] == row[:-1]
    keys, pair = np.unique(ids[:-1][within] * len(words) + ids[1:][within], return_inverse=True)

    def pair_names(columns: npt.NDArray[np.int64]) -> list[str]:
        first, second = np.divmod(keys[columns], max(1, len(words)))
        return [f"{words[a]} {words[b]}" for a, b in zip(first.tolist(), second.tolist(), strict=True)]

    # Character n-grams include punctuation. Each distinct string between spaces is processed only once.
    strings, string_row, string_ids = _numbered(text.lower().split() for text in texts)
    pieces, of_string, piece_ids = _numbered(map(_pieces, strings))
    cut = _counted(of_string, piece_ids, (len(strings), len(pieces)))
    contents = _counted(string_row, string_ids, (len(texts), len(strings)))
    return (
        _Terms(_counted(row, ids, (len(texts), len(words))), _picker(words), least=1),
        _Terms(_counted(row[1:][within], pair, (len(texts), len(keys))), pair_names, least=2, keys=keys),
        _Terms(sparse.csr_array(contents @ cut), _picker(pieces), least=2),
    )


def _numbered(lists: Iterable[list[str]]) -> tuple[list[str], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the distinct strings and, for each occurrence, the index of its list and of its string."""
    place: defaultdict[str, int] = defaultdict()
    place.default_factory = place.__len__  # a new string gets the next index
    ids, lengths = array("q"), array("q")
    for strings in lists:
        ids.extend(map(place.__getitem__, strings))
        lengths.append(len(strings))
    rows = np.repeat(np.arange(len(lengths)), np.array(lengths, dtype=np.int64))
    return list(place), rows, np.array(ids, dtype=np.int64)


def _picker(names: list[str]) -> Callable[[npt.NDArray[np.int64]], list[str]]:
    return lambda columns: [names[column] for column in columns.tolist()]


def _counted(rows: npt.NDArray[Any], columns: npt.NDArray[Any], shape: tuple[int, int]) -> Matrix:
    """Return a matrix that counts how often each (row, column) pair occurs."""
    counts = sparse.coo_array((np.ones(len(rows), dtype=np.float32), (rows, columns)), shape=shape)
    return sparse.csr_array(counts)  # sums duplicates


def _pieces(word: str) -> list[str]:
    """Return the character n-grams of a word with a space before and after it, for all lengths in `PIECES`.

    >>> _pieces("cat")
    [' c', 'ca', 'at', 't ', ' ca', 'cat', 'at ', ' cat', 'cat ']
    """
    marked = f" {word} "
    return [marked[i : i + size] for size in PIECES for i in range(len(marked) - size + 1)]


def _tf(counts: Matrix) -> Matrix:
    """Replace the counts in place with logarithmic term frequencies, 1 + log(count)."""
    counts.data = 1 + np.log(counts.data)
    return counts


def _known_terms(terms: _Terms, place: Mapping[str, int]) -> Matrix:
    """Return the counts of known terms, CSR (texts, known). `place` maps each known term to its column."""
    names = terms.names(np.arange(terms.counts.shape[1]))
    to = np.array([place.get(name, -1) for name in names], dtype=np.int64)
    there = to[terms.counts.indices]
    keep = there >= 0
    starts = np.concatenate([[0], np.cumsum(keep)])[terms.counts.indptr]
    shape = (terms.counts.shape[0], len(place))
    return sparse.csr_array((terms.counts.data[keep], there[keep], starts), shape=shape)


def _idf(frequency: npt.NDArray[Any], count: int) -> npt.NDArray[np.float64]:
    """Return the inverse document frequency of terms that occur in `frequency` of `count` samples."""
    return np.log((1 + count) / (1 + frequency.astype(np.float64))) + 1


class _Frequencies:
    """The number of texts that contain each term of one kind, accumulated over blocks of texts.

    The terms are in order of first occurrence.
    """

    def __init__(self) -> None:
        self._place: dict[str, int] = {}
        self._counts = array("q")
        self.least = 1

    def add(self, terms: _Terms) -> None:
        """Add the terms of additional texts."""
        frequency = _frequency(terms)
        names = terms.names(np.arange(len(frequency)))
        for name, count in zip(names, frequency.tolist(), strict=True):
            place = self._place.setdefault(name, len(self._place))
            if place < len(self._counts):
                self._counts[place] += count
            else:
                self._counts.append(count)
        self.least = terms.least

    def result(self) -> tuple[npt.NDArray[np.int64], Callable[[npt.NDArray[np.int64]], list[str]]]:
        """Return the frequency of each term, and a function that maps indices to terms."""
        return np.array(self._counts, dtype=np.int64), _picker(list(self._place))

    def places(self, names: Iterable[str]) -> npt.NDArray[np.int64]:
        """Return the indices of terms that have been added."""
        return np.array([self._place[name] for name in names], dtype=np.int64)


class _PairFrequencies:
    """Like `_Frequencies`, but for pairs of words, which are sorted by the indices of their words.

    Pairs are stored as integers to save memory, because there are many of them.
    """

    def __init__(self, words: _Frequencies) -> None:
        self._words, self.least = words, 1
        self._keys, self._counts = (np.empty(0, dtype=np.int64) for _ in range(2))

    def add(self, words: _Terms, pairs: _Terms) -> None:
        """Add the pairs of additional texts, whose words must already have been added."""
        to = self._words.places(words.names(np.arange(words.counts.shape[1])))
        first, second = np.divmod(pairs.keys, max(1, len(to)))
        keys, place = np.unique(
            np.concatenate([self._keys, to[first] << 32 | to[second]]), return_inverse=True
        )
        counts = np.concatenate([self._counts, _frequency(pairs)])
        self._keys = keys
        # Sums of integers below 2**53 are exact in float64.
        self._counts = np.bincount(place, weights=counts, minlength=len(keys)).astype(np.int64)
        self.least = pairs.least

    def result(self) -> tuple[npt.NDArray[np.int64], Callable[[npt.NDArray[np.int64]], list[str]]]:
        """Return the frequency of each pair, and a function that maps indices to pairs."""

        def names(columns: npt.NDArray[np.int64]) -> list[str]:
            _, word = self._words.result()
            first, second = word(self._keys[columns] >> 32), word(self._keys[columns] & (2**32 - 1))
            return [f"{a} {b}" for a, b in zip(first, second, strict=True)]

        return self._counts, names


def _frequency(terms: _Terms) -> npt.NDArray[np.int64]:
    """Return the number of texts that contain each term."""
    return np.bincount(terms.counts.indices, minlength=terms.counts.shape[1])


def _fit_texts(texts: list[str]) -> tuple[tuple[list[str], list[str], list[str]], list[float]]:
    """Select the words, pairs and character n-grams that become inputs, and compute their IDF weights."""
    words, pieces = _Frequencies(), _Frequencies()
    pairs = _PairFrequencies(words)
    for some in _slices(len(texts), texts):
        found = _all_terms(texts[some])
        words.add(found[0])
        pairs.add(*found[:2])
        pieces.add(found[2])
    kinds, idf = [], list[float]()
    for terms in (words, pairs, pieces):
        frequency, names = terms.result()
        often = np.flatnonzero(frequency >= terms.least)
        if len(often) > MOST_TERMS:  # keep the most frequent terms, breaking ties by index
            often = np.sort(often[np.argsort(-frequency[often], kind="stable")[:MOST_TERMS]])
        kinds.append(names(often))
        idf += [round(float(weight), 7) for weight in _idf(frequency[often], len(texts))]
    return (kinds[0], kinds[1], kinds[2]), idf
