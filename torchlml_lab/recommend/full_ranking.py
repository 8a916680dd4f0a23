"""All items a user does not have, ranked; and how many of those the user took later are on top."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from torchlml.metrics import TopKNDCG, TopKPrecision, TopKRecall
from torchlml.metrics.topk import TopKMetric
from torchlml_lab.recommend.histories import Batch
from torchlml_lab.tasks.label_losses import PADDING

KS = (1, 2, 5, 10, 20, 50, 100)
METRICS: tuple[type[TopKMetric], ...] = (TopKRecall, TopKPrecision, TopKNDCG)
ROWS = 128  # users whose scores are held at a time


class Ranked(NamedTuple):
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


def rank(scores: Tensor, labels: Tensor, most: int) -> Ranked:
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
    return Ranked(
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
        joined = Ranked(*(torch.cat([_widen(t, width) for t in kind]) for kind in zip(*rows, strict=True)))
        if accelerator is not None:
            # The widths are those of the longest list of labels, which processes do not share.
            joined = Ranked(*accelerator.pad_across_processes(tuple(joined), dim=1))
            joined = Ranked(*accelerator.gather_for_metrics(tuple(joined)))
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
