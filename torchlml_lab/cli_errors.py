"""Command-line errors: the exception for invalid input, and one-line messages for all failures."""

import errno
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any

_SIZES = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class BadInput(Exception):
    """Invalid input from the user. The command line prints the message and exits with code 2."""


def sentence(error: BaseException) -> str:
    """Format an error as a one-line message.

        >>> sentence(OSError(28, "No space left on device", "rows.csv"))
        '`rows.csv` cannot be read or written: there is no space left on the disk.'

    Args:
        error: Any exception. Operating-system errors and failed memory allocations are reworded.

    Returns:
        The message without line breaks, ending with a punctuation mark.
    """
    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        why = reason(error)
        said = f"`{error.filename}` cannot be read or written: {why}" if error.filename else _capital(why)
    elif wanted := re.search(r"tried to allocate ([\d.]+) (\w+)", said, re.IGNORECASE):
        size = float(wanted[1]) * _SIZES.get(wanted[2].lower(), 1) / 2**30
        gib = f"{size:,.0f}" if size >= 10 else f"{size:.2g}"
        said = f"Not enough memory: an allocation of {gib} GiB failed"
    elif isinstance(error, MemoryError):
        said = "Not enough memory"
    return said if said.endswith((".", "!", "?")) else f"{said}."


def reason(error: OSError) -> str:
    """Describe why a file cannot be read or written, as the last clause of a sentence."""
    if error.errno == errno.ENOSPC:
        return "there is no space left on the disk"
    said = error.strerror or " ".join(str(error).split()).rstrip(".")
    return said[:1].lower() + said[1:]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ". Did you mean `x`?" for the most similar known name, or an empty string if none is similar."""
    near = get_close_matches(word, list(known), n=1)
    return f". Did you mean `{near[0]}`?" if near else ""


def answer_help(arguments: Sequence[str], usage: str) -> None:
    """Print the usage of a command and exit if `--help` is its only argument.

    This is for commands that parse their arguments without tyro.

    Args:
        arguments: The arguments after the command's name.
        usage: The usage and description, without the option `--help`.
    """
    if list(arguments) in (["-h"], ["--help"]):
        sys.stdout.write(f"{usage}\noptions:\n  -h, --help  show this help\n")
        raise SystemExit(0)


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def options(settings: Any, prefix: str = "--") -> Iterator[str]:
    """Yield every option as typed on the command line. Options of nested settings contain a dot."""
    for field in fields(settings):
        name, value = field.name.replace("_", "-"), getattr(settings, field.name)
        if is_dataclass(value):
            yield from options(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def parse_error(event: Any, arguments: Sequence[str], known: Sequence[str]) -> str | None:
    """Describe the parse error that a tyro event reports, or return None for an unknown kind of event."""
    kind = type(event).__name__
    name = event.argument.display_name() if getattr(event, "argument", None) else ""
    if kind == "UnrecognizedArgs":
        word = next((token for token in event.tokens if token.startswith("-")), None)
        if word is None:
            return f"Unexpected argument `{event.tokens[0]}`"
        word = word.partition("=")[0]
        return f"There is no option `{word}`{did_you_mean(word, known)}"
    if kind == "InvalidChoice":
        choices = ", ".join(sorted(choice for choice in event.choices if choice != "None"))
        return f"`{name}` must be one of {choices}, but it is `{event.value}`"
    if kind == "BadValue":
        return f"`{name}` needs a value"
    if kind == "MissingArgs":
        return f"`{event.missing_arguments[0].arg.display_name()}` is missing"
    if kind == "InstantiationFailure" and name:
        number = {"INT": "an integer", "FLOAT": "a number"}
        metavar = str(event.argument.lowered.metavar)
        wanted = next((words for mark, words in number.items() if mark in metavar), metavar)
        if wanted != metavar:  # for example INT|{labels}, an integer or the word `labels`
            words = re.findall(r"[^{},]+(?=[^{]*\})", metavar)
            wanted = " or ".join([wanted, *(f"`{word}`" for word in dict.fromkeys(words))])
        several = event.argument.lowered.nargs == "*"
        given = " ".join(_values(name, arguments))
        return f"{'Each value of ' if several else ''}`{name}` must be {wanted}, but got `{given}`"
    return None


def _values(option: str, arguments: Sequence[str]) -> list[str]:
    """Return the values that follow the last occurrence of an option."""
    values: list[str] = []
    reading = False
    for word in arguments:
        found, _, value = word.partition("=")
        if found.replace("_", "-") == option:
            reading, values = not value, [value] if value else []
        elif word.startswith("--"):
            reading = False
        elif reading:
            values.append(word)
    return values
