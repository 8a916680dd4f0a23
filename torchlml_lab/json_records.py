"""JSON files that are read into dataclasses: every value is checked against the type of its field."""

import dataclasses
import json
import types
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torchlml_lab.errors import BadInput
from torchlml_lab.files import read_json

Record = TypeVar("Record")

_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
    bool: "true or false",
    type(None): "null",
}


def read_record(path: Path, kind: type[Record]) -> Record:
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


def record(values: dict[str, Any], kind: type[Record]) -> Record:
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
