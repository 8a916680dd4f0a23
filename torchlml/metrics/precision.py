"""Precision at k: the part of the k highest scores that are observed labels."""

from __future__ import annotations

import torch
from torch import Tensor

from torchlml.metrics.ranked import Ranked
from torchlml.metrics.topk import TopKMetric


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
