"""Recall for scene graphs: R@K, ng-R@K and mR@K."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torchmetrics.utilities.distributed import gather_all_tensors

from torchlml._arguments import check_tensor
from torchlml._rows import wide_dtype
from torchlml.metrics.topk import CountingMetric, average, in_units, of_batch

_OVERLAP = 0.5
Images = Sequence[Mapping[str, Tensor]]


class SceneGraphRecall(CountingMetric):
    """The fraction of an image's true relations that are among its K highest-scored predictions.

        >>> recall = SceneGraphRecall(k=(20, 50))
        >>> predicted = {
        ...     "boxes": torch.tensor([[0.0, 0, 10, 10], [20, 20, 40, 40]]),  # (B, 4) x1, y1, x2, y2
        ...     "labels": torch.tensor([3, 7]),  # (B,) object classes
        ...     "pairs": torch.tensor([[0, 1], [1, 0]]),  # (P, 2) subject box, object box
        ...     "scores": torch.tensor([[0.9, 0.1], [0.2, 0.3]]),  # (P, C) one score per predicate
        ... }
        >>> true = {
        ...     "boxes": torch.tensor([[0.0, 0, 10, 10], [20, 20, 40, 41]]),  # (G, 4)
        ...     "labels": torch.tensor([3, 7]),  # (G,)
        ...     "relations": torch.tensor([[0, 1, 0]]),  # (T, 3) subject box, object box, predicate
        ... }
        >>> recall.update([predicted], [true])
        >>> recall.compute()
        {'R@20': tensor(1.), 'R@50': tensor(1.)}

    Args:
        k: an integer or a sequence of integers. `compute` returns a scalar for an integer, and a dict for a
            sequence.
        constrained: if True, every pair keeps only its best predicate (the graph constraint, R@K). If False,
            all predicates of all pairs compete (ng-R@K).
        mean: if False, average over images. If True, average over images for each predicate, then over
            predicates (mR@K), so that frequent predicates do not dominate.
        **settings: arguments of `torchmetrics.Metric`.

    A prediction is a triple of subject, predicate and object. It matches a true relation if the predicate and
    both object classes are the same and both boxes overlap the true boxes with an IoU of at least 0.5. The
    recall of an image is the fraction of its relations that match one of the K highest-scored triples. One
    triple may match several relations. Images without relations are ignored. Ties are broken in favor of the
    earlier pair, then of the lower predicate index.

    `scores` has one column for each predicate, but no column for "no relation". The scores rank the triples
    of an image. If the object classes are also predicted, first multiply each score by the scores of both
    object classes.

    Papers report several related metrics, often in the same table:

    - ng-R@K ("no graph constraint") is usually much higher than R@K for the same scores.
    - mR@K gives rare predicates the same weight as frequent ones and is usually much lower than R@K. It
      averages over the images that contain a predicate, and then over the predicates that occur.
    - Zero-shot recall (zR@K) counts only the relations whose combination of subject class, predicate and
      object class never occurs in the training data. To compute it, remove all other relations from `target`.
    - A micro average divides the number of matched relations in all images by the number of relations in all
      images, which gives more weight to images with many relations.
    - Some implementations add one pixel to the width and height of a box, which increases overlaps slightly.
    """

    recalled: Tensor
    images: Tensor

    def __init__(
        self,
        k: int | Sequence[int] = (20, 50, 100),
        constrained: bool = True,
        mean: bool = False,
        **settings: object,
    ) -> None:
        super().__init__(k, **settings)
        self.constrained = constrained
        self.mean = mean
        # There is one column for each predicate, or a single column if `mean` is False. The number of
        # predicates is unknown until the first image, but one column of zeros broadcasts to any number of
        # columns.
        columns = torch.zeros(len(self._ks), 1, dtype=torch.int64)
        self.add_state("recalled", columns, dist_reduce_fx="sum")
        self.add_state("images", columns[0].clone(), dist_reduce_fx="sum")

    def update(self, preds: Images, target: Images) -> None:
        """Add a batch of images, with one mapping of tensors per image, as in the example for this class."""
        for name, images in (("preds", preds), ("target", target)):
            if not isinstance(images, Sequence):
                raise TypeError(
                    f"`{name}` must be a list with one mapping of tensors per image, but its type is "
                    f"{type(images).__name__}."
                )
        if len(preds) != len(target):
            raise ValueError(
                "`preds` and `target` must have one entry per image, but their lengths are "
                f"{len(preds)} and {len(target)}."
            )
        for image, (predicted, true) in enumerate(zip(preds, target, strict=True)):
            _check(predicted, true, image)
            if self.mean:
                self._check_predicates(predicted["scores"].shape[1], image)
        for predicted, true in zip(preds, target, strict=True):
            self._add(predicted, true)

    def _add(self, predicted: Mapping[str, Tensor], true: Mapping[str, Tensor]) -> None:
        rank = relation_ranks(predicted, true, max(self._ks), self.constrained)
        hits = rank < torch.tensor(self._ks, device=rank.device).unsqueeze(-1)
        # The relations that each column counts: those with its predicate, or all relations.
        counted = torch.ones_like(hits[:1])
        if self.mean:
            predicates = torch.arange(predicted["scores"].shape[1], device=rank.device)
            counted = true["relations"][:, 2] == predicates.unsqueeze(-1)
        count = counted.sum(-1)
        found = (hits.unsqueeze(1) & counted).sum(-1).to(wide_dtype(rank.device))
        self.recalled = self.recalled + in_units(found / count.clamp(min=1))
        self.images = self.images + (count > 0).long()

    def _check_predicates(self, number: int, image: int) -> None:
        before = self.recalled.shape[1]
        if before not in (1, number):
            raise ValueError(
                f"`preds[{image}]['scores']` must have {before} columns (predicates) as in earlier images, "
                f"but it has {number}."
            )

    def _sync_dist(
        self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None
    ) -> None:
        # A process without images has one column. torchmetrics stacks the states, so they must have the same
        # width.
        mine = torch.tensor(self.images.shape[0], device=self.images.device)
        columns = max(int(n) for n in dist_sync_fn(mine, group=process_group or self.process_group))
        if self.images.shape[0] == 1:
            self.recalled = pad(self.recalled, (0, columns - 1))
            self.images = pad(self.images, (0, columns - 1))
        super()._sync_dist(dist_sync_fn, process_group)

    def compute(self) -> Any:
        """Return the recall for each k, or NaN if there are no relations.

        For a sequence of k, the result is a dict with keys such as `R@20` or `ng-mR@20`, depending on
        `constrained` and `mean`.
        """
        recall = average(self.recalled, self.images)[:, self.images > 0].mean(-1)
        return self.by_k(recall, ("" if self.constrained else "ng-") + ("mR" if self.mean else "R"))


def scene_graph_recall(
    preds: Images,
    target: Images,
    k: int | Sequence[int] = (20, 50, 100),
    constrained: bool = True,
    mean: bool = False,
) -> Tensor | dict[str, Tensor]:
    """Compute `SceneGraphRecall` for one batch of images.

        >>> boxes, labels = torch.tensor([[0.0, 0, 10, 10], [20, 20, 40, 40]]), torch.tensor([3, 7])
        >>> scores = torch.tensor([[0.9, 0.1], [0.2, 0.3]])
        >>> predicted = {"boxes": boxes, "labels": labels, "pairs": torch.tensor([[0, 1], [1, 0]])}
        >>> true = {"boxes": boxes, "labels": labels, "relations": torch.tensor([[0, 1, 0], [1, 0, 0]])}
        >>> scene_graph_recall([{**predicted, "scores": scores}], [true], k=(1, 2))
        {'R@1': tensor(0.5000), 'R@2': tensor(0.5000)}

    The arguments are those of `SceneGraphRecall` and its `update` method.

    Returns:
        A scalar for an integer k, or a dict for a sequence, as returned by `SceneGraphRecall.compute`.
    """
    return of_batch(SceneGraphRecall(k, constrained, mean, sync_on_compute=False), preds, target)


def relation_ranks(
    predicted: Mapping[str, Tensor], true: Mapping[str, Tensor], most: int, constrained: bool
) -> Tensor:
    """Return the rank (from 0) of the first triple that matches each true relation.

    The rank is `most` if none of the `most` highest-scored triples matches.
    """
    scores = predicted["scores"].nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if constrained:
        scores, predicate = scores.max(-1)
        pair = torch.arange(len(scores), device=scores.device)
    else:
        flat, number = torch.arange(scores.numel(), device=scores.device), scores.shape[1]
        scores, predicate, pair = scores.flatten(), flat % number, flat // number
    best = _first(scores, most)
    subject, object_ = predicted["pairs"][pair[best]].unbind(-1)
    true_subject, true_object, true_predicate = true["relations"].unbind(-1)
    same_object = (predicted["labels"].unsqueeze(-1) == true["labels"]) & _overlapping(
        predicted["boxes"], true["boxes"]
    )
    match = (
        (predicate[best].unsqueeze(-1) == true_predicate)
        & same_object[subject][:, true_subject]
        & same_object[object_][:, true_object]
    )
    place = torch.arange(len(best), device=match.device).unsqueeze(-1)
    place = torch.where(match, place, most)
    return place.amin(0) if len(best) else place.new_full((match.shape[1],), most)


def _first(scores: Tensor, most: int) -> Tensor:
    """Return the indices of the `most` highest scores in descending order, with ties in index order."""
    if most < len(scores):
        # Usually few scores pass this threshold, so sorting them is fast. topk would order ties arbitrarily.
        kept = (scores >= scores.topk(most).values[-1]).nonzero().squeeze(-1)
        return kept[scores[kept].argsort(descending=True, stable=True)[:most]]
    return scores.argsort(descending=True, stable=True)


def _overlapping(a: Tensor, b: Tensor) -> Tensor:
    """Whether each box in `a` (B, 4) overlaps each box in `b` (G, 4) with an IoU of at least 0.5."""
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    a, b = a.to(wide).unsqueeze(1), b.to(wide)
    sides = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0)
    shared = sides.prod(-1)
    union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - shared
    # Identical boxes count as overlapping, even if their area is 0.
    return ((shared >= _OVERLAP * union) & (union > 0)) | (a == b).all(-1)


def _check(predicted: Mapping[str, Tensor], true: Mapping[str, Tensor], image: int) -> None:
    for name, given, keys in (
        ("preds", predicted, ("boxes", "labels", "pairs", "scores")),
        ("target", true, ("boxes", "labels", "relations")),
    ):
        where = f"`{name}[{image}]`"
        if not isinstance(given, Mapping):
            raise TypeError(f"{where} must be a mapping of tensors, but its type is {type(given).__name__}.")
        missing = [key for key in keys if key not in given]
        if missing:
            raise ValueError(
                f"{where} must have the keys {', '.join(keys)}, but it lacks {', '.join(missing)}."
            )
        for key in keys:
            check_tensor(given[key], f"{name}[{image}]['{key}']")
        boxes, labels = given["boxes"], given["labels"]
        if boxes.shape[1:] != (4,) or labels.shape != boxes.shape[:1]:
            raise ValueError(
                f"{where} must have `boxes` of shape (B, 4) and `labels` of shape (B,), but their shapes are "
                f"{tuple(boxes.shape)} and {tuple(labels.shape)}."
            )
    pairs, scores, relations = predicted["pairs"], predicted["scores"], true["relations"]
    if pairs.shape[1:] != (2,) or scores.dim() != 2 or len(scores) != len(pairs) or scores.shape[1] == 0:
        raise ValueError(
            f"`preds[{image}]` must have `pairs` of shape (P, 2) and `scores` of shape (P, predicates), but "
            f"their shapes are {tuple(pairs.shape)} and {tuple(scores.shape)}."
        )
    if relations.shape[1:] != (3,):
        raise ValueError(
            f"`target[{image}]` must have `relations` of shape (T, 3) with the columns subject, object and "
            f"predicate, but their shape is {tuple(relations.shape)}."
        )
    _check_indices(pairs, len(predicted["boxes"]), f"`preds[{image}]['pairs']`", "box")
    _check_indices(relations[:, :2], len(true["boxes"]), f"`target[{image}]['relations']`", "box")
    _check_indices(relations[:, 2], scores.shape[1], f"`target[{image}]['relations']`", "predicate")
    subject, object_ = pairs.long().unbind(1)
    if len((subject * len(predicted["boxes"]) + object_).unique()) < len(pairs):
        raise ValueError(f"`preds[{image}]['pairs']` must not repeat a pair, but it contains a pair twice.")


def _check_indices(indices: Tensor, number: int, where: str, what: str) -> None:
    if indices.is_floating_point() or indices.dtype == torch.bool:
        raise TypeError(f"{where} must contain integer indices, but its dtype is {indices.dtype}.")
    if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= number):
        raise ValueError(
            f"{where} must contain {what} indices from 0 to {number - 1}, but its indices range from "
            f"{int(indices.min())} to {int(indices.max())}."
        )
