"""Recall, precision and nDCG for the k highest scores in each row, and the ranking code that they share.

Sums are stored as integers, because a metric is cast together with its model. `model.to(torch.bfloat16)` and
Lightning's precision "bf16-true" cast every floating-point state, and a sum in bfloat16 stops growing at 256.
Integer states are not cast, and integer sums do not depend on the order of batches and processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torchmetrics import Metric

from torchlml._arguments import Canonical, canonical, check_integer_k, is_sharded
from torchlml._rows import Rows, rows_of, wide_dtype
from torchlml._targets import read_labels

# Fractions are stored in units of 2^-30: the resolution is 1e-9, and the sum of 2^32 rows fits in an int64.
_UNIT = 2**30


class CountingMetric(Metric):
    """A metric for one or several values of k. Its states are integers regardless of the requested dtype."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    def __init__(self, k: int | Sequence[int], **settings: object) -> None:
        super().__init__(**settings)
        self.k = k
        self._ks = tuple(k) if isinstance(k, Sequence) else (k,)
        if not self._ks:
            raise ValueError(
                "`k` must be a positive integer or a nonempty sequence of positive integers, but it is empty."
            )
        self._ks = tuple(check_integer_k(each) for each in self._ks)

    def by_k(self, values: Tensor, name: str) -> Tensor | dict[str, Tensor]:
        """Return a float32 value for each k: a scalar for an integer k, a dict (`name@k`) for a sequence."""
        values = values.float()
        if not isinstance(self.k, Sequence):
            return values[0]
        return {f"{name}@{each}": value for each, value in zip(self.k, values, strict=True)}

    def set_dtype(self, dst_type: str | torch.dtype) -> CountingMetric:
        """Do nothing: the inherited method would cast the integer states and lose precision."""
        return self


def of_batch(metric: CountingMetric, *batch: Any, **options: Any) -> Any:
    """Compute a metric on one batch."""
    metric.update(*batch, **options)
    return metric.compute()


def in_units(parts: Tensor) -> Tensor:
    """Express numbers from 0 to 1 as multiples of 2^-30, rounded to int64."""
    return (parts * _UNIT).round().long()


def average(total: Tensor, count: Tensor) -> Tensor:
    """Return total / count in double precision, or NaN if `count` is 0. `total` is in units of 2^-30."""
    return total.to(wide_dtype(total.device)) / _UNIT / count


def add_up(numbers: Tensor) -> Tensor:
    """Sum nonnegative numbers (R, K) over the rows.

    Returns:
        An int64 tensor of shape (K, 2): the sums of the integer parts, and the sums of the fractional parts
        in units of 2^-30.
    """
    wholes = numbers.floor()
    return torch.stack([wholes.long().sum(0), in_units(numbers - wholes).sum(0)], dim=-1)


def ratio(found: Tensor, possible: Tensor) -> Tensor:
    """Divide sums from `add_up` in double precision. The result of 0 / 0 is NaN."""
    return _number(found) / _number(possible)


def _number(total: Tensor) -> Tensor:
    wholes, units = total.to(wide_dtype(total.device)).unbind(-1)
    return wholes + units / _UNIT


class Ranked:
    """The scores and the observed labels of a batch, for metrics that depend on the ranking of each row.

        >>> batch = Ranked("example", torch.tensor([[0.5, 0.9, 0.5]]), torch.tensor([0]), (1, 3))
        >>> batch.sums(batch.labels)
        tensor([[0., 1.]], dtype=torch.float64)
        >>> batch.at_places(batch.labels)
        tensor([[0.0000, 0.5000, 0.5000]], dtype=torch.float64)

    Args:
        function: the name of the metric. All processes of a group must call the same metric.
        preds, target, ignore_index, mask, offsets, group: as for `torchlml.metrics.topk_recall`.
        ks: the values of k that will be evaluated.
        check: a function that raises an error if other arguments of the metric do not match the scores.
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
            from torchlml._distributed import loss as sharded

            c, self.rows, self.labels = sharded.rank(
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
        # The number of ranks does not exceed the length of the longest row, regardless of k.
        self.places = min(max(ks), self.rows.longest)
        self._available = torch.ones_like(c.x, dtype=torch.bool) if c.mask is None else c.mask
        self._x = c.x.detach().masked_fill(~self._available | c.x.isnan(), -torch.inf)

    def at_places(self, worth: Tensor) -> Tensor:
        """Return the value of the entry at each rank, averaged over all ways to break ties.

        `worth` is the value of each entry, with the shape of the scores. Pass `labels` to count labels. The
        result has shape (R, places).
        """
        rows = self.rows
        if self.places == 0:
            return worth.new_zeros((rows.count, 0), dtype=rows.wide)
        scores, found = rows.top(self._x, self.places, worth)
        last = scores[:, -1]
        # Ties above the last score lie entirely within these ranks. The tie at the last score may extend past
        # them. If that score is -inf, masked entries have the same score and must be excluded.
        level = self._available & (self._x == rows.broadcast(last))
        number, total = rows.sum(level), rows.sum(worth * level)
        above = (scores > last[:, None]).sum(-1, keepdim=True)
        place = torch.arange(self.places, device=scores.device) - above
        mean = total.to(rows.wide) / number.clamp(min=1)
        at_last = torch.where(place < number[:, None], mean[:, None], 0)
        return torch.where(place < 0, _mean_of_ties(scores, found.to(rows.wide)), at_last)

    def sums(self, worth: Tensor) -> Tensor:
        """Return the total value of the k highest-scored entries of each row for every k, as (R, len(ks))."""
        return self.first(self.at_places(worth))

    def best(self, worth: Tensor) -> Tensor:
        """Return the highest total value of any k entries of each row for every k, as (R, len(ks))."""
        return self.first(self.rows.top(worth, self.places, worth)[1])

    def first(self, places: Tensor) -> Tensor:
        """Sum the values at the first k ranks of each row, for every k."""
        return pad(places.cumsum(-1), (1, 0))[..., self.ks.clamp(max=self.places)]


def _mean_of_ties(scores: Tensor, found: Tensor) -> Tensor:
    """Replace each number with its mean over the entries of the row that have the same score.

    The scores are in descending order.
    """
    lower = pad(scores[:, 1:] != scores[:, :-1], (1, 0))
    tie = lower.cumsum(-1)
    total = torch.zeros_like(found).scatter_add(-1, tie, found)
    number = torch.zeros_like(found).scatter_add(-1, tie, torch.ones_like(found))
    return (total / number.clamp(min=1)).gather(-1, tie)


class TopKMetric(CountingMetric):
    """Base class of metrics that divide one sum over rows by another, for each k.

    Subclasses define both sums. The arguments are those of `TopKRecall`.
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
        """Return the achieved and the achievable value of each row for every k, both as (R, len(ks))."""
        raise NotImplementedError

    def update(
        self, preds: Tensor, target: Tensor, *, mask: Tensor | None = None, offsets: Tensor | None = None
    ) -> None:
        """Add a batch of scores of shape (..., n). The other arguments are those of `torchlml.lml_loss`."""
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
        """Return the result for each k, or NaN if the sum in the denominator is still 0."""
        return self.by_k(ratio(self.found, self.possible), self.name)


class TopKRecall(TopKMetric):
    """The fraction of a row's observed labels that are among its k highest scores, averaged over rows.

        >>> recall = TopKRecall(k=(1, 2))
        >>> recall.update(torch.tensor([[0.1, 0.7, 0.2]]), torch.tensor([1]))
        >>> recall.update(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([2]))
        >>> recall.compute()
        {'recall@1': tensor(0.5000), 'recall@2': tensor(0.5000)}

    Args:
        k: an integer or a sequence of integers. `compute` returns a scalar for an integer, and a dict with
            the keys `recall@k` for a sequence.
        ignore_index: the class index that means "no label".
        group: the processes across which the scores of each row are sharded, as for `torchlml.lml_loss`. If
            the scores are a DTensor, no group is needed.
        **settings: arguments of `torchmetrics.Metric`.

    For a row with observed labels Y and a predicted set P of k entries, the recall is |Y ∩ P| / |Y|. The
    formula in the LML paper is the mean of [j not in P] over j in Y, which is 1 minus the recall, because its
    condition is inverted.

    - With one label per row, this is the top-k accuracy.
    - Every row has the same weight, regardless of its number of labels. The micro average, which
      divides the number of hits in all rows by the number of labels in all rows, is a different metric.
    - Rows without labels are ignored. If no row has a label, the result is NaN. `TopKPrecision` and
      `TopKNDCG` count a row without labels as 0, and so does napkinXC's recall.
    - Entries that tie for the last ranks are weighted by their probability of being selected if the tie is
      broken at random. A model that gives all n classes the same score has recall k / n, regardless of the
      order of the classes.
    - Nonzero weights in a float multi-hot target only mark labels as present. A masked label never counts as
      found, and a NaN score is treated as -inf.
    """

    name = "recall"

    def measure(self, batch: Ranked) -> tuple[Tensor, Tensor]:
        """Return the recall of each row that has labels, and 1 for each of these rows."""
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
    """Compute `TopKRecall` for one batch.

        >>> preds = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
        >>> topk_recall(preds, torch.tensor([1, 2]), k=(1, 2, 3))
        {'recall@1': tensor(0.5000), 'recall@2': tensor(0.5000), 'recall@3': tensor(1.)}

    Args:
        preds: scores of shape (..., n), a 1-d tensor of scores with `offsets`, or a nested tensor, as for
            `torchlml.lml_loss`.
        target: the observed labels, in any format that `torchlml.lml_loss` accepts.
        k: an integer or a sequence of integers.
        mask: a bool tensor that broadcasts to the shape of the scores. Entries that are False never count as
            found.
        offsets: int64 or int32 row boundaries of a ragged batch, as for `torchlml.lml`.
        ignore_index, group: as for `TopKRecall`.

    Returns:
        A scalar for an integer k, or a dict with the keys `recall@k` for a sequence.
    """
    metric = TopKRecall(k, ignore_index, group, sync_on_compute=False)
    return of_batch(metric, preds, target, mask=mask, offsets=offsets)


class TopKPrecision(TopKMetric):
    """The fraction of a row's k highest-scored entries that are observed labels (P@k), averaged over rows.

        >>> precision = TopKPrecision(k=(1, 2))
        >>> precision.update(torch.tensor([[0.1, 0.7, 0.2]]), torch.tensor([[1, 2]]))
        >>> precision.update(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[2, -100]]))
        >>> precision.compute()
        {'precision@1': tensor(0.5000), 'precision@2': tensor(0.5000)}

    The arguments are those of `TopKRecall`.

    For a row with observed labels Y and a predicted set P of k entries, the precision is |Y ∩ P| / k.

    - Every row counts. A row without labels counts as 0, as in napkinXC and in the Extreme Classification
      Repository. (`TopKRecall` ignores such a row, because its recall is 0 / 0.)
    - The divisor is k even if a row has fewer than k entries or labels. The highest possible precision is
      therefore below 1 if rows have fewer than k labels.
    - Ties, weights, masks and NaN are handled as in `TopKRecall`.
    """

    name = "precision"

    def measure(self, batch: Ranked) -> tuple[Tensor, Tensor]:
        """Return the precision of each row, and 1 for each row."""
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
    """Compute `TopKPrecision` for one batch.

        >>> preds = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
        >>> topk_precision(preds, torch.tensor([[1, 2], [2, -100]]), k=(1, 3))
        {'precision@1': tensor(0.5000), 'precision@3': tensor(0.5000)}

    The arguments are those of `topk_recall`.

    Returns:
        A scalar for an integer k, or a dict with the keys `precision@k` for a sequence.
    """
    return of_batch(
        TopKPrecision(k, ignore_index, group, sync_on_compute=False),
        preds,
        target,
        mask=mask,
        offsets=offsets,
    )


class TopKNDCG(TopKMetric):
    """The normalized discounted cumulative gain of the k highest-scored entries (nDCG@k), averaged over rows.

        >>> ndcg = TopKNDCG(k=(1, 3))
        >>> ndcg.update(torch.tensor([[0.1, 0.7, 0.2]]), torch.tensor([1]))
        >>> ndcg.update(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([2]))
        >>> ndcg.compute()
        {'ndcg@1': tensor(0.5000), 'ndcg@3': tensor(0.7500)}

    The arguments are those of `TopKRecall`.

    A label at rank r contributes a gain of 1 / log2(r + 1). The gain of the first k ranks is divided by the
    gain of a ranking with all labels first, which is the sum of 1 / log2(r + 1) over r from 1 to
    min(k, number of labels).

    - Every row counts. A row without labels counts as 0, as in napkinXC and in the Extreme Classification
      Repository.
    - Entries with equal scores share the mean gain of their ranks, which is the expected gain if the tie is
      broken at random.
    - Nonzero weights in a float multi-hot target only mark labels as present. Graded relevance is not
      supported. Masks and NaN are handled as in `TopKRecall`.
    """

    name = "ndcg"

    def measure(self, batch: Ranked) -> tuple[Tensor, Tensor]:
        """Return the gain of each row divided by the highest possible gain, and 1 for each row."""
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
    """Compute `TopKNDCG` for one batch.

        >>> preds = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
        >>> topk_ndcg(preds, torch.tensor([1, 2]), k=(1, 3))
        {'ndcg@1': tensor(0.5000), 'ndcg@3': tensor(0.7500)}

    The arguments are those of `topk_recall`.

    Returns:
        A scalar for an integer k, or a dict with the keys `ndcg@k` for a sequence.
    """
    metric = TopKNDCG(k, ignore_index, group, sync_on_compute=False)
    return of_batch(metric, preds, target, mask=mask, offsets=offsets)
