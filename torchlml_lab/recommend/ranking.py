"""Rankings of all items: the measures of a ranking, and calibrated probabilities."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

import torchlml
from torchlml.metrics import TopKNDCG, TopKPrecision, TopKRecall
from torchlml.metrics.topk import TopKMetric
from torchlml_lab.multilabel.losses import PADDING
from torchlml_lab.recommend.histories import Batch

KS = (1, 2, 5, 10, 20, 50, 100)
METRICS: tuple[type[TopKMetric], ...] = (TopKRecall, TopKPrecision, TopKNDCG)
ROWS = 128  # users whose scores are held at a time


class RankedItems(NamedTuple):
    """What a ranking metric looks at: the first places of each user, and the labels behind them."""

    scores: Tensor
    """(R, most + L), minus the place; all labels behind the first places share the next one."""
    is_label: Tensor
    there: Tensor


def without(scores: Tensor, history: Tensor) -> Tensor:
    """The scores (R, n), with minus infinity for what each user has."""
    rows, n = scores.shape
    # One column more than there are items receives the padding.
    wide = torch.cat([scores, scores.new_zeros(rows, 1)], 1)
    return wide.scatter_(1, torch.where(history == PADDING, n, history), -torch.inf)[:, :n]


def rank(scores: Tensor, labels: Tensor, most: int) -> RankedItems:
    """Keep of every row what metrics for at most `most` places need.

    Args:
        scores: (R, n), minus infinity for what cannot be recommended.
        labels: int64 (R, L), what is to be found, filled up with `PADDING`.
        most: How many places are looked at.

    Returns:
        Rows that are short, and have the same recall, precision and nDCG at k up to `most`.
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
    """Recall, precision and nDCG at each k, means over the users of all processes.

    Args:
        score: The scores (R, n) of all items for a batch.
        batches: Users, what they have and what is to be found.
        accelerator: Brings the rows of all processes together; None where one process has them all.
        ks: How many items are recommended.

    Returns:
        The measures, `recall@20` and so on.
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
            # The widths are those of the longest list of labels, which processes do not share.
            joined = RankedItems(*accelerator.pad_across_processes(tuple(joined), dim=1))
            joined = RankedItems(*accelerator.gather_for_metrics(tuple(joined)))
        for metric in metrics:
            metric.to(joined.scores.device).update(joined.scores, joined.is_label, mask=joined.there)
    return {name: value.item() for metric in metrics for name, value in metric.compute().items()}


def of_network(network: nn.Module) -> Callable[[Batch], Tensor]:
    """What `measures` needs of a network that gives `Factors`."""
    return lambda batch: network(batch.users, batch.history).scores()


def split(batch: Batch, rows: int) -> list[Batch]:
    """The batch in parts of so many users, each as wide as it has to be."""
    parts = []
    for users, history, labels in zip(*(t.split(rows) for t in batch), strict=True):
        parts.append(Batch(users, _narrow(history), _narrow(labels)))
    return parts


def _narrow(items: Tensor) -> Tensor:
    there = (items != PADDING).any(0)
    return items[:, : int(there.sum())]  # lists are filled up from the left, so these columns are the first


def _widen(rows: Tensor, width: int) -> Tensor:
    return nn.functional.pad(rows, (0, width - rows.shape[1]))


BINS, FIRST = 10, 100


def probabilities(scores: Tensor, k: float) -> Tensor:
    """The probability of each item to be among k, from scores that are minus infinity for what a user has.

    Args:
        scores: (R, n).
        k: How many items are expected; a user who lacks fewer than that gets them all.

    Returns:
        (R, n), rows that sum to k, 0 for what the user has.
    """
    new = scores > -torch.inf
    count = new.sum(-1)
    # A user who has everything gets nothing, but the layer wants an entry in every row.
    mask = new | (count == 0)[:, None]
    each = count.clamp(min=1, max=k) if k >= 1 else torch.full_like(count, k, dtype=torch.float64)
    found = torchlml.lml(torch.where(new, scores, 0), each.double(), mask=mask)
    return torch.where(new, found, 0)


def calibration(
    score: Callable[[Batch], Tensor], batches: Iterable[Batch], k: float
) -> list[tuple[float, float]]:
    """Compare probabilities with what happened, for the best items of every user.

    Args:
        score: The scores (R, n) of all items for a batch.
        batches: Users, what they have and what they took later.
        k: How many items they take on average: over all items the probabilities sum to it.

    Returns:
        For bins of items with similar probabilities, as many in each, the mean probability and the share that
        was taken.
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
