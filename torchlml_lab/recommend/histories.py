"""The data of a run: which pairs it is trained on, which are set aside, and batches of users."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchlml_lab.data.interactions import Interactions
from torchlml_lab.tasks.label_losses import PADDING

SHARE = 0.2  # of the items of a user whose items are set aside


class Batch(NamedTuple):
    """Some users: their numbers (R,), the items they have, and the items that are to be found."""

    users: Tensor
    history: Tensor
    """int64 (R, L), filled up with `PADDING`."""
    labels: Tensor
    """int64 (R, M), filled up with `PADDING`."""


class Users(Dataset[Batch]):
    """Users by number, with what they have and what is to be found.

    Args:
        history: What they have.
        labels: What is to be found; in training the history itself. Users without any are left out.
    """

    def __init__(self, history: Interactions, labels: Interactions) -> None:
        self.history, self.labels = history, labels
        self.users = labels.counts.nonzero().squeeze(1)

    def __len__(self) -> int:
        return len(self.users)

    def __getitems__(self, indices: list[int]) -> Batch:
        users = self.users[torch.tensor(indices)]
        history = padded_items(self.history, users)
        return Batch(
            users, history, history if self.labels is self.history else padded_items(self.labels, users)
        )


def padded_items(have: Interactions, users: Tensor) -> Tensor:
    """The items of some users as one int64 (R, L), filled up with `PADDING`."""
    starts, counts = have.starts[users], have.counts[users]
    place = torch.arange(int(counts.max()) if len(counts) else 0)
    there = place < counts[:, None]
    items = torch.full(there.shape, PADDING)
    items[there] = have.item[(starts[:, None] + place)[there]]
    return items


def some_users(have: Interactions, count: int) -> Interactions:
    """The pairs of so many users, drawn in the same way for every seed; all items stay."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.zeros(len(have.users), dtype=torch.bool)
    chosen[torch.randperm(len(have.users), generator=generator)[:count]] = True
    return have.keep(chosen[have.user])


def set_aside(have: Interactions, count: int) -> tuple[Interactions, Interactions]:
    """Split off a fifth of the items of some users; it does not depend on the seed of the run.

    Args:
        have: All pairs.
        count: Of how many users, or of all if there are fewer; those with a single item keep it, and every
            user keeps one.

    Returns:
        What is left to train on, and what was set aside.
    """
    generator = torch.Generator().manual_seed(1)
    able = (have.counts > 1).nonzero().squeeze(1)
    users = torch.zeros(len(have.users), dtype=torch.bool)
    users[able[torch.randperm(len(able), generator=generator)[:count]]] = True
    # Each pair draws a number, and the lowest of a user's are set aside.
    draw = torch.rand(len(have), generator=generator, dtype=torch.float64) + have.user
    place = torch.empty(len(have), dtype=torch.int64)
    place[draw.argsort()] = torch.arange(len(have))
    place -= have.starts[have.user]
    most = (SHARE * have.counts).ceil().long()  # less than all where there are two or more
    aside = users[have.user] & (place < most[have.user])
    return have.keep(~aside), have.keep(aside)
