"""Scene-graph recall for predicate classification, for trained runs and the frequency baseline."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from torchlml.metrics import SceneGraphRecall
from torchlml_lab.studies.scene_graph.graphs import Batch, GraphBatches, Splits
from torchlml_lab.studies.scene_graph.model import log_frequencies

KS = (20, 50, 100)
BATCH = 64  # images per batch in evaluation
MODES = ("constrained", "unconstrained")
RECALLS = tuple(f"{mode}R@{k}" for mode in ("", "ng-") for k in KS)
"""With the graph constraint (one predicate per pair) and, with the prefix `ng-`, without it."""
MEAN_RECALLS = tuple(f"{mode}mR@{k}" for mode in ("", "ng-") for k in KS)
CHOSEN_BY = "recall"
"""The mean of the six recalls, which does not favor the k of any objective."""
_HERE: dict[str, Any] = {"sync_on_compute": False}  # because `score` gathers the images of all processes


Scored = tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]
"""Predictions and targets of some images, as `SceneGraphRecall` takes them."""


def score(
    rank_by: Callable[[Batch], Tensor], batches: Iterable[Batch], accelerator: Accelerator
) -> Iterator[Scored]:
    """Rank the triples of all images, batch by batch.

    Args:
        rank_by: Computes the ranking scores (E, predicates) of the triples of each image.
        batches: The images.
        accelerator: Gathers the images of all processes, without duplicates.

    Yields:
        The images of a batch.
    """
    for batch in batches:
        images = _images(batch, rank_by(batch).float())
        if accelerator.num_processes > 1:
            images = accelerator.gather_for_metrics(images, use_gather_object=True)
        yield [predicted for predicted, _ in images], [true for _, true in images]


def measure(scored: Iterable[Scored]) -> dict[str, float]:
    """The six recalls, their mean as `recall`, and the six mean recalls, from 0 to 1."""
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
        scored: The images.
        predicates: The number of predicates.

    Returns:
        (modes x ks, predicates), in the order of `RECALLS`, with NaN for predicates without images; and
        (predicates,), the number of images with each predicate.
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
    """The recalls of the frequency bias alone, on one of the splits."""
    table = log_frequencies(splits.training, counts)

    def rank_by(batch: Batch) -> Tensor:
        subject, object_ = batch.labels[batch.edges].unbind(1)
        return table[subject, object_].softmax(1)[:, 1:]

    batches = GraphBatches(getattr(splits, split)).in_order(BATCH)
    return measure(score(rank_by, batches, accelerator))


def _images(batch: Batch, scores: Tensor) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """The predictions and targets of each image, with box indices within the image."""
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
