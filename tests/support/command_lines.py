"""Command lines that must be refused: the options, and a part of the one sentence that comes back."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

import pytest

from torchlml_lab import cli


def refused(capsys: pytest.CaptureFixture[str], arguments: Iterable[object]) -> str:
    """Run a command line that must be refused before it prints anything, and give its one sentence."""
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("torchlml: ")
    assert captured.err.endswith((".\n", "?\n"))
    assert captured.err.count("\n") == 1
    return captured.err


def refusals(said: str, *lines: str) -> dict[str, str]:
    """What is said of each line: `said` with the line's option and its last value in it.

    >>> refusals("`{}` is {}", "--epochs 0", "--seed -1")
    {'--epochs 0': '`--epochs` is 0', '--seed -1': '`--seed` is -1'}
    """
    return {line: said.format(line.split()[0], line.split()[-1]) for line in lines}


def each_refusal(*tables: dict[str, str]) -> pytest.MarkDecorator:
    """Run a test for every line of the tables: its words are the `options`, what is said the `needle`."""
    rows = [(shlex.split(line), needle) for table in tables for line, needle in table.items()]
    return pytest.mark.parametrize(("options", "needle"), rows)
