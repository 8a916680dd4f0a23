"""The table of a sweep: one row per finished run, in one CSV that tuning, figures and pages are made from."""

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean

from torchlml.cli import BadInput
from torchlml.files import replacing


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
    seconds: float

    @property
    def recipe(self) -> tuple[float, float]:
        """What was tuned: the learning rate and the temperature."""
        return self.learning_rate, self.temperature


_TYPES = {field.name: field.type for field in fields(Record)}


def write(path: Path, records: Iterable[Record]) -> None:
    """Writes the CSV whole or not at all, in an order that does not depend on which run ended first."""
    rows = sorted(records, key=lambda r: (r.source, r.loss, r.noise, r.recipe, r.seed))
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(_TYPES), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) | {"seconds": f"{row.seconds:.1f}"} for row in rows)


def read(path: Path, option: str) -> list[Record]:
    """Reads a CSV that `write` made; `option` named it, and stands in the error when it is something else."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if rows.fieldnames != list(_TYPES):
                raise ValueError("its columns are not those of a sweep of this version")
            records = [Record(**{key: _TYPES[key](row[key]) for key in _TYPES}) for row in rows]  # type: ignore[operator]
        if not records:
            raise ValueError("it has no rows")
    except (OSError, ValueError, TypeError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise BadInput(f"`{option}` names `{path}`, which cannot be read as a sweep: {said}.") from error
    return records


def best_recipes(
    records: Sequence[Record], losses: Sequence[str], path: Path
) -> dict[str, tuple[float, float]]:
    """For each loss the learning rate and temperature with the best mean top-k accuracy on validation.

    Args:
        records: The rows of a tuning sweep; the test accuracies are not looked at.
        losses: The losses that are needed.
        path: Where the rows come from, for the error.

    Returns:
        (learning rate, temperature) by loss. A loss that is missing, or recipes that were not tried on the
        same noise levels and seeds, raise `BadInput`.
    """
    best = {}
    for loss in losses:
        tried: dict[tuple[float, float], dict[tuple[float, int], float]] = defaultdict(dict)
        for record in records:
            if record.loss == loss:
                tried[record.recipe][record.noise, record.seed] = record.validation_topk
        if not tried:
            raise BadInput(f"`--tuned` names `{path}`, which has no run of the loss `{loss}`.")
        if len({frozenset(scores) for scores in tried.values()}) > 1:
            raise BadInput(
                f"`--tuned` names `{path}`, where `{loss}` was not tried on the same noise levels and seeds "
                "with every learning rate and temperature: finish that sweep first."
            )
        best[loss] = max(tried, key=lambda recipe: mean(tried[recipe].values()))
    return best
