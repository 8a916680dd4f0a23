"""`torchlml sweep multilabel`: losses x kept labels x seeds on one data set, that can be stopped any time."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from torchlml_lab.cli import parse_settings
from torchlml_lab.engine.grid import Grid, GridSettings, check_grid, checked_runs, resuming, run_grid
from torchlml_lab.engine.run import train
from torchlml_lab.engine.table import plain_table, spread
from torchlml_lab.errors import BadInput
from torchlml_lab.multilabel import study_rows
from torchlml_lab.multilabel.multilabel_settings import EXPERIMENT, MultilabelSettings, check
from torchlml_lab.multilabel.run_rows import Files, read_files, split
from torchlml_lab.multilabel.study_rows import Record
from torchlml_lab.multilabel.training import task
from torchlml_lab.screen import new_console
from torchlml_lab.tasks.label_losses import named

# These settings of a run are the sweep's to choose.
_CHOSEN = ("out", "resume", "loss", "k", "keep", "seed")
LOSSES = ("bce", "softmax", "lml-5", "lml-20", "lml-labels", "truncated-entropy-1")


@dataclass(frozen=True)
class SweepSettings(GridSettings):
    """Run all combinations of losses, kept labels, seeds and learning rates that are not done.

    Needs --run.train and --run.test.
    """

    out: Path = Path("runs/multilabel-sweep")
    losses: tuple[str, ...] = LOSSES
    """The losses with their k: bce, softmax, lml-5, lml-labels, truncated-entropy-1, and so on."""
    keeps: tuple[float | Literal["one"], ...] = (1.0, 0.5, 0.3, "one")
    """The shares of the training labels that are kept, at least one in each row; `one`: no more than one."""
    seeds: tuple[int, ...] = (0, 1, 2)
    run: MultilabelSettings = field(default_factory=MultilabelSettings)
    """All that the runs have in common, as for `torchlml train multilabel`."""


def main(arguments: Sequence[str]) -> None:
    """Read the options and run what is not done yet."""
    settings = parse_settings(SweepSettings, "sweep multilabel", arguments, SweepSettings())
    runs = grid(settings)
    _files_of(runs[0])  # so that a bad file is reported once, and at once
    study = Grid(
        EXPERIMENT, runs, _run_one, lambda one, done: [record(one, done)], study_rows.TABLE.write, _table
    )
    run_grid(study, settings, new_console())


def grid(settings: SweepSettings) -> list[MultilabelSettings]:
    """The settings of every run; those that cannot be run raise `BadInput`."""
    check_grid(settings, settings.run, _CHOSEN, ("losses", "keeps", "seeds"))
    if settings.run.test is None:
        raise BadInput("`--run.test` is missing: a sweep compares the losses on test rows.")
    rates = dict.fromkeys(settings.losses, settings.learning_rates or (settings.run.learning_rate,))
    if settings.tuned is not None:
        rows = settings.read_tuned(study_rows.TABLE)
        best = study_rows.best_rates(rows, settings.losses, settings.tuned)
        rates = {loss: (rate,) for loss, rate in best.items()}
    return checked_runs(_runs(settings, rates), check)


def _runs(settings: SweepSettings, rates: Mapping[str, Sequence[float]]) -> Iterator[MultilabelSettings]:
    # The seed varies slowest: a sweep that is stopped early still has every loss at every share of labels.
    for seed, keep, loss in product(settings.seeds, settings.keeps, settings.losses):
        chosen = named(loss)
        for rate in rates[loss]:
            out = settings.out / f"{loss}_keep{keep}_lr{rate:g}_seed{seed}"
            yield dataclasses.replace(
                settings.run, out=out, loss=chosen.name, k=chosen.k, keep=keep, seed=seed, learning_rate=rate
            )


def record(settings: MultilabelSettings, result: dict[str, Any]) -> Record:
    """The row of a finished run."""
    assert settings.train is not None
    return Record(
        data=settings.train.name.partition(".")[0],
        loss=settings.loss if settings.k is None else f"{settings.loss}-{settings.k}",
        keep=str(settings.keep),
        seed=settings.seed,
        learning_rate=settings.learning_rate,
        best_epoch=result["best_epoch"],
        validation_ndcg5=round(result["validation"]["ndcg@5"], 6),
        **study_rows.tested(result["test"]),
        seconds=result["seconds"],
    )


_read_once = lru_cache(maxsize=1)(read_files)


def _files_of(settings: MultilabelSettings) -> Files:
    """The files of a run, read once for all runs of this process: they have the same."""
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


def _table(rows: Sequence[Record]) -> Table:
    """The mean measures over the seeds; the spread is their standard deviation."""
    groups: dict[tuple[str, str, float], list[Record]] = defaultdict(list)
    for row in rows:
        groups[row.keep, row.loss, row.learning_rate].append(row)
    # Narrow enough for a terminal of 80 columns.
    heads = ("kept", "loss", "lr", "seeds", "val nDCG@5", "P@1", "P@5", "R@5")
    table = plain_table("in %, mean±standard deviation over the seeds", heads, left=2)
    for (keep, loss, rate), group in sorted(groups.items()):
        cells = [
            spread([getattr(row, name) for row in group], 1)
            for name in ("validation_ndcg5", "p1", "p5", "r5")
        ]
        table.add_row(keep, loss, f"{rate:g}", str(len(group)), *cells)
    return table
