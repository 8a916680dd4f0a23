"""Normalised discounted cumulative gain at k: labels count the more the higher they are ranked."""

from __future__ import annotations

import torch
from torch import Tensor

from torchlml.metrics.ranked import Ranked
from torchlml.metrics.topk import TopKMetric


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
