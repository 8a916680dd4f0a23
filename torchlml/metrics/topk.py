"""Recall of the observed labels among the k highest logits of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from torchlml._core.rows import row_index
from torchlml.losses.targets import LogitRows, multi_hot, read_k, read_labels, read_logits


class TopKRecall(Metric):
    """The part of a row's observed labels that is among its k highest logits, averaged over rows.

        recall = TopKRecall(k=(1, 5))
        recall.update(logits, target)       # the targets of `torchlml.lml_loss`
        recall.compute()                    # {"recall@1": tensor(0.71), "recall@5": tensor(0.92)}

    Args:
        k: one number, and `compute` returns a scalar; or several, and it returns a dict.
        ignore_index: the class index that means "no label".
        **settings: for `torchmetrics.Metric`.

    For a row with observed labels Y and a predicted set P of k entries, the recall is |Y and P| / |Y|. The
    paper prints the mean over Y of [y_j not in P], which is one minus that: its Iverson bracket is inverted.

    - With one label per row it is top-k accuracy.
    - Every row counts the same, however many labels it has. The micro average, hits of all rows over labels
      of all rows, is another number.
    - A row without labels does not count; if there is no other, the result is NaN.
    - Ties: where entries tie for the last places, each gets its chance of a place if the tie is broken at
      random. A model that gives all n classes the same logit has recall k / n, in whatever order they are.
    - A weight in a floating multi-hot only says that the label is there. A label behind a mask is never
      found, and NaN is lower than every number.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    found: Tensor
    rows: Tensor

    def __init__(self, k: int | Sequence[int] = (1, 5), ignore_index: int = -100, **settings: object) -> None:
        super().__init__(**settings)
        self.k = k
        self._ks = read_ks(k)
        self.ignore_index = ignore_index
        self.add_state("found", torch.zeros(len(self._ks)), dist_reduce_fx="sum")
        self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")

    def update(
        self, logits: Tensor, target: Tensor, mask: Tensor | None = None, offsets: Tensor | None = None
    ) -> None:
        """Count a batch; the arguments are those of `torchlml.lml_loss`."""
        rows = read_logits(logits.detach(), mask, offsets)
        labels = read_labels(rows._replace(mask=None), target, None, self.ignore_index)
        observed = multi_hot(rows, labels)
        row = None if rows.offsets is None else row_index(rows.offsets, observed.numel())
        number = _sum(observed, row, rows).clamp(min=1)
        for i, k in enumerate(self._ks):
            found = _sum(torch.where(observed, _chances(rows, row, k), 0), row, rows)
            self.found[i] += (found / number).sum()
        self.rows += labels.has_label.sum()

    def compute(self) -> Any:
        """The recall for each k."""
        recall = self.found / self.rows
        if isinstance(self.k, int):
            return recall[0]
        return {f"recall@{k}": value for k, value in zip(self._ks, recall, strict=True)}


def read_ks(k: int | Sequence[int]) -> tuple[int, ...]:
    """The numbers to report, at least one of them."""
    ks = tuple(k) if isinstance(k, Sequence) else (k,)
    if not ks:
        raise ValueError("`k` must be a positive integer or several of them, but it is empty.")
    return tuple(read_k(each, None) for each in ks)


def _chances(rows: LogitRows, row: Tensor | None, k: int) -> Tensor:
    """The chance of every entry to be among the k highest of its row, 0 or 1 but for ties."""
    available = torch.ones_like(rows.x, dtype=torch.bool) if rows.mask is None else rows.mask
    x = rows.x.masked_fill(~available | rows.x.isnan(), -torch.inf)
    threshold = _kth_largest(x, rows, row, k)
    threshold = threshold.unsqueeze(-1) if row is None else threshold[row]
    above, level = available & (x > threshold), available & (x == threshold)
    places = k - _sum(above, row, rows)
    chance = (places / _sum(level, row, rows).clamp(min=1)).clamp(max=1)
    chance = chance.unsqueeze(-1) if row is None else chance[row]
    return torch.where(level, chance, above.to(chance.dtype))


def _kth_largest(x: Tensor, rows: LogitRows, row: Tensor | None, k: int) -> Tensor:
    """The k-th largest entry of each row, the last one if it is shorter; any number if it is empty."""
    if rows.offsets is None or row is None:
        k = min(k, x.shape[-1])
        return x.topk(k, dim=-1).values[:, -1] if k else x.new_zeros(rows.number)
    if x.numel() == 0:
        return x.new_zeros(rows.number)
    by_value = x.argsort(descending=True)
    order = by_value[row[by_value].argsort(stable=True)]
    place = torch.minimum(rows.offsets[:-1] + k, rows.offsets[1:]) - 1
    return x[order[place.clamp(min=0)]]


def _sum(t: Tensor, row: Tensor | None, rows: LogitRows) -> Tensor:
    """The sum over each row; of a bool, the number."""
    if row is None:
        return t.sum(-1)
    t = t.long() if t.dtype == torch.bool else t
    return torch.zeros(rows.number, dtype=t.dtype, device=t.device).index_add(0, row, t)
