"""The baseline of every recommendation: what most users have, for everyone."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchlml_lab.data.interactions import Interactions
from torchlml_lab.recommend.histories import Batch


def popular_items(have: Interactions) -> Tensor:
    """The items, first those that most users have; of equals first the one that the file names first."""
    counts = torch.bincount(have.item, minlength=len(have.items))
    return counts.argsort(descending=True, stable=True)


def by_popularity(have: Interactions) -> Callable[[Batch], Tensor]:
    """The same scores (R, n) for all users, higher where more of them have the item."""
    scores = torch.empty(len(have.items))
    scores[popular_items(have)] = -torch.arange(len(have.items), dtype=scores.dtype)
    return lambda batch: scores.to(batch.users.device).expand(len(batch.users), -1)
