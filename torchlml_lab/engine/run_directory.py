"""The directory of a run, which is complete at every moment, even if the program is killed.

    run.json            which experiment, run id, versions, seed, git commit
    settings.json       every setting
    (others)            files that a task stores for its predictions
    metrics.jsonl       one line of JSON per evaluation
    checkpoints/        one folder per kept epoch: weights, optimizer, schedule, random states
    state.json          the last complete epoch and which checkpoints are "last" and "best"
    result.json         written when the run has finished
    failed.json         written when its loss became infinite or NaN
    .lock               held by the process that writes the directory

A checkpoint is written under a temporary name and renamed; then `state.json` is replaced, and only that makes
it count. Anything that a killed run left after `state.json` is dropped when it is continued. The operating
system holds the lock: a killed process leaves the file `.lock` behind, but not the lock.
"""

import dataclasses
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
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.settings import SETTINGS_FILE, TrainSettings, from_json, to_json
from torchlml_lab.files import read_record, replacing

if sys.platform == "win32":
    import msvcrt

    def _take(file: IO[str]) -> None:
        # A byte far behind the text, which stays readable: locks of Windows forbid reading too.
        file.seek(1 << 20)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _take(file: IO[str]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder within the block.

        with locked(Path("runs/a")):
            ...

    Args:
        folder: It must exist; when another process holds it, that raises `BadInput`.
    """
    with _open(folder / ".lock") as file:
        try:
            _take(file)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            holder = file.read().strip() or "its number is not known"
            raise BadInput(
                f"`{folder}` is in use by another process ({holder}): wait for it, or stop it first."
            ) from None
        except OSError:
            pass  # a file system without locks: as safe as it can be there
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _open(path: Path) -> IO[str]:
    try:
        return path.open("a+", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"`{path.parent}` cannot be written: {error.strerror}.") from error


FORMAT = 2
# run.json goes first: without it the folder holds no run, whatever else is left of it.
_RECORD = ("run.json", SETTINGS_FILE, "metrics.jsonl", "state.json", "result.json", "failed.json")


@dataclass(frozen=True)
class State:
    """How far a run is: whole epochs done, the kept checkpoints, the best score, and the seconds it took."""

    epoch: int
    last: str
    best: str
    best_epoch: int
    best_score: float
    processes: int
    seconds: float


@dataclass(frozen=True)
class RunRecord:
    """The entries of `run.json` that are read back."""

    format: int
    experiment: str
    run: str
    versions: dict[str, str]


@dataclass(frozen=True)
class _Written:
    """The entries of a `checkpoint.json` that are read back."""

    run: str
    torchlml: str


@dataclass(frozen=True)
class _Failed:
    """A `failed.json`."""

    epoch: int
    loss: str


@dataclass(frozen=True)
class _Result:
    """A `result.json`."""

    best_epoch: int
    validation: dict[str, float]
    test: dict[str, float]
    seconds: float


class _Measures(dict[str, float]):
    """The measures of a `result.json`; one that is missing raises `BadInput`."""

    def __init__(self, values: dict[str, float], path: Path) -> None:
        super().__init__(values)
        self.path = path

    def __missing__(self, name: str) -> float:
        raise BadInput(f"`{self.path}` is damaged: the measure `{name}` is missing.")


class RunFolder:
    """The folder of one run.

    Args:
        path: Where it is.
        experiment: The experiment's name; a folder of another experiment is refused.
    """

    def __init__(self, path: Path, experiment: str) -> None:
        self.path = path
        self.experiment = experiment
        self.partial = path / "checkpoints" / ".partial"

    def check_free(self, overwrite: bool) -> None:
        """Refuse a folder that holds a run, unless that may be removed."""
        if not (self.path / "run.json").exists():
            return
        with locked(self.path):  # a run that is under way is nobody else's to continue or remove
            pass
        if not overwrite:
            self.check_sound()
            raise BadInput(
                f"`--out` names `{self.path}`, which holds a run: continue it with `--resume {self.path}`, "
                "give another folder, or replace it with `--overwrite`."
            )

    def check_sound(self) -> None:
        """Refuse a run whose loss became infinite or NaN: continued, it would do so again."""
        if (self.path / "failed.json").exists():
            failed = read_record(self.path / "failed.json", _Failed)
            raise BadInput(f"`{self.path}`: " + self.failure(failed.epoch, failed.loss))

    def failure(self, epoch: int, loss: str) -> str:
        """What is said of a run whose loss became infinite or NaN, when it happens and ever after."""
        return (
            f"The loss became {loss} in epoch {epoch}, and would again: begin a new run with a smaller "
            "`--learning-rate`, in another `--out` or with `--overwrite`."
        )

    def create(self, settings: TrainSettings, stored: Mapping[str, dict[str, Any]]) -> None:
        """Begin the record of a new run; one that is there is refused, or removed with `overwrite`.

        Args:
            settings: The run.
            stored: Further JSON files by name.
        """
        if settings.overwrite:
            for name in _RECORD:
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
        elif (self.path / "run.json").exists():
            raise BadInput(f"`--out` names `{self.path}`, where another process has just begun a run.")
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
        """Write the settings, with whole paths."""
        self.write(SETTINGS_FILE, to_json(settings))

    def check(self) -> None:
        """Refuse to continue what another experiment or another version has written."""
        run = self.record()
        if run.experiment != self.experiment:
            raise BadInput(f"`{self.path}` holds a run of `{run.experiment}`, not of `{self.experiment}`.")
        version = run.versions.get("torchlml")
        if version is None:
            raise BadInput(f"`{self.path / 'run.json'}` is damaged: the version of torchlml is missing.")
        if run.format != FORMAT or version != torchlml.__version__:
            raise BadInput(
                f"`{self.path}` was written by torchlml {version}, and this is {torchlml.__version__}: "
                "a run is continued by the version that began it."
            )

    def state(self) -> State | None:
        """How far the run is; None when no epoch was finished."""
        if not (self.path / "state.json").exists():
            return None
        return read_record(self.path / "state.json", State)

    def record(self) -> RunRecord:
        """Which run this is."""
        return read_record(self.path / "run.json", RunRecord)

    def result(self) -> dict[str, Any]:
        """The content of `result.json`: the best epoch, its measures, and the seconds."""
        path = self.path / "result.json"
        values = asdict(read_record(path, _Result))
        return values | {split: _Measures(values[split], path) for split in ("validation", "test")}

    def checkpoint(self, name: str) -> Path:
        """The folder of a checkpoint, checked to be of this run and version."""
        path = self.path / "checkpoints" / name
        written = read_record(path / "checkpoint.json", _Written)
        if written.run != self.record().run:
            raise BadInput(f"The checkpoint `{path}` is of another run.")
        if written.torchlml != torchlml.__version__:
            raise BadInput(
                f"The checkpoint `{path}` was written by torchlml {written.torchlml}, "
                f"and this is {torchlml.__version__}."
            )
        return path

    def commit(self, state: State) -> None:
        """Make what was saved under `partial` the last checkpoint, and drop those no longer needed."""
        written = {"run": self.record().run, "torchlml": torchlml.__version__, "epoch": state.epoch}
        (self.partial / "checkpoint.json").write_text(json.dumps(written), encoding="utf-8")
        place = self.path / "checkpoints" / state.last
        shutil.rmtree(place, ignore_errors=True)  # left by a run that was killed between rename and commit
        self.partial.rename(place)
        self.write("state.json", asdict(state))
        self.drop_checkpoints_beside(state)

    def drop_checkpoints_beside(self, state: State) -> None:
        """Keep only the last and the best checkpoint."""
        for other in (self.path / "checkpoints").iterdir():
            if other.name not in (state.last, state.best):
                shutil.rmtree(other)

    def add_metrics(self, lines: list[dict[str, Any]]) -> None:
        """Add lines to `metrics.jsonl`."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`; half a line that a killed run left is not one."""
        path = self.path / "metrics.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = []
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            if line.endswith("\n"):
                lines.append(_metrics_of(line, f"`{path}`, line {number}"))
        return lines

    def drop_metrics(self) -> None:
        """Remove all metrics: without a state no epoch is whole."""
        (self.path / "metrics.jsonl").unlink(missing_ok=True)

    def drop_metrics_after(self, epoch: int) -> None:
        """Keep only the lines of whole epochs."""
        lines = [line for line in self.metrics() if line["epoch"] <= epoch and line["split"] != "test"]
        with replacing(self.path / "metrics.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def write(self, name: str, values: dict[str, Any]) -> None:
        """Write a JSON file whole or not at all."""
        with replacing(self.path / name) as temporary:
            temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _metrics_of(line: str, where: str) -> dict[str, Any]:
    """A line of `metrics.jsonl`; anything else raises `BadInput`."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise BadInput(f"{where}: the file is damaged, this is not JSON.") from error
    numbers = isinstance(values, dict) and all(
        isinstance(value, (int, float)) for name, value in values.items() if name != "split"
    )
    if not numbers or "epoch" not in values or not isinstance(values.get("split"), str):
        raise BadInput(f"{where}: the file is damaged, this is not a line of metrics.")
    return dict(values)


def git_commit() -> str | None:
    """The commit of the checkout this package runs from, with `+` where files changed; None elsewhere."""
    here = Path(torchlml.__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # a checkout of something else does not know us
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


Settings = TypeVar("Settings", bound=TrainSettings)


class BestEpoch(NamedTuple):
    """Where the weights of a run's best epoch are."""

    epoch: int
    weights: Path

    def load(self, model: nn.Module) -> None:
        """Read the weights into a network that is ready to predict afterwards.

        A file of another model, or with weights that are NaN or infinite, raises `BadInput`.
        """
        try:
            load_model(model, str(self.weights))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise BadInput(f"`{self.weights}` is damaged or of another model.") from error
        for name, values in model.named_parameters():
            wrong = values[~values.isfinite()]
            if wrong.numel():
                raise BadInput(f"`{self.weights}` is damaged: `{name}` holds {wrong[0].item()}.")
        model.eval()


def find_best_epoch(experiment: str, run: Path) -> BestEpoch:
    """The best epoch of a run so far; a folder without a run or a whole epoch raises `BadInput`."""
    folder = RunFolder(run, experiment)
    folder.check()
    state = folder.state()
    if state is None:
        raise BadInput(f"`{run}` has no finished epoch yet.")
    return BestEpoch(state.best_epoch, folder.checkpoint(state.best) / "model.safetensors")


def read_moved(kind: type[Settings], run: Path, moved: dict[str, Path | None]) -> Settings:
    """The settings of a run, with the paths of data that have moved since.

    Args:
        kind: The task's settings.
        run: The folder of the run.
        moved: New paths by the names of the settings; None where nothing has moved.

    Returns:
        The settings. Data that the run did not use, or that are nowhere, raise `BadInput`.
    """
    settings = from_json(kind, run / SETTINGS_FILE)
    for name, path in moved.items():
        option = "--" + name.replace("_", "-")
        stored = getattr(settings, name)
        if path is not None and stored is None:
            raise BadInput(f"`{option}` is given, but the run `{run}` was started without it.")
        if path is None and stored is not None and not stored.exists():
            raise BadInput(
                f"The run `{run}` was started with `{option} {stored}`, which is not there any more: "
                f"say with `{option}` where it is now."
            )
    changes: dict[str, Any] = {name: path for name, path in moved.items() if path is not None}
    return dataclasses.replace(settings, **changes)
