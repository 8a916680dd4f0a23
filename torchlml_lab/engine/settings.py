"""The settings of every training run, sweep and timing, and reading them from options or from a run."""

import dataclasses
import inspect
import math
import os
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from torchlml_lab.cli_errors import BadInput, options, refusal
from torchlml_lab.files import read_json, record


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
    import torch  # here, since reading options must not wait for it

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
Options = TypeVar("Options")


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
    if not path.exists():
        raise BadInput(f"`{path.parent}` holds no run of this version: No such file or directory.")
    values = read_json(path, dict)
    names = {field.name for field in dataclasses.fields(kind)} - _CALL
    if set(values) != names:
        raise BadInput(f"`{path}` is damaged: its settings are not those of this task and version.")
    default = kind()
    try:
        return record(values | {name: getattr(default, name) for name in _CALL}, kind)
    except ValueError as error:
        raise BadInput(f"`{path}` is damaged: {error}.") from error


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


def parse_settings(kind: type[Options], command: str, arguments: Sequence[str], default: Options) -> Options:
    """Read the options of a subcommand into its settings.

    Args:
        kind: A dataclass whose docstrings are the help.
        command: The subcommand's name.
        arguments: What followed the subcommand's name.
        default: The settings where an option is not given.

    Returns:
        The settings. Wrong options raise `BadInput`; `--help` prints the help and ends the command well.
    """
    import tyro

    def refuse(event: Any) -> None:
        said = refusal(event, arguments, list(options(default)))
        if said:
            more = f" (`torchlml {command} --help` explains every option)."
            raise BadInput(said if said.endswith("?") else said + more)

    with _refusing(refuse):
        return tyro.cli(
            kind,
            prog=f"torchlml {command}",
            # tyro folds everything to the width of the terminal but this, and joins lines without an indent.
            description=folded(kind.__doc__ or "", indent=" "),
            args=arguments,
            default=default,
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
        )


def folded(text: str, indent: str = "") -> str:
    """Wrap paragraphs to the width of the terminal."""
    width = shutil.get_terminal_size().columns
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(textwrap.fill(paragraph, width, subsequent_indent=indent) for paragraph in paragraphs)


def _refusing(refuse: Any) -> AbstractContextManager[None]:
    """Have tyro hand what is wrong to `refuse` before it draws a box around it.

    The hook is not part of tyro's stable interface: a version without it draws the box and exits with 2.
    """
    try:
        from tyro._errors import on_parse_error
    except ImportError:
        return nullcontext()
    return on_parse_error(refuse)


@dataclass(frozen=True)
class GridSettings:
    """What every sweep can be told; an experiment's own sweep extends it."""

    out: Path = Path("runs/sweep")
    """The folder for the runs, one folder each; the same command continues what was stopped."""
    csv: Path | None = None
    """The CSV of the finished runs; by default `results.csv` in `--out`."""
    seeds: tuple[int, ...] = (0,)
    """The seeds of each combination."""
    learning_rates: tuple[float, ...] = ()
    """The learning rates to try; by default the one of `--run.learning-rate`."""
    tuned: Path | None = None
    """The CSV of an earlier sweep of these data: each method gets what is best there on validation."""
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    """How many runs at a time, at least 1, each on one thread."""


@dataclass(frozen=True)
class StepTimeSettings:
    """How steps are timed; a task's own settings are a subclass, which adds where its data are."""

    batch_size: int | None = None
    """Samples per step, at most 1024; by default as many as in training."""
    steps: int = 30
    """How many batches each loss is timed on, at least 1."""
    threads: int = 1
    """How many threads torch may use, from 1 to the cores."""
