"""A lock on a folder that only one process may write, and that ends with this process, whatever ends it.

The operating system holds it: a killed process leaves the file `.lock` behind, but not the lock.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from torchlml_lab.errors import BadInput

if sys.platform == "win32":
    import msvcrt

    def _take(file: IO[str]) -> None:
        # A byte far behind the text, which stays readable: locks of Windows forbid reading too.
        file.seek(1 << 20)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _take(file: IO[str]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder within the block.

        with locked(Path("runs/a")):
            ...

    Args:
        folder: It must exist; when another process holds it, that raises `BadInput`.
    """
    with _open(folder / ".lock") as file:
        try:
            _take(file)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            holder = file.read().strip() or "its number is not known"
            raise BadInput(
                f"`{folder}` is in use by another process ({holder}): wait for it, or stop it first."
            ) from None
        except OSError:
            pass  # a file system without locks: as safe as it can be there
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _open(path: Path) -> IO[str]:
    try:
        return path.open("a+", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"`{path.parent}` cannot be written: {error.strerror}.") from error
