"""Files that are whole or not there: written beside their place and then moved into it."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
