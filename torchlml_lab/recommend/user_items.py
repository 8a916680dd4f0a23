"""The pairs of a run: read, checked, and split into what is trained on, chosen by and tested on."""

import zlib
from pathlib import Path
from typing import NamedTuple

import torch

from torchlml_lab.data.interactions import Interactions, align, read_interactions
from torchlml_lab.errors import BadInput
from torchlml_lab.recommend.histories import Users, set_aside, some_users
from torchlml_lab.recommend.recommend_settings import RecommendSettings, loss_of


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
    loss_of(settings).check_labels(len(have.items))
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
