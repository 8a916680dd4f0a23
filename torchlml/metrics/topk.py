"""Metrics of the k highest scores of a row: recall of the observed labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchlml._core.arguments import canonical
from torchlml._core.rows import Rows, rows_of
from torchlml.losses.targets import read_labels
from torchlml.metrics.means import CountingMetric, average, by_k, in_units, read_ks


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
    batch = _Ranked(preds, target, ignore_index, mask, offsets, group)
    return by_k(average(*batch.total(TopKRecall.measure, read_ks(k))), k, "recall")


class _Ranked:
    """A batch of rows with their labels, and the chance of each entry to be among the highest."""

    rows: Rows

    def __init__(
        self,
        preds: Tensor,
        target: Tensor,
        ignore_index: int,
        mask: Tensor | None,
        offsets: Tensor | None,
        group: Any = None,
    ) -> None:
        if group is None:
            c = canonical(preds, 1, -1, mask, offsets, any_k=True, name="preds", nested=True)
            self.labels = read_labels(c._replace(mask=None), target, None, ignore_index).multi_hot(c.x)
            self.rows = rows_of(c.x, c.offsets, differentiable=True)
        else:
            from torchlml.parallel.ranking import spread_ranking

            if offsets is not None:
                raise ValueError("`offsets` is not accepted with a `group`: give dense rows.")
            c, self.rows, self.labels = spread_ranking(preds, target, ignore_index, mask, group)
        self.count = self.rows.sum(self.labels)
        self._available = torch.ones_like(c.x, dtype=torch.bool) if c.mask is None else c.mask
        self._x = c.x.detach().masked_fill(~self._available | c.x.isnan(), -torch.inf)

    def chances(self, k: int) -> Tensor:
        """The chance of every entry to be among the k highest of its row, 0 or 1 but for ties."""
        rows = self.rows
        threshold = rows.spread(rows.largest(self._x, k))
        above, level = self._available & (self._x > threshold), self._available & (self._x == threshold)
        places = (k - rows.sum(above)).to(rows.wide)
        chance = (places / rows.sum(level).clamp(min=1)).clamp(max=1)
        return torch.where(level, rows.spread(chance), above.to(rows.wide))

    def total(self, measure: Callable[[_Ranked, int], Tensor], ks: Sequence[int]) -> tuple[Tensor, Tensor]:
        """For each k the sum of a measure over the rows that have a label, and how many these are."""
        counted = self.count > 0
        sums = [in_units(torch.where(counted, measure(self, k), 0)).sum() for k in ks]
        return torch.stack(sums), counted.sum()


class TopKMetric(CountingMetric):
    """The mean over rows of a number from 0 to 1 for each k; a subclass says which number.

    Args:
        k: one number, and `compute` returns a scalar; or several, and it returns a dict.
        ignore_index: the class index that means "no label".
        group: the processes among which the scores of each row are split, as in `torchlml.lml_loss`.
        **settings: for `torchmetrics.Metric`.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    name: ClassVar[str]
    found: Tensor
    rows: Tensor

    def __init__(
        self,
        k: int | Sequence[int] = (1, 5),
        ignore_index: int = -100,
        group: Any = None,
        **settings: object,
    ) -> None:
        super().__init__(**settings)
        self.group = group
        self._ks = read_ks(k)
        self.k = k
        self.ignore_index = ignore_index
        self.add_state("found", torch.zeros(len(self._ks), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")

    @staticmethod
    def measure(batch: _Ranked, k: int) -> Tensor:
        """The number of each row of the batch."""
        raise NotImplementedError

    def update(
        self, preds: Tensor, target: Tensor, mask: Tensor | None = None, offsets: Tensor | None = None
    ) -> None:
        """Count a batch of scores (..., n); the other arguments are those of `torchlml.lml_loss`."""
        batch = _Ranked(preds, target, self.ignore_index, mask, offsets, self.group)
        found, rows = batch.total(self.measure, self._ks)
        self.found = self.found + found
        self.rows = self.rows + rows

    def compute(self) -> Any:
        """The mean for each k, NaN before the first row that has a label."""
        return by_k(average(self.found, self.rows), self.k, self.name)


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
    - A row without labels does not count; if there is no other, the result is NaN.
    - Ties: where entries tie for the last places, each gets its chance of a place if the tie is broken at
      random. A model that gives all n classes the same score has recall k / n, in whatever order they are.
    - A weight in a floating multi-hot only says that the label is there. A label behind a mask is never
      found, and NaN is lower than every number.
    """

    name = "recall"

    @staticmethod
    def measure(batch: _Ranked, k: int) -> Tensor:
        """The recall of each row."""
        found = batch.rows.sum(torch.where(batch.labels, batch.chances(k), 0))
        return found / batch.count.clamp(min=1)
