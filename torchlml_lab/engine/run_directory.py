"""The directory of a run, which stays consistent even if the process is killed.

    run.json            experiment, run id, versions, seed, git commit
    settings.json       all settings
    (others)            files that a task stores for prediction
    metrics.jsonl       one line of JSON per evaluation
    checkpoints/        one directory per retained epoch: weights, optimizer, scheduler, random states
    state.json          the last complete epoch, and which checkpoints are "last" and "best"
    result.json         written when the run has finished
    failed.json         written if the loss became infinite or NaN
    .lock               locked by the process that writes to the directory

A checkpoint is written under a temporary name and then renamed. It becomes valid only when `state.json` is
replaced. Anything that a killed run wrote after that is removed when the run is resumed. The lock is held by
the operating system: a killed process leaves the file `.lock` behind, but not the lock.
"""

import dataclasses
import glob
import json
import os
import platform
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import accelerate
import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

import torchlml
from torchlml_lab.cli_errors import BadInput, reason
from torchlml_lab.engine.settings import SETTINGS_FILE, TrainSettings, from_json, to_json
from torchlml_lab.files import read_record, replacing

if sys.platform == "win32":
    import msvcrt

    def _take(file: IO[str]) -> None:
        # Lock a byte far beyond the text, because a Windows lock also prevents reading.
        file.seek(1 << 20)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _take(file: IO[str]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a directory against other processes within the block.

        with locked(Path("runs/a")):
            ...

    Args:
        folder: An existing directory. If another process has locked it, `BadInput` is raised.
    """
    with _open(folder / ".lock") as file:
        try:
            _take(file)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise BadInput(
                f"`{folder}` is in use by another process (ID {holder}). Wait for it to finish, or stop it."
            ) from None
        except OSError:
            pass  # the file system does not support locks
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _open(path: Path) -> IO[str]:
    try:
        return path.open("a+", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"`{path.parent}` cannot be written to: {reason(error)}.") from error


FORMAT = 2
# The files of a run, in the order in which they are removed. run.json comes first, because a directory
# without it does not count as a run.
_RECORD = ("run.json", SETTINGS_FILE, "metrics.jsonl", "state.json", "result.json", "failed.json")


@dataclass(frozen=True)
class State:
    """The progress of a run: completed epochs, retained checkpoints, best score, and elapsed seconds."""

    epoch: int
    last: str
    best: str
    best_epoch: int
    best_score: float
    processes: int
    seconds: float


@dataclass(frozen=True)
class RunRecord:
    """The fields of `run.json` that are read back."""

    format: int
    experiment: str
    run: str
    versions: dict[str, str]


@dataclass(frozen=True)
class _Written:
    """The fields of a `checkpoint.json` that are read back."""

    run: str
    torchlml: str


@dataclass(frozen=True)
class _Failed:
    """The content of `failed.json`."""

    epoch: int
    loss: str


@dataclass(frozen=True)
class _Result:
    """The content of `result.json`."""

    best_epoch: int
    validation: dict[str, float]
    test: dict[str, float]
    seconds: float


class _Measures(dict[str, float]):
    """The metrics in a `result.json`. Reading a missing metric raises `BadInput`."""

    def __init__(self, values: dict[str, float], path: Path) -> None:
        super().__init__(values)
        self.path = path

    def __missing__(self, name: str) -> float:
        raise BadInput(f"`{self.path}` is damaged: the metric `{name}` is missing.")


class RunFolder:
    """The directory of one run.

    Args:
        path: The path of the directory.
        experiment: The name of the task. `check` raises `BadInput` for a run of another task.
    """

    def __init__(self, path: Path, experiment: str) -> None:
        self.path = path
        self.experiment = experiment
        self.partial = path / "checkpoints" / ".partial"

    def check_free(self, overwrite: bool) -> None:
        """Raise `BadInput` if the directory contains a run, unless it may be overwritten."""
        if not (self.path / "run.json").exists():
            return
        with locked(self.path):  # raises if another process is writing to the run
            pass
        if not overwrite:
            self.check_sound()
            raise BadInput(
                f"`{self.path}` (`--out`) already contains a run. Resume it with "
                f"`--resume {self.path}`, choose another directory, or replace it with `--overwrite`."
            )

    def check_sound(self) -> None:
        """Raise `BadInput` if the loss became infinite or NaN, as it would again in a resumed run."""
        if (self.path / "failed.json").exists():
            failed = read_record(self.path / "failed.json", _Failed)
            raise BadInput(f"`{self.path}`: " + self.failure(failed.epoch, failed.loss))

    def failure(self, epoch: int, loss: str) -> str:
        """Return the message for a run whose loss became infinite or NaN."""
        return (
            f"The loss became {loss} in epoch {epoch}, and a resumed run would repeat this. Start a new run "
            "with a smaller `--learning-rate`, either in another directory (`--out`) or with `--overwrite`."
        )

    def create(self, settings: TrainSettings, stored: Mapping[str, dict[str, Any]]) -> None:
        """Write the files that describe a new run.

        If the directory already contains a run, that run is removed if `overwrite` is set. Otherwise,
        `BadInput` is raised.

        Args:
            settings: The settings of the run.
            stored: Additional JSON files by name.
        """
        if settings.overwrite:
            for name in _RECORD:
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
        elif (self.path / "run.json").exists():
            raise BadInput(f"Another process has just started a run in `{self.path}` (`--out`).")
        self.write_settings(settings)
        for name, values in stored.items():
            self.write(name, values)
        run = {
            "format": FORMAT,
            "experiment": self.experiment,
            "run": uuid.uuid4().hex,
            "seed": settings.seed,
            "versions": {
                "torchlml": torchlml.__version__,
                "torch": str(torch.__version__),
                "accelerate": accelerate.__version__,
                "python": platform.python_version(),
            },
            "git_commit": git_commit(),
        }
        self.write("run.json", run)

    def write_settings(self, settings: TrainSettings) -> None:
        """Write the settings, with absolute paths."""
        self.write(SETTINGS_FILE, to_json(settings))

    def check(self) -> None:
        """Raise `BadInput` if the run is for another task or was written by another version."""
        run = self.record()
        if run.experiment != self.experiment:
            raise BadInput(f"`{self.path}` is a run of the task `{run.experiment}`, not `{self.experiment}`.")
        version = run.versions.get("torchlml")
        if version is None:
            raise BadInput(f"`{self.path / 'run.json'}` is damaged: the version of torchlml is missing.")
        if version != torchlml.__version__:
            raise BadInput(
                f"`{self.path}` was written by torchlml {version}, but the installed version is "
                f"{torchlml.__version__}. A run can be used only with the version that started it."
            )
        if run.format != FORMAT:
            raise BadInput(
                f"`{self.path}` has run format {run.format}, but the installed torchlml reads only format "
                f"{FORMAT}. Start a new run."
            )

    def state(self) -> State | None:
        """Return the progress of the run, or None if no epoch is complete."""
        if not (self.path / "state.json").exists():
            return None
        return read_record(self.path / "state.json", State)

    def record(self) -> RunRecord:
        """Read `run.json`, which identifies the run."""
        return read_record(self.path / "run.json", RunRecord)

    def result(self) -> dict[str, Any]:
        """Return the content of `result.json`: the best epoch, its metrics, and the elapsed seconds."""
        path = self.path / "result.json"
        values = asdict(read_record(path, _Result))
        return values | {split: _Measures(values[split], path) for split in ("validation", "test")}

    def checkpoint(self, name: str) -> Path:
        """Return the directory of a checkpoint, after checking that it belongs to this run and version."""
        path = self.path / "checkpoints" / name
        written = read_record(path / "checkpoint.json", _Written)
        if written.run != self.record().run:
            raise BadInput(f"The checkpoint `{path}` belongs to another run.")
        if written.torchlml != torchlml.__version__:
            raise BadInput(
                f"The checkpoint `{path}` was written by torchlml {written.torchlml}, "
                f"but the installed version is {torchlml.__version__}."
            )
        return path

    def commit(self, state: State) -> None:
        """Make the files in `partial` the last checkpoint, and remove all others except the best."""
        written = {"run": self.record().run, "torchlml": torchlml.__version__, "epoch": state.epoch}
        (self.partial / "checkpoint.json").write_text(json.dumps(written), encoding="utf-8")
        place = self.path / "checkpoints" / state.last
        shutil.rmtree(place, ignore_errors=True)  # left by a run that was killed before it wrote state.json
        self.partial.rename(place)
        self.write("state.json", asdict(state))
        self.drop_checkpoints_beside(state)

    def drop_checkpoints_beside(self, state: State) -> None:
        """Remove all checkpoints except the last and the best."""
        for other in (self.path / "checkpoints").iterdir():
            if other.name not in (state.last, state.best):
                shutil.rmtree(other)

    def add_metrics(self, lines: list[dict[str, Any]]) -> None:
        """Append lines to `metrics.jsonl`."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`, without an incomplete last line left by a killed run."""
        path = self.path / "metrics.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = []
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            if line.endswith("\n"):
                lines.append(_metrics_of(line, f"`{path}`, line {number}"))
        return lines

    def drop_metrics(self) -> None:
        """Remove all metrics, for a run without a complete epoch."""
        (self.path / "metrics.jsonl").unlink(missing_ok=True)

    def drop_metrics_after(self, epoch: int) -> None:
        """Remove the metrics of all epochs after `epoch`, and the test metrics."""
        lines = [line for line in self.metrics() if line["epoch"] <= epoch and line["split"] != "test"]
        with replacing(self.path / "metrics.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def write(self, name: str, values: dict[str, Any]) -> None:
        """Write a JSON file atomically."""
        with replacing(self.path / name) as temporary:
            temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _metrics_of(line: str, where: str) -> dict[str, Any]:
    """Parse a line of `metrics.jsonl`. A line with any other content raises `BadInput`."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise BadInput(f"{where}: the file is damaged, because the line is not JSON.") from error
    numbers = isinstance(values, dict) and all(
        isinstance(value, (int, float)) for name, value in values.items() if name != "split"
    )
    if not numbers or "epoch" not in values or not isinstance(values.get("split"), str):
        raise BadInput(f"{where}: the file is damaged, because the line does not contain metrics.")
    return dict(values)


def git_commit() -> str | None:
    """Return the git commit of this package (`+` marks uncommitted changes), or None outside a checkout."""
    here = Path(torchlml.__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # fails if the checkout belongs to another project
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


Settings = TypeVar("Settings", bound=TrainSettings)


class BestEpoch(NamedTuple):
    """The best epoch of a run and the file with its weights."""

    epoch: int
    weights: Path

    def load(self, model: nn.Module) -> None:
        """Load the weights into a network and set it to evaluation mode.

        A file for another model, or with weights that are NaN or infinite, raises `BadInput`.
        """
        try:
            load_model(model, str(self.weights))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise BadInput(f"`{self.weights}` is damaged or belongs to another model.") from error
        for name, values in model.named_parameters():
            wrong = values[~values.isfinite()]
            if wrong.numel():
                raise BadInput(f"`{self.weights}` is damaged: `{name}` contains {wrong[0].item()}.")
        model.eval()


def find_best_epoch(experiment: str, run: Path) -> BestEpoch:
    """Find the best epoch of a run so far. A run without a complete epoch raises `BadInput`."""
    folder = RunFolder(run, experiment)
    folder.check()
    state = folder.state()
    if state is None:
        raise BadInput(f"`{run}` has no complete epoch yet.")
    return BestEpoch(state.best_epoch, folder.checkpoint(state.best) / "model.safetensors")


def read_moved(
    kind: type[Settings], run: Path, moved: Mapping[str, Path | tuple[Path, ...] | None]
) -> Settings:
    """Read the settings of a run, with new paths for data that has moved.

    Args:
        kind: The settings class of the task.
        run: The run directory.
        moved: New paths by setting name. None means that the data has not moved. A path may be a glob
            pattern.

    Returns:
        The settings. `BadInput` is raised if a new path is given for data that the run did not use, or if
        data is no longer at its stored path and no new path is given.
    """
    settings = from_json(kind, run / SETTINGS_FILE)
    for name, path in moved.items():
        option = "--" + name.replace("_", "-")
        stored = getattr(settings, name)
        if path is not None and stored is None:
            raise BadInput(f"`{option}` is given, but the run `{run}` was started without it.")
        several = stored if isinstance(stored, tuple) else () if stored is None else (stored,)
        gone = next((one for one in several if not one.exists() and not glob.glob(str(one))), None)
        if path is None and gone is not None:
            raise BadInput(
                f"The run `{run}` was started with `{option} {gone}`, which no longer exists. "
                f"Pass its new location with `{option}`."
            )
    changes: dict[str, Any] = {name: path for name, path in moved.items() if path is not None}
    return dataclasses.replace(settings, **changes)
