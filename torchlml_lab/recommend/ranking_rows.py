"""The table of a sweep: one row per finished run, in one CSV that tuning, figures and pages are made from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchlml_lab.engine import table
from torchlml_lab.engine.table import StudyTable, Tried


@dataclass(frozen=True)
class Record:
    """One run: what it was told, and the measures of the epoch chosen on validation."""

    model: str
    loss: str
    """With its k, as in `lml-20`."""
    users: int
    """How many were trained on."""
    seed: int
    dimension: int
    learning_rate: float
    temperature: float
    """Of matrix factorisation; the autoencoder has none, and the dropout is the autoencoder's alone."""
    dropout: float
    epochs: int
    best_epoch: int
    validation_recall20: float
    validation_ndcg20: float
    test_recall5: float
    test_recall10: float
    test_recall20: float
    test_recall50: float
    test_recall100: float
    test_ndcg20: float
    seconds: float

    @property
    def method(self) -> str:
        """The model and the loss."""
        return f"{self.model} {self.loss}"

    @property
    def recipe(self) -> tuple[float, float, float]:
        """What was tuned."""
        return self.learning_rate, self.temperature, self.dropout


TABLE = StudyTable(Record, lambda row: (row.model, row.loss, row.recipe, row.users, row.seed))


def best_recipes(rows: Sequence[Record], methods: Sequence[str], path: Path) -> dict[str, tuple[float, ...]]:
    """For each model and loss the recipe with the best mean Recall@20 on validation.

    Args:
        rows: Those of a tuning sweep; the test is not looked at.
        methods: The models and losses that are needed, as `Record.method` has them.
        path: Where the rows come from, for the errors.

    Returns:
        (learning rate, temperature, dropout) by method. A method that is missing, or recipes that were not
        tried with the same users and seeds, raise `BadInput`.
    """
    tried = [Tried(row.method, row.recipe, (row.users, row.seed), row.validation_recall20) for row in rows]
    return table.best_recipes(tried, methods, path, "method", "recipe", "users and seeds")
