"""The commands of every task in `TASKS` exist and are documented on a page and in the help."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import torchlml_lab
from torchlml_lab import cli
from torchlml_lab.commands import TASKS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").rglob("*.md")]


@pytest.mark.parametrize("name", TASKS)
def test_the_commands_of_a_task_exist(name: str) -> None:
    task = TASKS[name]
    for command in filter(None, task):
        for place in (command.settings, command.function):
            module, _, function = place.partition(":")
            assert callable(getattr(importlib.import_module(f"torchlml_lab.{module}"), function))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_documented(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert any(f"torchlml train {name}" in page.read_text(encoding="utf-8") for page in PAGES)
    assert cli.main(["train", name, "--help"]) == 0
    assert "--resume" in capsys.readouterr().out


def test_the_dtype_of_metrics_is_never_set() -> None:
    """Metrics count in integers, so calling `set_dtype` would have no effect and would be misleading."""
    package = Path(torchlml_lab.__file__).parent
    for path in package.rglob("*.py"):
        assert ".set_dtype(" not in path.read_text(encoding="utf-8"), path
