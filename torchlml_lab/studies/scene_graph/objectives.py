"""The training objectives, and a parser for method names such as `lml-20`."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import torchlml
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.studies.scene_graph.graphs import Batch
from torchlml_lab.studies.scene_graph.settings import OBJECTIVES, Objective

# Motifs trains on at most this many edges per image, averaged over a batch. If there are more, it keeps a
# random sample of the edges without a relation.
EDGES_PER_IMAGE = 1024


def has_background(objective: Objective) -> bool:
    """Whether each edge has a score for "no relation", which precedes the scores of the predicates."""
    return objective == "softmax"


def takes_k(objective: Objective) -> bool:
    """Whether the objective takes k, the number of relations to predict."""
    return objective in ("lml", "truncated-entropy")


def loss(objective: Objective, scores: Tensor, batch: Batch, k: int, one_per_edge: bool = False) -> Tensor:
    """Compute the mean loss of a batch of images.

    Args:
        objective: The name of the loss.
        scores: (E, predicates), or (E, 1 + predicates) with "no relation" first for `softmax`.
        batch: The images.
        k: The number of relations per image that `lml` and `truncated-entropy` predict.
        one_per_edge: Whether to use one random relation per edge, as for `softmax`, instead of all relations.

    Returns:
        A scalar. For `softmax`, it is the mean over edges, as in Motifs. For the other losses, it is the mean
        over images of the sum over relations (for `bce`, the sum over all candidates).
    """
    edge, predicate = batch.relation_edges, batch.relation_predicates
    if one_per_edge or objective == "softmax":
        edge, predicate = _one_of_each(edge, predicate)
    if objective == "softmax":
        return _softmax(scores, edge, predicate, len(batch.images))
    count = scores.shape[1]
    flat, offsets, positions = scores.flatten(), batch.edge_offsets * count, edge * count + predicate
    if objective == "lml":
        return torchlml.lml_loss(flat, positions, k, offsets=offsets)
    if objective == "truncated-entropy":
        return torchlml.truncated_entropy_loss(flat, positions, k, offsets=offsets)
    observed = torch.zeros_like(flat).scatter(0, positions, 1.0)
    return binary_cross_entropy_with_logits(flat, observed, reduction="sum") / len(batch.images)


def ranking(objective: Objective, scores: Tensor) -> Tensor:
    """Return scores (E, predicates) that rank the triples in the same order as their probabilities."""
    return scores.softmax(1)[:, 1:] if has_background(objective) else scores


def probabilities(objective: Objective, scores: Tensor, k: int) -> Tensor:
    """Return the probability (E, predicates) of each triple of one image, as defined by the objective."""
    if has_background(objective):
        return scores.softmax(1)[:, 1:]
    if objective == "bce":
        return scores.sigmoid()
    flat = scores.flatten()
    k = min(k, flat.numel())
    if objective == "lml":
        return torchlml.lml(flat, k).view_as(scores)
    # A label competes only with the labels that the loss does not ignore.
    rest = flat.topk(flat.numel() - k, largest=False).values.logsumexp(0)
    return (scores - rest).sigmoid()


def _softmax(scores: Tensor, edge: Tensor, predicate: Tensor, images: int) -> Tensor:
    """Compute the mean cross-entropy over edges. Edges without a relation are sampled if necessary."""
    label = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    label[edge] = predicate + 1
    most = EDGES_PER_IMAGE * images
    if len(label) > most:
        without = (label == 0).nonzero().squeeze(1)
        without = without[torch.randperm(len(without), device=scores.device)[: max(0, most - len(edge))]]
        kept = torch.cat((edge, without))
        scores, label = scores[kept], label[kept]
    return cross_entropy(scores, label)


def _one_of_each(edge: Tensor, predicate: Tensor) -> tuple[Tensor, Tensor]:
    """Choose a random relation for each edge that has relations; `edge` must be sorted."""
    order = torch.randperm(len(edge), device=edge.device)
    order = order[edge[order].argsort(stable=True)]
    first = torch.ones_like(edge, dtype=torch.bool)
    first[1:] = edge[1:] != edge[:-1]
    return edge[first], predicate[order][first]


class Method(NamedTuple):
    """An objective and its k, if it takes one."""

    objective: Objective
    k: int | None

    @property
    def name(self) -> str:
        """The name in tables and options, such as `softmax` or `lml-20`."""
        return self.objective if self.k is None else f"{self.objective}-{self.k}"


def method_of(objective: Objective, k: int) -> Method:
    """Return the method for an objective and k. If the objective does not take k, then k is ignored."""
    return Method(objective, k if takes_k(objective) else None)


def find_method(name: str) -> Method | None:
    """Parse the name of a method; return None if it is unknown.

    Example:
        >>> find_method("truncated-entropy-20")
        Method(objective='truncated-entropy', k=20)
    """
    objective, _, k = name.rpartition("-")
    for one in OBJECTIVES:
        if takes_k(one) and one == objective and k.isdecimal():
            return Method(one, int(k))
        if not takes_k(one) and one == name:
            return Method(one, None)
    return None


def parse_method(name: str) -> Method:
    """Parse a method name from `--methods`; an unknown name raises `BadInput`."""
    method = find_method(name)
    if method is None:
        known = ", ".join(f"{one}-K" if takes_k(one) else one for one in OBJECTIVES)
        raise BadInput(f"`--methods` may contain only {known} (K is an integer), but it contains `{name}`.")
    return method
