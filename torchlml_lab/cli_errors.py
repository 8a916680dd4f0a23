"""What is wrong with the options of a command, in sentences, from what tyro reports."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torchlml_lab.errors import did_you_mean


def options(settings: Any, prefix: str = "--") -> Iterator[str]:
    """Every option of some settings, as it is typed; those of settings within settings have a dot."""
    for field in fields(settings):
        name, value = field.name.replace("_", "-"), getattr(settings, field.name)
        if is_dataclass(value):
            yield from options(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def refusal(event: Any, arguments: Sequence[str], known: Sequence[str]) -> str | None:
    """What is wrong with the options, by the kind of tyro's event; None for one that is not known here."""
    kind = type(event).__name__
    name = event.argument.display_name() if getattr(event, "argument", None) else ""
    if kind == "UnrecognizedArgs":
        word = next((token for token in event.tokens if token.startswith("-")), None)
        if word is None:
            return f"Nothing was expected where `{event.tokens[0]}` stands"
        word = word.partition("=")[0]
        return f"There is no option `{word}`{did_you_mean(word, known)}"
    if kind == "InvalidChoice":
        return f"`{name}` is `{event.value}`, and must be one of {', '.join(event.choices)}"
    if kind == "BadValue":
        return f"`{name}` needs a value"
    if kind == "MissingArgs":
        return f"`{event.missing_arguments[0].arg.display_name()}` is missing"
    if kind == "InstantiationFailure" and name:
        number = {"INT": "a whole number", "FLOAT": "a number"}
        metavar = str(event.argument.lowered.metavar)
        wanted = next((words for mark, words in number.items() if mark in metavar), metavar)
        several = event.argument.lowered.nargs == "*"
        given = " ".join(_values(name, arguments))
        return f"`{name}` was given `{given}`, and {'each value' if several else 'it'} must be {wanted}"
    return None


def _values(option: str, arguments: Sequence[str]) -> list[str]:
    """The words that were given to an option, from its last mention."""
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
