"""`torchlml sweep recommend`: models x losses x seeds, and the table of results."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from torchlml_lab.engine import output
from torchlml_lab.engine.output import StudyTable, Tried, new_console, plain_table, spread
from torchlml_lab.engine.run import train
from torchlml_lab.engine.sweep import Grid, check_grid, checked_runs, read_tuned, resuming, run_grid
from torchlml_lab.multilabel.losses import loss_with_usual_k, named
from torchlml_lab.recommend.histories import Data, read
from torchlml_lab.recommend.model import EXPERIMENT
from torchlml_lab.recommend.settings import RecommendSettings, SweepSettings
from torchlml_lab.recommend.training import check, task


@dataclass(frozen=True)
class RankingRecord:
    """One run: its settings, and the metrics of the epoch chosen on validation."""

    model: str
    loss: str
    """The loss with its k, such as `lml-20`."""
    users: int
    """The number of training users."""
    seed: int
    dimension: int
    learning_rate: float
    temperature: float
    """Used by matrix factorization only; `dropout` is used by the autoencoder only."""
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
        """The tuned settings."""
        return self.learning_rate, self.temperature, self.dropout


TABLE = StudyTable(RankingRecord, lambda row: (row.model, row.loss, row.recipe, row.users, row.seed))


def best_recipes(
    rows: Sequence[RankingRecord], methods: Sequence[str], path: Path
) -> dict[str, tuple[float, ...]]:
    """The (learning rate, temperature, dropout) of each method with the best mean Recall@20 on validation.

    `methods` are named as by `RankingRecord.method`.
    """
    tried = [Tried(row.method, row.recipe, (row.users, row.seed), row.validation_recall20) for row in rows]
    return output.best_recipes(tried, methods, path, "method", "recipe", "users and seeds")


# The sweep sets these options of a run itself.
_CHOSEN = ("out", "resume", "model", "loss", "k", "seed")


def main(settings: SweepSettings) -> None:
    """Run all combinations that are not finished."""
    runs = grid(settings)
    users = int((read(settings.run).training.counts > 0).sum())  # raises for a bad file before any run starts

    def rows(one: RecommendSettings, done: dict[str, Any]) -> list[RankingRecord]:
        return [record(one, done, users)]

    run_grid(Grid(EXPERIMENT, runs, _run_one, rows, TABLE.write, _tables), settings, new_console())


def grid(settings: SweepSettings) -> list[RecommendSettings]:
    """The settings of every run; raises `BadInput` if one of them is invalid."""
    check_grid(settings, settings.run, _CHOSEN, ("models", "losses", "seeds"))
    return checked_runs(_runs(settings), check)


def _runs(settings: SweepSettings) -> Iterator[RecommendSettings]:
    methods = list(product(settings.models, settings.losses))
    recipes = _recipes(settings, methods)
    # The seed varies slowest, so that a sweep stopped early still has every model and loss.
    for seed, (model, loss) in product(settings.seeds, methods):
        chosen = named(loss)
        for rate, temperature, dropout in recipes[model, loss]:
            tuned = f"d{dropout:g}" if model == "autoencoder" else f"t{temperature:g}"
            out = settings.out / f"{model}_{loss}_lr{rate:g}_{tuned}_seed{seed}"
            one = dataclasses.replace(
                settings.run, out=out, model=model, loss=chosen.name, k=chosen.k, seed=seed
            )
            yield dataclasses.replace(one, learning_rate=rate, temperature=temperature, dropout=dropout)


def _recipes(
    settings: SweepSettings, methods: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], list[tuple[float, ...]]]:
    """The recipes of each model and loss: learning rates with temperatures or dropouts, or the tuned one."""
    if settings.tuned is not None:
        rows = read_tuned(settings, TABLE, ("learning_rates", "temperatures", "dropouts"))
        best = best_recipes(rows, [f"{model} {loss}" for model, loss in methods], settings.tuned)
        return {(model, loss): [best[f"{model} {loss}"]] for model, loss in methods}
    run = settings.run
    rates = settings.learning_rates or (run.learning_rate,)
    of_model = {
        "autoencoder": product(rates, (run.temperature,), settings.dropouts or (run.dropout,)),
        "matrix-factorisation": product(rates, settings.temperatures or (run.temperature,), (run.dropout,)),
    }
    listed: dict[str, list[tuple[float, ...]]] = {model: list(tried) for model, tried in of_model.items()}
    return {(model, loss): listed[model] for model, loss in methods}


def record(settings: RecommendSettings, result: dict[str, Any], users: int) -> RankingRecord:
    """The record of a finished run."""
    validation = result["validation"]
    test = result["test"] or dict.fromkeys(validation, math.nan)  # tuning runs have no test
    return RankingRecord(
        model=settings.model,
        loss=str(loss_with_usual_k(settings.loss, settings.k)),
        users=users,
        seed=settings.seed,
        dimension=settings.dimension,
        learning_rate=settings.learning_rate,
        temperature=settings.temperature,
        dropout=settings.dropout,
        epochs=settings.epochs,
        best_epoch=result["best_epoch"],
        validation_recall20=validation["recall@20"],
        validation_ndcg20=validation["ndcg@20"],
        test_recall5=test["recall@5"],
        test_recall10=test["recall@10"],
        test_recall20=test["recall@20"],
        test_recall50=test["recall@50"],
        test_recall100=test["recall@100"],
        test_ndcg20=test["ndcg@20"],
        seconds=result["seconds"],
    )


@lru_cache(maxsize=1)
def _read_once(run: RecommendSettings) -> Data:
    return read(run)


def _run_one(settings: RecommendSettings) -> dict[str, Any]:
    # The files do not depend on the settings that vary in a sweep, so each worker reads them once.
    files = dataclasses.replace(
        RecommendSettings(),
        **{name: getattr(settings, name) for name in ("train", "test", "columns", "validation", "users")},
    )
    return train(
        EXPERIMENT, resuming(settings), lambda: task(settings, _read_once(files)), new_console(quiet=True)
    )


def _tables(rows: Sequence[RankingRecord]) -> Group:
    """For each model, the metrics as mean and standard deviation over the seeds."""
    models = sorted({row.model for row in rows})
    return Group(*(_table(model, [row for row in rows if row.model == model]) for model in models))


def _table(model: str, rows: Sequence[RankingRecord]) -> Table:
    groups: dict[tuple[str, tuple[float, ...]], list[RankingRecord]] = defaultdict(list)
    for row in rows:
        groups[row.loss, row.recipe].append(row)
    heads = ("loss", "lr", "temp", "drop", "seeds", "val R@20", "test R@20", "nDCG@20")
    output = plain_table(f"{model}: in %, mean±standard deviation over the seeds", heads)
    for (loss, recipe), group in sorted(groups.items()):
        cells = [
            spread([getattr(row, name) for row in group])
            for name in ("validation_recall20", "test_recall20", "test_ndcg20")
        ]
        output.add_row(loss, *(f"{number:g}" for number in recipe), str(len(group)), *cells)
    return output
