"""The table of the study: one row per evaluation of a run, in one CSV for tables, curves and tuning."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchlml_lab.engine import table
from torchlml_lab.engine.table import StudyTable, Tried
from torchlml_lab.studies.scene_graph.methods import find_method
from torchlml_lab.studies.scene_graph.recalls import MEAN_RECALLS, RECALLS

FREQUENCY = "frequency"
"""The method that ranks by the frequencies alone and is not trained."""


@dataclass(frozen=True)
class Record:
    """One evaluation: of which run, after which epoch, on which images, and the recalls."""

    data: str
    """`vg` or `vrd`."""
    vision: str
    method: str
    """The objective and, where it has one, its k, as in `lml-20`."""
    variant: str
    """What differs from the usual run, as in `without-bias`."""
    seed: int
    learning_rate: float
    epochs: int
    epoch: int
    split: str
    """`train`, `validation` or `test`."""
    chosen: int
    """1 for the epoch that was best on validation."""
    recall: float
    r20: float
    r50: float
    r100: float
    ng_r20: float
    ng_r50: float
    ng_r100: float
    mr20: float
    mr50: float
    mr100: float
    ng_mr20: float
    ng_mr50: float
    ng_mr100: float
    seconds: float
    """Of the whole run."""


def columns(measures: dict[str, float]) -> dict[str, float]:
    """The measures under the names they have in a record."""
    return {"recall": measures["recall"]} | {column(name): measures[name] for name in RECALLS + MEAN_RECALLS}


def column(measure: str) -> str:
    """The column of a measure: `ng_r20` for `ng-R@20`."""
    return measure.lower().replace("@", "").replace("-", "_")


TABLE = StudyTable(
    Record,
    lambda row: (
        *(row.data, row.vision, row.method, row.variant),
        *(row.learning_rate, row.seed, row.epoch, row.split),
    ),
)


def best_rates(
    records: Sequence[Record], cells: Sequence[tuple[str, str]], path: Path
) -> dict[tuple[str, str], float]:
    """For each method and variant the learning rate with the best recall on validation.

    Args:
        records: The rows of a tuning sweep; those of the test are not looked at.
        cells: The pairs of method and variant that are needed.
        path: Where the rows come from, for the error.

    Returns:
        The learning rate by method and variant. A k that was not tuned has that of its objective's nearest k,
        a variant of which nothing was tuned that of the usual runs. A method that is missing, or learning
        rates that were not tried with the same seeds, raise `BadInput`.
    """
    rates = {}
    for method, variant in cells:
        rows = [row for row in records if row.split == "validation" and row.chosen]
        of_variant = [row for row in rows if row.variant == variant]
        tried = [
            Tried(row.method, (row.learning_rate,), (row.data, row.seed), row.recall)
            for row in of_variant or [row for row in rows if not row.variant]
        ]
        model = _nearest(method, {one.method for one in tried})
        best = table.best_recipes(tried, [model], path, "method", "learning rate", "data and seeds")
        rates[method, variant] = best[model][0]
    return rates


def _nearest(method: str, tuned: Collection[str]) -> str:
    """The tuned method of the same objective with the nearest k; the method itself where there is none."""
    wanted = find_method(method)
    if method in tuned or wanted is None or wanted.k is None:
        return method
    k = wanted.k
    others = [one for name in tuned if (one := find_method(name)) and one.objective == wanted.objective]
    nearest = min(others, key=lambda one: (abs((one.k or 0) - k), one.name), default=wanted)
    return nearest.name


def title_of(rows: Sequence[Record], split: str) -> str:
    """What stands above a table of the recalls on a split."""
    about = next(row for row in rows if row.method != FREQUENCY)
    return (
        f"{about.data}, predicate classification, {about.vision}, {split}: recall in %, mean±standard "
        "deviation over the seeds"
    )
