"""The training engine: killed and interrupted runs, full disks, invalid requests, and two processes."""

import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model

import torchlml
from tests.support.command_lines import each_rejection, rejected, rejections
from tests.support.features import write_features
from tests.support.processes import output, start, start_two
from torchlml_lab import cli
from torchlml_lab.engine import loop
from torchlml_lab.engine import run as run_of_engine
from torchlml_lab.engine.loop import EpochBatches
from torchlml_lab.engine.run_directory import RunFolder
from torchlml_lab.engine.settings import cores, use_threads
from torchlml_lab.studies.cifar100.data import read_features
from torchlml_lab.studies.cifar100.settings import Cifar100Settings
from torchlml_lab.studies.cifar100.task import feature_head


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """A small file of synthetic features whose classes (100 fine, 20 coarse) are easy to learn."""
    return write_features(tmp_path_factory.mktemp("features"), 16)


def words(features, out, *more):
    options = ["--features", str(features), "--out", str(out), "--validation", "400", "--batch-size", "100"]
    return ["train", "cifar100", *options, "--epochs", "6", "--noise", "0.4", *more]


def wait_for_epoch(folder, epoch, running):
    limit = time.monotonic() + 120
    while time.monotonic() < limit and running.running():
        state = folder / "state.json"
        if state.exists() and json.loads(state.read_text())["epoch"] >= epoch:
            return
        time.sleep(0.005)
    raise AssertionError(running.end())


@pytest.fixture(scope="module")
def whole(features, tmp_path_factory):
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert "Test results for epoch" in output(start(words(features, out)))[0]
    return out


def killed(features, out):
    """Start a run and kill it after its second epoch."""
    running = start(words(features, out))
    wait_for_epoch(out, 2, running)
    running.kill()


def resume(out):
    return ["train", "cifar100", "--resume", str(out)]


def same(one, other):
    """Check that the metrics and the last weights are byte-for-byte identical."""
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    weights = [
        (run / "checkpoints" / "epoch-0006" / "model.safetensors").read_bytes() for run in (one, other)
    ]
    assert weights[0] == weights[1]


def lines_of(run):
    """Return the validation and test lines of a run's metrics."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] != "train"]


def test_a_run_is_recorded(whole):
    run = json.loads((whole / "run.json").read_text())
    assert run["experiment"] == "cifar100"
    assert run["versions"]["torch"] == torch.__version__
    assert run["git_commit"] is None or re.fullmatch(r"[0-9a-f]{40}\+?", run["git_commit"])
    settings = json.loads((whole / "settings.json").read_text())
    assert settings["noise"] == 0.4
    assert set(settings) == {f.name for f in dataclasses.fields(Cifar100Settings)} - {"resume", "overwrite"}
    lines = lines_of(whole)
    assert [line["epoch"] for line in lines[:-1]] == [1, 2, 3, 4, 5, 6]
    best = max(lines[:-1], key=lambda line: (line["top5"], -line["epoch"]))
    result = json.loads((whole / "result.json").read_text())
    assert result["best_epoch"] == best["epoch"] == lines[-1]["epoch"]
    assert result["validation"] == {key: best[key] for key in ("top1", "top5")}
    assert lines[-1]["split"] == "test"
    kept = {path.name for path in (whole / "checkpoints").iterdir()}
    assert kept == {"epoch-0006", f"epoch-{best['epoch']:04d}"}


def test_a_killed_and_resumed_run_equals_an_undisturbed_run(features, whole, tmp_path):
    out = tmp_path / "run"
    killed(features, out)
    assert not (out / "result.json").exists(), "the run finished before it was killed"
    output(start(resume(out)))
    same(out, whole)


def test_an_interrupted_run_says_how_to_continue(features, whole, tmp_path):
    out = tmp_path / "run"
    running = start(words(features, out))
    wait_for_epoch(out, 1, running)
    running.send_signal(signal.SIGINT)
    _, errors = output(running, code=130, seconds=60)
    said = re.fullmatch(r"torchlml: Interrupted\. .* saved\. Resume the run with `torchlml (.*)`\.\n", errors)
    assert said, errors
    output(start(said[1].split()))
    same(out, whole)


def test_resuming_a_finished_run_changes_nothing(capsys, whole):
    before = (whole / "metrics.jsonl").read_bytes()
    assert cli.main(resume(whole)) == 0
    assert "Test results for epoch" in capsys.readouterr().out
    assert (whole / "metrics.jsonl").read_bytes() == before


def full_disk(size):
    """Limit the size of files, so that larger writes fail as on a full disk, even in compiled libraries."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("kept", ["nothing", "the weights"])
def test_a_full_disk_leaves_a_usable_run(features, whole, tmp_path, kept):
    """A run can be resumed after a full disk prevented writing the weights, or only the optimizer state."""
    out = tmp_path / "run"
    weights = (whole / "checkpoints" / "epoch-0006" / "model.safetensors").stat().st_size
    killed(features, out)
    before = (out / "state.json").read_bytes()
    # A run that is killed just before or after its state is written leaves a superfluous checkpoint like this
    # one, which must also be removed.
    shutil.copytree(out / "checkpoints" / json.loads(before)["last"], out / "checkpoints" / "epoch-0000")
    limit = 20_000 if kept == "nothing" else weights + 100
    _, errors = output(start(resume(out), partial(full_disk, limit)), code=1)
    assert re.fullmatch(r"torchlml: The checkpoint of epoch \d could not be written to .*\.\n", errors), (
        errors
    )
    why = "file too large" if kept == "nothing" else r"a file is incomplete .free disk space: .* GB"
    assert re.search(rf"`{out}`: {why}.*\. Earlier epochs are intact", errors), errors
    assert "enforce" not in errors
    assert "os error" not in errors
    assert (out / "state.json").read_bytes() == before
    state = json.loads(before)
    kept = {path.name for path in (out / "checkpoints").iterdir()}
    assert kept == {state["last"], state["best"]}
    output(start(resume(out)))
    same(out, whole)


@pytest.fixture
def unfinished(whole, tmp_path):
    """A copy of the uninterrupted run without its test result."""
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    return tmp_path / "run"


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_metrics_after_the_last_checkpoint_are_dropped(capsys, unfinished, whole):
    # The file contains the test result, a line for an epoch without a checkpoint, and an incomplete line.
    with (unfinished / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 7, "split": "validation"}\n{"epo')
    (unfinished / "checkpoints" / ".partial").mkdir()
    assert cli.main(resume(unfinished)) == 0
    assert (unfinished / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def die_before_the_first_commit():
    """Make this process kill itself after writing the first epoch's metrics, but before writing the state."""

    def commit(self, state):
        os.kill(os.getpid(), signal.SIGKILL)

    RunFolder.commit = commit  # type: ignore[method-assign]


@pytest.mark.parametrize("half", [False, True])
def test_a_run_killed_before_its_first_state_starts_again(features, whole, tmp_path, half):
    out = tmp_path / "run"
    output(start(words(features, out), die_before_the_first_commit), code=-signal.SIGKILL)
    metrics = out / "metrics.jsonl"
    assert metrics.exists()
    assert not (out / "state.json").exists()
    if half:  # killed in the middle of the write
        metrics.write_bytes(metrics.read_bytes()[:-20])
    output(start(resume(out)))
    same(out, whole)


def test_a_checkpoint_of_another_run_is_rejected(capsys, unfinished):
    edit(next((unfinished / "checkpoints").glob("epoch-0006/checkpoint.json")), run="0" * 32)
    assert "belongs to another run" in rejected(capsys, resume(unfinished))


def test_a_run_of_another_version_is_rejected(capsys, unfinished):
    edit(unfinished / "run.json", versions={"torchlml": "0.0.1"})
    error = rejected(capsys, resume(unfinished))
    assert f"was written by torchlml 0.0.1, but the installed version is {torchlml.__version__}" in error


def test_a_run_in_another_format_is_rejected(capsys, unfinished):
    edit(unfinished / "run.json", format=1)
    assert "has run format 1, but the installed torchlml reads only format 2" in rejected(
        capsys, resume(unfinished)
    )


def test_a_run_of_another_experiment_is_rejected(capsys, unfinished):
    edit(unfinished / "run.json", experiment="scene-graph")
    assert "is a run of the task `scene-graph`" in rejected(capsys, resume(unfinished))


def test_other_settings_are_rejected(capsys, unfinished):
    error = rejected(capsys, [*resume(unfinished), "--noise", "0.8"])
    assert "`--noise` is 0.8, but the run" in error
    assert "was started with 0.4" in error


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin"])
def test_a_damaged_checkpoint_is_rejected(capsys, unfinished, name):
    path = unfinished / "checkpoints" / "epoch-0006" / name
    path.write_bytes(path.read_bytes()[:100])
    assert "is damaged or belongs to another model" in rejected(capsys, resume(unfinished))


@pytest.mark.parametrize("kept", [0, 100, None])
def test_damaged_random_states_are_rejected(capsys, unfinished, kept):
    """Without the saved states, a resumed run would use other random numbers and report other metrics."""
    path = unfinished / "checkpoints" / "epoch-0006" / "random_states_0.pkl"
    if kept is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:kept])
    error = rejected(capsys, resume(unfinished))
    assert "is damaged or belongs to another model" in error
    assert "`random_states_0.pkl` cannot be read" in error


def test_random_states_that_accelerate_skips_are_rejected(capsys, unfinished):
    """If one random state is missing, accelerate restores none of them and only logs a message."""
    path = unfinished / "checkpoints" / "epoch-0006" / "random_states_0.pkl"
    states = torch.load(path, weights_only=False)
    del states["numpy_random_seed"]
    torch.save(states, path)
    error = rejected(capsys, resume(unfinished))
    assert "is damaged or belongs to another model: `random_states_0.pkl` cannot be used." in error


def test_a_run_is_written_by_one_process_at_a_time(features, tmp_path, capsys):
    out = tmp_path / "run"
    running = start(words(features, out, "--epochs", "100000"))
    wait_for_epoch(out, 1, running)
    try:
        for arguments in (
            resume(out),
            words(features, out),
            words(features, out, "--overwrite"),
        ):
            said = rejected(capsys, arguments)
            assert f"`{out}` is in use by another process (ID {running.pid})" in said
        state = json.loads((out / "state.json").read_text())
        wait_for_epoch(out, state["epoch"] + 2, running)
    finally:
        running.kill()
    # The lock is released when its process ends, so the run can be resumed.
    epochs = [line["epoch"] for line in lines_of(out)]
    assert epochs == list(range(1, len(epochs) + 1))
    again = start(resume(out))
    wait_for_epoch(out, epochs[-1] + 1, again)
    again.kill()


def test_a_loss_that_became_nan_ends_the_run_for_good(capsys, features, tmp_path):
    out = tmp_path / "run"
    huge = ["--loss", "bce", "--learning-rate", "1e30"]
    assert cli.main(words(features, out, *huge)) == 1
    assert "The loss became nan in epoch 1" in capsys.readouterr().err
    # Resuming fails with a message that suggests `--overwrite`, which works.
    for arguments in (words(features, out), resume(out)):
        assert cli.main(arguments) == 2
        error = capsys.readouterr().err
        assert "became nan in epoch 1" in error
        assert "a smaller `--learning-rate`" in error
        assert "`--overwrite`" in error
        assert "continue it" not in error
    assert cli.main(words(features, out, "--overwrite", "--epochs", "1")) == 0
    assert "Test results for epoch 1" in capsys.readouterr().out
    assert not (out / "failed.json").exists()


def test_overwrite_removes_the_run_and_nothing_else(capsys, features, unfinished):
    (unfinished / "notes.txt").write_text("mine")
    assert cli.main(words(features, unfinished, "--overwrite", "--epochs", "1")) == 0
    assert (unfinished / "notes.txt").read_text() == "mine"
    assert [line["epoch"] for line in lines_of(unfinished)] == [1, 1]
    assert cli.main(["train", "cifar100", "--resume", str(unfinished), "--overwrite"]) == 2
    assert "`--overwrite`" in capsys.readouterr().err


def test_paths_are_stored_absolute_and_data_may_move(capsys, features, tmp_path, monkeypatch):
    monkeypatch.chdir(features.parent)
    out = tmp_path / "run"
    assert cli.main(words(Path(features.name), out, "--epochs", "2")) == 0
    assert json.loads((out / "settings.json").read_text())["features"] == str(features)
    monkeypatch.chdir(tmp_path)
    (out / "result.json").unlink()
    assert cli.main(resume(out)) == 0
    (out / "result.json").unlink()
    moved = tmp_path / "moved.npz"
    shutil.copy(features, moved)
    assert cli.main(["train", "cifar100", "--resume", str(out), "--features", "moved.npz"]) == 0
    assert json.loads((out / "settings.json").read_text())["features"] == str(moved)
    capsys.readouterr()
    assert "`--data` is given" in rejected(capsys, [*resume(out), "--data", "x"])


def test_small_networks_use_one_thread_by_default(features, whole, tmp_path, monkeypatch):
    used = []

    def recorded(threads):
        used.append(threads)
        return use_threads(threads)

    monkeypatch.setattr(run_of_engine, "use_threads", recorded)
    with use_threads(2):
        assert cli.main(words(features, tmp_path / "default", "--epochs", "1")) == 0
        assert cli.main(words(features, tmp_path / "two", "--threads", "2")) == 0
    assert used == [1, 2]
    # Apart from rounding, the number of threads changes only the speed.
    results = (json.loads((run / "result.json").read_text())["test"] for run in (tmp_path / "two", whole))
    assert next(results) == pytest.approx(next(results), abs=0.02)


def test_every_line_reports_percentages(capsys, whole, features, tmp_path):
    assert cli.main(words(features, tmp_path / "run", "--epochs", "2")) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "top5" in line]
    assert len(lines) == 3
    for line in lines:
        assert re.search(r"top1 \d+\.\d\d%, top5 \d+\.\d\d%", line), line


def test_a_long_run_says_so_at_the_start(capsys, features, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "LONG", 1e-6)
    assert cli.main(words(features, tmp_path / "run", "--epochs", "2")) == 0
    first = capsys.readouterr().out.splitlines()[0]
    time, memory = r"\d+ \w+", r"\d\.\d GB of memory"
    assert re.fullmatch(
        rf"2 epochs of 20 batches will take about {time} on this CPU \({time} per epoch\) "
        rf"and use about {memory}\.",
        first,
    )


def test_the_forecast_does_not_change_the_metrics(features, tmp_path, monkeypatch):
    monkeypatch.setattr(run_of_engine, "forecast", lambda *arguments: None)
    assert cli.main(words(features, tmp_path / "without", "--epochs", "2")) == 0
    monkeypatch.undo()
    assert cli.main(words(features, tmp_path / "with", "--epochs", "2")) == 0
    found = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("without", "with")]
    assert found[0] == found[1]


def test_an_unwritable_output_directory_is_rejected_before_any_work(capsys, features, monkeypatch):
    def work(*arguments):
        raise AssertionError("work was done")

    monkeypatch.setattr(run_of_engine, "_Run", work)
    for out in ("/proc/nothing/run", features / "run"):
        error = rejected(capsys, words(features, out))
        assert f"`{out}` (`--out`) cannot be written" in error


@pytest.mark.parametrize("name", ["state.json", "run.json", "settings.json"])
def test_a_damaged_record_is_rejected(capsys, unfinished, name):
    (unfinished / name).write_text('{"half')
    assert str(unfinished) in rejected(capsys, resume(unfinished))


def test_a_folder_without_a_run_is_rejected(capsys, tmp_path):
    assert "is not a run directory" in rejected(capsys, resume(tmp_path))


def test_a_run_is_not_overwritten(capsys, features, whole):
    assert cli.main(words(features, whole)) == 2
    assert f"`--resume {whole}`, choose another directory" in capsys.readouterr().err


def test_two_processes(features, tmp_path):
    out = tmp_path / "run"
    printed, _ = output(*start_two(words(features, out, "--cpu", "--noise", "0")))
    assert printed.count("Test results for epoch") == 1
    state = json.loads((out / "state.json").read_text())
    assert state["processes"] == 2
    lines = lines_of(out)
    assert [line["epoch"] for line in lines[:-1]] == [1, 2, 3, 4, 5, 6]
    # The model learned. If every sample was counted once, one process with the same weights gets the same
    # test result.
    assert lines[-1]["top5"] > 0.5
    network = feature_head(16, 100).eval()
    load_model(network, out / "checkpoints" / state["best"] / "model.safetensors")
    _, test = read_features(features)
    top = network(test.x).topk(5).indices == test.fine.unsqueeze(1)
    for name, found in (("top5", top.any(1)), ("top1", top[:, 0])):
        assert lines[-1][name] == found.double().mean().float().item()  # the metric reports float32
    weights = {path.name for path in (out / "checkpoints" / "epoch-0006").iterdir()}
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= weights


def test_data_order_depends_only_on_seed_and_epoch():
    def order(seed, epoch):
        batches = EpochBatches(10, 4, seed, shuffle=True)
        batches.epoch = epoch
        return list(batches)

    assert [len(batch) for batch in order(0, 1)] == [4, 4, 2]
    assert sorted(row for batch in order(0, 1) for row in batch) == list(range(10))
    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2)
    assert order(0, 1) != order(1, 1)


def test_help_explains_every_setting(capsys):
    assert cli.main(["train", "cifar100", "--help"]) == 0
    said = " ".join(re.sub("[│╭╰─╮╯]", " ", capsys.readouterr().out).split())
    for field in dataclasses.fields(Cifar100Settings):
        option = "--" + field.name.replace("_", "-")
        metavar = r"(?:[A-Z]+ |\{[^}]*\} )?"
        end = r"(?= --|$)" if field.default in (None, ()) or field.default is False else r" \(default: \S"
        assert re.search(rf"{option} {metavar}[A-Z`][\w`]*(?: \S+){{3,}}\.{end}", said), option


@each_rejection(
    rejections("`{}` must be at least 1, but it is {}", "--epochs 0", "--batch-size 0"),
    rejections("`{}` must be finite and positive, but it is {}", "--learning-rate nan"),
    rejections("`{}` must be from 0 to 2**32 - 1, but it is {}", "--seed -1"),
    rejections(f"`{{}}` must be from 1 to {cores()} (the number of cores), but it is {{}}", "--threads 0"),
    {f"--out '{__file__}'": "`--out` must be a directory"},
)
def test_bad_settings(capsys, options, needle):
    assert needle in rejected(capsys, ["train", "cifar100", *options])
