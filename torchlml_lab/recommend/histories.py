"""The items of users, read from files and split into training, validation and test data."""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.interactions import Interactions, align, read_interactions
from torchlml_lab.files import counted
from torchlml_lab.multilabel.losses import PADDING, loss_with_usual_k
from torchlml_lab.recommend.settings import RecommendSettings

SHARE = 0.2  # the fraction of a user's items that is held out for validation


class Batch(NamedTuple):
    """A batch of users, with their histories and the items to predict."""

    users: Tensor
    """int64 (R,), the indices of the users."""
    history: Tensor
    """int64 (R, L), the items that each user has, padded with `PADDING`."""
    labels: Tensor
    """int64 (R, M), the items to predict for each user, padded with `PADDING`."""


class Users(Dataset[Batch]):
    """A dataset of users, with their histories and the items to predict.

    Args:
        history: The items that the users have.
        labels: The items to predict. During training, they are the history itself. Users without labels are
            left out.
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

    def batches(self, rows: int) -> Iterator[Batch]:
        """Yield all users in order, in batches of `rows` users."""
        for some in torch.arange(len(self)).split(rows):
            yield self.__getitems__(some.tolist())


def padded_items(have: Interactions, users: Tensor) -> Tensor:
    """Return the items of the given users as int64 (R, L), padded with `PADDING`."""
    starts, counts = have.starts[users], have.counts[users]
    place = torch.arange(int(counts.max()) if len(counts) else 0)
    there = place < counts[:, None]
    items = torch.full(there.shape, PADDING)
    items[there] = have.item[(starts[:, None] + place)[there]]
    return items


def some_users(have: Interactions, count: int) -> Interactions:
    """Return the user-item pairs of `count` random users, chosen independently of the run's seed.

    The names of all users and items are retained.
    """
    generator = torch.Generator().manual_seed(0)
    chosen = torch.zeros(len(have.users), dtype=torch.bool)
    chosen[torch.randperm(len(have.users), generator=generator)[:count]] = True
    return have.keep(chosen[have.user])


def set_aside(have: Interactions, count: int, latest: bool = False) -> tuple[Interactions, Interactions]:
    """Hold out a fifth (rounded up) of the items of some users, chosen independently of the run's seed.

    Args:
        have: All user-item pairs.
        count: The number of users to hold out items from. They are chosen from the users with at least two
            items, and every user keeps at least one item. If there are fewer such users, all are chosen.
        latest: Whether to hold out the last items of each user instead of random ones.

    Returns:
        The pairs to train on, and the held-out pairs.
    """
    generator = torch.Generator().manual_seed(1)
    able = (have.counts > 1).nonzero().squeeze(1)
    users = torch.zeros(len(have.users), dtype=torch.bool)
    users[able[torch.randperm(len(able), generator=generator)[:count]]] = True
    if latest:
        place = have.starts[have.user + 1] - 1 - torch.arange(len(have))
    else:
        # Each pair gets a random number, and each user's pairs with the smallest numbers are held out.
        draw = torch.rand(len(have), generator=generator, dtype=torch.float64) + have.user
        place = torch.empty(len(have), dtype=torch.int64)
        place[draw.argsort()] = torch.arange(len(have))
        place -= have.starts[have.user]
    most = (SHARE * have.counts).ceil().long()  # less than the count if a user has at least two items
    aside = users[have.user] & (place < most[have.user])
    return have.keep(~aside), have.keep(aside)


def popular_items(have: Interactions) -> Tensor:
    """Return all items, most popular first. Equally popular items are sorted by index."""
    counts = torch.bincount(have.item, minlength=len(have.items))
    return counts.argsort(descending=True, stable=True)


def by_popularity(have: Interactions) -> Callable[[Batch], Tensor]:
    """Return the popularity baseline, a function that maps a batch to popularity scores (R, n)."""
    scores = torch.empty(len(have.items))
    scores[popular_items(have)] = -torch.arange(len(have.items), dtype=scores.dtype)
    return lambda batch: scores.to(batch.users.device).expand(len(batch.users), -1)


class Data(NamedTuple):
    """The user-item pairs of a run."""

    training: Interactions
    validation: Interactions
    test: Interactions | None
    before_test: Interactions
    """The histories for the test: the training items and the items held out for validation."""
    everything: Interactions
    """All pairs in `--train`."""
    notes: list[str]
    """Notes about the files, to be printed."""

    @property
    def fingerprint(self) -> int:
        """A checksum of the names and pairs in `--train`."""
        have = self.everything
        names = zlib.crc32("\n".join([*have.users, "", *have.items]).encode())
        return zlib.crc32(have.item.numpy().tobytes(), zlib.crc32(have.starts.numpy().tobytes(), names))

    @property
    def splits(self) -> dict[str, Users]:
        """The users of the split `validation` and, if there is a test file, of the split `test`."""
        splits = {"validation": Users(self.training, self.validation)}
        if self.test is not None:
            splits["test"] = Users(self.before_test, self.test)
        return splits


def read(settings: RecommendSettings) -> Data:
    """Read the user-item pairs for training, validation and testing."""
    assert settings.train is not None
    have = read_interactions(
        settings.train, "--train", settings.columns, settings.min_rating, settings.latest
    )
    notes = _notes(settings.train, have)
    if have.unused:
        columns = " and ".join(f"`{name}`" for name in have.unused)
        notes.append(
            f"`{settings.train}`: {columns} {'is' if len(have.unused) == 1 else 'are'} not used. "
            "`--min-rating` skips low ratings, and `--latest` validates on each user's latest items."
        )
    if settings.loss is not None:
        loss_with_usual_k(settings.loss, settings.k).check_labels(len(have.items))
    later = None
    if settings.test is not None:
        later, said = read_later(settings.test, "--test", settings, have)
        notes += said
    everything = have
    if settings.users is not None and settings.users < len(have.users):
        have = some_users(have, settings.users)
        later = None if later is None else later.keep((have.counts > 0)[later.user])
        if later is not None and not len(later):
            raise BadInput(
                f"`--users` must select at least one user with a pair in `{settings.test}`, but the "
                f"{counted(settings.users, 'selected user has', 'selected users have')} none."
            )
    able = int((have.counts > 1).sum())
    if not able:
        raise BadInput(
            "`--train` must have a user with at least two items, but the users of this run have at most one "
            f"in `{settings.train}`."
        )
    count = settings.validation or max(min(100, able // 4), min(3000, able // 10), 1)
    training, validation = set_aside(have, count, settings.latest)
    return Data(training, validation, later, have, everything, notes)


def read_later(
    path: Path, option: str, settings: RecommendSettings, have: Interactions
) -> tuple[Interactions, list[str]]:
    """Read held-out items of known users, and return them with notes about skipped pairs."""
    file = read_interactions(path, option, settings.columns, settings.min_rating)
    later, users, items = align(file, have)
    notes = _notes(path, file)
    if users or items:
        notes.append(
            f"`{path}`: {counted(users, 'user', 'users')} and {counted(items, 'item', 'items')} that are not "
            "in the training data were skipped."
        )
    known = torch.isin(later.user * len(have.items) + later.item, have.user * len(have.items) + have.item)
    if known.any():
        skipped = counted(
            int(known.sum()),
            "pair that is also in the training data was",
            "pairs that are also in the training data were",
        )
        notes.append(f"`{path}`: {skipped} skipped.")
        later = later.keep(~known)
    if not len(later):
        raise BadInput(
            f"`{option}` must have a new pair of a known user and a known item, but `{path}` has none."
        )
    return later, notes


def _notes(path: Path, have: Interactions) -> list[str]:
    notes = []
    if have.repeated:
        skipped = counted(have.repeated, "duplicate pair was", "duplicate pairs were")
        notes.append(f"`{path}`: {skipped} skipped.")
    if have.low:
        pairs = counted(have.low, "pair was", "pairs were")
        notes.append(f"`{path}`: {pairs} skipped because of a rating below `--min-rating`.")
    empty = int((have.counts == 0).sum())
    if empty:
        notes.append(f"`{path}`: {counted(empty, 'user has', 'users have')} no items.")
    return notes
