"""Every task in the table can be trained, has the commands that it names, and is shown on a page."""

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
def test_a_task_has_the_commands_it_names(name: str) -> None:
    task = TASKS[name]
    for command in filter(None, task):
        for place in (command.settings, command.function):
            module, _, function = place.partition(":")
            assert callable(getattr(importlib.import_module(f"torchlml_lab.{module}"), function))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_shown_and_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert any(f"torchlml train {name}" in page.read_text(encoding="utf-8") for page in PAGES)
    assert cli.main(["train", name, "--help"]) == 0
    assert "--resume" in capsys.readouterr().out


def test_no_dtype_is_set_that_metrics_ignore() -> None:
    """The metrics count in integers, so `set_dtype` would have no effect and a call would be misleading."""
    package = Path(torchlml_lab.__file__).parent
    for path in package.rglob("*.py"):
        assert ".set_dtype(" not in path.read_text(encoding="utf-8"), path
