"""Ranking of all items for each user, with ranking metrics and calibrated probabilities."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

import torchlml
from torchlml.metrics import TopKNDCG, TopKPrecision, TopKRecall
from torchlml.metrics.topk import TopKMetric
from torchlml_lab.multilabel.losses import PADDING, LabelLoss
from torchlml_lab.recommend.histories import Batch, Users

KS = (1, 2, 5, 10, 20, 50, 100)
METRICS: tuple[type[TopKMetric], ...] = (TopKRecall, TopKPrecision, TopKNDCG)
ROWS = 128  # the number of users that are scored at a time


class RankedItems(NamedTuple):
    """The inputs of a ranking metric: the top items of each user, and the labels ranked below them.

    The shapes refer to the arguments of `rank`, where a `most` greater than n counts as n.
    """

    scores: Tensor
    """(R, most + L), the negative ranks. All labels below the top items share the next rank."""
    is_label: Tensor
    """bool (R, most + L), whether an entry is an item to predict."""
    there: Tensor
    """bool (R, most + L), False for padding, for items that the user already has, and for labels in the last
    L columns that are also among the top items."""


def without(scores: Tensor, history: Tensor) -> Tensor:
    """Return the scores (R, n), with minus infinity for the items that a user already has."""
    rows, n = scores.shape
    # An extra column receives the padding.
    wide = torch.cat([scores, scores.new_zeros(rows, 1)], 1)
    return wide.scatter_(1, torch.where(history == PADDING, n, history), -torch.inf)[:, :n]


def rank(scores: Tensor, labels: Tensor, most: int) -> RankedItems:
    """Reduce each row to the entries that are needed for metrics at k up to `most`.

    Args:
        scores: (R, n), minus infinity for items that cannot be recommended.
        labels: int64 (R, L), the items to predict, padded with `PADDING`.
        most: The largest k.

    Returns:
        Short rows with the same recall, precision and nDCG at every k up to `most`.
    """
    top = scores.topk(min(most, scores.shape[1]))
    same = top.indices[:, :, None] == labels[:, None, :]
    below = (labels != PADDING) & ~same.any(1)
    place = torch.arange(top.indices.shape[1], device=scores.device).expand_as(top.indices)
    return RankedItems(
        -torch.cat([place, torch.full_like(labels, place.shape[1])], 1).float(),
        torch.cat([same.any(2), below], 1),
        torch.cat([top.values > -torch.inf, below], 1),
    )


def measures(
    score: Callable[[Batch], Tensor],
    batches: Iterable[Batch],
    accelerator: Accelerator | None,
    ks: Sequence[int],
) -> dict[str, float]:
    """Compute recall, precision and nDCG at each k, averaged over the users of all processes.

    Args:
        score: Computes the scores (R, n) of all items for a batch.
        batches: The users with their histories and the items to predict.
        accelerator: Gathers the users from all processes. None means that this process has all users.
        ks: The numbers of recommended items.

    Returns:
        The metrics by name, such as `recall@20`.
    """
    metrics = [metric(tuple(ks), sync_on_compute=False) for metric in METRICS]
    for batch in batches:
        rows = [
            rank(without(score(part).float(), part.history), part.labels, max(ks))
            for part in split(batch, ROWS)
        ]
        width = max(one.scores.shape[1] for one in rows)
        joined = RankedItems(
            *(torch.cat([_widen(t, width) for t in kind]) for kind in zip(*rows, strict=True))
        )
        if accelerator is not None:
            # The width depends on the longest list of labels, which differs between processes.
            joined = RankedItems(*accelerator.pad_across_processes(tuple(joined), dim=1))
            joined = RankedItems(*accelerator.gather_for_metrics(tuple(joined)))
        for metric in metrics:
            metric.to(joined.scores.device).update(joined.scores, joined.is_label, mask=joined.there)
    return {name: value.item() for metric in metrics for name, value in metric.compute().items()}


def of_network(network: nn.Module) -> Callable[[Batch], Tensor]:
    """Return a function that computes a network's scores for a batch, for use as `score` in `measures`."""
    return lambda batch: network(batch.users, batch.history).scores()


def split(batch: Batch, rows: int) -> list[Batch]:
    """Split a batch into parts of at most `rows` users, each padded to the length of its longest list."""
    parts = []
    for users, history, labels in zip(*(t.split(rows) for t in batch), strict=True):
        parts.append(Batch(users, _narrow(history), _narrow(labels)))
    return parts


def _narrow(items: Tensor) -> Tensor:
    there = (items != PADDING).any(0)
    return items[:, : int(there.sum())]  # the padding is on the right, so the first columns are kept


def _widen(rows: Tensor, width: int) -> Tensor:
    return nn.functional.pad(rows, (0, width - rows.shape[1]))


BINS, FIRST = 10, 100


def probabilities(scores: Tensor, k: float) -> Tensor:
    """Return P(item in top k) for each item.

    Args:
        scores: (R, n), minus infinity for the items that a user already has.
        k: The number of items. If fewer items are new to a user, all of them get probability 1.

    Returns:
        (R, n), with rows that sum to k or, if it is smaller, to the number of new items. The probability of
        items that a user already has is 0.
    """
    new = scores > -torch.inf
    count = new.sum(-1)
    # `lml` requires at least one available entry in each row. For a user without new items, all entries are
    # made available, and the probabilities are set to 0 below.
    mask = new | (count == 0)[:, None]
    each = count.clamp(min=1, max=k) if k >= 1 else torch.full_like(count, k, dtype=torch.float64)
    found = torchlml.lml(torch.where(new, scores, 0), each.double(), mask=mask)
    return torch.where(new, found, 0)


def calibration(
    score: Callable[[Batch], Tensor], batches: Iterable[Batch], k: float
) -> list[tuple[float, float]]:
    """Compare the probabilities of the top `FIRST` items of every user with the outcomes.

    Args:
        score: Computes the scores (R, n) of all items for a batch.
        batches: The users with their histories and the items to predict.
        k: The mean number of items to predict per user. The probabilities of all items sum to k.

    Returns:
        For each bin, the mean probability of its items and the share of them that are among the items to
        predict. Items are sorted by probability and divided into bins of equal size.
    """
    chances, taken = [], []
    for batch in batches:
        for part in split(batch, ROWS):
            scores = without(score(part).float(), part.history)
            top = scores.topk(min(FIRST, scores.shape[1]))
            chance = probabilities(scores, k).gather(1, top.indices)
            new = top.values > -torch.inf
            chances.append(chance[new])
            taken.append((top.indices[:, :, None] == part.labels[:, None, :]).any(-1)[new])
    order = torch.cat(chances).argsort()
    pairs = zip(
        *(torch.cat(all_)[order].double().tensor_split(BINS) for all_ in (chances, taken)), strict=True
    )
    return [(chance.mean().item(), share.mean().item()) for chance, share in pairs if len(chance)]


MOST_USERS = 512


def fit_scale(score: Callable[[Batch], Tensor], users: Users) -> float:
    """Find the factor for the scores that maximizes the likelihood of the held-out items under a softmax.

    Args:
        score: Computes the scores (R, n) of all items for a batch.
        users: Users with their histories and held-out items. At most `MOST_USERS` of them are used.

    Returns:
        The factor, from 2⁻¹⁰ to 2¹⁰. The log-likelihood is a concave function of the factor, so a ternary
        search finds the maximum.
    """
    some = users.__getitems__(list(range(min(MOST_USERS, len(users)))))
    scores = torch.cat([without(score(part).float(), part.history) for part in split(some, ROWS)])
    loss = LabelLoss("softmax")

    def value(power: float) -> float:
        return float(loss(scores * 2**power, some.labels))

    low, high = -10.0, 10.0
    while high - low > 0.05:
        left, right = (2 * low + high) / 3, (low + 2 * high) / 3
        low, high = (low, right) if value(left) <= value(right) else (left, high)
    return float(2 ** ((low + high) / 2))
