"""`torchlml train scene-graph`: train on Visual Genome or VRD, measure recalls, and time training steps."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from rich.console import Console
from rich.table import Table
from torch import Tensor

from torchlml.metrics import SceneGraphRecall
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine import loop, run_directory
from torchlml_lab.engine.loop import Task
from torchlml_lab.engine.output import ProgressBar, new_console, plain_table
from torchlml_lab.engine.run import in_percent, say_test, train
from torchlml_lab.engine.settings import check as check_settings
from torchlml_lab.engine.settings import use_threads
from torchlml_lab.studies.scene_graph import datasets, objectives
from torchlml_lab.studies.scene_graph.graphs import Batch, GraphBatches, RegionFeatures, Splits, split
from torchlml_lab.studies.scene_graph.model import LeaveOneOut, MotifNet, log_frequencies, word_vectors
from torchlml_lab.studies.scene_graph.settings import (
    EXPERIMENT,
    OBJECTIVES,
    EvaluateSettings,
    MovedData,
    Objective,
    ObjectiveTimesSettings,
    SceneGraphSettings,
)

KS = (20, 50, 100)
BATCH = 64  # images per evaluation batch
MODES = ("constrained", "unconstrained")
RECALLS = tuple(f"{mode}R@{k}" for mode in ("", "ng-") for k in KS)
"""The recalls with the graph constraint (one predicate per pair) and without it (prefix `ng-`)."""
MEAN_RECALLS = tuple(f"{mode}mR@{k}" for mode in ("", "ng-") for k in KS)
CHOSEN_BY = "recall"
"""The metric that selects the best epoch: the mean of all `RECALLS`, so that no k is favored."""
_HERE: dict[str, Any] = {"sync_on_compute": False}  # `score` already gathers results from all processes


Scored = tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]
"""The predictions and targets of some images, in the format of `SceneGraphRecall`."""


def score(
    rank_by: Callable[[Batch], Tensor], batches: Iterable[Batch], accelerator: Accelerator
) -> Iterator[Scored]:
    """Score all triples (subject, predicate, object) of all images, batch by batch.

    Args:
        rank_by: Computes scores (E, predicates), by which the triples of each image are ranked.
        batches: The images.
        accelerator: Gathers the results from all processes, without duplicates.

    Yields:
        The predictions and targets of a batch.
    """
    for batch in batches:
        images = _images(batch, rank_by(batch).float())
        if accelerator.num_processes > 1:
            images = accelerator.gather_for_metrics(images, use_gather_object=True)
        yield [predicted for predicted, _ in images], [true for _, true in images]


def measure(scored: Iterable[Scored]) -> dict[str, float]:
    """Return six recalls, their mean as `recall`, and six recalls averaged over predicates, all in [0, 1]."""
    metrics = [SceneGraphRecall(KS, one, mean, **_HERE) for mean in (False, True) for one in (True, False)]
    for predicted, true in scored:
        for metric in metrics:
            metric.to(predicted[0]["scores"].device).update(predicted, true)
    found = {name: value.item() for metric in metrics for name, value in metric.compute().items()}
    recalls = {name: found[name] for name in RECALLS}
    return recalls | {CHOSEN_BY: mean(recalls.values())} | {name: found[name] for name in MEAN_RECALLS}


def measure_predicates(scored: Sequence[Scored], predicates: int) -> tuple[Tensor, Tensor]:
    """Compute the recall of each predicate separately.

    Args:
        scored: The predictions and targets of all images.
        predicates: The number of predicates.

    Returns:
        (modes x ks, predicates), the recalls in the order of `RECALLS`, with NaN for predicates that occur in
        no image; and (predicates,), the number of images with each predicate.
    """
    table = torch.full((len(RECALLS), predicates), torch.nan, dtype=torch.float64)
    images = torch.zeros(predicates, dtype=torch.int64)
    pairs = [pair for part in scored for pair in zip(*part, strict=True)]
    for predicate in range(predicates):
        alone = []
        for predicted, true in pairs:
            relations = true["relations"]
            if (mine := relations[relations[:, 2] == predicate]).numel():
                alone.append((predicted, true | {"relations": mine}))
        if alone:
            found = measure([([one for one, _ in alone], [true for _, true in alone])])
            table[:, predicate] = torch.tensor([found[name] for name in RECALLS])
        images[predicate] = len(alone)
    return table, images


def frequency_recall(
    splits: Splits, split: str, counts: Path | None, accelerator: Accelerator
) -> dict[str, float]:
    """Return the recalls on a split when relations are ranked only by the frequency bias."""
    table = log_frequencies(splits.training, counts)

    def rank_by(batch: Batch) -> Tensor:
        subject, object_ = batch.labels[batch.edges].unbind(1)
        return table[subject, object_].softmax(1)[:, 1:]

    batches = GraphBatches(getattr(splits, split)).in_order(BATCH)
    return measure(score(rank_by, batches, accelerator))


def _images(batch: Batch, scores: Tensor) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Return the predictions and targets of each image, with boxes numbered within the image."""
    boxes, edges = batch.box_offsets.tolist(), batch.edge_offsets.tolist()
    ends = batch.edges[batch.relation_edges]
    relations = torch.searchsorted(batch.relation_edges, batch.edge_offsets).tolist()
    found = []
    for i in range(len(batch.images)):
        box, edge, relation = (slice(*offsets[i : i + 2]) for offsets in (boxes, edges, relations))
        predicate = batch.relation_predicates[relation].unsqueeze(1)
        objects = {"boxes": batch.boxes[box], "labels": batch.labels[box]}
        predicted = objects | {"pairs": batch.edges[edge] - boxes[i], "scores": scores[edge]}
        found.append(
            (predicted, objects | {"relations": torch.cat((ends[relation] - boxes[i], predicate), 1)})
        )
    return found


def main(settings: SceneGraphSettings) -> None:
    """Train a model and print its test recalls."""
    console = new_console()
    result = run(settings, console)
    say_test(console, settings, result, f"{in_percent(result['test'], RECALLS)} ({vision(settings)})")


def run(settings: SceneGraphSettings, console: Console) -> dict[str, Any]:
    """Train with these settings. Invalid settings raise `BadInput` before any file is written."""
    check(settings)
    return train(EXPERIMENT, settings, lambda: task(settings, read(settings)), console)


def vision(settings: SceneGraphSettings) -> str:
    """Describe whether the model has visual input, for tables."""
    return "vision-free" if settings.region_features is None else "with region features"


def check(settings: SceneGraphSettings) -> None:
    """Raise `BadInput` for invalid settings."""
    check_settings(settings)
    if (settings.vg is None) == (settings.vrd is None):
        raise BadInput("Pass exactly one of `--vg` (Visual Genome) and `--vrd`.")
    if settings.k < 1:
        raise BadInput(f"`--k` must be at least 1, but it is {settings.k}.")
    if settings.hidden < 2 or settings.hidden % 2:
        raise BadInput(f"`--hidden` must be even and at least 2, but it is {settings.hidden}.")
    if not 0 <= settings.dropout < 1:
        raise BadInput(f"`--dropout` must be at least 0 and less than 1, but it is {settings.dropout}.")
    if not 0 <= settings.weight_decay < math.inf:
        raise BadInput(f"`--weight-decay` must be finite and at least 0, but it is {settings.weight_decay}.")
    if not settings.clip > 0:
        raise BadInput(f"`--clip` must be positive, but it is {settings.clip}.")
    if settings.without_bias and (settings.counts is not None or settings.leave_one_out):
        given = "--leave-one-out" if settings.counts is None else "--counts"
        raise BadInput(
            f"`{given}` cannot be combined with `--without-bias`, which removes the frequency bias."
        )
    if settings.counts is not None and settings.leave_one_out:
        raise BadInput(
            "`--counts` cannot be combined with `--leave-one-out`, which requires counts of training images."
        )


def read(settings: SceneGraphSettings) -> Splits:
    """Read the run's images, and split them into training, validation and test images."""
    if settings.vg is not None:
        training, test = datasets.read_visual_genome(settings.vg)
    else:
        assert settings.vrd is not None
        training, test = datasets.read_vrd(settings.vrd)
    return split(training, test, settings.validation, settings.split_seed)


def task(settings: SceneGraphSettings, splits: Splits) -> Task:
    """Build the task of a run. This initializes the network, so set the random seed before the call."""
    regions = read_regions(settings, splits)
    model = network(settings, splits, regions)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
    )
    # The training recall is measured on the same images in every epoch, so that epochs are comparable.
    followed = splits.training[torch.arange(min(settings.validation, len(splits.training)))]
    parts = {"train": followed, "validation": splits.validation, "test": splits.test}

    def loss(motifs: torch.nn.Module, batch: Batch) -> Tensor:
        scores = motifs(batch).float()
        return objectives.loss(settings.objective, scores, batch, settings.k, settings.one_per_edge)

    def measure_all(
        motifs: torch.nn.Module, batches: Iterable[Batch], accelerator: Accelerator
    ) -> dict[str, float]:
        return measure(score(ranker(settings.objective, motifs), batches, accelerator))

    return Task(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.epochs),
        training=GraphBatches(
            splits.training, regions, LeaveOneOut(splits.training) if settings.leave_one_out else None
        ),
        held_out={name: GraphBatches(part, regions) for name, part in parts.items()},
        loss=loss,
        measure=measure_all,
        chosen_by=CHOSEN_BY,
        printed=RECALLS,
        most_gradient=settings.clip,
        threads=1,
    )


def ranker(objective: Objective, motifs: torch.nn.Module) -> Callable[[Batch], Tensor]:
    """Return a function that computes the scores by which the triples of a batch are ranked."""
    return lambda batch: objectives.ranking(objective, motifs(batch))


def read_regions(settings: SceneGraphSettings, splits: Splits) -> RegionFeatures | None:
    """Return the region features of the run, or None."""
    return None if settings.region_features is None else RegionFeatures(settings.region_features, splits)


def network(settings: SceneGraphSettings, splits: Splits, regions: RegionFeatures | None) -> MotifNet:
    """Return a newly initialized network."""
    training = splits.training
    background = int(objectives.has_background(settings.objective))
    bias = None
    if not settings.without_bias:
        bias = log_frequencies(training, settings.counts)[..., 1 - background :].contiguous()
    return MotifNet(
        len(training.objects),
        background + len(training.predicates),
        bias,
        None if settings.glove is None else word_vectors(settings.glove, training.objects),
        None if regions is None else (regions.box_size, regions.union_size),
        settings.hidden,
        settings.dropout,
    )


class TrainedGraphs(NamedTuple):
    """A trained model, with the settings and data of its run."""

    settings: SceneGraphSettings
    splits: Splits
    regions: RegionFeatures | None
    model: MotifNet
    epoch: int
    """The epoch of the weights, which is the best one so far on the validation images."""


def load(run: Path, moved: MovedData) -> TrainedGraphs:
    """Load a run and read its data.

    Args:
        run: A directory created by `torchlml train scene-graph`; any other directory raises `BadInput`.
        moved: The new paths of data that has moved since training.

    Returns:
        The run, with the network on the CPU in evaluation mode.
    """
    best = run_directory.find_best_epoch(EXPERIMENT, run)
    settings = run_directory.read_moved(SceneGraphSettings, run, _paths(moved))
    splits = read(settings)
    regions = read_regions(settings, splits)
    model = network(settings, splits, regions)
    best.load(model)
    return TrainedGraphs(settings, splits, regions, model, best.epoch)


def _paths(moved: MovedData) -> dict[str, Any]:
    return {field.name: getattr(moved, field.name) for field in fields(MovedData)}


def evaluate(settings: EvaluateSettings) -> None:
    """Evaluate a run and print two tables."""
    console = new_console()
    accelerator = Accelerator(cpu=settings.cpu)
    with use_threads(1):  # one thread, as in training, because the tensors are small
        run = load(settings.run, settings)
        graphs = getattr(run.splits, settings.split)
        scored = _score(run, settings.split, accelerator, console)
        rows = {
            "frequencies alone": frequency_recall(
                run.splits, settings.split, run.settings.counts, accelerator
            ),
            objectives.method_of(run.settings.objective, run.settings.k).name: measure(scored),
        }
        alone = measure_predicates(scored, len(graphs.predicates))
    said = f"{len(graphs)} {settings.split} images, epoch {run.epoch}, {vision(run.settings)}; recall in %"
    console.print(_recalls(said, rows))
    console.print(_predicates(*alone, graphs.predicates))


def _score(run: TrainedGraphs, split: str, accelerator: Accelerator, console: Console) -> list[Scored]:
    graphs = getattr(run.splits, split)
    rank_by = ranker(run.settings.objective, run.model.to(accelerator.device))
    batches = GraphBatches(graphs, run.regions).in_order(BATCH)
    found = []
    with torch.no_grad(), ProgressBar(console) as progress:
        task = progress.add_task("images", total=len(graphs))
        sent = (send_to_device(batch, accelerator.device) for batch in batches)
        for scored in score(rank_by, sent, accelerator):
            found.append(scored)
            progress.advance(task, len(scored[0]))
    return found


def _recalls(title: str, rows: dict[str, dict[str, float]]) -> Table:
    table = plain_table(title, ("", *(f"@{k}" for k in KS)))
    modes = ("constrained R", "unconstrained R", "constrained mR", "unconstrained mR")
    names = RECALLS + MEAN_RECALLS
    for name, recall in rows.items():
        for place, mode in enumerate(modes):
            measures = names[place * len(KS) : (place + 1) * len(KS)]
            table.add_row(f"{name}, {mode}", *(f"{100 * recall[one]:.1f}" for one in measures))
    return table


def _predicates(recall: Tensor, images: Tensor, predicates: tuple[str, ...]) -> Table:
    heads = (f"@{KS[0]}", f"@{KS[-1]}", f"ng@{KS[0]}", f"ng@{KS[-1]}")
    chosen = [RECALLS.index(f"{mode}R@{k}") for mode in ("", "ng-") for k in (KS[0], KS[-1])]
    table = plain_table("recall of each predicate in %", ("predicate", "images", *heads))
    for i in images.argsort(descending=True, stable=True).tolist():
        cells = [f"{100 * recall[j, i]:.1f}" if images[i] else "-" for j in chosen]
        table.add_row(predicates[i], str(int(images[i])), *cells)
    return table


def step_time(settings: ObjectiveTimesSettings) -> None:
    """Time the training steps of all objectives and print a table."""
    paths = _paths(settings)
    if settings.run is None:
        common = SceneGraphSettings(**paths, validation=1)
    else:
        common = run_directory.read_moved(SceneGraphSettings, settings.run, paths)
    k = common.k if settings.k is None else settings.k
    size = loop.checked_size(settings, common.batch_size)
    common = replace(common, k=k, batch_size=size)
    check(common)
    splits = read(common)
    loop.compare_steps(
        OBJECTIVES, lambda name: task(replace(common, objective=name), splits), settings, size, "images"
    )
