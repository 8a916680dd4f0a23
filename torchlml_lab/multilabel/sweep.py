"""`torchlml sweep multilabel`: compare losses and fractions of labels kept, and tabulate the results."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine import output
from torchlml_lab.engine.output import StudyTable, Tried, new_console, plain_table, spread
from torchlml_lab.engine.run import train
from torchlml_lab.engine.sweep import Grid, check_grid, checked_runs, read_tuned, resuming, run_grid
from torchlml_lab.multilabel.losses import named
from torchlml_lab.multilabel.samples import Files, read_files, short_name, split
from torchlml_lab.multilabel.settings import EXPERIMENT, MultilabelSettings, SweepSettings
from torchlml_lab.multilabel.training import check, task

MEASURES = {
    "p1": "precision@1",
    "p3": "precision@3",
    "p5": "precision@5",
    "ndcg5": "ndcg@5",
    "psp5": "psp@5",
    "r5": "recall@5",
}
"""The fields of a record that contain test metrics, and the names of these metrics in a run."""


@dataclass(frozen=True)
class LabelRecord:
    """The settings of a run, and its metrics at the epoch with the best validation nDCG."""

    data: str
    """The name of the training file without its suffixes."""
    loss: str
    """The loss with its k, such as `lml-5`."""
    keep: str
    """The fraction of the training labels that were kept, or `one` for one label per sample."""
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


TABLE = StudyTable(LabelRecord, lambda row: (row.data, row.keep, row.loss, row.learning_rate, row.seed))


def tested(found: Mapping[str, float]) -> dict[str, float]:
    """Return the test metrics of a record, rounded to six digits."""
    return {name: round(found[measure], 6) for name, measure in MEASURES.items()}


def best_rates(records: Sequence[LabelRecord], losses: Sequence[str], path: Path) -> dict[str, float]:
    """Find the learning rate with the best mean validation nDCG@5 for each loss.

    Args:
        records: The records of a tuning sweep. Their test metrics are not used.
        losses: The losses to choose a learning rate for.
        path: The file with the records, for error messages.

    Returns:
        The learning rate for each loss. A loss without records, or one whose learning rates were not all
        tried with the same data, kept labels and seeds, raises `BadInput`.
    """
    tried = [
        Tried(row.loss, (row.learning_rate,), (row.data, row.keep, row.seed), row.validation_ndcg5)
        for row in records
    ]
    best = output.best_recipes(tried, losses, path, "loss", "learning rate", "kept labels and seeds")
    return {loss: rate for loss, (rate,) in best.items()}


# The options of a run that the sweep sets itself.
_CHOSEN = ("out", "resume", "loss", "k", "keep", "seed")


def main(settings: SweepSettings) -> None:
    """Train all combinations that have not been finished."""
    runs = grid(settings)
    _files_of(runs[0])  # an invalid file raises here, before any run starts
    study = Grid(EXPERIMENT, runs, _run_one, lambda one, done: [record(one, done)], TABLE.write, _table)
    run_grid(study, settings, new_console())


def grid(settings: SweepSettings) -> list[MultilabelSettings]:
    """Return the settings of every run. Invalid settings raise `BadInput`."""
    check_grid(settings, settings.run, _CHOSEN, ("losses", "keeps", "seeds"))
    if settings.run.test is None:
        raise BadInput("`--run.test` is missing. A sweep compares losses on test samples.")
    rates = dict.fromkeys(settings.losses, settings.learning_rates or (settings.run.learning_rate,))
    if settings.tuned is not None:
        rows = read_tuned(settings, TABLE)
        best = best_rates(rows, settings.losses, settings.tuned)
        rates = {loss: (rate,) for loss, rate in best.items()}
    return checked_runs(_runs(settings, rates), check)


def _runs(settings: SweepSettings, rates: Mapping[str, Sequence[float]]) -> Iterator[MultilabelSettings]:
    # The seed varies slowest, so that a sweep that is stopped early still covers every loss and every `keep`.
    for seed, keep, loss in product(settings.seeds, settings.keeps, settings.losses):
        chosen = named(loss)
        name = chosen.name
        if name == "topk-softmax":
            raise BadInput(f"`--losses` contains `{loss}`, which only `torchlml sweep recommend` supports.")
        for rate in rates[loss]:
            out = settings.out / f"{loss}_keep{keep}_lr{rate:g}_seed{seed}"
            yield dataclasses.replace(
                settings.run, out=out, loss=name, k=chosen.k, keep=keep, seed=seed, learning_rate=rate
            )


def record(settings: MultilabelSettings, result: dict[str, Any]) -> LabelRecord:
    """Return the record of a finished run."""
    assert settings.train is not None
    return LabelRecord(
        data=short_name(settings.train),
        loss=settings.loss if settings.k is None else f"{settings.loss}-{settings.k}",
        keep=str(settings.keep),
        seed=settings.seed,
        learning_rate=settings.learning_rate,
        best_epoch=result["best_epoch"],
        validation_ndcg5=round(result["validation"]["ndcg@5"], 6),
        **tested(result["test"]),
        seconds=result["seconds"],
    )


_read_once = lru_cache(maxsize=1)(read_files)


def _files_of(settings: MultilabelSettings) -> Files:
    """Return the samples in the files of a run. All runs share them, so each process reads them only once."""
    same = MultilabelSettings()
    kept = {name: getattr(same, name) for name in (*_CHOSEN, "learning_rate")}
    return _read_once(dataclasses.replace(settings, **kept))


def _run_one(settings: MultilabelSettings) -> dict[str, Any]:
    return train(
        EXPERIMENT,
        resuming(settings),
        lambda: task(settings, split(settings, _files_of(settings))),
        new_console(quiet=True),
    )


def _table(rows: Sequence[LabelRecord]) -> Table:
    """Tabulate the means and standard deviations of the metrics over the seeds."""
    groups: dict[tuple[str, str, float], list[LabelRecord]] = defaultdict(list)
    for row in rows:
        groups[row.keep, row.loss, row.learning_rate].append(row)
    # The table must fit a terminal that is 80 characters wide.
    heads = ("kept", "loss", "lr", "seeds", "val nDCG@5", "P@1", "P@5", "R@5")
    output = plain_table("Mean±standard deviation over the seeds, in %", heads, left=2)
    for (keep, loss, rate), group in sorted(groups.items()):
        cells = [
            spread([getattr(row, name) for row in group], 1)
            for name in ("validation_ndcg5", "p1", "p5", "r5")
        ]
        output.add_row(keep, loss, f"{rate:g}", str(len(group)), *cells)
    return output
