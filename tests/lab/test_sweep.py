"""A sweep writes one CSV, skips finished runs, survives interruptions, and tunes only on validation data."""

import csv
import json
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.command_lines import each_rejection, made, rejected, rejections
from tests.support.features import write_features
from tests.support.processes import output, start
from torchlml_lab import cli
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.output import StudyTable
from torchlml_lab.studies.cifar100 import sweep
from torchlml_lab.studies.cifar100.settings import SweepSettings
from torchlml_lab.studies.cifar100.sweep import AccuracyRecord, grid


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    return write_features(tmp_path_factory.mktemp("features"), 8)


def words(features, out, *more):
    common = ["--run.features", str(features), "--run.validation", "400", "--run.batch-size", "100"]
    chosen = ["--losses", "lml", "bce", "--noises", "0", "1", "--seeds", "0", "1", "--workers", "2"]
    return ["sweep", "cifar100", *common, "--run.epochs", "4", *chosen, "--out", str(out), *more]


def rows(path):
    with path.open(newline="") as file:
        return [
            {key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)
        ]


@pytest.fixture(scope="module")
def whole(features, tmp_path_factory):
    """An uninterrupted sweep of eight runs."""
    return made(words(features, tmp_path_factory.mktemp("whole") / "sweep"))


def test_every_combination_has_one_row(whole):
    found = rows(whole / "results.csv")
    combinations = {(row["loss"], float(row["noise"]), row["seed"]) for row in found}
    assert len(found) == len(combinations) == 8
    for row in found:
        name = f"{row['loss']}_noise{float(row['noise']):g}_lr0.1_t1_seed{row['seed']}"
        result = json.loads((whole / name / "result.json").read_text())
        assert float(row["test_topk"]) == result["test"]["top5"]
        assert float(row["validation_topk"]) == result["validation"]["top5"]


def test_finished_runs_are_skipped(capsys, features, whole):
    before = {path: path.stat().st_mtime_ns for path in whole.glob("*/result.json")}
    assert cli.main(words(features, whole)) == 0
    assert "8 runs, 8 of them already finished" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in whole.glob("*/result.json")} == before


def test_an_interrupted_and_resumed_sweep_equals_an_undisturbed_sweep(capsys, features, whole, tmp_path):
    out = tmp_path / "sweep"
    running = start(words(features, out))
    limit = time.monotonic() + 120
    while time.monotonic() < limit and running.running() and not list(out.glob("*/result.json")):
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    printed, errors = output(running, code=130, seconds=60)
    assert "8 runs, 0 of them already finished" in printed
    said = re.fullmatch(
        r"torchlml: Interrupted\. (\d) of 8 runs are finished\. Repeat the command to resume\.\n", errors
    )
    assert said, errors
    assert int(said[1]) < 8
    assert cli.main(words(features, out)) == 0
    assert "8 runs, 0 of them" not in capsys.readouterr().out
    assert rows(out / "results.csv") == rows(whole / "results.csv")


def test_a_second_sweep_is_rejected_and_workers_end_with_a_killed_parent(features, tmp_path):
    out = tmp_path / "sweep"
    endless = words(features, out, "--run.epochs", "100000")
    running = start(endless)
    limit = time.monotonic() + 120
    while time.monotonic() < limit and len(list(out.glob("*/state.json"))) < 2:
        time.sleep(0.02)
    second = start(endless)
    while time.monotonic() < limit and second.running():
        time.sleep(0.02)
    code, _, errors = second.kill() if second.running() else second.end()
    assert running.running()
    running.kill()
    assert code == 2
    assert f"`{out}` is in use by another process (ID {running.pid})" in errors
    time.sleep(2)
    before = {path: path.read_bytes() for path in out.glob("*/state.json")}
    time.sleep(1)
    assert {path: path.read_bytes() for path in out.glob("*/state.json")} == before


def test_a_failed_run_is_reported_and_the_others_are_kept(capsys, features, tmp_path):
    out = tmp_path / "sweep"
    options = ["--losses", "bce", "--noises", "0", "--seeds", "0", "--learning-rates", "0.1", "1e30"]
    assert cli.main(words(features, out, *options)) == 1
    error = capsys.readouterr().err
    assert "1 of 2 runs failed. The first run to fail was `bce_noise0_lr1e+30_t1_seed0`: The loss" in error
    assert [row["learning_rate"] for row in rows(out / "results.csv")] == ["0.1"]


def test_a_folder_with_other_settings_is_rejected(capsys, features, whole):
    assert cli.main(words(features, whole, "--run.epochs", "5")) == 2
    assert "contains a run in which `epochs` is 4 instead of 5" in capsys.readouterr().err


def test_unwritable_paths_are_rejected_before_any_work(capsys, features, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "run_grid", None)
    for options, named in (
        (["--csv", str(features / "x.csv")], f"`{features / 'x.csv'}` (`--csv`)"),
        (["--out", str(features / "sweep")], f"`{features / 'sweep'}` (`--out`)"),
    ):
        error = rejected(capsys, words(features, tmp_path / "sweep", *options))
        assert f"{named} cannot be written: not a directory" in error
    assert not (tmp_path / "sweep").exists()


def test_a_full_disk_keeps_the_table_on_the_screen(capsys, features, whole, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    plain, calls = StudyTable.write, []

    def write(self, path, rows):
        calls.append(path)
        return plain(self, path, rows) if len(calls) == 1 else full()

    monkeypatch.setattr(StudyTable, "write", write)
    assert cli.main(words(features, whole)) == 1
    captured = capsys.readouterr()
    assert "accuracy in %" in captured.out
    assert "Results written to" not in captured.out
    assert "The CSV could not be written to" in captured.err
    assert "there is no space left on the disk, but the finished runs are saved" in captured.err


def record(**changes):
    values = {
        "source": "features",
        "loss": "lml",
        "noise": 0.4,
        "seed": 0,
        "k": 5,
        "learning_rate": 0.1,
        "temperature": 1.0,
        "epochs": 4,
        "best_epoch": 2,
        "validation_top1": 0.4,
        "validation_topk": 0.5,
        "test_top1": 0.4,
        "test_topk": 0.5,
        "train_top1": 0.4,
        "train_topk": 0.5,
        "last_top1": 0.4,
        "last_topk": 0.5,
        "seconds": 1.0,
    }
    return AccuracyRecord(**{**values, **changes})


def tuning(path):
    """Write rows in which, on average, the best learning rate is 0.3 on validation but 0.1 on test."""
    found = [
        record(learning_rate=rate, noise=noise, validation_topk=validation, test_topk=test)
        for rate, noise, validation, test in (
            (0.1, 0.0, 0.9, 0.99),
            (0.1, 0.8, 0.1, 0.99),
            (0.3, 0.0, 0.8, 0.2),
            (0.3, 0.8, 0.5, 0.2),
        )
    ]
    sweep.TABLE.write(path, found)
    return found


def test_tuning_uses_the_mean_on_validation(tmp_path):
    found = tuning(tmp_path / "t.csv")
    assert set(sweep.TABLE.read(tmp_path / "t.csv", "--csv")) == set(found)
    runs = grid(
        SweepSettings(
            losses=("lml",), tuned=tmp_path / "t.csv", run=SweepSettings().run.__class__(features=Path("x"))
        )
    )
    assert {(run.learning_rate, run.temperature) for run in runs} == {(0.3, 1.0)}
    assert len(runs) == 6 * 4


def test_unfair_tuning_is_rejected(tmp_path):
    found = tuning(tmp_path / "t.csv")
    with pytest.raises(BadInput, match="was not run with the same noise levels"):
        sweep.best_recipes(found[:-1], ["lml"], tmp_path / "t.csv")
    with pytest.raises(BadInput, match="no runs with the loss `bce`"):
        sweep.best_recipes(found, ["lml", "bce"], tmp_path / "t.csv")


def test_the_figure_is_drawn_from_the_csv(capsys, whole, tmp_path):
    picture = tmp_path / "a" / "cifar100.png"
    assert cli.main(["figures", "cifar100", "--csv", str(whole / "results.csv"), "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    tuning(tmp_path / "t.csv")
    assert cli.main(["figures", "cifar100", "--csv", str(tmp_path / "t.csv"), "--out", str(picture)]) == 2
    assert "several settings" in capsys.readouterr().err


@each_rejection(
    rejections("`{}` must be at least 1, but it is {}", "--workers 0"),
    rejections("`{}` cannot be given", "--run.loss bce", "--run.noise 0.5"),
    rejections("`{1}` (`{0}`)", "--tuned no.csv"),
    {"--seeds -1": "`--seed` must be from 0 to 2**32 - 1, but it is -1"},
    {"--learning-rates nan": "`--learning-rate` must be finite and positive, but it is nan"},
    {"--noises 2": "`--noise` must be from 0 to 1, but it is 2.0", "--losses hinge": "hinge"},
)
def test_bad_options(capsys, features, tmp_path, options, needle):
    assert needle in rejected(capsys, words(features, tmp_path / "sweep", *options))


def test_bad_csv(capsys, tmp_path):
    for content in ("", "a,b\n1,2\n", (",".join(AccuracyRecord.__dataclass_fields__) + "\n")):
        (tmp_path / "x.csv").write_text(content)
        assert cli.main(["figures", "cifar100", "--csv", str(tmp_path / "x.csv")]) == 2
        assert "cannot be read as a results CSV" in capsys.readouterr().err
