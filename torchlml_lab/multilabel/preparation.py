"""Turns samples into network inputs: fitted on the training samples and stored with the run."""

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
    terms: list[str] = field(default_factory=list)
    """The words and word pairs that are inputs."""
    idf: list[float] = field(default_factory=list)
    """The inverse document frequency of each term."""
    features: list[int] = field(default_factory=list)
    """The feature columns that are inputs."""
    means: list[float] = field(default_factory=list)
    """The mean that is subtracted from each of these features; 0 for sparse features."""
    scales: list[float] = field(default_factory=list)
    """The scale that each of these features is then divided by."""

    @property
    def inputs(self) -> int:
        """The number of network inputs."""
        return len(self.terms) + len(self.features)

    @property
    def mean_count(self) -> float:
        """The mean number of labels per training sample."""
        return sum(self.counts) / self.rows

    def apply(self, rows: LabelledRows) -> Prepared:
        """Compute the inputs of samples.

        Texts become TF-IDF vectors, the numbers of a table are standardized, and sparse features are scaled
        to norm 1.
        """
        blocks = []
        if self.terms:
            blocks.append(sparse.csr_array(self._vectorizer.transform(rows.texts)))
        chosen = np.array(self.features, dtype=np.int64)
        there = rows.features
        unknown = int((~np.isin(there.indices, chosen)).sum())
        if self.columns is not None:
            numbers = (there[:, chosen].toarray() - np.array(self.means)) / np.array(self.scales)
            blocks.append(sparse.csr_array(np.nan_to_num(numbers, nan=0.0)))  # missing numbers get the mean
        elif self.features:
            known = _chosen_columns(there, chosen) @ sparse.diags_array(1 / np.array(self.scales))
            length = np.sqrt(known.multiply(known).sum(axis=1))
            blocks.append(sparse.diags_array(1 / np.where(length > 0, length, 1)) @ known)
        inputs = sparse.csr_array(sparse.hstack(blocks, format="csr"), dtype=np.float32)
        inputs.eliminate_zeros()
        inputs.sort_indices()
        # If every number of a sample is the mean, all its inputs are 0, but they are not unknown.
        empty = 0 if self.columns is not None and self.features else int((np.diff(inputs.indptr) == 0).sum())
        return Prepared(inputs, unknown, empty)

    @property
    def _vectorizer(self) -> TfidfVectorizer:
        vectorizer = _new_vectorizer(vocabulary=self.terms)
        vectorizer.idf_ = np.array(self.idf)
        return vectorizer

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return dataclasses.asdict(self)


def continued(earlier: Preparation, rows: LabelledRows, k: int) -> Preparation:
    """The inputs of an earlier run with the labels of other training samples, which start with its labels."""
    counts = np.bincount(rows.labels.indices, minlength=len(rows.names)).tolist()
    return dataclasses.replace(earlier, labels=rows.names, counts=counts, rows=len(rows), k=k)


def fit(rows: LabelledRows, columns: Columns | None, k: int) -> Preparation:
    """Fit the inputs and the labels on training samples.

    Args:
        rows: The training samples.
        columns: The columns of the table that they come from, if any.
        k: The number of labels to predict.

    Returns:
        The preparation. Samples without features or words raise `BadInput`.
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
        raise BadInput("The training samples must have features or words, but they have neither.")
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
    for several in (("labels", "counts"), ("terms", "idf"), ("features", "means", "scales")):
        lengths = [len(getattr(found, name)) for name in several]
        if len(set(lengths)) > 1:
            names = ", ".join(f"`{name}`" for name in several)
            raise BadInput(f"`{path}` is damaged: {names} must have equal lengths, but they have {lengths}.")
    for name in ("labels", "terms"):
        if len(set(getattr(found, name))) < len(getattr(found, name)):
            raise BadInput(f"`{path}` is damaged: `{name}` contains a duplicate.")
    if found.terms and found.columns is None:
        raise BadInput(f"`{path}` is damaged: it has `terms`, but not the `columns` they come from.")
    if not found.inputs or found.rows < 1 or len(found.labels) < 2 or not 1 <= found.k < len(found.labels):
        sizes = f"{found.inputs} inputs, {found.rows} samples, {len(found.labels)} labels and k = {found.k}"
        raise BadInput(f"`{path}` is damaged: it has {sizes}.")
    return found


def _new_vectorizer(**more: Any) -> TfidfVectorizer:
    # Single letters can be words ("C", "R"), and word pairs are more specific than words.
    return TfidfVectorizer(
        token_pattern=r"(?u)\b\w+\b", ngram_range=(1, 2), sublinear_tf=True, dtype=np.float32, **more
    )


def _fit_texts(texts: list[str]) -> tuple[list[str], list[float]]:
    """The terms that occur in at least two texts (or one, if there are none) and their weights."""
    for least in (2, 1):
        vectorizer = _new_vectorizer(min_df=least, max_features=MOST_TERMS)
        try:
            vectorizer.fit(texts)
        except ValueError:  # no term is left
            continue
        terms = vectorizer.get_feature_names_out().tolist()
        return terms, [round(float(weight), 7) for weight in vectorizer.idf_]
    return [], []
