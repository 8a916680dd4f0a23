"""`torchlml sweep recommend`: run all combinations of models, losses and seeds, and tabulate the results."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group
from rich.table import Table

from torchlml_lab.engine import output
from torchlml_lab.engine.output import StudyTable, Tried, new_console, plain_table, spread
from torchlml_lab.engine.run import train
from torchlml_lab.engine.sweep import Grid, check_grid, checked_runs, read_tuned, resuming, run_grid
from torchlml_lab.multilabel.losses import named
from torchlml_lab.recommend.histories import Data, read
from torchlml_lab.recommend.model import EXPERIMENT
from torchlml_lab.recommend.settings import Model, RecommendSettings, SweepSettings
from torchlml_lab.recommend.training import WITHOUT_LOSS, check, completed, loss_of, task, train_all


@dataclass(frozen=True)
class RankingRecord:
    """The settings of a run, and its metrics at the epoch with the best validation Recall@20."""

    model: str
    layers: int
    """The number of graph layers for matrix factorization, also within `auto`; 0 for other models."""
    loss: str
    """The loss and its k, such as `lml-20`, or `own` for models that are not trained with a single loss."""
    users: int
    """The number of training users."""
    seed: int
    dimension: int
    learning_rate: float
    temperature: float
    """Applies to matrix factorization only."""
    dropout: float
    """Applies to the autoencoder only."""
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
        """The name of the method, which consists of the model, its layers and the loss."""
        return Method(self.model, self.layers, self.loss).name

    @property
    def recipe(self) -> tuple[float, float, float]:
        """The hyperparameter values: learning rate, temperature and dropout."""
        return self.learning_rate, self.temperature, self.dropout


class Method(NamedTuple):
    """A model with its layers and its loss."""

    model: str
    layers: int
    loss: str

    @property
    def name(self) -> str:
        """The name of the method in error messages and run directories."""
        layers = f"_{self.layers}-layers" if self.layers else ""
        return f"{self.model}{layers}_{self.loss}"


OWN = "own"  # the loss name for models that are not trained with a single loss


TABLE = StudyTable(
    RankingRecord, lambda row: (row.model, row.layers, row.loss, row.recipe, row.users, row.seed)
)


def best_recipes(
    rows: Sequence[RankingRecord], methods: Sequence[str], path: Path
) -> dict[str, tuple[float, ...]]:
    """Find each method's (learning rate, temperature, dropout) with the best mean validation Recall@20.

    `methods` contains names as returned by `RankingRecord.method`.
    """
    tried = [Tried(row.method, row.recipe, (row.users, row.seed), row.validation_recall20) for row in rows]
    return output.best_recipes(tried, methods, path, "method", "set of hyperparameters", "users and seeds")


# The options of a run that the sweep sets itself.
_CHOSEN = ("out", "resume", "model", "layers", "loss", "k", "seed")


def main(settings: SweepSettings) -> None:
    """Train all combinations that have not been finished."""
    runs = grid(settings)
    # An invalid file raises here, before any run starts.
    users = int((read(settings.run).training.counts > 0).sum())

    def rows(one: RecommendSettings, done: dict[str, Any]) -> list[RankingRecord]:
        return [record(one, done, users)]

    run_grid(Grid(EXPERIMENT, runs, _run_one, rows, TABLE.write, _tables), settings, new_console())


def grid(settings: SweepSettings) -> list[RecommendSettings]:
    """Return the settings of every run. Invalid settings raise `BadInput`."""
    check_grid(settings, settings.run, _CHOSEN, ("models", "losses", "seeds"))
    return checked_runs(_runs(settings), check)


def _runs(settings: SweepSettings) -> Iterator[RecommendSettings]:
    methods = list(_methods(settings))
    recipes = _recipes(settings, methods)
    # The seed varies slowest, so that a sweep that is stopped early still covers every model and loss.
    for seed, (model, method) in product(settings.seeds, methods):
        for rate, temperature, dropout in recipes[method]:
            one = dataclasses.replace(settings.run, model=model, layers=method.layers, seed=seed)
            if method.loss != OWN:
                loss = named(method.loss)
                one = dataclasses.replace(one, loss=loss.name, k=loss.k)
            one = dataclasses.replace(one, learning_rate=rate, temperature=temperature, dropout=dropout)
            if model != "auto":
                one = completed(one)
            tuned = f"_lr{one.learning_rate:g}" * (method.loss != OWN)
            tuned += {"autoencoder": f"_d{dropout:g}", "matrix-factorization": f"_t{temperature:g}"}.get(
                model, ""
            )
            yield dataclasses.replace(one, out=settings.out / f"{method.name}{tuned}_seed{seed}")


def _methods(settings: SweepSettings) -> Iterator[tuple[Model, Method]]:
    for model in settings.models:
        if model in WITHOUT_LOSS:
            yield model, Method(model, settings.run.layers if model == "auto" else 0, OWN)
            continue
        for layers in settings.layer_counts if model == "matrix-factorization" else (0,):
            for loss in settings.losses:
                yield model, Method(model, layers, loss)


def _recipes(
    settings: SweepSettings, methods: Sequence[tuple[Model, Method]]
) -> dict[Method, list[tuple[float, ...]]]:
    """Return all combinations of hyperparameters to try for each method, or only the best if it was tuned."""
    run = settings.run
    usual: list[tuple[float, ...]] = [(run.learning_rate, run.temperature, run.dropout)]
    rates = settings.learning_rates or (run.learning_rate,)
    listed: dict[str, list[tuple[float, ...]]] = {
        "autoencoder": list(product(rates, (run.temperature,), settings.dropouts or (run.dropout,))),
        "matrix-factorization": list(
            product(rates, settings.temperatures or (run.temperature,), (run.dropout,))
        ),
    }
    found = {method: listed.get(model, usual) for model, method in methods}
    if settings.tuned is not None:
        rows = read_tuned(settings, TABLE, ("learning_rates", "temperatures", "dropouts"))
        tuned = [method for _, method in methods if method.loss != OWN]
        best = best_recipes(rows, [method.name for method in tuned], settings.tuned)
        found |= {method: [best[method.name]] for method in tuned}
    return found


def record(settings: RecommendSettings, result: dict[str, Any], users: int) -> RankingRecord:
    """Return the record of a finished run."""
    validation = result["validation"]
    test = result["test"] or dict.fromkeys(validation, math.nan)  # tuning runs may have no test results
    return RankingRecord(
        model=settings.model,
        layers=settings.layers if settings.model in ("auto", "matrix-factorization") else 0,
        loss=OWN if settings.model in WITHOUT_LOSS else str(loss_of(settings)),
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


_FILES = ("train", "test", "columns", "min_rating", "latest", "validation", "users")


def _run_one(settings: RecommendSettings) -> dict[str, Any]:
    # The files do not depend on the settings that vary in a sweep, so each worker reads them only once.
    files = dataclasses.replace(RecommendSettings(), **{name: getattr(settings, name) for name in _FILES})
    console = new_console(quiet=True)
    if settings.model == "auto":
        return train_all(resuming(settings), lambda _: _read_once(files), console)
    return train(EXPERIMENT, resuming(settings), lambda: task(settings, _read_once(files)), console)


def _tables(rows: Sequence[RankingRecord]) -> Group:
    """Tabulate the means and standard deviations of the metrics over the seeds, with one table per model."""
    models = sorted({row.model for row in rows})
    return Group(*(_table(model, [row for row in rows if row.model == model]) for model in models))


def _table(model: str, rows: Sequence[RankingRecord]) -> Table:
    groups: dict[tuple[str, int, tuple[float, ...]], list[RankingRecord]] = defaultdict(list)
    for row in rows:
        groups[row.loss, row.layers, row.recipe].append(row)
    heads = ("loss", "layers", "lr", "temp", "drop", "seeds", "val R@20", "test R@20", "nDCG@20")
    output = plain_table(f"{model}: metrics in % (mean±standard deviation over the seeds)", heads)
    for (loss, layers, recipe), group in sorted(groups.items()):
        cells = [
            spread([getattr(row, name) for row in group])
            for name in ("validation_recall20", "test_recall20", "test_ndcg20")
        ]
        output.add_row(loss, str(layers), *(f"{number:g}" for number in recipe), str(len(group)), *cells)
    return output
