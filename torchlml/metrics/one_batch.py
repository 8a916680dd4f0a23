"""The metrics as functions of one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchlml.metrics.propensity import PropensityScoredPrecision
from torchlml.metrics.scene_graph import Images, SceneGraphRecall
from torchlml.metrics.topk import TopKMetric, TopKNDCG, TopKPrecision, TopKRecall


def topk_recall(
    preds: Tensor,
    target: Tensor,
    k: int | Sequence[int],
    *,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    group: Any = None,
) -> Tensor | dict[str, Tensor]:
    """The part of a row's observed labels that is among its k highest scores, averaged over rows.

        >>> preds = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
        >>> topk_recall(preds, torch.tensor([1, 2]), k=(1, 2, 3))
        {'recall@1': tensor(0.5000), 'recall@2': tensor(0.5000), 'recall@3': tensor(1.)}

    Args:
        preds: scores (..., n), or flat values with `offsets`, or a nested tensor, as in `torchlml.lml_loss`.
        target: the observed labels, in any form that `torchlml.lml_loss` takes.
        k: one number, and the result is a scalar; or several, and it is a dict.
        ignore_index: the class index that means "no label".
        mask: bool, broadcasts to the scores; False entries cannot be found.
        offsets: int64 row boundaries of a ragged batch, as in `torchlml.lml`.
        group: the processes among which the scores of each row are split, as in `torchlml.lml_loss`.

    Returns:
        What `TopKRecall` computes from this one batch.
    """
    return _of_batch(TopKRecall, preds, target, k, ignore_index, group, mask=mask, offsets=offsets)


def topk_precision(
    preds: Tensor,
    target: Tensor,
    k: int | Sequence[int],
    *,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    group: Any = None,
) -> Tensor | dict[str, Tensor]:
    """The part of a row's k highest scores that are observed labels (P@k), averaged over rows.

        >>> preds = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
        >>> topk_precision(preds, torch.tensor([[1, 2], [2, -100]]), k=(1, 3))
        {'precision@1': tensor(0.5000), 'precision@3': tensor(0.5000)}

    Arguments as for `topk_recall`.

    Returns:
        What `TopKPrecision` computes from this one batch.
    """
    return _of_batch(TopKPrecision, preds, target, k, ignore_index, group, mask=mask, offsets=offsets)


def topk_ndcg(
    preds: Tensor,
    target: Tensor,
    k: int | Sequence[int],
    *,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    group: Any = None,
) -> Tensor | dict[str, Tensor]:
    """The discounted gain of a row's labels among its k highest scores (nDCG@k), averaged over rows.

        >>> preds = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
        >>> topk_ndcg(preds, torch.tensor([1, 2]), k=(1, 3))
        {'ndcg@1': tensor(0.5000), 'ndcg@3': tensor(0.7500)}

    Arguments as for `topk_recall`.

    Returns:
        What `TopKNDCG` computes from this one batch.
    """
    return _of_batch(TopKNDCG, preds, target, k, ignore_index, group, mask=mask, offsets=offsets)


def propensity_scored_precision(
    preds: Tensor,
    target: Tensor,
    propensities: Tensor,
    k: int | Sequence[int],
    *,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    classes: Tensor | None = None,
    group: Any = None,
) -> Tensor | dict[str, Tensor]:
    """The propensity-scored precision (PSP@k) of one batch.

        >>> preds = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
        >>> propensities = torch.tensor([1.0, 0.5, 0.25])
        >>> propensity_scored_precision(preds, torch.tensor([1, 2]), propensities, k=(1, 3))
        {'psp@1': tensor(0.3333), 'psp@3': tensor(1.)}

    Args:
        propensities: (n,), one for each class; see `PropensityScoredPrecision`.
        classes: with `offsets`, int64: the class of each of the flat values.

    The other arguments are those of `topk_recall`.

    Returns:
        What `PropensityScoredPrecision` computes from this one batch.
    """
    more = {"mask": mask, "offsets": offsets, "classes": classes}

    def metric(**settings: Any) -> PropensityScoredPrecision:
        return PropensityScoredPrecision(propensities, **settings)

    return _of_batch(metric, preds, target, k, ignore_index, group, **more)


def scene_graph_recall(
    preds: Images,
    target: Images,
    k: int | Sequence[int] = (20, 50, 100),
    constrained: bool = True,
    mean: bool = False,
) -> Tensor | dict[str, Tensor]:
    """The recall of scene graphs in one batch of images: what `SceneGraphRecall` computes from it.

        >>> boxes, labels = torch.tensor([[0.0, 0, 10, 10], [20, 20, 40, 40]]), torch.tensor([3, 7])
        >>> scores = torch.tensor([[0.9, 0.1], [0.2, 0.3]])
        >>> predicted = {"boxes": boxes, "labels": labels, "pairs": torch.tensor([[0, 1], [1, 0]])}
        >>> true = {"boxes": boxes, "labels": labels, "relations": torch.tensor([[0, 1, 0], [1, 0, 0]])}
        >>> scene_graph_recall([{**predicted, "scores": scores}], [true], k=(1, 2))
        {'R@1': tensor(0.5000), 'R@2': tensor(0.5000)}

    Arguments as for `SceneGraphRecall` and its `update`.
    """
    recall = SceneGraphRecall(k, constrained, mean, sync_on_compute=False)
    recall.update(preds, target)
    return recall.compute()


def _of_batch(
    metric: Callable[..., TopKMetric],
    preds: Tensor,
    target: Tensor,
    k: int | Sequence[int],
    ignore_index: int,
    group: Any,
    **more: Tensor | None,
) -> Tensor | dict[str, Tensor]:
    """What a metric computes from one batch of this process; `more` are other arguments of its `update`."""
    one = metric(k=k, ignore_index=ignore_index, group=group, sync_on_compute=False)
    one.update(preds, target, **more)
    return one.compute()
