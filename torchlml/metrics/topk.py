"""Recall, precision and nDCG of the k highest scores of each row, and the counting and ranking behind them.

Sums are kept as integers. A metric moves with its model: `model.to(torch.bfloat16)`, which is Lightning's
"bf16-true", converts every floating state, and a sum in bfloat16 stops growing at 256. Integer states are not
converted, and integer sums do not depend on the order of batches and processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torchmetrics import Metric

from torchlml._arguments import Canonical, canonical, check_integer_k
from torchlml._distributed import is_sharded
from torchlml._rows import Rows, rows_of, wide_dtype
from torchlml._targets import read_labels

# A fraction is counted in units of 2^-30: seven digits, and the sum of 2^33 rows fits into an int64.
_UNIT = 2**30


class CountingMetric(Metric):
    """A metric for one k or several, whose states are whole numbers, whatever dtype is asked for."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    def __init__(self, k: int | Sequence[int], **settings: object) -> None:
        super().__init__(**settings)
        self.k = k
        self._ks = tuple(k) if isinstance(k, Sequence) else (k,)
        if not self._ks:
            raise ValueError("`k` must be a positive integer or several of them, but it is empty.")
        self._ks = tuple(check_integer_k(each) for each in self._ks)

    def by_k(self, values: Tensor, name: str) -> Tensor | dict[str, Tensor]:
        """A value for each k, as float32: a scalar if k is one number, else a dict with the keys `name@k`."""
        values = values.float()
        if not isinstance(self.k, Sequence):
            return values[0]
        return {f"{name}@{each}": value for each, value in zip(self.k, values, strict=True)}

    def set_dtype(self, dst_type: str | torch.dtype) -> CountingMetric:
        """Nothing: torchmetrics' own would convert the counts, and with them what they can hold."""
        return self


def of_batch(metric: CountingMetric, *batch: Any, **options: Any) -> Any:
    """The value of a metric on one batch."""
    metric.update(*batch, **options)
    return metric.compute()


def in_units(parts: Tensor) -> Tensor:
    """Numbers from 0 to 1 as int64."""
    return (parts * _UNIT).round().long()


def average(total: Tensor, count: Tensor) -> Tensor:
    """The mean of numbers whose units sum to `total`, NaN where there are none, in double precision."""
    return total.to(wide_dtype(total.device)) / _UNIT / count


def add_up(numbers: Tensor) -> Tensor:
    """The sums over rows of (R, K) numbers from 0 on, in whole numbers: (K, 2), the wholes and the units."""
    wholes = numbers.floor()
    return torch.stack([wholes.long().sum(0), in_units(numbers - wholes).sum(0)], dim=-1)


def ratio(found: Tensor, possible: Tensor) -> Tensor:
    """The quotients of sums from `add_up`, NaN for 0 / 0, in double precision."""
    return _number(found) / _number(possible)


def _number(total: Tensor) -> Tensor:
    wholes, units = total.to(wide_dtype(total.device)).unbind(-1)
    return wholes + units / _UNIT


class Ranked:
    """Scores and the observed labels among them.

        >>> batch = Ranked("example", torch.tensor([[0.5, 0.9, 0.5]]), torch.tensor([0]), (1, 3))
        >>> batch.sums(batch.labels)
        tensor([[0., 1.]], dtype=torch.float64)
        >>> batch.at_places(batch.labels)
        tensor([[0.0000, 0.5000, 0.5000]], dtype=torch.float64)

    Args:
        function: the name of the metric, for processes that must all call the same one.
        preds, target, ignore_index, mask, offsets, group: as `torchlml.metrics.topk_recall` takes them.
        ks: how many of the highest scores will be looked at.
        check: refuses other arguments of the metric that do not fit to the scores.
    """

    rows: Rows

    def __init__(
        self,
        function: str,
        preds: Tensor,
        target: Tensor,
        ks: Sequence[int],
        ignore_index: int = -100,
        mask: Tensor | None = None,
        offsets: Tensor | None = None,
        group: Any = None,
        check: Callable[[Canonical], None] | None = None,
    ) -> None:
        if is_sharded(preds, group):
            from torchlml._distributed import calls

            c, self.rows, self.labels = calls.rank(
                function, preds, target, ks, ignore_index, mask, offsets, group, check
            )
        else:
            c = canonical(preds, 1, -1, mask, offsets, any_k=True, name="preds", nested=True)
            if check is not None:
                check(c)
            self.labels = read_labels(c._replace(mask=None), target, None, ignore_index).multi_hot(c.x)
            self.rows = rows_of(c.x, c.offsets, differentiable=True)
        self.ks = torch.tensor(ks, device=c.x.device)
        self.count = self.rows.sum(self.labels)
        # No row has more places than entries, however large k is.
        self.places = min(max(ks), self.rows.longest)
        self._available = torch.ones_like(c.x, dtype=torch.bool) if c.mask is None else c.mask
        self._x = c.x.detach().masked_fill(~self._available | c.x.isnan(), -torch.inf)

    def at_places(self, worth: Tensor) -> Tensor:
        """What the entry at each place is worth, the mean of all ways to break ties: (R, places).

        `worth` has the shape of the scores; the labels themselves count 1 each.
        """
        rows = self.rows
        if self.places == 0:
            return worth.new_zeros((rows.count, 0), dtype=rows.wide)
        scores, found = rows.top(self._x, self.places, worth)
        last = scores[:, -1]
        # A tie above the last score lies in these places as a whole; the one for the last places may go on
        # behind them, and where it is at -inf what is masked stands among it.
        level = self._available & (self._x == rows.broadcast(last))
        number, total = rows.sum(level), rows.sum(worth * level)
        above = (scores > last[:, None]).sum(-1, keepdim=True)
        place = torch.arange(self.places, device=scores.device) - above
        mean = total.to(rows.wide) / number.clamp(min=1)
        at_last = torch.where(place < number[:, None], mean[:, None], 0)
        return torch.where(place < 0, _mean_of_ties(scores, found.to(rows.wide)), at_last)

    def sums(self, worth: Tensor) -> Tensor:
        """What the k highest entries of each row are worth together, for every k: (R, len(ks))."""
        return self.first(self.at_places(worth))

    def best(self, worth: Tensor) -> Tensor:
        """The most that k entries of each row are worth together, for every k: (R, len(ks))."""
        return self.first(self.rows.top(worth, self.places, worth)[1])

    def first(self, places: Tensor) -> Tensor:
        """The sum of the first k places, for every k."""
        return pad(places.cumsum(-1), (1, 0))[..., self.ks.clamp(max=self.places)]


def _mean_of_ties(scores: Tensor, found: Tensor) -> Tensor:
    """Every number of a row, replaced by the mean of those whose scores, which fall, are the same."""
    lower = pad(scores[:, 1:] != scores[:, :-1], (1, 0))
    tie = lower.cumsum(-1)
    total = torch.zeros_like(found).scatter_add(-1, tie, found)
    number = torch.zeros_like(found).scatter_add(-1, tie, torch.ones_like(found))
    return (total / number.clamp(min=1)).gather(-1, tie)


class TopKMetric(CountingMetric):
    """A sum over rows divided by another, for each k; a subclass says of what.

    Arguments as for `TopKRecall`.
    """

    name: ClassVar[str]
    found: Tensor
    possible: Tensor

    def __init__(
        self, k: int | Sequence[int], ignore_index: int = -100, group: Any = None, **settings: object
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
        self, preds: Tensor, target: Tensor, *, mask: Tensor | None = None, offsets: Tensor | None = None
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
        k: one number, and `compute` returns a tensor; or several, and it returns a dict with keys `recall@k`.
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
    metric = TopKRecall(k, ignore_index, group, sync_on_compute=False)
    return of_batch(metric, preds, target, mask=mask, offsets=offsets)


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
        TopKPrecision(k, ignore_index, group, sync_on_compute=False),
        preds,
        target,
        mask=mask,
        offsets=offsets,
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
    metric = TopKNDCG(k, ignore_index, group, sync_on_compute=False)
    return of_batch(metric, preds, target, mask=mask, offsets=offsets)
