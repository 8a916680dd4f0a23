"""What turns the rows of a file into a network's inputs: fitted on the training rows, stored with the run."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import sparse
from sklearn.feature_extraction.text import TfidfVectorizer

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.labelled_rows import LabelledRows, Matrix
from torchlml_lab.data.tables import Columns
from torchlml_lab.files import read_record

FILE = "preparation.json"
MOST_TERMS = 100_000


class Prepared(NamedTuple):
    """Rows as a network reads them."""

    inputs: Matrix
    """CSR float32 (rows, inputs)."""
    unknown: int
    """How many features of the rows, words not counted, the run does not know."""
    empty: int
    """How many rows have nothing that the run knows."""


@dataclass(frozen=True)
class Preparation:
    """The inputs and outputs of a run's network, by name."""

    labels: list[str]
    """The names of the network's outputs."""
    counts: list[int]
    """In how many training rows each of them is."""
    rows: int
    """How many training rows there are."""
    k: int
    """How many labels are predicted."""
    columns: Columns | None = None
    """The columns of the table, where the rows came from one."""
    terms: list[str] = field(default_factory=list)
    """The words and pairs of words of the texts that are inputs."""
    idf: list[float] = field(default_factory=list)
    """The weight of each term."""
    features: list[int] = field(default_factory=list)
    """The columns of the features that are inputs."""
    means: list[float] = field(default_factory=list)
    """What is subtracted from each of them: nothing where they are sparse."""
    scales: list[float] = field(default_factory=list)
    """What each of them is divided by after that."""

    @property
    def inputs(self) -> int:
        """How many inputs the network has."""
        return len(self.terms) + len(self.features)

    def apply(self, rows: LabelledRows) -> Prepared:
        """The inputs of rows: the TF-IDF of texts, numbers in units of their spread, features of length 1."""
        blocks = []
        if self.terms:
            blocks.append(sparse.csr_array(self._vectorizer.transform(rows.texts)))
        chosen = np.array(self.features, dtype=np.int64)
        there = rows.features
        unknown = int((~np.isin(there.indices, chosen)).sum())
        if self.columns is not None:
            numbers = (there[:, chosen].toarray() - np.array(self.means)) / np.array(self.scales)
            blocks.append(sparse.csr_array(np.nan_to_num(numbers, nan=0.0)))  # the mean where there is none
        elif self.features:
            known = _chosen_columns(there, chosen) @ sparse.diags_array(1 / np.array(self.scales))
            length = np.sqrt(known.multiply(known).sum(axis=1))
            blocks.append(sparse.diags_array(1 / np.where(length > 0, length, 1)) @ known)
        inputs = sparse.csr_array(sparse.hstack(blocks, format="csr"), dtype=np.float32)
        inputs.eliminate_zeros()
        inputs.sort_indices()
        # A row of numbers that are all average has no input that is not 0, and is no row of unknown things.
        empty = 0 if self.columns is not None and self.features else int((np.diff(inputs.indptr) == 0).sum())
        return Prepared(inputs, unknown, empty)

    @property
    def _vectorizer(self) -> TfidfVectorizer:
        vectorizer = _new_vectorizer(vocabulary=self.terms)
        vectorizer.idf_ = np.array(self.idf)
        return vectorizer

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON's types."""
        return dataclasses.asdict(self)


def fit(rows: LabelledRows, columns: Columns | None, k: int) -> Preparation:
    """Learn from training rows what the inputs and the labels are.

    Args:
        rows: The training rows.
        columns: The columns of the table they came from.
        k: How many labels are predicted.

    Returns:
        The preparation. Rows without anything to learn from raise `BadInput`.
    """
    terms, idf = _fit_texts(rows.texts) if rows.texts is not None else ([], [])
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
            scales = abs(_chosen_columns(rows.features, used)).max(axis=0).toarray().ravel()
    if not terms and not len(used):
        raise BadInput("The training rows have no features and no words: there is nothing to learn from.")
    return Preparation(
        labels=rows.names,
        counts=np.bincount(rows.labels.indices, minlength=len(rows.names)).tolist(),
        rows=len(rows),
        k=k,
        columns=columns,
        terms=terms,
        idf=idf,
        features=used.tolist(),
        means=means.tolist(),
        scales=np.where(scales > 0, scales, 1.0).tolist(),
    )


def _chosen_columns(matrix: Matrix, columns: npt.NDArray[np.int64]) -> Matrix:
    """Some columns, by rising numbers. By its own indexing scipy takes memory for all there could be."""
    place = np.searchsorted(columns, matrix.indices)
    found = columns[np.minimum(place, len(columns) - 1)] == matrix.indices
    starts = np.concatenate([[0], np.cumsum(found)])[matrix.indptr]
    shape = (matrix.shape[0], len(columns))
    return sparse.csr_array((matrix.data[found], place[found], starts), shape=shape)


def stored(run: Path) -> Preparation:
    """The preparation of a run; a file that holds something else raises `BadInput`."""
    path = run / FILE
    found = read_record(path, Preparation)
    for several in (("labels", "counts"), ("terms", "idf"), ("features", "means", "scales")):
        lengths = [len(getattr(found, name)) for name in several]
        if len(set(lengths)) > 1:
            names = ", ".join(f"`{name}`" for name in several)
            raise BadInput(f"`{path}` is damaged: {names} must be of one length, but they have {lengths}.")
    for name in ("labels", "terms"):
        if len(set(getattr(found, name))) < len(getattr(found, name)):
            raise BadInput(f"`{path}` is damaged: `{name}` has a name twice.")
    if found.terms and found.columns is None:
        raise BadInput(f"`{path}` is damaged: it has `terms`, but no `columns` that they come from.")
    if not found.inputs or len(found.labels) < 2 or not 1 <= found.k < len(found.labels):
        sizes = f"{found.inputs} inputs, {len(found.labels)} labels and k = {found.k}"
        raise BadInput(f"`{path}` is damaged: it has {sizes}.")
    return found


def _new_vectorizer(**more: Any) -> TfidfVectorizer:
    # Words of one letter count too ("C", "R"), and pairs of words tell more than words.
    return TfidfVectorizer(
        token_pattern=r"(?u)\b\w+\b", ngram_range=(1, 2), sublinear_tf=True, dtype=np.float32, **more
    )


def _fit_texts(texts: list[str]) -> tuple[list[str], list[float]]:
    """The terms that are in at least two texts, or in one where no text has another, and their weights."""
    for least in (2, 1):
        vectorizer = _new_vectorizer(min_df=least, max_features=MOST_TERMS)
        try:
            vectorizer.fit(texts)
        except ValueError:  # no word is left
            continue
        terms = vectorizer.get_feature_names_out().tolist()
        return terms, [round(float(weight), 7) for weight in vectorizer.idf_]
    return [], []
