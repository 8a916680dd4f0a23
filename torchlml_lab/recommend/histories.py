"""The histories of users: read from files, split for training, validation and test."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.interactions import Interactions, align, read_interactions
from torchlml_lab.multilabel.losses import PADDING, loss_with_usual_k
from torchlml_lab.recommend.settings import RecommendSettings

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


def popular_items(have: Interactions) -> Tensor:
    """The items, first those that most users have; of equals first the one that the file names first."""
    counts = torch.bincount(have.item, minlength=len(have.items))
    return counts.argsort(descending=True, stable=True)


def by_popularity(have: Interactions) -> Callable[[Batch], Tensor]:
    """The same scores (R, n) for all users, higher where more of them have the item."""
    scores = torch.empty(len(have.items))
    scores[popular_items(have)] = -torch.arange(len(have.items), dtype=scores.dtype)
    return lambda batch: scores.to(batch.users.device).expand(len(batch.users), -1)


class Data(NamedTuple):
    """The pairs of a run."""

    training: Interactions
    validation: Interactions
    test: Interactions | None
    before_test: Interactions
    """What users have when the test begins: what was trained on, and what was set aside for validation."""
    everything: Interactions
    """All pairs of `--train`."""
    notes: list[str]
    """What a person should know about the files, in sentences."""

    @property
    def fingerprint(self) -> int:
        """A number that names, numbers and pairs of `--train` decide."""
        have = self.everything
        names = zlib.crc32("\n".join([*have.users, "", *have.items]).encode())
        return zlib.crc32(have.item.numpy().tobytes(), zlib.crc32(have.starts.numpy().tobytes(), names))

    @property
    def splits(self) -> dict[str, Users]:
        """The users of `validation`, and of `test` if there is one: what they have, what is to be found."""
        splits = {"validation": Users(self.training, self.validation)}
        if self.test is not None:
            splits["test"] = Users(self.before_test, self.test)
        return splits


def read(settings: RecommendSettings) -> Data:
    """The pairs to train on, to choose by and to test on."""
    assert settings.train is not None
    have = read_interactions(settings.train, "--train", settings.columns)
    notes = _notes(settings.train, have)
    loss_with_usual_k(settings.loss, settings.k).check_labels(len(have.items))
    later = None
    if settings.test is not None:
        later, said = read_later(settings.test, "--test", settings.columns, have)
        notes += said
    everything = have
    if settings.users is not None and settings.users < len(have.users):
        have = some_users(have, settings.users)
        later = None if later is None else later.keep((have.counts > 0)[later.user])
        if later is not None and not len(later):
            raise BadInput(f"`--users` is {settings.users}: none of these has a pair in `{settings.test}`.")
    able = int((have.counts > 1).sum())
    if not able:
        raise BadInput(f"`--train` names `{settings.train}`, where no user has more than one item.")
    count = settings.validation or max(min(100, able // 4), min(3000, able // 10), 1)
    training, validation = set_aside(have, count)
    return Data(training, validation, later, have, everything, notes)


def read_later(
    path: Path, option: str, columns: tuple[str, str] | None, have: Interactions
) -> tuple[Interactions, list[str]]:
    """What the users took later, and what of the file cannot be found by any model, in sentences."""
    file = read_interactions(path, option, columns)
    later, users, items = align(file, have)
    notes = _notes(path, file)
    if users or items:
        notes.append(
            f"`{path}`: {users} users and {items} items are not in the training data, and are left out."
        )
    known = torch.isin(later.user * len(have.items) + later.item, have.user * len(have.items) + have.item)
    if known.any():
        notes.append(f"`{path}`: {int(known.sum())} pairs are also in the training data, and are left out.")
        later = later.keep(~known)
    if not len(later):
        raise BadInput(
            f"`{option}` names `{path}`, which has no new pair of a user and an item of the training data."
        )
    return later, notes


def _notes(path: Path, have: Interactions) -> list[str]:
    notes = []
    if have.repeated:
        notes.append(f"`{path}`: {have.repeated} pairs come more than once, and count once.")
    empty = int((have.counts == 0).sum())
    if empty:
        notes.append(f"`{path}`: {empty} users have no items.")
    return notes
