"""`torchlml missing-labels`: tune and compare methods for training with one observed label per sample."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from torchlml_lab.cli_errors import BadInput, did_you_mean
from torchlml_lab.engine.output import ProgressBar, StudyTable, new_console
from torchlml_lab.engine.settings import check_threads, use_threads
from torchlml_lab.files import check_folder
from torchlml_lab.studies.missing_labels import measures
from torchlml_lab.studies.missing_labels.data import (
    FOLDERS,
    PUBLISHED,
    Dataset,
    Split,
    check_files,
    labeled_part,
    predicted_k,
    read_dataset,
    split_of,
)
from torchlml_lab.studies.missing_labels.methods import (
    METHODS,
    Adam,
    Batch,
    Estimates,
    Method,
    Recipe,
    first_recipes,
    neighbors,
    online_estimation,
    probabilities_of,
    scores_of,
)
from torchlml_lab.studies.settings import MissingLabelsSettings

HEADS = ("linear", "hidden")
HIDDEN = 128
TUNING_SEEDS = (0, 1)
_TOGETHER = 2**18
"""The maximum number of logits in a training step. If all configurations together have more, they are trained
in groups."""
EXACT = ("yeast", "cal500", "tmc2007")
"""The data sets for the exact k-subset loss. This loss takes several times as long as LML, so it is used only
on these data sets and only with the linear head. On VOC 2012, k rounds to 1, and for k = 1 the loss equals
softmax cross-entropy."""


@dataclass(frozen=True)
class TuningRecord:
    """The validation result of one configuration of a method with one tuning seed."""

    dataset: str
    head: str
    method: str
    seed: int
    steps: int
    learning_rate: float
    weight: float
    epoch: int
    """The epoch with the best validation mAP, counted from 1."""
    validation_map: float
    seconds: float
    """The CPU time."""


@dataclass(frozen=True)
class ResultRecord:
    """The test metrics of a model with the chosen configuration."""

    dataset: str
    head: str
    method: str
    draw: str
    """The source of the observed labels: "random" (drawn with the seed) or "published"."""
    seed: int
    steps: int
    learning_rate: float
    weight: float
    epoch: int
    validation_map: float
    map: float
    recall: float
    """Recall at the rounded mean number of labels."""
    brier: float
    ece: float
    f1: float
    """Micro-F1 of the labels with p > 0.5."""
    slope: float
    offset: float
    fitted_brier: float
    """The Brier score after recalibration with `slope` and `offset`."""
    fitted_ece: float
    """The calibration error after recalibration."""
    fitted_f1: float
    """Micro-F1 of the labels with p > 0.5, after recalibration."""
    threshold: float
    threshold_f1: float
    """Micro-F1 of the labels with p > `threshold`, after recalibration."""
    seconds: float


def _place(row: TuningRecord | ResultRecord) -> tuple[int, int, int]:
    return list(FOLDERS).index(row.dataset), HEADS.index(row.head), list(METHODS).index(row.method)


TUNING = StudyTable(TuningRecord, lambda row: (_place(row), row.seed, row.learning_rate, row.weight))
RESULTS = StudyTable(ResultRecord, lambda row: (_place(row), row.draw == "published", row.seed))


class Trained(NamedTuple):
    """The best epoch of a configuration, and its weights after that epoch."""

    epoch: int
    validation_map: float
    parameters: list[Tensor]


def new_parameters(
    head: str, features: int, labels: int, start: float, seed: int, count: int
) -> list[Tensor]:
    """Create initial weights and biases for a head; all `count` configurations get the same values.

    The last layer has zero weights and a bias that makes the sigmoid of every logit equal to `start`.
    """
    generator = torch.Generator().manual_seed(seed)
    bias = torch.full((1, labels), start).logit()
    if head == "linear":
        layers = [torch.zeros(features, labels), bias]
    else:
        first = torch.randn(features, HIDDEN, generator=generator) * (2 / features) ** 0.5
        layers = [first, torch.zeros(1, HIDDEN), torch.zeros(HIDDEN, labels), bias]
    return [part.expand(count, -1, -1).clone().requires_grad_() for part in layers]


def logits_of(parameters: Sequence[Tensor], x: Tensor) -> Tensor:
    """Apply the heads of all configurations to samples, and return (configurations, samples, labels)."""
    if len(parameters) == 4:
        # One matrix product for all configurations is faster than one per configuration.
        count, features, _ = parameters[0].shape
        first = x @ parameters[0].transpose(0, 1).reshape(features, -1)
        hidden = first.view(len(x), count, -1).transpose(0, 1) + parameters[1]
        return torch.baddbmm(parameters[3], hidden.relu(), parameters[2])
    return torch.matmul(x, parameters[0]) + parameters[1]


class ExpectedCounts(NamedTuple):
    """The numbers of labels that a method expects for the training, validation and test samples."""

    train: Tensor
    validation: Tensor
    test: Tensor


def expected_counts(method: Method, split: Split) -> ExpectedCounts:
    """Return k for every sample: a multiple of the mean number of labels, or a prediction."""
    parts = (split.x, split.validation_x, split.test_x)
    if method.k is None:
        return _predicted_counts(split)
    # If k = 1.5 times the mean reached the number of labels, every probability would be 1.
    k = min(method.k * split.k, 0.9 * split.labels.shape[1])
    return ExpectedCounts(*(torch.full((len(part),), k) for part in parts))


def train(
    method: Method,
    split: Split,
    counts: ExpectedCounts,
    head: str,
    recipes: Sequence[Recipe],
    steps: int,
    seed: int,
) -> list[Trained]:
    """Train one model per configuration, and keep its weights from the epoch with the best validation mAP.

    Args:
        method: The method.
        split: The samples.
        counts: The numbers of labels that the method expects for these samples.
        head: "linear" or "hidden".
        recipes: The configurations. They share initial weights and batches.
        steps: The number of steps, rounded to whole epochs.
        seed: The seed for initial weights and batches.

    Returns:
        The best epoch of each configuration.
    """
    batch = batch_size(len(split.x))
    together = max(1, _TOGETHER // (batch * split.labels.shape[1]))
    if len(recipes) > together:
        parts = [recipes[start : start + together] for start in range(0, len(recipes), together)]
        return [one for part in parts for one in train(method, split, counts, head, part, steps, seed)]
    samples, labels = split.labels.shape
    weights = torch.tensor([recipe.weight for recipe in recipes])
    rates = torch.tensor([recipe.learning_rate for recipe in recipes])
    start = split.k / labels if method.start is None else method.start
    parameters = new_parameters(head, split.x.shape[1], labels, start, seed, len(recipes))
    moments = [[torch.zeros_like(part), torch.zeros_like(part)] for part in parameters]
    estimates = Estimates(split.observed, labels, rates, seed) if method.loss is online_estimation else None
    optimizer, generator = Adam(rates), torch.Generator().manual_seed(seed)
    best = [Trained(0, -1.0, []) for _ in recipes]
    number = 0
    for epoch in range(1, max(1, round(steps / (samples / batch))) + 1):
        for rows in torch.randperm(samples, generator=generator).split(batch):
            number += 1
            guesses = None if estimates is None else estimates.of(rows, number)
            x = logits_of(parameters, split.x[rows])
            known = (split.observed[rows], counts.train[rows], weights, split.labels[rows])
            loss = method.loss(Batch(x, *known, guesses)).sum()
            leaves = parameters if guesses is None else [*parameters, guesses]
            gradients = torch.autograd.grad(loss, leaves)
            with torch.no_grad():
                for part, gradient, pair in zip(parameters, gradients, moments, strict=False):
                    optimizer.step(part, gradient, pair, number)
                if estimates is not None and guesses is not None:
                    estimates.update(rows, guesses, gradients[-1], number)
        with torch.no_grad():
            x = logits_of(parameters, split.validation_x)
            scores = scores_of(method.link, x, counts.validation)
            found = measures.mean_average_precision(scores, split.validation_labels).tolist()
        for place, score in enumerate(found):
            if score > best[place].validation_map:
                kept = [part[place : place + 1].detach().clone() for part in parameters]
                best[place] = Trained(epoch, score, kept)
    return best


def batch_size(samples: int) -> int:
    """Return 1/32 of the number of samples, rounded down to a power of two and clipped to 32–256."""
    return 2 ** min(max((samples // 32).bit_length() - 1, 5), 8)


class Cell(NamedTuple):
    """A unit of work in the study. A cell counts as done once all of its rows are in the files."""

    dataset: str
    head: str
    method: str
    draw: str
    """Either "tuning" (all tuning seeds), or the source of the observed labels: "random" or "published"."""
    seed: int


def cells(settings: MissingLabelsSettings) -> Iterator[Cell]:
    """Yield the cells in the order of computation: by head, data set and method, tuning before results."""
    for head in settings.heads:
        for dataset in settings.datasets:
            for method in METHODS:
                if method == "subset" and (head == "hidden" or dataset not in EXACT):
                    continue
                yield Cell(dataset, head, method, "tuning", 0)
                yield from (Cell(dataset, head, method, "random", seed) for seed in range(settings.seeds))
                if dataset in PUBLISHED:
                    yield Cell(dataset, head, method, "published", 0)


class Study:
    """The rows of the study's two files. Missing rows are computed and added to the files."""

    def __init__(self, settings: MissingLabelsSettings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.tuning_path, self.results_path = settings.out / "tuning.csv", settings.out / "results.csv"
        self.tuning = TUNING.read(self.tuning_path, "--out") if self.tuning_path.exists() else []
        self.results = RESULTS.read(self.results_path, "--out") if self.results_path.exists() else []
        for steps in (*(row.steps for row in self.tuning), *(row.steps for row in self.results)):
            if steps != settings.steps:
                raise BadInput(
                    f"`--steps` is {settings.steps}, but `{settings.out}` (`--out`) contains "
                    f"results for {steps} steps. Use another directory."
                )

        self.tried: dict[tuple[str, str, str], dict[Recipe, dict[int, float]]] = {}
        for row in self.tuning:
            self._remember(row)

    def _remember(self, row: TuningRecord) -> None:
        """Store the validation mAP by data set, head and method, then by configuration, and then by seed."""
        tried = self.tried.setdefault((row.dataset, row.head, row.method), {})
        tried.setdefault(Recipe(row.learning_rate, row.weight), {})[row.seed] = row.validation_map

    def complete(self, cell: Cell) -> bool:
        """Whether the cell's rows are in the files. Results count only if they use the best configuration."""
        if cell.draw == "tuning":
            return not any(self.missing_runs(cell).values())
        return any(
            cell == Cell(row.dataset, row.head, row.method, row.draw, row.seed)
            and self.best_recipe(cell) == Recipe(row.learning_rate, row.weight)
            for row in self.results
        )

    def missing_runs(self, cell: Cell) -> dict[int, list[Recipe]]:
        """Return the configurations that the search for a method tries next, for each tuning seed.

        The search starts with nine configurations. It continues with the neighbors of the best one until no
        neighbor is better. The lists are empty if the search is complete.
        """
        method, tried = METHODS[cell.method], self.tried.get(cell[:3], {})
        recipes = list(tried) or first_recipes(method)
        if all(len(scores) == len(TUNING_SEEDS) for scores in tried.values()) and tried:
            recipes = neighbors(method, self.best_recipe(cell))
        return {seed: [one for one in recipes if seed not in tried.get(one, {})] for seed in TUNING_SEEDS}

    def best_recipe(self, cell: Cell) -> Recipe:
        """Return the configuration with the best validation mAP, averaged over the tuning seeds."""
        tried = self.tried[cell[:3]]
        return max(sorted(tried), key=lambda recipe: mean(tried[recipe].values()))

    def compute(self, cell: Cell) -> None:
        """Compute a cell and write its rows to the files."""
        if cell.draw != "tuning":
            self._compute_result(cell)
            return
        while any((runs := self.missing_runs(cell)).values()):
            for seed, recipes in runs.items():
                if recipes:
                    self._tune(cell._replace(seed=seed), recipes)

    def _tune(self, cell: Cell, recipes: list[Recipe]) -> None:
        start = time.process_time()
        found, _, _ = self._train(cell, recipes)
        seconds = (time.process_time() - start) / len(recipes)
        for recipe, one in zip(recipes, found, strict=True):
            row = TuningRecord(
                dataset=cell.dataset,
                head=cell.head,
                method=cell.method,
                seed=cell.seed,
                steps=self.settings.steps,
                learning_rate=recipe.learning_rate,
                weight=recipe.weight,
                epoch=one.epoch,
                validation_map=round(one.validation_map, 6),
                seconds=seconds,
            )
            self.tuning.append(row)
            self._remember(row)
        TUNING.write(self.tuning_path, self.tuning)

    def _compute_result(self, cell: Cell) -> None:
        start, recipe = time.process_time(), self.best_recipe(cell)
        (found,), counts, split = self._train(cell, [recipe])
        at = predictions_per_sample(_dataset(cell.dataset, self.folder))
        measured = evaluate(METHODS[cell.method], split, counts, found, at)
        result = ResultRecord(
            dataset=cell.dataset,
            head=cell.head,
            method=cell.method,
            draw=cell.draw,
            seed=cell.seed,
            steps=self.settings.steps,
            learning_rate=recipe.learning_rate,
            weight=recipe.weight,
            epoch=found.epoch,
            validation_map=round(found.validation_map, 6),
            seconds=time.process_time() - start,
            **{name: round(value, 6) for name, value in measured.items()},
        )
        others = [
            row for row in self.results if Cell(row.dataset, row.head, row.method, row.draw, row.seed) != cell
        ]
        self.results = [*others, result]
        RESULTS.write(self.results_path, self.results)

    def _train(self, cell: Cell, recipes: list[Recipe]) -> tuple[list[Trained], ExpectedCounts, Split]:
        method = METHODS[cell.method]
        split = _split(cell.dataset, self.folder, cell.seed, cell.draw == "published")
        split = labeled_part(split) if method.labels == "validation" else split
        counts = expected_counts(method, split)
        return train(method, split, counts, cell.head, recipes, self.settings.steps, cell.seed), counts, split


def predictions_per_sample(data: Dataset) -> int:
    """Return the rounded mean number of labels per sample, the same for all seeds and methods.

    If the data set has an official split, only its training samples are counted.
    """
    known = data.labels if data.train is None else data.labels[data.train]
    return max(1, round(float(known.sum(-1).double().mean())))


@lru_cache(maxsize=1)
def _dataset(name: str, folder: Path) -> Dataset:
    return read_dataset(name, folder)


@lru_cache(maxsize=8)  # enough for all seeds of a method
def _split(name: str, folder: Path, seed: int, published: bool) -> Split:
    return split_of(_dataset(name, folder), seed, published)


@lru_cache(maxsize=8)
def _predicted_counts(split: Split) -> ExpectedCounts:
    return ExpectedCounts(*predicted_k(split))


def evaluate(
    method: Method, split: Split, counts: ExpectedCounts, model: Trained, at: int
) -> dict[str, float]:
    """Compute the metrics of a model on the test samples.

    Args:
        method: The method.
        split: The samples. The recalibration is fitted on the validation samples.
        counts: The numbers of labels that the method expects.
        model: The model.
        at: The number of predictions per sample for recall.

    Returns:
        The metrics, by their field names in `ResultRecord`.
    """
    with torch.no_grad():
        validation, test = (
            scores_of(method.link, logits_of(model.parameters, x), k)[0]
            for x, k in ((split.validation_x, counts.validation), (split.test_x, counts.test))
        )
    labels, p = split.test_labels, probabilities_of(method.link, test)
    fit = measures.recalibrated(validation, split.validation_labels)
    fitted = fit.probabilities(test)
    return {
        "map": float(measures.mean_average_precision(test, labels)),
        "recall": measures.recall_at(test, labels, at),
        "brier": measures.brier_score(p, labels),
        "ece": measures.calibration_error(p, labels),
        "f1": measures.f1_score(p > 0.5, labels),
        "slope": fit.slope,
        "offset": fit.offset,
        "fitted_brier": measures.brier_score(fitted, labels),
        "fitted_ece": measures.calibration_error(fitted, labels),
        "fitted_f1": measures.f1_score(fitted > 0.5, labels),
        "threshold": fit.threshold,
        "threshold_f1": measures.f1_score(fitted > fit.threshold, labels),
    }


def main(settings: MissingLabelsSettings) -> None:
    """Compute the missing cells until the study is complete or the time limit is reached."""
    folder = check_settings(settings)
    study, console = Study(settings, folder), new_console()
    settings.out.mkdir(parents=True, exist_ok=True)
    left = _compute(study, list(cells(settings)), console)
    if left:
        console.print(f"Parts left to compute: {left}. Repeat the command to continue.", soft_wrap=True)
    else:
        console.print(f"The study is complete. The results are in {settings.out}.", soft_wrap=True)
        console.print("Draw the figure with `torchlml figures missing-labels`.", soft_wrap=True)


def _compute(study: Study, todo: Sequence[Cell], console: Console) -> int:
    """Compute missing cells until the time limit is reached, and return the number of remaining cells."""
    start, limit = time.monotonic(), 60 * study.settings.minutes
    with ProgressBar(console) as progress, use_threads(study.settings.threads):
        task = progress.add_task("parts", total=len(todo))
        for number, cell in enumerate(todo):
            if study.complete(cell):
                progress.advance(task)
                continue
            try:
                study.compute(cell)
            except KeyboardInterrupt:
                said = f"Interrupted after {number} of {len(todo)} parts. Repeat the command to continue."
                raise KeyboardInterrupt(said) from None
            progress.advance(task)
            if limit and time.monotonic() - start > limit:
                return sum(not study.complete(left) for left in todo[number + 1 :])
    return 0


def check_settings(settings: MissingLabelsSettings) -> Path:
    """Check all options before any computation, and return the data directory."""
    for option, given, known in (
        ("--datasets", settings.datasets, tuple(FOLDERS)),
        ("--heads", settings.heads, HEADS),
    ):
        if not given:
            raise BadInput(f"`{option}` must contain at least one of {', '.join(known)}, but it is empty.")
        for name in given:
            if name not in known:
                near = did_you_mean(name, known) or f": the choices are {', '.join(known)}."
                raise BadInput(f"`{option}` contains `{name}`, which is unknown{near}")
    for name, least in (("seeds", 1), ("steps", 1), ("minutes", 0)):
        if not getattr(settings, name) >= least:
            raise BadInput(f"`--{name}` must be at least {least}, but it is {getattr(settings, name)}.")
    check_threads(settings.threads)
    check_folder("--out", settings.out)
    folder = settings.data or (Path(os.environ["TORCHLML_DATA"]) if "TORCHLML_DATA" in os.environ else None)
    if folder is None:
        raise BadInput("`--data` is missing: pass the data directory, or set TORCHLML_DATA.")
    check_files(settings.datasets, folder)
    return folder
