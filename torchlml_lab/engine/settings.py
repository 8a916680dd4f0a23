"""The settings of every training run, sweep and timing, and reading them from options or from a run."""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

import torch

from torchlml_lab.cli import parse_settings
from torchlml_lab.cli_errors import BadInput


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_threads(threads: int, option: str = "--threads") -> None:
    """Refuse less than one thread, and more than there are cores: they would only wait for one another."""
    if not 1 <= threads <= cores():
        raise BadInput(
            f"`{option}` is {threads}, and must be from 1 to {cores()}, the cores of this machine."
        )


@contextmanager
def use_threads(threads: int) -> Iterator[None]:
    """Let torch use so many threads within the block, and as many as before after it.

        with use_threads(1):
            ...

    Args:
        threads: At least 1.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class TrainSettings:
    """What every task can be told; a task's own settings extend it, and repeat only what differs."""

    out: Path = Path("runs/run")
    """The run's folder: settings, metrics and checkpoints go there. It must not hold another run."""
    resume: Path | None = None
    """Continue the run in this folder after its last whole epoch, with the settings it was started with."""
    overwrite: bool = False
    """Remove the run that `--out` holds, and begin a new one there."""
    seed: int = 0
    """Decides the first weights, the order of the data and every other random choice."""
    epochs: int = 10
    """How often the training data are seen, at least once."""
    batch_size: int = 64
    """Samples per step, over all processes together; a multiple of the number of processes."""
    learning_rate: float = 0.1
    """The learning rate at the start."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Compute in half precision where it is safe, keeping the weights in float32; fp16 is meant for GPUs."""
    cpu: bool = False
    """Stay on the CPU even where a GPU is available."""
    threads: int | None = None
    """How many threads compute on the CPU, from 1 to the cores; by default as many as the task gains from."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, into the run's folder; needs the package `tensorboard`."""


# How a run is called, not what it is.
_CALL = {"resume", "overwrite"}
# These may change when a run is continued: they do not change its numbers, or only in the last digit.
FREE = _CALL | {"out", "tensorboard", "threads"}
SETTINGS_FILE = "settings.json"

Settings = TypeVar("Settings", bound=TrainSettings)


def read_settings(
    kind: type[Settings], command: str, arguments: Sequence[str], default: Settings
) -> Settings:
    """Read the options; with `--resume FOLDER`, those that the run was started with are the defaults.

    Args:
        kind: The task's settings.
        command: The command's name, for the help and the errors.
        arguments: What followed it.
        default: The settings where an option is not given.

    Returns:
        The settings. An option that contradicts the run to be continued raises `BadInput`.
    """
    folder = _resumed_folder(arguments)
    if folder is None:
        settings = parse_settings(kind, command, arguments, default)
    else:
        stored = from_json(kind, folder / SETTINGS_FILE)
        settings = parse_settings(kind, command, arguments, stored)
        for field in dataclasses.fields(settings):
            _check_unchanged(folder, field.name, getattr(settings, field.name), getattr(stored, field.name))
        if settings.overwrite:
            raise BadInput("`--overwrite` begins a new run, and `--resume` continues one: give one of them.")
    check(settings)
    return settings


def to_json(settings: TrainSettings) -> dict[str, Any]:
    """The settings as JSON's types, with whole paths: a run does not depend on the folder it was begun in."""
    values = {name: value for name, value in dataclasses.asdict(settings).items() if name not in _CALL}
    return {name: _json_value(value) for name, value in values.items()}


def _json_value(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    return list(value) if isinstance(value, tuple) else value


def from_json(kind: type[Settings], path: Path) -> Settings:
    """Read the settings that `to_json` gave; a file that holds something else raises `BadInput`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        hints = get_type_hints(kind)
        names = {field.name for field in dataclasses.fields(kind)} - _CALL
        if set(values) != names:
            raise ValueError("its settings are not those of this task and version")
        for name, value in values.items():
            if hints[name] in (Path, Path | None) and value is not None:
                values[name] = Path(value)
            elif isinstance(value, list):
                values[name] = tuple(value)
        return kind(**values)
    except (OSError, ValueError, TypeError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise BadInput(f"`{path.parent}` holds no run of this version: {said}.") from error


def _check_unchanged(folder: Path, name: str, now: object, then: object) -> None:
    """Refuse an option that would make another run of it; data may lie elsewhere than they did."""
    option = "--" + name.replace("_", "-")
    where = f"but the run `{folder}` was started with"
    if name in FREE or now == then or (isinstance(now, Path) and isinstance(then, Path)):
        return
    if then is None:
        raise BadInput(f"`{option}` is given, {where}out it: a run is continued with its own settings.")
    raise BadInput(f"`{option}` is {now}, {where} {then}: a run is continued with its own settings.")


def _resumed_folder(arguments: Sequence[str]) -> Path | None:
    for i, word in enumerate(arguments):
        if word == "--resume" and i + 1 < len(arguments):
            return Path(arguments[i + 1])
        if word.startswith("--resume="):
            return Path(word.removeprefix("--resume="))
    return None


def check(settings: TrainSettings) -> None:
    """Refuse settings that no task can be run with."""
    if settings.threads is not None:
        check_threads(settings.threads)
    for name in ("epochs", "batch_size"):
        if getattr(settings, name) < 1:
            option = "--" + name.replace("_", "-")
            raise BadInput(f"`{option}` is {getattr(settings, name)}, and must be at least 1.")
    if not (settings.learning_rate > 0 and math.isfinite(settings.learning_rate)):
        raise BadInput(f"`--learning-rate` is {settings.learning_rate}, and must be finite and more than 0.")
    if not 0 <= settings.seed < 2**32:
        raise BadInput(f"`--seed` is {settings.seed}, and must be from 0 to 2**32 - 1.")
    if settings.out.exists() and not settings.out.is_dir():
        raise BadInput(f"`--out` names `{settings.out}`, which is a file: give a folder.")
