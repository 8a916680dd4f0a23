"""Damaged JSON files of a run: a one-line error names the file, unless the command still succeeds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_lines import made
from tests.support.tagged_texts import tagged_texts, write_texts
from torchlml_lab import cli, plots

# The command that reads each file. "resume finished" resumes a run that already has its result.
FILES = {
    "run.json": "predict",
    "settings.json": "predict",
    "preparation.json": "predict",
    "calibration.json": "predict",
    "state.json": "predict",
    "checkpoint.json": "predict",
    "result.json": "resume finished",
    "metrics.jsonl": "resume",
    "failed.json": "resume",
}
# Words from raw error messages of Python, torch and json, which must not be shown to the user.
RAW = ("NoneType", "object is", "object has", "argument", "Error", "unexpected", "indices", "Expecting")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tampering")
    data = write_texts(folder / "train.csv", tagged_texts(60, seed=0))
    words = ["train", "multilabel", "--train", str(data), "--epochs", "2", "--hidden", "4"]
    words += ["--model", "network"]  # for speed
    return made([*words, "--out", str(folder / "run")])


def tampered(text: str) -> Iterator[str]:
    """Yield damaged copies of a JSON text: truncated, replaced, or with a missing or invalid value."""
    yield from ("", text[: len(text) // 2], "null\n", "[]\n", "3\n", "{}\n")
    first, *others = text.splitlines() if text.startswith('{"') else [text]
    values: dict[str, Any] = json.loads(first)
    # All numbers in a file are read in the same way. Only three are changed, because each run takes seconds.
    alike = [name for name, value in values.items() if isinstance(value, float)][3:]
    for name, value in values.items():
        if name in alike:
            continue
        changes: list[Any] = [None, "x" if isinstance(value, (bool, int, float)) else 7, [], {}]
        if isinstance(value, list) and value:
            changes += [value[:-1], [*value, value[0]], [None, *value[1:]], [value, *value[1:]]]
        if isinstance(value, dict) and value:
            changes += [dict.fromkeys(value), dict(list(value.items())[1:])]
        for changed in changes:
            yield "\n".join([json.dumps(values | {name: changed}), *others]) + "\n"
        kept = {other: values[other] for other in values if other != name}
        yield "\n".join([json.dumps(kept), *others]) + "\n"


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_in_a_one_line_error(run, tmp_path, capsys, monkeypatch, name):
    # The figure in the report does not depend on these files, and drawing it would take most of the time.
    monkeypatch.setattr(plots, "draw_recall_and_calibration", lambda *_, **__: None)
    copy, data = tmp_path / "run", str(run.parent / "train.csv")
    words = ["predict", str(copy), "--data", data]
    if FILES[name] != "predict":
        words = ["train", "multilabel", "--resume", str(copy)]
    original = run / name
    if name == "checkpoint.json":
        best = json.loads((run / "state.json").read_text())["best"]
        original = run / "checkpoints" / best / name
    text = json.dumps({"epoch": 1, "loss": "nan"}) if name == "failed.json" else original.read_text()
    place = copy / original.relative_to(run)
    rejected = 0
    for changed in tampered(text):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run, copy)
        if FILES[name] == "resume":
            (copy / "result.json").unlink()
        place.write_text(changed)
        capsys.readouterr()
        code = cli.main(words)
        said = capsys.readouterr().err
        if code == 0:
            continue
        rejected += 1
        where = (changed[:300], said)
        assert code == 2, where
        assert said.startswith("torchlml: "), where
        assert said.endswith((".\n", "?\n")), where
        assert said.count("\n") == 1, where
        assert str(place) in said, where
        assert not any(word in said.replace(str(copy), "") for word in RAW), where
    assert rejected >= 6
