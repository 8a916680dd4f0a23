"""The table of a sweep: one row per finished run, in one CSV that tuning, figures and pages are made from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchlml_lab.engine import table
from torchlml_lab.engine.table import StudyTable, Tried


@dataclass(frozen=True)
class Record:
    """One run: what it was told, and the accuracies of the epoch chosen on validation."""

    source: str
    """`features`, or the network that was trained on images."""
    loss: str
    noise: float
    seed: int
    k: int
    learning_rate: float
    temperature: float
    epochs: int
    best_epoch: int
    validation_top1: float
    validation_topk: float
    test_top1: float
    test_topk: float
    train_top1: float
    """After the last epoch, on the noisy labels of training samples: 1 where they were learned by heart."""
    train_topk: float
    last_top1: float
    """After the last epoch, on validation, whose labels are clean."""
    last_topk: float
    seconds: float

    @property
    def recipe(self) -> tuple[float, float]:
        """What was tuned: the learning rate and the temperature."""
        return self.learning_rate, self.temperature


TABLE = StudyTable(Record, lambda row: (row.source, row.loss, row.noise, row.recipe, row.seed))


def best_recipes(
    records: Sequence[Record], losses: Sequence[str], path: Path
) -> dict[str, tuple[float, ...]]:
    """For each loss the learning rate and temperature with the best mean top-k accuracy on validation.

    Args:
        records: The rows of a tuning sweep; the test accuracies are not looked at.
        losses: The losses that are needed.
        path: Where the rows come from, for the error.

    Returns:
        (learning rate, temperature) by loss. A loss that is missing, or recipes that were not tried on the
        same noise levels and seeds, raise `BadInput`.
    """
    tried = [Tried(row.loss, row.recipe, (row.noise, row.seed), row.validation_topk) for row in records]
    tuned = "learning rate and temperature"
    return table.best_recipes(tried, losses, path, "loss", tuned, "noise levels and seeds")
