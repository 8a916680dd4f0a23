"""Recall of scene graphs for predicate classification: what runs and frequencies alone are judged by."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from torchlml.metrics.scene_graph import relation_ranks
from torchlml_lab.tasks.scene_graph.batches import Batch, GraphBatches
from torchlml_lab.tasks.scene_graph.data import SceneGraphs, Splits
from torchlml_lab.tasks.scene_graph.priors import log_frequencies

KS = (20, 50, 100)
BATCH = 64  # images at a time where nothing is learned
MODES = ("constrained", "unconstrained")
RECALLS = tuple(f"{mode}R@{k}" for mode in ("", "ng-") for k in KS)
"""With the graph constraint (one predicate for each pair) and, with `ng-`, without it."""
MEAN_RECALLS = tuple(f"{mode}mR@{k}" for mode in ("", "ng-") for k in KS)
CHOSEN_BY = "recall"
"""The mean of the six recalls, which favours no objective's k."""


class Recall(NamedTuple):
    """The recalls of a model on some images."""

    measures: dict[str, float]
    """The six recalls, their mean as `recall`, and the six mean recalls."""
    per_predicate: Tensor
    """(modes x ks, predicates), in the order of `RECALLS`; NaN for a predicate that no image has."""
    images: Tensor
    """(predicates,): how many images have the predicate."""


def evaluate(
    rank_by: Callable[[Batch], Tensor], batches: Iterable[Batch], predicates: int, accelerator: Accelerator
) -> Recall:
    """Measures what `torchlml.metrics.SceneGraphRecall` measures, all of it in one pass over the images.

    Args:
        rank_by: Gives the numbers (E, predicates) by which the triples of each image are ranked.
        batches: The images.
        predicates: How many there are.
        accelerator: Gathers the images of all processes.

    Returns:
        The recalls, between 0 and 1.
    """
    rows = []
    for batch in batches:
        scores = rank_by(batch).float()
        rows.append(accelerator.gather_for_metrics(_count(batch, scores, predicates)))
    hits, counts = torch.cat(rows).double().split((len(RECALLS) * predicates, predicates), 1)
    hits = hits.unflatten(1, (len(RECALLS), predicates))
    recalls = (hits.sum(2) / counts.sum(1, keepdim=True)).mean(0)
    images = (counts > 0).sum(0)
    per_predicate = (hits / counts.unsqueeze(1).clamp(min=1)).sum(0) / images
    means = per_predicate[:, images > 0].mean(1)
    measures = dict(zip(RECALLS, recalls.tolist(), strict=True))
    measures[CHOSEN_BY] = recalls.mean().item()
    measures |= dict(zip(MEAN_RECALLS, means.tolist(), strict=True))
    return Recall(measures, per_predicate, images)


def frequency_recall(splits: Splits, split: str, counts: Path | None, accelerator: Accelerator) -> Recall:
    """The recalls of a model that is nothing but the frequency bias, on one of the splits."""
    table = log_frequencies(splits.training, counts)
    data: SceneGraphs = getattr(splits, split)

    def rank_by(batch: Batch) -> Tensor:
        subject, object_ = batch.labels[batch.edges].unbind(1)
        return table[subject, object_].softmax(1)[:, 1:]

    return evaluate(rank_by, GraphBatches(data).in_order(BATCH), len(data.predicates), accelerator)


def _count(batch: Batch, scores: Tensor, predicates: int) -> Tensor:
    """For each image the relations of each predicate that are found, by mode and k, and those there are."""
    found = []
    boxes, edges = batch.box_offsets.tolist(), batch.edge_offsets.tolist()
    ends = batch.edges[batch.relation_edges]
    relations = torch.searchsorted(batch.relation_edges, batch.edge_offsets).tolist()
    ks = torch.tensor(KS, device=scores.device).unsqueeze(1)
    for i in range(len(batch.images)):
        box, edge = slice(*boxes[i : i + 2]), slice(*edges[i : i + 2])
        relation = slice(*relations[i : i + 2])
        predicate = batch.relation_predicates[relation]
        objects = {"boxes": batch.boxes[box], "labels": batch.labels[box]}
        true = objects | {"relations": torch.cat((ends[relation] - boxes[i], predicate.unsqueeze(1)), 1)}
        predicted = objects | {"pairs": batch.edges[edge] - boxes[i], "scores": scores[edge]}
        hits = [relation_ranks(predicted, true, max(KS), mode == "constrained") < ks for mode in MODES]
        table = torch.zeros(len(RECALLS) + 1, predicates, device=scores.device)
        marks = torch.cat((*hits, torch.ones_like(hits[0][:1]))).float()
        found.append(table.index_add(1, predicate, marks).flatten())
    return torch.stack(found)
