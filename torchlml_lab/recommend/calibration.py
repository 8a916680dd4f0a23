"""Whether the probability of an item is the share of users who take it."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

import torchlml
from torchlml_lab.recommend.full_ranking import ROWS, split, without
from torchlml_lab.recommend.histories import Batch

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
