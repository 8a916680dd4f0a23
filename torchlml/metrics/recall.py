"""Recall at k: the part of a row's observed labels that is found."""

from __future__ import annotations

from torch import Tensor

from torchlml.metrics.ranked import Ranked
from torchlml.metrics.topk import TopKMetric


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
        group: the processes among which the scores of each row are split, as in `torchlml.lml_loss`.
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
