"""`torchlml sweep cifar100`: run all losses, noise levels and seeds, and tabulate the results."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table

from torchlml_lab.engine import output
from torchlml_lab.engine.output import StudyTable, Tried, new_console, plain_table, spread
from torchlml_lab.engine.run import train
from torchlml_lab.engine.run_directory import RunFolder
from torchlml_lab.engine.sweep import Grid, check_grid, checked_runs, read_tuned, resuming, run_grid
from torchlml_lab.studies.cifar100.settings import EXPERIMENT, Cifar100Settings, SweepSettings
from torchlml_lab.studies.cifar100.task import check, model_name, read, task


@dataclass(frozen=True)
class AccuracyRecord:
    """The settings and accuracies of a run.

    Unless noted otherwise, the accuracies are those after the epoch with the best validation accuracy.
    """

    source: str
    """`features` or `wide-head` for frozen features, or the network for images."""
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
    """Top-1 accuracy on the noisy labels of up to 5000 training samples after the last epoch; 1 if all of
    these labels are memorized."""
    train_topk: float
    """Top-k accuracy on the same noisy labels after the last epoch."""
    last_top1: float
    """Top-1 accuracy on the validation samples, which have clean labels, after the last epoch."""
    last_topk: float
    """Top-k accuracy on the validation samples after the last epoch."""
    seconds: float

    @property
    def recipe(self) -> tuple[float, float]:
        """The hyperparameter values: learning rate and temperature."""
        return self.learning_rate, self.temperature


TABLE = StudyTable(AccuracyRecord, lambda row: (row.source, row.loss, row.noise, row.recipe, row.seed))


def best_recipes(
    records: Sequence[AccuracyRecord], losses: Sequence[str], path: Path
) -> dict[str, tuple[float, ...]]:
    """Find each loss's (learning rate, temperature) with the best mean top-k validation accuracy."""
    tried = [Tried(row.loss, row.recipe, (row.noise, row.seed), row.validation_topk) for row in records]
    tuned = "learning rate and temperature"
    return output.best_recipes(tried, losses, path, "loss", tuned, "noise levels and seeds")


# The options of a run that the sweep sets itself.
_CHOSEN = ("out", "resume", "loss", "noise", "seed")


def main(settings: SweepSettings) -> None:
    """Run all unfinished combinations."""
    runs = grid(settings)
    read(settings.run.data, settings.run.features)  # raises for an invalid file before any run starts
    study = Grid(EXPERIMENT, runs, _run_one, lambda one, done: [record(one, done)], TABLE.write, _table)
    run_grid(study, settings, new_console())


def grid(settings: SweepSettings) -> list[Cifar100Settings]:
    """Return the settings of every run; raise `BadInput` if one of them is invalid."""
    check_grid(settings, settings.run, _CHOSEN, ("losses", "noises", "seeds"))
    rates = settings.learning_rates or (settings.run.learning_rate,)
    temperatures = settings.temperatures or (settings.run.temperature,)
    recipes: dict[str, list[tuple[float, ...]]] = {
        loss: list(product(rates, temperatures)) for loss in settings.losses
    }
    if settings.tuned is not None:
        rows = read_tuned(settings, TABLE, ("learning_rates", "temperatures"))
        best = best_recipes(rows, settings.losses, settings.tuned)
        recipes = {loss: [recipe] for loss, recipe in best.items()}
    return checked_runs(_runs(settings, recipes), check)


def _runs(
    settings: SweepSettings, recipes: Mapping[str, Sequence[tuple[float, ...]]]
) -> Iterator[Cifar100Settings]:
    # The seed varies slowest, so that a sweep stopped early still covers every loss at every noise level.
    for seed, noise, loss in product(settings.seeds, settings.noises, settings.losses):
        for rate, temperature in recipes[loss]:
            out = settings.out / f"{loss}_noise{noise:g}_lr{rate:g}_t{temperature:g}_seed{seed}"
            one = dataclasses.replace(settings.run, out=out, loss=loss, noise=noise, seed=seed)
            yield dataclasses.replace(one, learning_rate=rate, temperature=temperature)


def record(settings: Cifar100Settings, result: dict[str, Any]) -> AccuracyRecord:
    """Return the record of a finished run."""
    topk = f"top{settings.k}"
    lines = RunFolder(settings.out, EXPERIMENT).metrics()
    last = {line["split"]: line for line in lines if line["epoch"] == settings.epochs}
    copied = ("loss", "noise", "seed", "k", "learning_rate", "temperature", "epochs")
    return AccuracyRecord(
        source=model_name(settings),
        **{name: getattr(settings, name) for name in copied},
        best_epoch=result["best_epoch"],
        validation_top1=result["validation"]["top1"],
        validation_topk=result["validation"][topk],
        test_top1=result["test"]["top1"],
        test_topk=result["test"][topk],
        train_top1=last["train"]["top1"],
        train_topk=last["train"][topk],
        last_top1=last["validation"]["top1"],
        last_topk=last["validation"][topk],
        seconds=result["seconds"],
    )


_read_once = lru_cache(maxsize=1)(read)


def _run_one(settings: Cifar100Settings) -> dict[str, Any]:
    return train(
        EXPERIMENT,
        resuming(settings),
        lambda: task(settings, *_read_once(settings.data, settings.features)),
        new_console(quiet=True),
    )


def _table(rows: Sequence[AccuracyRecord]) -> Table:
    """Tabulate the means and standard deviations of the accuracies over the seeds."""
    groups: dict[tuple[str, float, float, float], list[AccuracyRecord]] = defaultdict(list)
    for row in rows:
        groups[(row.loss, row.noise, *row.recipe)].append(row)
    # The column headings are short, so that the table fits in 80 characters.
    heads = ("loss", "noise", "lr", "temp", "seeds", "val top-k", "test top-1", "test top-k")
    output = plain_table("accuracy in %, mean±standard deviation over the seeds", heads)
    for (loss, *numbers), group in sorted(groups.items()):
        cells = [
            spread([getattr(row, name) for row in group])
            for name in ("validation_topk", "test_top1", "test_topk")
        ]
        output.add_row(loss, *(f"{number:g}" for number in numbers), str(len(group)), *cells)
    return output
