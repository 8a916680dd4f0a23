"""Helpers for reading and writing files, with atomic writes and early checks of output paths."""

import dataclasses
import gzip
import json
import os
import tempfile
import types
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torchlml_lab.cli_errors import BadInput, reason

Kind = TypeVar("Kind", dict, list)  # type: ignore[type-arg]


def read_json(path: Path, kind: type[Kind]) -> Kind:
    """Read a JSON file that contains one object (`dict`) or one list. Other content raises `BadInput`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        said = reason(error) if isinstance(error, OSError) else "it is not valid JSON"
        raise BadInput(f"`{path}` cannot be read: {said}.") from error
    if not isinstance(values, kind):
        wanted = "object" if kind is dict else "list"
        raise BadInput(f"`{path}` cannot be read: it does not contain a JSON {wanted}.")
    return values


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the directory of `path`, and move it to `path` if the block succeeds.

    Example:
        >>> with replacing(Path("answer.txt")) as temporary:
        ...     temporary.write_text("42")

    Args:
        path: The file to create or replace. Its directory must exist.

    Yields:
        The path to write to. If the block raises, this file is removed and `path` is unchanged.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # Set the default permissions, because mkstemp creates files that only their owner may read.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_folder(option: str, folder: Path) -> None:
    """Raise `BadInput` if a directory cannot be created or written to. The directory is not created.

    Args:
        option: The command-line option that gave the path, for error messages.
        folder: The directory. Neither it nor its parents need to exist.
    """
    if folder.is_file():
        raise BadInput(f"`{option}` must be a directory, but `{folder}` is a file.")
    _check_place(option, folder, folder)


def check_file(option: str, path: Path) -> None:
    """Raise `BadInput` if a file cannot be written. The file is not created."""
    if path.is_dir():
        raise BadInput(f"`{option}` must be a file, but `{path}` is a directory.")
    if path.exists() and not path.is_file():
        raise BadInput(f"`{option}` must be a regular file, but `{path}` is a device, pipe or socket.")
    _check_place(option, path, path.parent)


def _check_place(option: str, named: Path, folder: Path) -> None:
    folder = folder.absolute()
    try:
        there = next(place for place in (folder, *folder.parents) if place.exists())
        # Missing permissions, read-only file systems and full disks are detected only by writing.
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"0")
    except OSError as error:
        raise BadInput(f"`{named}` (`{option}`) cannot be written: {reason(error)}.") from error


@contextmanager
def writing(what: str, path: Path, kept: str) -> Iterator[None]:
    """Turn a failure to write a file into an error that also states which results are not lost.

    Args:
        what: The name of the output, as in "The report".
        path: The file or directory that is written.
        kept: A clause about the remaining results, as in "the tables above are complete".
    """
    try:
        yield
    except OSError as error:
        raise RuntimeError(
            f"{what} could not be written to `{path}`: {reason(error)}, but {kept}."
        ) from error


BLOCK = 2**20  # the number of bytes to read at once


def read_content(path: Path, option: str) -> bytes:
    """Read a whole text file, with the checks and conversions of `read_blocks`."""
    return b"".join(read_blocks(path, option))


def read_blocks(path: Path, option: str, size: int = BLOCK) -> Iterator[bytes]:
    """Read a text file in blocks of complete lines, so that a large file is never entirely in memory.

    Args:
        path: The file. Gzip is recognized by its first bytes, not by the file name.
        option: The command-line option that gave the path, for error messages.
        size: The approximate size of a block in bytes. A block that contains a longer line is larger.

    Yields:
        The text as UTF-8, with `\\n` line endings and without a byte order mark. A file that is empty or
        does not contain text raises `BadInput`.
    """
    line, parts, blank = 1, list[bytes](), True
    for chunk in _chunks(path, option, size):
        head, end, tail = chunk.rpartition(b"\n")
        if not end:
            parts.append(chunk)
            continue
        block = b"".join([*parts, head, end]).replace(b"\r\n", b"\n")
        parts = [tail]
        _check_text(block, path, line)
        blank = blank and not block.strip()
        line += block.count(b"\n")
        yield block
    rest = b"".join(parts)
    # A file without line feeds may use carriage returns as line endings.
    rest = rest.replace(b"\r", b"\n") if line == 1 else rest
    if blank and not rest.strip():
        raise BadInput(f"`{path}` (`{option}`) is empty.")
    if rest:
        _check_text(rest, path, line)
        yield rest


def _chunks(path: Path, option: str, size: int) -> Iterator[bytes]:
    """Yield the bytes of a file, decompressed and without a byte order mark."""
    mark = b"\xef\xbb\xbf"
    try:
        with path.open("rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"  # peek instead of read, because a pipe cannot be rewound
            with gzip.open(raw) if packed else nullcontext(raw) as file:
                yield file.read(size).removeprefix(mark)
                while chunk := file.read(size):
                    yield chunk
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        said = "it is truncated" if isinstance(error, EOFError) else "its gzip data is damaged"
        raise BadInput(f"`{path}` (`{option}`) cannot be read: {said}.") from error
    except OSError as error:
        raise BadInput(f"`{path}` (`{option}`) cannot be read: {reason(error)}.") from error


def _check_text(block: bytes, path: Path, first: int) -> None:
    """Raise `BadInput` if a block is not UTF-8 text. `first` is the line number of its first line."""
    try:
        block.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first + block.count(b"\n", 0, error.start)
        raise BadInput(f"`{path}`, line {line}: the text is not UTF-8.") from error
    if b"\0" in block:
        line = first + block.count(b"\n", 0, block.index(b"\0"))
        raise BadInput(f"`{path}`, line {line}: the line contains a zero byte, so this is not a text file.")


def file_kind(path: Path) -> str:
    """Return the last suffix of a file name other than `.gz`, in lower case, or "" if there is none."""
    return next((end.lower() for end in path.suffixes[::-1] if end.lower() != ".gz"), "")


def counted(count: int, singular: str, plural: str) -> str:
    """Return a count followed by singular or plural words, such as "1 sample has" or "2 samples have"."""
    return f"{count} {singular if count == 1 else plural}"


def shown(text: str) -> str:
    """Shorten text from a file to one line of at most 40 characters, for a message."""
    text = " ".join(text.split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def check_picture(picture: Path, option: str = "--out") -> None:
    """Raise `BadInput` if a picture cannot be written to this path."""
    if picture.suffix not in (".png", ".svg") and not picture.is_dir():
        raise BadInput(f"`{option}` must end in `.png` or `.svg`, but it is `{picture}`.")
    check_file(option, picture)


Stored = TypeVar("Stored")

_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
    bool: "true or false",
    type(None): "null",
}


def read_record(path: Path, kind: type[Stored]) -> Stored:
    """Read a JSON object into a dataclass. A file with any other content raises `BadInput`.

    Args:
        path: The file.
        kind: The dataclass. Its fields are numbers, strings, bools, None, paths, literals, lists, tuples,
            dicts or dataclasses, or unions of these. Keys in the file that are not fields are ignored.
    """
    values = read_json(path, dict)
    try:
        return record(values, kind)
    except ValueError as error:
        raise BadInput(f"`{path}` is damaged: {error}.") from error


def record(values: dict[str, Any], kind: type[Stored]) -> Stored:
    """Build a dataclass from JSON values. A missing value or one of the wrong type raises ValueError."""
    hints = get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name not in values:
            raise ValueError(f"`{field.name}` is missing")
        found[field.name] = _checked(values[field.name], hints[field.name], field.name)
    return kind(**found)


def _checked(value: Any, hint: Any, name: str) -> Any:
    """Convert a value to the type of the hint, or raise ValueError."""
    try:
        return _as(value, hint)
    except TypeError:
        shown = json.dumps(value)
        shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
        raise ValueError(f"`{name}` must be {_described(hint)}, but it is {shown}") from None


def _as(value: Any, hint: Any) -> Any:
    """Convert a value to the type of the hint, or raise TypeError."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for part in parts:
            try:
                return _as(value, part)
            except TypeError:
                continue
    elif origin is Literal:
        if isinstance(value, str) and value in parts:
            return value
    elif origin is list and isinstance(value, list):
        return [_as(one, parts[0]) for one in value]
    elif origin is tuple and isinstance(value, list):
        if parts[-1] is Ellipsis:
            return tuple(_as(one, parts[0]) for one in value)
        if len(value) == len(parts):
            return tuple(_as(one, part) for one, part in zip(value, parts, strict=True))
    elif origin is dict and isinstance(value, dict):
        return {key: _as(one, parts[1]) for key, one in value.items()}
    elif dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return record(value, hint)  # type: ignore[arg-type]
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif hint in (int, str, bool, type(None)) and type(value) is hint:
        return value
    raise TypeError


def _described(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_described(part) for part in parts)
    if origin is Literal:
        return " or ".join(f'"{part}"' for part in parts)
    if origin is tuple and parts[-1] is not Ellipsis:
        return f"a list of length {len(parts)}"
    if origin in (list, tuple):
        return f"a list in which each element is {_described(parts[0])}"
    return _NAMES.get(hint, "an object")
