"""Files that are whole or not there: their place is checked before the work, and they are moved into it."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from torchlml_lab.errors import BadInput, reason

Kind = TypeVar("Kind", dict, list)  # type: ignore[type-arg]


def read_json(path: Path, kind: type[Kind]) -> Kind:
    """Reads a JSON file that holds one object (`dict`) or one list; anything else raises `BadInput`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is not whole JSON"
        raise BadInput(f"`{path}` cannot be read: {said}.") from error
    if not isinstance(values, kind):
        wanted = "object" if kind is dict else "list"
        raise BadInput(f"`{path}` cannot be read: it holds no JSON {wanted}.")
    return values


def check_writable(path: Path, option: str) -> None:
    """Refuse a path where no file can be written, before any work is done for it.

        >>> check_writable(Path("results/rows.csv"), "--csv")

    Args:
        path: The file to make or replace later; folders that are missing may be made then.
        option: The option that named it, for the error.
    """
    if path.is_dir():
        raise BadInput(f"`{option}` names `{path}`, which is a folder: give a file.")
    try:
        if path.exists() and not path.is_file():
            raise BadInput(f"`{option}` names `{path}`, which is a device and not a file: give a file.")
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        # Rights, a file system that is read-only and a full disk show only when something is written.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".torchlml-") as probe:
            probe.write(b"0")
    except OSError as error:
        raise BadInput(f"`{option}` names `{path}`, which cannot be written: {reason(error)}.") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary path in the folder of `path`, and moves it to `path` when the block ends well.

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
