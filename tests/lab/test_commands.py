"""Commands that accept a run of any task, and the help texts of all task commands."""

import json
import re
import shutil

import numpy as np
import pytest

from torchlml_lab import cli
from torchlml_lab.commands import TASKS


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the task `cifar100` on a small feature file."""
    folder = tmp_path_factory.mktemp("runs")
    random = np.random.default_rng(0)
    fine = np.repeat(np.arange(100), 10)
    x = (random.normal(size=(100, 8))[fine] + 0.3 * random.normal(size=(1000, 8))).astype(np.float32)
    np.savez(folder / "f.npz", x=x, fine=fine, coarse=fine // 5, test=np.arange(1000) % 5 == 0)
    options = ["--features", str(folder / "f.npz"), "--validation", "100", "--epochs", "2", "--noise", "0.2"]
    assert cli.main(["train", "cifar100", *options, "--out", str(folder / "run")]) == 0
    return folder / "run"


def test_evaluate_repeats_the_results_of_the_run(capsys, run):
    for split in ("validation", "test"):
        assert cli.main(["evaluate", str(run), "--split", split]) == 0
        said = capsys.readouterr().out
        result = json.loads((run / "result.json").read_text())
        assert f"epoch {result['best_epoch']}" in said
        (row,) = re.findall(r"^lml +0\.2 +(.*)$", said, re.MULTILINE)
        numbers = [float(n) for n in row.split()]
        assert [numbers[0], numbers[3]] == [
            pytest.approx(100 * result[split][name], abs=0.006) for name in ("top1", "top5")
        ]
        assert numbers == sorted(numbers)


def test_evaluate_finds_moved_data(capsys, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    shutil.copy(run.parent / "f.npz", tmp_path / "moved.npz")
    stored = json.loads((run / "settings.json").read_text())
    changed = json.dumps({**stored, "features": str(tmp_path / "gone.npz")})
    (tmp_path / "run" / "settings.json").write_text(changed)
    assert cli.main(["evaluate", str(tmp_path / "run")]) == 2
    assert "Pass its new location with `--features`" in capsys.readouterr().err
    assert cli.main(["evaluate", str(tmp_path / "run"), "--features", str(tmp_path / "moved.npz")]) == 0


def test_step_time_of_a_run(capsys, run):
    assert cli.main(["step-time", str(run), "--steps", "2", "--batch-size", "10"]) == 0
    said = capsys.readouterr().out
    for loss in ("cross-entropy", "smooth-svm", "truncated-entropy", "lml", "bce"):
        assert re.search(rf"^{loss} +[\d.]+ +[+-][\d.]+%", said, re.MULTILINE)


def test_a_task_without_predictions_is_rejected(capsys, run):
    assert cli.main(["predict", str(run)]) == 2
    error = capsys.readouterr().err
    assert "is a run of the task `cifar100`, which does not support predictions" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_a_valid_run_is_required(capsys, tmp_path, command):
    assert cli.main([command]) == 2
    assert f"Missing RUN directory. Usage: `torchlml {command} RUN`." in capsys.readouterr().err
    assert cli.main([command, "--cpu"]) == 2
    assert f"Missing RUN directory. Usage: `torchlml {command} RUN`." in capsys.readouterr().err
    (tmp_path / "run.json").write_text('{"experiment": "chess"}')
    assert cli.main([command, str(tmp_path)]) == 2
    assert "is a run of the task `chess`, which this version does not support" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["evaluate", "predict", "export", "step-time"])
def test_help_without_a_run_lists_the_options_of_every_task(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: torchlml {command} RUN [OPTIONS]\n")
    assert max(map(len, said.splitlines())) <= 80
    for name, task in TASKS.items():
        entry = getattr(task, command.replace("-", "_"))
        assert (f"\n  {name} " in said) == (entry is not None)
        if entry is None:
            continue
        assert cli.main([command, name, "--help"]) == 0
        explained = capsys.readouterr().out
        assert f"usage: torchlml {command} [-h]" in explained
        assert " RUN" in explained.splitlines()[0]
        assert re.search(r"^ +RUN +", explained, re.MULTILINE)
        options = set(re.findall(r"^  (--[a-z-]+)", explained, re.MULTILINE))
        listed = re.search(rf"^  {name} ((?:.*\n)(?: {{16}}.*\n)*)", said, re.MULTILINE)
        assert listed is not None
        assert set(listed[1].split()) == options


def boxes(capsys, *words):
    """Map the title of each section in a help text to the options in that section."""
    assert cli.main([*words, "--help"]) == 0
    parts = re.split(r"^ (\S.*\S) +\n -+ $", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    return {
        title: re.findall(r"^  (--[\w.-]+)", text, re.MULTILINE)
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


@pytest.mark.parametrize("name", TASKS)
def test_training_options_are_grouped(capsys, name):
    found = boxes(capsys, "train", name)
    assert list(found) == ["options", "data options", "model options", "training options", "output options"]
    assert found["options"] == []  # each option is in a group
    assert {"--loss", "--objective"} & set(found["model options"])
    assert "--epochs" in found["training options"]
    assert "--out" in found["output options"]


def test_the_options_of_a_sweep_come_before_those_of_its_runs(capsys):
    found = boxes(capsys, "sweep", "recommend")
    runs = [f"--run, {group} options" for group in ("data", "model", "training", "output")]
    assert list(found) == ["options", "output options", *runs]
    assert {"--seeds", "--losses"} <= set(found["options"])
    assert "--run.train" in found["--run, data options"]


@pytest.mark.parametrize(("name", "value"), [("multilabel", "FILE [FILE ...]"), ("recommend", "PATH")])
def test_required_options_are_in_the_usage(capsys, name, value):
    assert cli.main(["train", name, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: torchlml train {name} [-h] --train {value} [OPTIONS]\n")
    assert said.count("(required)") == 1
