"""The record of a run: a folder that is whole at every moment, whatever kills the program.

    run.json            which experiment, run id, versions, seed, git commit
    settings.json       every setting
    (others)            what a task stores for its predictions
    metrics.jsonl       one line of JSON per evaluation
    checkpoints/        one folder per kept epoch: weights, optimizer, schedule, random states
    state.json          the last whole epoch and which checkpoints are "last" and "best"
    result.json         there when the run is finished
    failed.json         there when its loss became infinite or NaN
    .lock               held by the process that writes the folder

A checkpoint is written under a temporary name and renamed; then `state.json` is replaced, and only that makes
it count. What a killed run left beyond `state.json` is dropped when it is continued.
"""

import json
import platform
import shutil
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch

import torchlml
from torchlml_lab.engine.lock import locked
from torchlml_lab.engine.settings import SETTINGS_FILE, TrainSettings, to_json
from torchlml_lab.errors import BadInput
from torchlml_lab.files import replacing
from torchlml_lab.json_records import read_record

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
