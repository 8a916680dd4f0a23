"""Recall, precision and nDCG: what the k highest scores of a row are worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchlml._arguments import Canonical
from torchlml.metrics.means import CountingMetric, add_up, of_batch, ratio
from torchlml.metrics.ranked import Ranked


class TopKMetric(CountingMetric):
    """A sum over rows divided by another, for each k; a subclass says of what.

    Arguments as for `TopKRecall`.
    """

    name: ClassVar[str]
    found: Tensor
    possible: Tensor

    def __init__(
        self, k: int | Sequence[int] = (1, 5), ignore_index: int = -100, group: Any = None, **settings: object
    ) -> None:
        super().__init__(k, **settings)
        self.group = group
        self.ignore_index = ignore_index
        for state in ("found", "possible"):
            self.add_state(state, torch.zeros(len(self._ks), 2, dtype=torch.int64), dist_reduce_fx="sum")

    def measure(self, batch: Ranked) -> tuple[Tensor, Tensor]:
        """What was found in each row and what was possible, for every k: two of shape (R, len(ks))."""
        raise NotImplementedError

    def update(
        self, preds: Tensor, target: Tensor, mask: Tensor | None = None, offsets: Tensor | None = None
    ) -> None:
        """Count a batch of scores (..., n); the other arguments are those of `torchlml.lml_loss`."""
        self._count(*self.measure(self._rank(preds, target, mask, offsets)))

    def _rank(
        self,
        preds: Tensor,
        target: Tensor,
        mask: Tensor | None,
        offsets: Tensor | None,
        check: Callable[[Canonical], None] | None = None,
    ) -> Ranked:
        name = type(self).__name__
        return Ranked(name, preds, target, self._ks, self.ignore_index, mask, offsets, self.group, check)

    def _count(self, found: Tensor, possible: Tensor) -> None:
        self.found = self.found + add_up(found)
        self.possible = self.possible + add_up(possible)

    def compute(self) -> Any:
        """The result for each k, NaN before the first row that counts."""
        return self.by_k(ratio(self.found, self.possible), self.name)


class TopKRecall(TopKMetric):
    """The part of a row's observed labels that is among its k highest scores, averaged over rows.

        >>> recall = TopKRecall(k=(1, 2))
        >>> recall.update(torch.tensor([[0.1, 0.7, 0.2]]), torch.tensor([1]))
        >>> recall.update(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([2]))
        >>> recall.compute()
        {'recall@1': tensor(0.5000), 'recall@2': tensor(0.5000)}

    Args:
        k: one number, and `compute` returns a scalar; or several, and it returns a dict.
        ignore_index: the class index that means "no label".
        group: the processes among which the scores of each row are split, as in `torchlml.lml_loss`;
            a DTensor needs none.
        **settings: for `torchmetrics.Metric`.

    For a row with observed labels Y and a predicted set P of k entries, the recall is |Y and P| / |Y|. The
    paper prints the mean over Y of [y_j not in P], which is one minus that: its Iverson bracket is inverted.

    - With one label per row it is top-k accuracy.
    - Every row counts the same, however many labels it has. The micro average, hits of all rows over labels
      of all rows, is another number.
    - A row without labels does not count; if there is no other, the result is NaN. `TopKPrecision` and
      `TopKNDCG` count such a row with 0, and so does the recall of napkinXC.
    - Ties: where entries tie for the last places, each gets its chance of a place if the tie is broken at
      random. A model that gives all n classes the same score has recall k / n, in whatever order they are.
    - A weight in a floating multi-hot only says that the label is there. A label behind a mask is never
      found, and NaN is lower than every number.
    """

    name = "recall"

    def measure(self, batch: Ranked) -> tuple[Tensor, Tensor]:
        """The recall of each row that has labels, and 1 for each of them."""
        count = batch.count[:, None]
        recall = batch.sums(batch.labels) / count.clamp(min=1)
        return recall, (count > 0).to(recall).expand_as(recall)


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
    """`TopKRecall` of one batch.

        >>> preds = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
        >>> topk_recall(preds, torch.tensor([1, 2]), k=(1, 2, 3))
        {'recall@1': tensor(0.5000), 'recall@2': tensor(0.5000), 'recall@3': tensor(1.)}

    Args:
        preds: scores (..., n), or flat values with `offsets`, or a nested tensor, as in `torchlml.lml_loss`.
        target: the observed labels, in any form that `torchlml.lml_loss` takes.
        k: one number, and the result is a scalar; or several, and it is a dict.
        mask: bool, broadcasts to the scores; False entries cannot be found.
        offsets: int64 row boundaries of a ragged batch, as in `torchlml.lml`.
        ignore_index, group: as for `TopKRecall`.
    """
    return of_batch(TopKRecall(k, ignore_index, group, sync_on_compute=False), preds, target, mask, offsets)


class TopKPrecision(TopKMetric):
    """The part of a row's k highest scores that are observed labels (P@k), averaged over rows.

        >>> precision = TopKPrecision(k=(1, 2))
        >>> precision.update(torch.tensor([[0.1, 0.7, 0.2]]), torch.tensor([[1, 2]]))
        >>> precision.update(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[2, -100]]))
        >>> precision.compute()
        {'precision@1': tensor(0.5000), 'precision@2': tensor(0.5000)}

    Arguments as for `TopKRecall`.

    For a row with observed labels Y and a predicted set P of k entries, the precision is |Y and P| / k.

    - Every row counts, one without labels with 0: these are the numbers of napkinXC and of the tables of the
      extreme classification repository. (`TopKRecall` leaves such a row out, since its recall is 0 / 0.)
    - It is divided by k even where a row has fewer than k entries or labels: so the best that can be reached
      is below 1 where rows have fewer than k labels.
    - Ties, weights, masks and NaN are treated as in `TopKRecall`.
    """

    name = "precision"

    def measure(self, batch: Ranked) -> tuple[Tensor, Tensor]:
        """The precision of each row, and 1 for each."""
        precision = batch.sums(batch.labels) / batch.ks
        return precision, torch.ones_like(precision)


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
    """`TopKPrecision` of one batch.

        >>> preds = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
        >>> topk_precision(preds, torch.tensor([[1, 2], [2, -100]]), k=(1, 3))
        {'precision@1': tensor(0.5000), 'precision@3': tensor(0.5000)}

    Arguments as for `topk_recall`.
    """
    return of_batch(
        TopKPrecision(k, ignore_index, group, sync_on_compute=False), preds, target, mask, offsets
    )


class TopKNDCG(TopKMetric):
    """The discounted gain of a row's labels among its k highest scores (nDCG@k), averaged over rows.

        >>> ndcg = TopKNDCG(k=(1, 3))
        >>> ndcg.update(torch.tensor([[0.1, 0.7, 0.2]]), torch.tensor([1]))
        >>> ndcg.update(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([2]))
        >>> ndcg.compute()
        {'ndcg@1': tensor(0.5000), 'ndcg@3': tensor(0.7500)}

    Arguments as for `TopKRecall`.

    A label at place r of the ranking gains 1 / log2(r + 1). The gain of the first k places is divided by that
    of a ranking with all labels in front: the sum of 1 / log2(r + 1) over r up to min(k, number of labels).

    - Every row counts, one without labels with 0: these are the numbers of napkinXC and of the tables of the
      extreme classification repository.
    - Ties: entries of the same score share the mean gain of the places they take together, as if the tie were
      broken at random.
    - A weight in a floating multi-hot only says that the label is there, it is no graded relevance. Masks and
      NaN are treated as in `TopKRecall`.
    """

    name = "ndcg"

    def measure(self, batch: Ranked) -> tuple[Tensor, Tensor]:
        """The gain of each row in parts of the best, and 1 for each row."""
        rank = torch.arange(1, batch.places + 1, dtype=batch.rows.wide, device=batch.count.device)
        discount = 1 / (rank + 1).log2()
        gain = batch.first(batch.at_places(batch.labels) * discount)
        best = batch.first(discount * (rank <= batch.count[:, None]))
        ndcg = gain / torch.where(best > 0, best, 1)
        return ndcg, torch.ones_like(ndcg)


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
    """`TopKNDCG` of one batch.

        >>> preds = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
        >>> topk_ndcg(preds, torch.tensor([1, 2]), k=(1, 3))
        {'ndcg@1': tensor(0.5000), 'ndcg@3': tensor(0.7500)}

    Arguments as for `topk_recall`.
    """
    return of_batch(TopKNDCG(k, ignore_index, group, sync_on_compute=False), preds, target, mask, offsets)
