"""`torchlml predict RUN` for recommendation: recommend new items to users, with their probabilities."""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.interactions import Interactions, read_interactions
from torchlml_lab.engine.output import new_console, plain_table
from torchlml_lab.engine.run import say
from torchlml_lab.files import check_file, counted, replacing, writing
from torchlml_lab.multilabel.losses import padded
from torchlml_lab.recommend.histories import popular_items
from torchlml_lab.recommend.model import TrainedRecommender, load, scores_new_users
from torchlml_lab.recommend.ranking import ROWS, probabilities, without
from torchlml_lab.recommend.settings import PredictSettings

SHOWN = 10  # the maximum number of users in the printed table


class Person(NamedTuple):
    """A user for whom items are recommended."""

    name: str
    number: int
    """The index in the training data, or -1 for a new user."""
    items: Tensor


class Recommendation(NamedTuple):
    """The recommended items for a user, best first."""

    user: str
    items: list[str]
    probabilities: list[float] | None
    """None if the model cannot score the user. The items are then the most popular ones."""


def main(settings: PredictSettings) -> None:
    """Write the recommendations to a file, and print a table of the first users."""
    _check(settings)
    trained = load(settings.run, {"train": settings.train}, with_test=False)
    have, console = trained.data.everything, new_console()
    if settings.top > len(have.items):
        raise BadInput(
            f"`--top` must be at most {len(have.items)}, the number of items, but it is {settings.top}."
        )
    people, notes = find_people(settings, trained)
    strangers = sum(not known(person, trained) for person in people)
    if strangers:
        are = "cannot be scored and gets" if strangers == 1 else "cannot be scored and get"
        notes.append(f"{strangers} of {len(people)} users {are} the most popular items.")
    say(notes, console)
    everyone = recommendations(trained, people, settings.top)
    shown = list(islice(everyone, SHOWN))
    try:
        if settings.out is not None:
            with writing("The recommendations", settings.out, "the table above shows the first users"):
                settings.out.parent.mkdir(parents=True, exist_ok=True)
                _write(settings.out, (one for some in (shown, everyone) for one in some))
    finally:
        title = f"{settings.top} recommended items per user"
        heads = ("user", f"items with P(item in top k), k = {settings.top}, in %")
        table = plain_table(title, heads, left=2)
        for one in shown:
            table.add_row(one.user, _cell(one))
        console.print(table)
    if settings.out is not None:
        said = f"The recommendations for {counted(len(people), 'user', 'users')} are in {settings.out}."
        console.print(said, soft_wrap=True, highlight=False)
    elif len(people) > SHOWN:
        more = counted(len(people) - SHOWN, "more user is", "more users are")
        said = f"{more} not shown. Use `--out FILE.csv` to write the recommendations for all users."
        console.print(said, highlight=False)


def _check(settings: PredictSettings) -> None:
    if settings.top < 1:
        raise BadInput(f"`--top` must be at least 1, but it is {settings.top}.")
    if settings.out is not None:
        if settings.out.suffix not in (".csv", ".jsonl"):
            raise BadInput(f"`--out` must end in `.csv` or `.jsonl`, but it is `{settings.out}`.")
        check_file("--out", settings.out)


def find_people(settings: PredictSettings, trained: TrainedRecommender) -> tuple[list[Person], list[str]]:
    """Return the users to recommend items to, and notes about unknown items in `--data`."""
    have = trained.data.everything
    number = {name: place for place, name in enumerate(have.users)}
    notes: list[str] = []
    more: dict[str, Tensor] = {}
    if settings.data is not None:
        file = read_interactions(
            settings.data, "--data", trained.settings.columns, trained.settings.min_rating
        )
        more, unknown = _known_items(file, have)
        if unknown:
            skipped = counted(
                unknown,
                "item that is not in the training data was",
                "items that are not in the training data were",
            )
            notes.append(f"`{settings.data}`: {skipped} skipped.")
    people = []
    for name in settings.users or more or have.users:
        place = number.get(name, -1)
        items = have.of(place) if place >= 0 else have.item[:0]
        if name in more:
            items = torch.cat([items, more[name]]).unique()
        people.append(Person(name, place, items))
    return people, notes


def _known_items(file: Interactions, have: Interactions) -> tuple[dict[str, Tensor], int]:
    """Return each user's items in a file as indices into `have.items`, and the number of unknown items."""
    number = {name: place for place, name in enumerate(have.items)}
    item = torch.tensor([number.get(name, -1) for name in file.items])
    lists = item[file.item].split(file.counts.tolist())
    more = {name: found[found >= 0] for name, found in zip(file.users, lists, strict=True)}
    return more, int((item < 0).sum())


def known(person: Person, trained: TrainedRecommender) -> bool:
    """Whether the model can score a user. Some models can score only users in the training data."""
    return _trained_on(person, trained) or (len(person.items) > 0 and scores_new_users(trained.model))


def _trained_on(person: Person, trained: TrainedRecommender) -> bool:
    return person.number >= 0 and bool(trained.data.training.counts[person.number] > 0)


@torch.no_grad()
def recommendations(
    trained: TrainedRecommender, people: Sequence[Person], top: int
) -> Iterator[Recommendation]:
    """Compute the recommendations for the given users, in the same order.

    Args:
        trained: The run.
        people: The users.
        top: The number of items per user. A user with fewer new items gets all of them.

    Yields:
        One recommendation per user.
    """
    have = trained.data.everything
    popular = popular_items(have)
    for start in range(0, len(people), ROWS):
        some = people[start : start + ROWS]
        history = padded([person.items for person in some])
        users = torch.tensor([person.number if _trained_on(person, trained) else -1 for person in some])
        scores = without(trained.model(users, history).scores().float(), history)
        chances = probabilities(scores, top)
        best = scores.topk(top).indices
        for row, person in enumerate(some):
            if known(person, trained):
                chosen = best[row][scores[row, best[row]] > -torch.inf]
                yield Recommendation(person.name, _names(have, chosen), chances[row, chosen].tolist())
            else:
                new = popular[~torch.isin(popular, person.items)][:top]
                yield Recommendation(person.name, _names(have, new), None)


def _names(have: Interactions, items: Tensor) -> list[str]:
    return [have.items[item] for item in items.tolist()]


def _cell(one: Recommendation) -> str:
    if one.probabilities is None:
        return ", ".join(one.items) + " (popular)"
    return ", ".join(f"{item} ({100 * p:.1f})" for item, p in zip(one.items, one.probabilities, strict=True))


def _write(path: Path, everyone: Iterable[Recommendation]) -> None:
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        (_write_lines if path.suffix == ".jsonl" else _write_csv)(file, everyone)


def _write_csv(file: IO[str], everyone: Iterable[Recommendation]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("user", "rank", "item", "probability"))
    for one in everyone:
        for place, item in enumerate(one.items):
            probability = "" if one.probabilities is None else f"{one.probabilities[place]:.6g}"
            writer.writerow((one.user, place + 1, item, probability))


def _write_lines(file: IO[str], everyone: Iterable[Recommendation]) -> None:
    for one in everyone:
        file.write(json.dumps(one._asdict(), ensure_ascii=False) + "\n")
