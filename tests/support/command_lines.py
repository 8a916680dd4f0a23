"""Run command lines that must succeed, and command lines that must be rejected with a one-line error."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from torchlml_lab import cli


def made(words: Sequence[str]) -> Path:
    """Run a command line that must succeed, and return the path given by `--out`."""
    assert cli.main(words) == 0
    return _out(words)


def rejected(capsys: pytest.CaptureFixture[str], arguments: Iterable[object]) -> str:
    """Run a command line that must be rejected, and return its one-line error.

    Nothing else may be printed, and the command must not create the path given by `--out`.
    """
    words = [str(argument) for argument in arguments]
    there = _out(words).exists()
    capsys.readouterr()
    assert cli.main(words) == 2
    assert _out(words).exists() == there
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("torchlml: ")
    assert captured.err.endswith((".\n", "?\n"))
    assert captured.err.count("\n") == 1
    return captured.err


def _out(words: Sequence[str]) -> Path:
    """Return the path given by the last `--out`, or the current directory if there is no `--out`."""
    return Path(next((after for word, after in reversed(list(pairwise(words))) if word == "--out"), "."))


def rejections(said: str, *lines: str) -> dict[str, str]:
    """Map each command line to its expected error: `said`, formatted with the line's first and last word.

    >>> rejections("`{}` is {}", "--epochs 0", "--seed -1")
    {'--epochs 0': '`--epochs` is 0', '--seed -1': '`--seed` is -1'}
    """
    return {line: said.format(line.split()[0], line.split()[-1]) for line in lines}


def each_rejection(*tables: dict[str, str]) -> pytest.MarkDecorator:
    """Run a test for each command line (`options`) and its expected error (`needle`) in the tables."""
    rows = [(shlex.split(line), needle) for table in tables for line, needle in table.items()]
    return pytest.mark.parametrize(("options", "needle"), rows)
