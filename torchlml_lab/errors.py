"""What the command line turns into one sentence and an exit code, and the sentences themselves."""

import errno
import re
from collections.abc import Iterable
from difflib import get_close_matches

_SIZES = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class BadInput(Exception):
    """What the user asked for cannot be done; the message is the one sentence that says why."""


def sentence(error: BaseException) -> str:
    """Say in one sentence what failed.

        >>> sentence(OSError(28, "No space left on device", "rows.csv"))
        '`rows.csv` cannot be read or written: there is no space left on the disk.'

    Args:
        error: Anything that was raised; messages of the system and of torch's allocators get other words.

    Returns:
        A sentence without a line break.
    """
    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        why = reason(error)
        said = f"`{error.filename}` cannot be read or written: {why}" if error.filename else _capital(why)
    elif wanted := re.search(r"tried to allocate ([\d.]+) (\w+)", said, re.IGNORECASE):
        size = float(wanted[1]) * _SIZES.get(wanted[2].lower(), 1) / 2**30
        said = f"There is not enough memory: {size:,.2g} GiB more were needed at once"
    elif isinstance(error, MemoryError):
        said = "There is not enough memory"
    return said if said.endswith((".", "!", "?")) else f"{said}."


def reason(error: OSError) -> str:
    """Say why a file cannot be read or written, as the end of a sentence."""
    if error.errno == errno.ENOSPC:
        return "there is no space left on the disk"
    said = error.strerror or " ".join(str(error).split()).rstrip(".")
    return said[:1].lower() + said[1:]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """End a sentence about an unknown name: with the known one that resembles it, if there is one."""
    near = get_close_matches(word, list(known), n=1)
    return f": did you mean `{near[0]}`?" if near else ""


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
