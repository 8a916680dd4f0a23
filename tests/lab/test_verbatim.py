"""Text from user files appears verbatim on the screen and in figures, even if it resembles markup."""

from __future__ import annotations

import ast
import csv
import io
import json
from pathlib import Path

import pytest

import torchlml_lab
from tests.support.command_lines import made
from tests.support.scene_graphs import draw, write_vrd
from torchlml_lab import cli
from torchlml_lab.engine.output import ProgressBar, new_console

# Rich interprets brackets as tags and colons as emoji. matplotlib interprets dollar signs as formulas.
LABELS = ["list[int]", "[/b]", ":cat:", r"$\frac$", "[red]"]


@pytest.fixture(autouse=True)
def wide_screen(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data whose labels, texts, users, items and paths all look like markup."""
    path = tmp_path_factory.mktemp("markup") / r"[b]$\frac$ $"
    path.mkdir()
    with (path / "train.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "labels"))
        for row in range(60):
            names = [LABELS[row % 5], LABELS[(row * 2 + 1) % 5]]
            writer.writerow((f"word{row % 5} [/b] [bold]text :dog: {row}", ";".join(names)))
    lines = [
        f"user[/i]{user} " + " ".join(f"item[/i]{(user + i) % 8}" for i in range(5)) for user in range(30)
    ]
    (path / "pairs.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def labels_run(folder: Path) -> Path:
    words = ["train", "multilabel", "--train", str(folder / "train.csv"), "--epochs", "1", "--hidden", "4"]
    return made([*words, "--out", str(folder / "labels")])


@pytest.fixture(scope="module")
def items_run(folder: Path) -> Path:
    words = ["train", "recommend", "--train", str(folder / "pairs.txt"), "--epochs", "1", "--dimension", "4"]
    return made([*words, "--out", str(folder / "items")])


def test_predicted_labels_and_their_texts(labels_run, folder, capsys):
    out = folder / "labels.jsonl"
    words = ["predict", str(labels_run), "--data", str(folder / "train.csv"), "--out", str(out)]
    assert cli.main([*words, "--top", "5"]) == 0
    printed = capsys.readouterr().out
    for name in LABELS:
        assert f"{name} " in printed
    assert "word1 [/b] [bold]text :dog: 1" in printed
    assert f"The labels of all samples are in {out}." in printed
    written = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert sorted(written[0]["labels"]) == sorted(LABELS)


def test_recommended_items(items_run, folder, capsys):
    out = folder / "items.csv"
    data = folder / "new.txt"
    data.write_text("stranger[/i] unknown[/b]\nuser[/i]1 item[/i]3\n", encoding="utf-8")
    words = ["predict", str(items_run), "--data", str(data), "--top", "3", "--out", str(out)]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert "stranger[/i] " in printed
    assert "item[/i]" in printed
    assert f"`{data}`: 1 item that is not in the training data was skipped" in printed
    assert f"are in {out}." in printed
    assert "user[/i]1,1,item[/i]" in out.read_text(encoding="utf-8")


def test_evaluations_name_files_verbatim(labels_run, items_run, folder, capsys):
    data = folder / r"later [i]$\frac$ $.csv"
    data.write_text((folder / "train.csv").read_text(encoding="utf-8"), encoding="utf-8")
    words = ["evaluate", str(labels_run), "--data", str(data), "--out", str(folder / "report")]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert f"60 samples from {data.name}, metrics in percent" in printed
    assert f"The report is in {folder / 'report' / 'report.md'}" in printed
    assert cli.main(["evaluate", str(items_run)]) == 0
    assert f"The run is in {items_run}" in capsys.readouterr().out


def test_objects_and_predicates_of_scene_graphs(folder, capsys):
    data = write_vrd(folder / "vrd", draw(24))
    (data / "objects.json").write_text(json.dumps(LABELS))
    (data / "predicates.json").write_text(json.dumps(["on[/b]", "[i]has", r"$\frac$ near", ":cat:"]))
    words = ["train", "scene-graph", "--vrd", str(data), "--epochs", "1", "--hidden", "4"]
    run = made([*words, "--validation", "4", "--out", str(folder / "graphs")])
    assert cli.main(["predict", str(run), "--out", str(folder / "graph.png")]) == 0
    assert "on[/b]" in capsys.readouterr().out
    assert cli.main(["evaluate", str(run)]) == 0
    assert {"on[/b]", "[i]has", ":cat:"} <= set(capsys.readouterr().out.split())


def test_a_file_is_written_even_if_the_table_cannot_be_printed(
    labels_run, items_run, folder, capsys, monkeypatch
):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the screen is broken")

    outs = [folder / "first.csv", folder / "second.csv"]
    for module, run, data, out in (
        ("multilabel.prediction", labels_run, "train.csv", outs[0]),
        ("recommend.prediction", items_run, "pairs.txt", outs[1]),
    ):
        monkeypatch.setattr(f"torchlml_lab.{module}.plain_table", broken)
        assert cli.main(["predict", str(run), "--data", str(folder / data), "--out", str(out)]) == 1
        assert "the screen is broken" in capsys.readouterr().err
        assert out.stat().st_size > 100


def test_progress_descriptions():
    written = io.StringIO()
    console = new_console(file=written, force_terminal=True, width=100)
    with ProgressBar(console) as progress:
        progress.add_task("run[/b] :cat:", total=2)
        progress.refresh()
    assert "run[/b] :cat:" in written.getvalue()


def test_every_console_prints_verbatim():
    """All consoles come from `new_console`, because any other console would interpret markup."""
    package = Path(torchlml_lab.__file__).parent
    calls = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Console":
                calls.append(path.relative_to(package).as_posix())
    assert calls == ["engine/output.py"]
