"""Reader for tables (CSV, TSV, JSON lines and Parquet), which also detects the roles of their columns."""

import csv
import io
import json
import math
import re
import shlex
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from torchlml_lab.cli_errors import BadInput, did_you_mean, reason
from torchlml_lab.data.labeled_rows import (
    Columns,
    LabeledRows,
    is_missing,
    label_matrix,
    listed,
    parse_flag,
    split_labels,
    stacked,
    usual_separator,
)
from torchlml_lab.files import file_kind, read_blocks, shown

_MOST = float(np.finfo(np.float32).max)  # the largest magnitude of a number in a cell
_ROWS = 2**16  # the number of rows that are converted at once
_DETECTED = 100_000  # the number of rows that are inspected to detect label columns
Table = Mapping[str, Sequence[Any]]
"""The cells of every column, by column name."""
USUAL_NAMES = (
    *("labels", "label", "tags", "tag", "topics", "topic", "categories", "category", "classes", "class"),
    *("keywords", "genres", "genre", "subjects"),
)
_IDENTIFIER = re.compile(r"|(.*[_ ])?id|index|unnamed: 0", re.IGNORECASE)
_DECIMAL = re.compile(r"-?\d+,\d+")  # a number with a decimal comma
_LONGEST = 60  # the maximum length of a label in characters


@dataclass(frozen=True)
class _Cells:
    """A table in memory: the cells of every column, and the line in the file where each row begins."""

    path: Path
    columns: dict[str, list[Any]]
    at: Sequence[int]
    unit: str  # the unit of `at`: line or row

    def wrong(self, row: int, said: str) -> BadInput:
        return BadInput(f"`{self.path}`, {self.unit} {self.at[row]}: {said}.")


def read_table(
    path: Path, option: str, columns: Columns, labeled: bool = True
) -> tuple[LabeledRows, Columns]:
    """Read samples from a table.

    Args:
        path: `*.csv`, `*.tsv`, `*.jsonl` or `*.ndjson`, optionally gzipped (`.gz`), or `*.parquet`.
        option: The command-line option that gave the path, for error messages.
        columns: The roles of its columns. Roles that are not given are detected.
        labeled: Whether to read labels. If so, the table must contain them.

    Returns:
        The samples, and the roles of the columns that are used. Invalid input raises `BadInput`, which names
        the file and the line.
    """
    kind = file_kind(path)
    read = _read_parquet if kind == ".parquet" else _read_json if kind in (".jsonl", ".ndjson") else _read_csv
    cells = read(path, option)
    if not cells.at:
        raise BadInput(f"`{path}` (`{option}`) has columns but no rows.")
    return _rows(cells, columns, labeled)


def rows_of_columns(table: Mapping[str, Sequence[Any]], columns: Columns) -> LabeledRows:
    """Convert a table in memory to samples without labels.

    Args:
        table: The cells of every column, by column name.
        columns: The text and number columns. A missing column or an invalid cell raises `BadInput`.
    """
    lengths = {name: len(cells) for name, cells in table.items()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{length} in `{name}`" for name, length in lengths.items())
        raise BadInput(f"All columns of `samples` must have the same number of cells, but there are {said}.")
    count = next(iter(lengths.values()), 0)
    cells = _Cells(
        Path("samples"), {name: list(column) for name, column in table.items()}, range(count), "row"
    )
    return _rows(cells, columns, labeled=False)[0]


def _rows(cells: _Cells, columns: Columns, labeled: bool) -> tuple[LabeledRows, Columns]:
    """Convert the cells of a table to samples."""
    columns = _resolve(cells, columns, labeled)
    texts = None
    if columns.texts:
        chosen = [cells.columns[name] for name in columns.texts]
        texts = [
            "\n".join("" if is_missing(cell) else str(cell) for cell in row)
            for row in zip(*chosen, strict=True)
        ]
    numbers = np.empty((len(cells.at), len(columns.numbers)), dtype=np.float32)
    for place, name in enumerate(columns.numbers):
        numbers[:, place] = np.fromiter(_numbers(cells, name), np.float32, len(cells.at))
    # Convert blocks of rows, because scipy needs 16 additional bytes per number during the conversion.
    parts = [sparse.csr_array(numbers[start : start + _ROWS]) for start in range(0, len(numbers), _ROWS)]
    labels, names = label_matrix(_labels(cells, columns) if labeled else ([] for _ in cells.at))
    return LabeledRows(stacked(parts, len(columns.numbers)), labels, names, texts, columns.numbers), columns


def column_names(path: Path, option: str) -> list[str] | None:
    """Return the column names of a table, or None for JSON lines, whose keys can differ."""
    kind = file_kind(path)
    if kind == ".parquet":
        with _parquet_file(path, option) as file:
            return list(file.schema_arrow.names)
    if kind in (".jsonl", ".ndjson"):
        return None
    try:
        return next(_csv_rows(path, option), [])
    except csv.Error as error:
        raise BadInput(f"`{path}`, line 1: the line cannot be parsed ({error}).") from error


def _csv_rows(path: Path, option: str) -> Any:
    """Return a `csv.reader` for a CSV file."""
    csv.field_size_limit(2**31 - 1)  # texts may be long
    blocks = _Blocks(read_blocks(path, option))
    separator = "\t" if file_kind(path) == ".tsv" else _cell_separator(blocks)
    return csv.reader(blocks.lines(), delimiter=separator, strict=True)


def _read_csv(path: Path, option: str) -> _Cells:
    rows = _csv_rows(path, option)
    at, found = array("q"), list[list[str]]()
    before = 0
    try:
        header = next(rows)
        before = rows.line_num
        _check_unique(header, f"`{path}`, line 1")
        found = [[] for _ in header]
        for row in rows:
            if row:  # skip empty lines
                if len(row) != len(header):
                    raise BadInput(
                        f"`{path}`, line {before + 1}: the number of cells is {len(row)}, but line 1 has "
                        f"{len(header)}."
                    )
                at.append(before + 1)
                for column, cell in zip(found, row, strict=True):
                    column.append(cell)
            before = rows.line_num
    except csv.Error as error:
        ends = "unexpected end" in str(error)
        said = "the file ends inside quotes" if ends else f"the line cannot be parsed ({error})"
        raise BadInput(f"`{path}`, line {before + 1}: {said}.") from error
    return _Cells(path, dict(zip(header, found, strict=True)), at, "line")


class _Blocks:
    """The lines of a text file that is read in blocks. Lines can be inspected before they are consumed.

    Args:
        blocks: The blocks, which are read only when they are needed.
    """

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._first, self._rest = list[str](), map(bytes.decode, blocks)

    def peek(self) -> Iterator[str]:
        """Yield the lines without consuming them, so that they can be read again."""
        for number in count():
            if number == len(self._first):
                if (block := next(self._rest, None)) is None:
                    return
                self._first.append(block)
            yield from io.StringIO(self._first[number])

    def lines(self) -> Iterator[str]:
        """Yield all lines and consume them."""
        for block in chain(self._first, self._rest):
            yield from io.StringIO(block)
        self._first.clear()


def _cell_separator(blocks: _Blocks) -> str:
    """Detect the separator of a CSV file, because many spreadsheets write semicolons or tabs.

    Separators that split the header and the first row into the same number of cells are preferred. Among
    these, the result is the one with the most cells.
    """

    def fit(separator: str) -> tuple[bool, int]:
        try:
            rows = filter(None, csv.reader(blocks.peek(), delimiter=separator, strict=True))
            header, first = len(next(rows, [])), len(next(rows, []))
        except csv.Error:  # reported when the file is read
            return False, 0
        return header > 1 and first in (0, header), header

    return max((",", ";", "\t"), key=fit)


def _check_unique(header: Sequence[str], where: str) -> None:
    twice = next((name for place, name in enumerate(header) if name in header[:place]), None)
    if twice is not None:
        raise BadInput(f"{where}: there are two columns called `{shown(twice)}`.")


def _read_json(path: Path, option: str) -> _Cells:
    """Read one JSON object per line. A key that is missing from an object becomes a missing cell."""
    at, columns = array("q"), dict[str, list[Any]]()
    lines = chain.from_iterable(
        block.decode().removesuffix("\n").split("\n") for block in read_blocks(path, option)
    )
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise BadInput(f"`{path}`, line {number}: the line is not valid JSON.") from error
        if not isinstance(row, dict):
            raise BadInput(f"`{path}`, line {number}: the line is not a JSON object (`{{...}}`).")
        if "\\ud" in line.lower() and not _is_unicode(row):
            raise BadInput(f"`{path}`, line {number}: the text is not valid Unicode.")
        for name in row:
            if name not in columns:
                columns[name] = [None] * len(at)
        for name, cells in columns.items():
            cells.append(row.get(name))
        at.append(number)
    return _Cells(path, columns, at, "line")


def _is_unicode(row: dict[str, Any]) -> bool:
    """Whether all strings are valid Unicode. JSON allows unpaired surrogates, which UTF-8 cannot encode."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_parquet(path: Path, option: str) -> _Cells:
    with _parquet_file(path, option) as file:
        table = file.read()
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    return _Cells(path, columns, range(1, table.num_rows + 1), "row")


@contextmanager
def _parquet_file(path: Path, option: str) -> Iterator[Any]:
    """Open a Parquet file."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise BadInput(
            f"Reading `{path}` requires the package `pyarrow`. Run `pip install 'torchlml[parquet]'`."
        ) from error
    try:
        with path.open("rb") as file:
            opened = parquet.ParquetFile(file)
            _check_unique(opened.schema_arrow.names, f"`{path}`")
            yield opened
    except (OSError, ArrowException) as error:
        said = reason(error) if getattr(error, "strerror", None) else "it is not a complete Parquet file"
        raise BadInput(f"`{path}` (`{option}`) cannot be read: {said}.") from error


def _resolve(cells: _Cells, columns: Columns, labeled: bool) -> Columns:
    """Validate the columns that are given, and detect the others."""
    labels = columns.labels if labeled else ()
    texts, numbers, table = columns.texts, columns.numbers, cells.columns
    for name in (*texts, *numbers, *labels):
        if name not in table:
            near = did_you_mean(name, table)
            raise BadInput(
                f"`{cells.path}` has no column `{shown(name)}`"
                + (near or f". Its columns are {listed(table)}.")
            )
    if labeled and not labels:
        first = {name: column[:_DETECTED] for name, column in table.items()}
        labels = detect_labels(first, (*texts, *numbers), cells.path)
    twice = next((name for name in labels if name in (*texts, *numbers)), None)
    if twice is not None:
        raise BadInput(
            f"`{cells.path}`: the column `{twice}` contains the labels, so it cannot also be used "
            "for texts or numbers. Choose another label column with `--labels`."
        )
    if not texts and not numbers:
        rest = [name for name in table if name not in labels]
        if not rest:
            raise BadInput(f"`{cells.path}` has no columns other than the labels ({listed(labels)}).")
        useful = [
            name
            for name in rest
            if not is_identifier(name, table[name]) and not any(map(_is_nested, table[name]))
        ]
        rest = useful or rest
        numbers = tuple(name for name in rest if _is_number_column(table[name]))
        texts = tuple(name for name in rest if name not in numbers)
    separator = columns.separator
    if len(labels) == 1 and separator is None:
        separator = usual_separator(table[labels[0]])
    return Columns(texts, numbers, labels, separator if len(labels) == 1 else None)


def _number(cell: Any) -> float | None:
    """Return the number in a cell, NaN if it is empty, or None if it is not a finite number in float32."""
    if is_missing(cell) or cell == "":
        return math.nan
    value = _python_number(cell)
    return value if value is not None and math.isfinite(value) and abs(value) <= _MOST else None


def _python_number(cell: Any) -> float | None:
    """Return the value of a numeric cell, which may be infinite or NaN, or None for any other cell."""
    if isinstance(cell, str) and "_" in cell:  # Python parses `1_23` as 123, but it may be a code
        return None
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return None


def _is_number_column(cells: Sequence[Any]) -> bool:
    """Whether every cell is a number or empty, and at least one is a number."""
    found = False
    for cell in cells:
        value = _number(cell)
        # A cell that is NaN, infinite or too large does not make this a text column. It raises an error when
        # the column is read.
        if value is None and not _is_infinite(cell):
            return False
        found = found or (value is not None and not math.isnan(value))
    return found


def _is_infinite(cell: Any) -> bool:
    """Whether a cell that `_number` rejects is numeric: NaN, infinite or too large for float32."""
    return _python_number(cell) is not None


def _numbers(cells: _Cells, name: str) -> Iterator[float]:
    for row, cell in enumerate(cells.columns[name]):
        value = _number(cell)
        if value is None:
            said = f"column `{name}` has `{shown(str(cell))}`, which is not a finite number in float32"
            number = _python_number(cell)
            if number is not None and math.isnan(number):
                said += " (for a missing number, leave the cell empty)"
            raise cells.wrong(row, said)
        yield value


def _is_nested(cell: Any) -> bool:
    """Whether a cell of a JSON or Parquet file is an object, or a list of objects or lists."""
    return isinstance(cell, dict) or (
        isinstance(cell, list) and any(isinstance(part, (dict, list)) for part in cell)
    )


def _labels(cells: _Cells, columns: Columns) -> Iterable[list[str]]:
    """Return the labels of each row."""
    if len(columns.labels) > 1:
        return _flagged(cells, columns.labels)
    (name,) = columns.labels
    for row, cell in enumerate(cells.columns[name]):
        if _is_nested(cell):
            said = f"column `{name}` must contain labels, but it contains an object or nested lists"
            raise cells.wrong(row, said)
    assert columns.separator is not None
    return split_labels(cells.columns[name], columns.separator)


def _flagged(cells: _Cells, columns: Sequence[str]) -> list[list[str]]:
    """Return the names of the columns that contain 1 in each row. An empty cell counts as 0."""
    lists: list[list[str]] = [[] for _ in cells.at]
    for name in columns:
        for row, cell in enumerate(cells.columns[name]):
            flag = False if is_missing(cell) or cell == "" else parse_flag(cell)
            if flag is None:
                raise cells.wrong(
                    row,
                    f"column `{name}` has `{shown(str(cell))}`, but with several label columns, each cell "
                    "must be 0, 1, false or true",
                )
            if flag:
                lists[row].append(name)
    return lists


def detect_labels(table: Table, inputs: Collection[str], path: Path) -> tuple[str, ...]:
    """Find the label columns of a table.

    If a column has a name in `USUAL_NAMES`, it is the label column. If there are several, the one whose name
    comes first in `USUAL_NAMES` is used, and columns in `inputs` come last. Otherwise, the label column is
    the only column whose cells look like lists of labels. If no column looks like that, but the table
    contains texts and at least two columns of 0s and 1s, each of those columns is a label.

        >>> detect_labels({"text": ["a b", "c d"], "topics": ["x;y", "y"]}, (), Path("rows.csv"))
        ('topics',)

    Args:
        table: The cells by column.
        inputs: The columns that the user chose as texts or numbers.
        path: The file, for error messages.

    Returns:
        The columns. If there is no clear choice, `BadInput` is raised, with a suggestion.
    """
    named = sorted(
        (name for name in table if name.strip().lower() in USUAL_NAMES),
        key=lambda name: (name in inputs, USUAL_NAMES.index(name.strip().lower())),
    )
    if named:  # if the only such column is an input, the caller reports the conflict
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
    """Return the error message for a table without an obvious label column, with a suggestion."""

    def command(columns: Sequence[str]) -> str:
        words = ["torchlml", "train", "multilabel", "--train", str(path), "--labels", *columns]
        return f"run `{shlex.join(words)}`"

    missing = f"`{path}` has no column called {', '.join(USUAL_NAMES[:3])} or similar"
    if separated:
        looks = f"several columns look like labels ({listed(separated)})"
        return f"{missing}, and {looks}. If the labels are in `{separated[0]}`, {command(separated[:1])}."
    if len(flags) > 1:
        looks = f"{len(flags)} columns contain only 0s and 1s ({listed(flags)})"
        return f"{missing}, but {looks}. If each of them is a label, {command(flags)}."
    repeated = [name for name, cells in table.items() if _repeats(cells)]
    if repeated:
        return (
            f"{missing}. Its columns are {listed(table)}. If the labels are in `{repeated[0]}`, "
            f"{command(repeated[:1])}."
        )
    return f"{missing}. Choose a column with `--labels` ({listed(table)})."


def looks_separated(cells: Sequence[Any]) -> bool:
    """Whether the cells look like lists of labels.

    If all cells are lists, as in JSON and Parquet files, the lists must contain only strings or integers. If
    all cells are strings, the names must be short, at least one in twenty cells must contain several names,
    and the names must occur in at least two cells on average.
    """
    there = [cell for cell in cells if not is_missing(cell) and cell != ""]
    if there and all(isinstance(cell, list) for cell in there):
        return any(there) and all(isinstance(part, str | int | None) for cell in there for part in cell)
    if not there or not all(isinstance(cell, str) for cell in there) or all(map(_DECIMAL.fullmatch, there)):
        return False
    names = list(split_labels(there, usual_separator(there)))
    several = sum(len(row) > 1 for row in names)
    return several > 0 and 20 * several >= len(there) and _are_names(names)


def _repeats(cells: Sequence[Any]) -> bool:
    """Whether a text column appears to contain one label per cell."""
    there = [cell for cell in cells if isinstance(cell, str) and cell]
    return bool(there) and _is_text_column(cells) and _are_names([[cell] for cell in there])


def _are_names(rows: Sequence[Sequence[str]]) -> bool:
    """Whether all names are short, contain a letter or digit, and occur at least twice on average."""
    names = [name for row in rows for name in dict.fromkeys(row)]
    distinct = set(names)
    short = all(len(name) <= _LONGEST and any(map(str.isalnum, name)) for name in distinct)
    return short and 2 * len(distinct) <= len(names)


def _is_text_column(cells: Sequence[Any]) -> bool:
    """Whether any cell of a column is a string that is not blank, a number or a flag."""
    texts = (cell for cell in cells if isinstance(cell, str) and cell.strip())
    return any(parse_flag(cell) is None and not _is_number(cell) for cell in texts)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _is_flag_column(cells: Sequence[Any]) -> bool:
    """Whether every cell is 0 or 1, and both occur."""
    return {parse_flag(cell) for cell in cells} == {False, True}


def is_identifier(name: str, cells: Sequence[Any]) -> bool:
    """Whether a column numbers the samples: it is called id, index or similar, and its cells are distinct."""
    return bool(_IDENTIFIER.fullmatch(name.strip())) and len(set(map(str, cells))) == len(cells)
