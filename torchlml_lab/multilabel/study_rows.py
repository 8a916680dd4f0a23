"""The table of a sweep: one row per finished run, in one CSV that tuning, figures and pages are made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchlml_lab.engine import table
from torchlml_lab.engine.table import StudyTable, Tried

MEASURES = {
    "p1": "precision@1",
    "p3": "precision@3",
    "p5": "precision@5",
    "ndcg5": "ndcg@5",
    "psp5": "psp@5",
    "r5": "recall@5",
}
"""The columns of the test measures, and what they are called in a run."""


@dataclass(frozen=True)
class Record:
    """One run: what it was told, and the measures of the epoch chosen on validation."""

    data: str
    """The training file's name without its endings."""
    loss: str
    """The loss with its k, as `lml-5`."""
    keep: str
    """The share of the training labels that was kept, or `one` per row."""
    seed: int
    learning_rate: float
    best_epoch: int
    validation_ndcg5: float
    p1: float
    p3: float
    p5: float
    ndcg5: float
    psp5: float
    r5: float
    seconds: float


TABLE = StudyTable(Record, lambda row: (row.data, row.keep, row.loss, row.learning_rate, row.seed))


def tested(found: Mapping[str, float]) -> dict[str, float]:
    """The columns of a record from the measures of a run, in the digits that mean something."""
    return {name: round(found[measure], 6) for name, measure in MEASURES.items()}


def best_rates(records: Sequence[Record], losses: Sequence[str], path: Path) -> dict[str, float]:
    """For each loss the learning rate with the best mean nDCG@5 on validation.

    Args:
        records: The rows of a tuning sweep; the test measures are not looked at.
        losses: The losses that are needed.
        path: Where the rows come from, for the error.

    Returns:
        The rate by loss. A loss that is missing, or rates that were not tried under the same conditions,
        raise `BadInput`.
    """
    tried = [
        Tried(row.loss, (row.learning_rate,), (row.data, row.keep, row.seed), row.validation_ndcg5)
        for row in records
    ]
    best = table.best_recipes(tried, losses, path, "loss", "learning rate", "kept labels and seeds")
    return {loss: rate for loss, (rate,) in best.items()}
