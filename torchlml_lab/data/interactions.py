"""User-item interactions from text, CSV, TSV and RecBole `.inter` files, optionally gzipped."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.files import file_kind, read_content, shown

_USER = ("user", "user_id", "userid", "uid")
_ITEM = ("item", "item_id", "itemid", "iid")
_RATING = ("rating", "ratings", "stars")
_TIME = ("timestamp", "time", "datetime", "date")
_OTHER = (".json", ".jsonl", ".npz", ".npy", ".parquet", ".pkl", ".xlsx", ".zip")
_READ = "Pass a .csv, .tsv or .inter file of user-item pairs, or a text file with lines `user item item ...`"


@dataclass(frozen=True)
class Interactions:
    """The items of every user in file order or by time, without duplicates, and all user and item names.

    Example:
        >>> have = read_interactions(Path("train.txt"), "--train")
        >>> have.users[0], [have.items[i] for i in have.of(0)]
    """

    users: list[str]
    items: list[str]
    starts: Tensor
    """int64 (users + 1,): the offset in `item` where the items of each user begin."""
    item: Tensor
    """int64: the concatenated items of all users."""
    repeated: int = 0
    """The number of duplicate pairs in the file, which are ignored."""
    low: int = 0
    """The number of pairs that are ignored because their rating is below `min_rating`."""
    unused: tuple[str, ...] = ()
    """The rating and timestamp columns in the file that were not read."""

    def __len__(self) -> int:
        return len(self.item)

    @property
    def counts(self) -> Tensor:
        """int64 (users,): the number of items of each user."""
        return self.starts.diff()

    @property
    def user(self) -> Tensor:
        """int64: the user of each entry of `item`."""
        return torch.repeat_interleave(torch.arange(len(self.users)), self.counts)

    def of(self, user: int) -> Tensor:
        """Return the items of one user."""
        return self.item[self.starts[user] : self.starts[user + 1]]

    def keep(self, chosen: Tensor) -> "Interactions":
        """Return only the pairs selected by a boolean mask. Users and items keep their indices."""
        counts = torch.bincount(self.user[chosen], minlength=len(self.users))
        return Interactions(self.users, self.items, _starts(counts), self.item[chosen])


def read_interactions(
    path: Path,
    option: str,
    columns: tuple[str, str] | None = None,
    min_rating: float | None = None,
    by_time: bool = False,
) -> Interactions:
    """Read a file of users and their items. The file extension, ignoring `.gz`, determines the format.

    Args:
        path: `*.csv` and `*.tsv` have a header and one user-item pair per line. `*.inter` is RecBole's
            format (tabs, a header like `user_id:token`). Any other file has lines `user item item ...`.
        option: The command-line option that gave the path, for error messages.
        columns: The names of the user and item columns in a table. By default, they are recognized by
            names such as user and item, or user_id and item_id.
        min_rating: Ignore pairs in a table whose rating is lower, as if they were not in the file. By
            default, ratings are not read, and every pair counts.
        by_time: Sort the items of each user by the time column of a table. Otherwise, and for files without
            columns, items stay in file order.

    Returns:
        The items of every user. Invalid input raises `BadInput`, which names the file and the line.
    """
    if file_kind(path) in _OTHER:
        raise BadInput(
            f"`{path}` (`{option}`) cannot be read: {file_kind(path)} files are not supported. {_READ}."
        )
    data = read_content(path, option)
    if is_table(path):
        table = _read_table(path, data, columns, min_rating, by_time)
        users, items = table.users, table.items
        if by_time:
            order = np.argsort(table.times, kind="stable").tolist()
            users, items = [users[i] for i in order], [items[i] for i in order]
        return replace(_number(users, items, None), low=table.low, unused=table.unused)
    names, listed, counts = _read_lines(data)
    if not listed:
        raise BadInput(f"`{path}` (`{option}`) contains no user-item pairs. {_READ}.")
    return _number(names, listed, counts)


def is_table(path: Path) -> bool:
    """Whether a file has columns, according to its extension."""
    return file_kind(path) in (".csv", ".tsv", ".inter")


def align(have: Interactions, known: Interactions) -> tuple[Interactions, int, int]:
    """Renumber users and items to match other data, usually the training data of a model.

    Args:
        have: The pairs to renumber.
        known: The data that defines the indices of users and items.

    Returns:
        The pairs of known users and items, the number of unknown users, and the number of unknown items.
    """
    user_of = {name: number for number, name in enumerate(known.users)}
    item_of = {name: number for number, name in enumerate(known.items)}
    user = torch.tensor([user_of.get(name, -1) for name in have.users])
    item = torch.tensor([item_of.get(name, -1) for name in have.items])
    users, items = user[have.user], item[have.item]
    both = (users >= 0) & (items >= 0)
    users, items = users[both], items[both]
    order = users.argsort(stable=True)
    counts = torch.bincount(users, minlength=len(known.users))
    aligned = Interactions(known.users, known.items, _starts(counts), items[order])
    return aligned, int((user < 0).sum()), int((item < 0).sum())


def _starts(counts: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])


def _read_lines(data: bytes) -> tuple[list[bytes], list[bytes], list[int]]:
    """Return the user of each line, the items of all lines, and the number of items per line."""
    users: list[bytes] = []
    items: list[bytes] = []
    counts: list[int] = []
    for line in data.split(b"\n"):
        words = line.split()  # bytes.split does not split at Unicode spaces, so names may contain them
        if words:
            users.append(words[0])
            items += words[1:]
            counts.append(len(words) - 1)
    return users, items, counts


class _Table(NamedTuple):
    """The user-item pairs in a table."""

    users: list[str]
    items: list[str]
    times: list[float]
    """The time of each pair, or an empty list if times are not read."""
    low: int
    """The number of pairs that were skipped because of their rating."""
    unused: tuple[str, ...]


def _read_table(
    path: Path, data: bytes, columns: tuple[str, str] | None, min_rating: float | None, by_time: bool
) -> _Table:
    """Read the pairs of a table, one per line."""
    text, kind = data.decode("utf-8"), file_kind(path)
    header = text.partition("\n")[0]
    separator = "\t" if kind != ".csv" else max((",", ";", "\t"), key=header.count)
    lines = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=separator,
        quoting=csv.QUOTE_NONE if kind == ".inter" else csv.QUOTE_MINIMAL,
        strict=True,
    )
    found = _Table([], [], [], 0, ())
    low, unused = 0, list[str]()
    try:
        names = next(lines)
        user_column, item_column = _find_columns(path, names, columns)
        rating_column = _find_other(path, names, _RATING, "--min-rating", min_rating is not None, unused)
        time_column = _find_other(path, names, _TIME, "--latest", by_time, unused)
        for fields in lines:
            if len(fields) != len(names):
                if not fields:
                    continue
                raise BadInput(
                    f"`{path}`, line {lines.line_num}: the line has {_fields(len(fields))} "
                    f"(`{shown(separator.join(fields))}`), but the header has {len(names)}."
                )
            user, item = fields[user_column], fields[item_column]
            if not user or not item:
                what = "item" if user else "user"
                raise BadInput(f"`{path}`, line {lines.line_num}: the {what} is empty.")
            if (
                rating_column is not None
                and min_rating is not None
                and _rating(path, lines.line_num, fields[rating_column]) < min_rating
            ):
                low += 1
                continue
            if time_column is not None:
                found.times.append(_time(path, lines.line_num, fields[time_column]))
            found.users.append(user)
            found.items.append(item)
    except csv.Error as error:
        raise BadInput(f"`{path}`, line {lines.line_num}: the line cannot be parsed ({error}).") from error
    if low and not found.items:
        raise BadInput(f"`--min-rating` is {min_rating:g}, but all {low} ratings in `{path}` are lower.")
    if not found.items:
        raise BadInput(f"`{path}` has a header, but no user-item pairs.")
    return found._replace(low=low, unused=tuple(unused))


def _find_other(
    path: Path, header: Sequence[str], usual: tuple[str, ...], option: str, wanted: bool, unused: list[str]
) -> int | None:
    """Return the index of the rating or time column if `wanted`. Otherwise add its name to `unused`."""
    names = [name.partition(":")[0].strip() for name in header]
    places = [place for place, name in enumerate(names) if name.lower() in usual]
    if not wanted:
        unused += [names[place] for place in places]
        return None
    if len(places) != 1:
        listed = ", ".join(f"`{name}`" for name in header)
        raise BadInput(
            f"`{option}` requires exactly one column called `{usual[0]}` or similar, but the columns of "
            f"`{path}` are {listed[:200]}."
        )
    return places[0]


def _rating(path: Path, line: int, text: str) -> float:
    try:
        rating = float(text)
    except ValueError:
        rating = math.nan
    if math.isnan(rating):
        raise BadInput(f"`{path}`, line {line}: the rating must be a number, but it is `{shown(text)}`.")
    return rating


def _time(path: Path, line: int, text: str) -> float:
    """Parse a number (such as seconds since 1970) or an ISO date, which is in UTC if it has no time zone."""
    try:
        time = float(text)
    except ValueError:
        try:
            date = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
            time = (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()
        except ValueError:
            time = math.nan
    if math.isnan(time):
        raise BadInput(
            f"`{path}`, line {line}: the time must be a number or a date such as 2024-05-31 or "
            f"2024-05-31T10:00, but it is `{shown(text)}`."
        )
    return time


def _fields(count: int) -> str:
    return f"{count} field" + "s" * (count != 1)


def _find_columns(path: Path, header: Sequence[str], columns: tuple[str, str] | None) -> tuple[int, int]:
    """Return the user and item column indices. In `.inter` files, a colon and a type follow each name."""
    names = [name.partition(":")[0].strip() for name in header]
    listed = ", ".join(f"`{name}`" for name in names)
    if columns is not None:
        for name in columns:
            if names.count(name) != 1:
                often = "no column" if name not in names else "more than one column"
                raise BadInput(
                    f"`{path}`, line 1: {often} is called `{name}`. The columns are {listed[:200]}."
                )
        if columns[0] == columns[1]:
            raise BadInput(f"`--columns` must name two different columns, but both are `{columns[0]}`.")
        return names.index(columns[0]), names.index(columns[1])
    found = []
    for what, usual in (("user", _USER), ("item", _ITEM)):
        places = [place for place, name in enumerate(names) if name.lower() in usual]
        if len(places) != 1:
            raise BadInput(
                f"`{path}`, line 1: {'no' if not places else 'more than one'} column is called `{what}`, "
                f"`{what}_id` or similar. Choose two of {listed[:200]} with `--columns USER ITEM`."
            )
        found += places
    return found[0], found[1]


def _number(
    users: Sequence[str | bytes],
    items: Sequence[str | bytes],
    counts: list[int] | None,
) -> Interactions:
    """Number names by first appearance, sort pairs by user, and remove duplicates."""
    user_names, user = _numbers(users)
    item_names, item = _numbers(items)
    if counts is not None:
        user = np.repeat(user, counts)
    # The first of several identical pairs is kept, so that items stay in file order.
    _, first = np.unique(user * len(item_names) + item, return_index=True)
    first.sort()
    order = first[np.argsort(user[first], kind="stable")]
    found = torch.from_numpy(np.bincount(user[order], minlength=len(user_names)))
    return Interactions(
        user_names, item_names, _starts(found), torch.from_numpy(item[order]), len(item) - len(order)
    )


def _numbers(names: Sequence[str | bytes]) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Return the distinct names as strings, and the index of every name among them."""
    number: dict[str | bytes, int] = {name: place for place, name in enumerate(dict.fromkeys(names))}
    numbers = np.fromiter(map(number.__getitem__, names), np.int64, len(names))
    return [name if isinstance(name, str) else name.decode("utf-8") for name in number], numbers
