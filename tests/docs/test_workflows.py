"""The CI workflows run only Makefile targets, so every step can also be run on a local machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def test_there_are_workflows() -> None:
    assert {path.stem for path in WORKFLOWS} == {"docs", "tests", "wheels"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_step_runs_a_make_target(path: Path) -> None:
    steps = re.findall(r"^\s*- run: (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert steps
    for step in steps:
        command, target, *variables = step.split()
        assert command == "make"
        assert target in TARGETS
        assert all("=" in variable for variable in variables)
