"""Reading and writing files: whole or not at all, checked before any work is done."""

import dataclasses
import gzip
import json
import os
import tempfile
import types
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torchlml_lab.cli_errors import BadInput, reason

Kind = TypeVar("Kind", dict, list)  # type: ignore[type-arg]


def read_json(path: Path, kind: type[Kind]) -> Kind:
    """Read a JSON file that holds one object (`dict`) or one list; anything else raises `BadInput`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        said = reason(error) if isinstance(error, OSError) else "it is not whole JSON"
        raise BadInput(f"`{path}` cannot be read: {said}.") from error
    if not isinstance(values, kind):
        wanted = "object" if kind is dict else "list"
        raise BadInput(f"`{path}` cannot be read: it holds no JSON {wanted}.")
    return values


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path in the folder of `path`, and move it to `path` when the block ends well.

    Example:
        >>> with replacing(Path("answer.txt")) as temporary:
        ...     temporary.write_text("42")

    Args:
        path: The file to make or replace; its folder must exist.

    Yields:
        The path to write to. When the block raises, it is removed and `path` stays as it was.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes files that only their owner may read; the result gets the usual permissions.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_folder(option: str, folder: Path) -> None:
    """Refuse a folder that cannot be made or written to, before any work is done for it; nothing is left.

    Args:
        option: The option that named it, for the sentence.
        folder: The folder; it and those above it may be missing.
    """
    if folder.is_file():
        raise BadInput(f"`{option}` names `{folder}`, which is a file: give a folder.")
    _check_place(option, folder, folder)


def check_file(option: str, path: Path) -> None:
    """Refuse a file that cannot be written, before any work is done for it; see `check_folder`."""
    if path.is_dir():
        raise BadInput(f"`{option}` names `{path}`, which is a folder: give a file.")
    if path.exists() and not path.is_file():
        raise BadInput(f"`{option}` names `{path}`, which is a device: give a file.")
    _check_place(option, path, path.parent)


def _check_place(option: str, named: Path, folder: Path) -> None:
    folder = folder.absolute()
    try:
        there = next(place for place in (folder, *folder.parents) if place.exists())
        # Rights, a file system that is read-only and a full disk show only when something is written.
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"0")
    except OSError as error:
        raise BadInput(f"`{option}` names `{named}`, which cannot be written: {reason(error)}.") from error


@contextmanager
def writing(what: str, path: Path, kept: str) -> Iterator[None]:
    """Say what is missing when a disk is full or gone, and what is not lost.

    Args:
        what: What is written in the block, as in "The report".
        path: Where it goes.
        kept: What is there nevertheless, as in "the tables above are all of it".
    """
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"{what} could not be written to `{path}`: {reason(error)}; {kept}.") from error


def read_content(path: Path, option: str) -> bytes:
    """Read a text file.

    Args:
        path: The file; gzip is known by its first bytes, whatever the name ends in.
        option: The option that named it, for the sentences.

    Returns:
        Its text as UTF-8, with line ends `\\n` and no byte order mark. What is no such text, or is empty,
        raises `BadInput`.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        said = "it ends in the middle" if isinstance(error, EOFError) else "its gzip data are damaged"
        raise BadInput(f"`{option}` names `{path}`, which cannot be read: {said}.") from error
    except OSError as error:
        raise BadInput(f"`{option}` names `{path}`, which cannot be read: {reason(error)}.") from error
    data = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    data = data if b"\n" in data else data.replace(b"\r", b"\n")
    if not data.strip():
        raise BadInput(f"`{option}` names `{path}`, which is empty.")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadInput(f"`{path}`, line {line}: the text is not UTF-8.") from error
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        raise BadInput(f"`{path}`, line {line}: a zero byte, so this is no text.")
    return data


def shown(text: str) -> str:
    """A cell or a word of a file for a sentence: not longer than 40 characters, in one line."""
    text = " ".join(text.split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def check_picture(picture: Path, option: str = "--out") -> None:
    """Refuse a path that a picture cannot be written to."""
    if picture.suffix not in (".png", ".svg") and not picture.is_dir():
        raise BadInput(f"`{option}` names `{picture}`, which must end in `.png` or `.svg`.")
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
    """Read a JSON object into a dataclass; a file that holds anything else raises `BadInput`.

    Args:
        path: The file.
        kind: The dataclass; its fields are numbers, strings, paths, literals, lists, tuples, dicts or
            dataclasses, or unions of these. Other keys of the file are ignored.
    """
    values = read_json(path, dict)
    try:
        return record(values, kind)
    except ValueError as error:
        raise BadInput(f"`{path}` is damaged: {error}.") from error


def record(values: dict[str, Any], kind: type[Stored]) -> Stored:
    """Make a dataclass from JSON values; a value that is missing or of another type raises ValueError."""
    hints = get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name not in values:
            raise ValueError(f"`{field.name}` is missing")
        found[field.name] = _checked(values[field.name], hints[field.name], field.name)
    return kind(**found)


def _checked(value: Any, hint: Any, name: str) -> Any:
    """The value as the type that the hint asks for."""
    try:
        return _as(value, hint)
    except TypeError:
        shown = json.dumps(value)
        shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
        raise ValueError(f"`{name}` must be {_described(hint)}, but it is {shown}") from None


def _as(value: Any, hint: Any) -> Any:
    """The same; a value of another type raises TypeError."""
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
        return f"a list of {len(parts)}"
    if origin in (list, tuple):
        return f"a list with {_described(parts[0])} in each place"
    return _NAMES.get(hint, "an object")
