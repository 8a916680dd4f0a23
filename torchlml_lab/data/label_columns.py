"""Detection of the label columns of a table: by name, by separated values, or by columns of 0 and 1."""

import ast
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.files import shown

Table = Mapping[str, Sequence[Any]]
"""The cells of every column, by its name."""

USUAL_NAMES = (
    *("labels", "label", "tags", "tag", "topics", "topic", "categories", "category", "classes", "class"),
    *("keywords", "genres", "genre", "subjects"),
)
_SEPARATORS = (",", ";", "|", "\t")
_FLAGS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
_LIST = re.compile(r"\[.*\]", re.DOTALL)
_IDENTIFIER = re.compile(r"|(.*[_ ])?id|index|unnamed: 0", re.IGNORECASE)
_DECIMAL = re.compile(r"-?\d+,\d+")  # a number with a decimal comma
_LONGEST = 60  # characters of a label
_LISTED = 6  # columns in a message


def detect(table: Table, inputs: Collection[str], path: Path) -> tuple[str, ...]:
    """Find the label columns of a table.

    A column with a common name is preferred, in the order of `USUAL_NAMES`. Otherwise, the only column whose
    cells look like separated labels is used. If there is none, the table contains texts, and several columns
    contain only 0 and 1, each of those columns is a label.

        >>> detect({"text": ["a b", "c d"], "topics": ["x;y", "y"]}, (), Path("rows.csv"))
        ('topics',)

    Args:
        table: The cells by column.
        inputs: The columns that the user chose as texts or numbers.
        path: The file, for error messages.

    Returns:
        The columns. If no column or more than one qualifies, `BadInput` suggests a command to run.
    """
    named = sorted(
        (name for name in table if name.strip().lower() in USUAL_NAMES),
        key=lambda name: (name in inputs, USUAL_NAMES.index(name.strip().lower())),
    )
    if named:  # if the only one is an input, the caller reports the conflict
        return (named[0],)
    rest = {name: cells for name, cells in table.items() if name not in inputs}
    separated = [name for name, cells in rest.items() if looks_separated(cells)]
    if len(separated) == 1:
        return (separated[0],)
    flags = tuple(name for name, cells in rest.items() if _is_flag_column(cells))
    if not separated and len(flags) > 1 and any(map(_is_text_column, table.values())):
        return flags
    raise BadInput(_suggestion(rest, separated, flags, path))


def _suggestion(table: Table, separated: Sequence[str], flags: Sequence[str], path: Path) -> str:
    """Return the error message for a table without an obvious label column, with a command to try."""

    def command(columns: Sequence[str]) -> str:
        words = ["torchlml", "train", "multilabel", "--train", str(path), "--labels", *columns]
        return f"run `{shlex.join(words)}`"

    missing = f"`{path}` has no column called {', '.join(USUAL_NAMES[:3])} or similar"
    if separated:
        looks = f"several columns look like labels ({listed(separated)})"
        return f"{missing}, and {looks}. If the labels are in `{separated[0]}`, {command(separated[:1])}."
    if len(flags) > 1:
        looks = f"{len(flags)} columns contain only 0 and 1 ({listed(flags)})"
        return f"{missing}, but {looks}. If each of them is a label, {command(flags)}."
    repeated = [name for name, cells in table.items() if _repeats(cells)]
    if repeated:
        return (
            f"{missing}; its columns are {listed(table)}. If the labels are in `{repeated[0]}`, "
            f"{command(repeated[:1])}."
        )
    return f"{missing}. Choose a column with `--labels` ({listed(table)})."


def listed(names: Iterable[str]) -> str:
    """Format the first few column names for a message."""
    every = [f"`{shown(name)}`" for name in names]
    more = len(every) - _LISTED
    return ", ".join(every) if more <= 0 else f"{', '.join(every[:_LISTED])} and {more} more"


def looks_separated(cells: Sequence[Any]) -> bool:
    """Whether the cells look like lists of labels: short names that occur in several cells.

    At least one in twenty cells contains several names, and a name occurs in two cells on average.
    """
    there = [cell for cell in cells if not is_missing(cell) and cell != ""]
    if there and all(isinstance(cell, list) for cell in there):
        return any(there) and all(isinstance(part, str | int | None) for cell in there for part in cell)
    if not there or not all(isinstance(cell, str) for cell in there) or all(map(_DECIMAL.fullmatch, there)):
        return False
    names = list(split(there, usual_separator(there)))
    several = sum(len(row) > 1 for row in names)
    return several > 0 and 20 * several >= len(there) and _are_names(names)


def _repeats(cells: Sequence[Any]) -> bool:
    """Whether a text column looks as if it contained one label per cell."""
    there = [cell for cell in cells if isinstance(cell, str) and cell]
    return bool(there) and _is_text_column(cells) and _are_names([[cell] for cell in there])


def _are_names(rows: Sequence[Sequence[str]]) -> bool:
    """Whether all names are short, contain a letter or digit, and occur twice on average."""
    names = [name for row in rows for name in dict.fromkeys(row)]
    distinct = set(names)
    short = all(len(name) <= _LONGEST and any(map(str.isalnum, name)) for name in distinct)
    return short and 2 * len(distinct) <= len(names)


def _is_text_column(cells: Sequence[Any]) -> bool:
    """Whether a column has a cell that is a text and neither a number nor a flag."""
    return any(isinstance(cell, str) and flag(cell) is None and not _is_number(cell) for cell in cells)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _is_flag_column(cells: Sequence[Any]) -> bool:
    """Whether every cell is 0 or 1, and both occur."""
    return {flag(cell) for cell in cells} == {False, True}


def flag(cell: Any) -> bool | None:
    """Parse a cell that indicates whether a sample has a label; return None for any other content."""
    return _FLAGS.get(str(cell).strip().lower())


def is_identifier(name: str, cells: Sequence[Any]) -> bool:
    """Whether a column numbers the samples: it is called id, index or similar, and its cells are distinct."""
    return bool(_IDENTIFIER.fullmatch(name.strip())) and len(set(map(str, cells))) == len(cells)


def split(cells: Sequence[Any], separator: str) -> Iterator[list[str]]:
    """Yield the labels of each cell.

        >>> list(split(["x; y", "", None, ["z", None]], ";"))
        [['x', 'y'], [], [], ['z']]
        >>> list(split(["['x', 'y']", "[]"], ","))
        [['x', 'y'], []]

    Args:
        cells: Texts, or lists as in Parquet and JSON files. Texts are parsed if all are Python list literals.
        separator: The text between two labels.

    Yields:
        The names without surrounding spaces. Missing and empty names are dropped.
    """
    for cell in _parsed_lists(cells) or cells:
        parts = cell if isinstance(cell, list) else [cell] if is_missing(cell) else str(cell).split(separator)
        yield [name for part in parts if not is_missing(part) and (name := str(part).strip())]


def _parsed_lists(cells: Sequence[Any]) -> list[Any] | None:
    """Parse cells that are all empty or list literals such as `['a', 'b']`; return None for other cells."""
    texts = (cell.strip() for cell in cells if isinstance(cell, str) and cell.strip())
    first = next(texts, None)
    if first is None or not all(map(_LIST.fullmatch, chain([first], texts))):
        return None
    try:
        return [
            ast.literal_eval(cell.strip()) if isinstance(cell, str) and cell.strip() else cell
            for cell in cells
        ]
    except (ValueError, SyntaxError):
        return None


def usual_separator(cells: Sequence[Any]) -> str:
    """Return the separator that most cells contain, or a comma if no cell contains any."""
    return max(_SEPARATORS, key=lambda mark: sum(isinstance(cell, str) and mark in cell for cell in cells))


def is_missing(cell: Any) -> bool:
    """Whether a cell is null or NaN."""
    return cell is None or bool(cell != cell)
