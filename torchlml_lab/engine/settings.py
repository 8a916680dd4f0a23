"""Settings for training runs, sweeps and timings, parsed from options or read from a run."""

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

from torchlml_lab.cli_errors import BadInput, options, parse_error
from torchlml_lab.files import read_json, record


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_threads(threads: int, option: str = "--threads") -> None:
    """Raise `BadInput` for fewer than one thread, or more than one per core, which only adds contention."""
    if not 1 <= threads <= cores():
        raise BadInput(f"`{option}` must be from 1 to {cores()} (the number of cores), but it is {threads}.")


@contextmanager
def use_threads(threads: int) -> Iterator[None]:
    """Set the number of torch threads within the block, and restore it afterwards.

        with use_threads(1):
            ...

    Args:
        threads: The number of threads, at least 1.
    """
    import torch  # imported here, so that `--help` does not import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class TrainSettings:
    """The settings that all tasks share. Each task extends them and overrides some defaults."""

    out: Path = Path("runs/run")
    """Directory for the run's settings, metrics and checkpoints. It must not already contain a run."""
    resume: Path | None = None
    """Resume the run in this directory after its last complete epoch, with its original settings."""
    overwrite: bool = False
    """Delete the run in `--out` and start a new one there."""
    seed: int = 0
    """Random seed for the initial weights, the order of the data and all other random choices."""
    epochs: int = 10
    """The number of passes over the training data, at least 1."""
    batch_size: int = 64
    """Number of samples per step across all processes. Must be a multiple of the number of processes."""
    learning_rate: float = 0.1
    """The learning rate at the start of training."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Reduced precision for suitable operations. Weights remain in float32. fp16 is intended for GPUs."""
    cpu: bool = False
    """Use the CPU even if a GPU is available."""
    threads: int | None = None
    """The number of CPU threads, at most the number of cores. The default is 1 if the tensors of the task
    are small, and all available threads otherwise."""
    tensorboard: bool = False
    """Also log the metrics to the run directory for TensorBoard. Requires the package `tensorboard`."""


# Options that apply to one invocation only and are not stored with the run.
_CALL = {"resume", "overwrite"}
# Options that may change when a run is resumed, because they change its results by rounding errors at most.
FREE = _CALL | {"out", "tensorboard", "threads"}
SETTINGS_FILE = "settings.json"

Settings = TypeVar("Settings", bound=TrainSettings)
Options = TypeVar("Options")


def read_settings(
    kind: type[Settings], command: str, arguments: Sequence[str], default: Settings
) -> Settings:
    """Parse the options. With `--resume DIR`, the defaults are the settings of that run.

    Args:
        kind: The settings class of the task.
        command: The name of the command, for help and error messages.
        arguments: The arguments after the command.
        default: The settings for options that are not given.

    Returns:
        The settings. An option that contradicts the resumed run raises `BadInput`.
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
            raise BadInput("`--overwrite` starts a new run, so it cannot be combined with `--resume`.")
    return settings


def to_json(settings: TrainSettings) -> dict[str, Any]:
    """Convert the settings to JSON types, with absolute paths that are valid in any working directory."""
    values = {name: value for name, value in dataclasses.asdict(settings).items() if name not in _CALL}
    return {name: _json_value(value) for name, value in values.items()}


def _json_value(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    return list(map(_json_value, value)) if isinstance(value, tuple) else value


def from_json(kind: type[Settings], path: Path) -> Settings:
    """Read settings that were written with `to_json`. A file with any other content raises `BadInput`."""
    if not path.exists():
        raise BadInput(f"`{path.parent}` is not a run directory. Create one with `torchlml train`.")
    values = read_json(path, dict)
    names = {field.name for field in dataclasses.fields(kind)} - _CALL
    if set(values) != names:
        raise BadInput(f"`{path}` is damaged: its settings do not match this task and version.")
    default = kind()
    try:
        return record(values | {name: getattr(default, name) for name in _CALL}, kind)
    except ValueError as error:
        raise BadInput(f"`{path}` is damaged: {error}.") from error


def _check_unchanged(folder: Path, name: str, now: object, then: object) -> None:
    """Raise `BadInput` for an option that would change the run. Data paths may change."""
    option = "--" + name.replace("_", "-")
    where = f"but the run `{folder}` was started with"
    if name in FREE or now == then or (_is_path(now) and _is_path(then)):
        return
    if then is None:
        raise BadInput(f"`{option}` is given, {where}out it. A run is resumed with its original settings.")
    raise BadInput(f"`{option}` is {now}, {where} {then}. A run is resumed with its original settings.")


def _is_path(value: object) -> bool:
    """Whether a setting is a path or a tuple of paths."""
    several = isinstance(value, tuple) and bool(value) and all(isinstance(one, Path) for one in value)
    return several or isinstance(value, Path)


def _resumed_folder(arguments: Sequence[str]) -> Path | None:
    for i, word in enumerate(arguments):
        if word == "--resume" and i + 1 < len(arguments):
            return Path(arguments[i + 1])
        if word.startswith("--resume="):
            return Path(word.removeprefix("--resume="))
    return None


def check(settings: TrainSettings) -> None:
    """Raise `BadInput` for settings that are invalid for every task."""
    if settings.threads is not None:
        check_threads(settings.threads)
    for name in ("epochs", "batch_size"):
        if getattr(settings, name) < 1:
            option = "--" + name.replace("_", "-")
            raise BadInput(f"`{option}` must be at least 1, but it is {getattr(settings, name)}.")
    if not (settings.learning_rate > 0 and math.isfinite(settings.learning_rate)):
        raise BadInput(f"`--learning-rate` must be finite and positive, but it is {settings.learning_rate}.")
    if not 0 <= settings.seed < 2**32:
        raise BadInput(f"`--seed` must be from 0 to 2**32 - 1, but it is {settings.seed}.")
    if settings.out.exists() and not settings.out.is_dir():
        raise BadInput(f"`--out` must be a directory, but `{settings.out}` is a file.")


def parse_settings(kind: type[Options], command: str, arguments: Sequence[str], default: Options) -> Options:
    """Parse the options of a subcommand into its settings.

    Args:
        kind: A dataclass. The docstrings of its fields are the help texts.
        command: The name of the subcommand.
        arguments: The arguments after the subcommand.
        default: The settings for options that are not given.

    Returns:
        The settings. Invalid options raise `BadInput`. `--help` prints the help and exits with code 0.
    """
    import tyro

    def report(event: Any) -> None:
        said = parse_error(event, arguments, list(options(default)))
        if said:
            more = f". Run `torchlml {command} --help` to see all options."
            raise BadInput(said if said.endswith("?") else said + more)

    with _reporting(report), _own_help(isinstance(default, TrainSettings | GridSettings)):
        return tyro.cli(
            kind,
            prog=f"torchlml {command}",
            # tyro does not wrap the description to the terminal width, and joins lines that are not indented.
            description=folded(kind.__doc__ or "", indent=" "),
            args=arguments,
            default=default,
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
        )


def folded(text: str, indent: str = "") -> str:
    """Wrap paragraphs to the terminal width."""
    width = shutil.get_terminal_size().columns
    # Do not break at hyphens, because the names of options contain them.
    wrapper = textwrap.TextWrapper(width, subsequent_indent=indent, break_on_hyphens=False)
    return "\n\n".join(wrapper.fill(paragraph) for paragraph in inspect.cleandoc(text).split("\n\n"))


def _reporting(report: Any) -> AbstractContextManager[None]:
    """Return a context in which tyro passes a parse error to `report` before printing it in a box.

    The hook is not part of tyro's stable API. A version without it prints the box and exits with code 2.
    """
    try:
        from tyro._errors import on_parse_error
    except ImportError:
        return nullcontext()
    return on_parse_error(report)


@contextmanager
def _own_help(grouped: bool) -> Iterator[None]:
    """Change tyro's help: group the options, show required ones in the usage, and wrap texts evenly.

    The defaults None, False and () are omitted, because the help texts explain them. The patched functions
    are not part of tyro's stable API. If a version lacks them, its help is not changed.
    """
    from tyro import _arguments

    try:
        from tyro._backends import _tyro_help_formatting as formatting

        helptext, format_help = _arguments.generate_argument_helptext, formatting.format_help
    except (ImportError, AttributeError):
        yield
        return

    def own_helptext(arg: Any, *others: Any, **named: Any) -> Any:
        text = arg.field.helptext() if callable(arg.field.helptext) else arg.field.helptext
        arg.field.helptext = text and " ".join(text.split())
        if arg.field.default is None or arg.field.default is False or arg.field.default == ():
            arg.field.argconf = dataclasses.replace(arg.field.argconf, help_behavior_hint="")
        return helptext(arg, *others, **named)

    def own_format_help(
        prog: str, parser_spec: Any, args: list[Any], *others: Any, **named: Any
    ) -> list[str]:
        if grouped:
            args = sorted(map(_in_group, args), key=lambda one: _place(one.source_parser.extern_prefix))
        first, *lines = format_help(prog, parser_spec, args, *others, **named)
        needed = [
            one.arg.get_invocation_text()[0].as_str_no_ansi()
            for one in args
            if one.arg.lowered.required and not one.arg.is_positional()
        ]
        # For a command with many options, tyro's usage line contains only "[OPTIONS]".
        first = first.replace("[OPTIONS]", " ".join((*needed, "[OPTIONS]")))
        # Remove the indentation that keeps tyro from joining the lines of the description.
        return [first, *(line.replace("\n ", "\n") for line in lines)]

    _arguments.generate_argument_helptext, formatting.format_help = own_helptext, own_format_help
    try:
        yield
    finally:
        _arguments.generate_argument_helptext, formatting.format_help = helptext, format_help


# The groups of options in the help of training commands and sweeps, in this order.
GROUPS = {
    "data": (
        "train valid test train_labels valid_labels test_labels label_names labels separator texts numbers "
        "keep data features noise validation samples vg vrd one_per_edge glove counts region_features "
        "split_seed columns min_rating latest users unlabeled"
    ),
    "model": (
        "network head encoder loss objective k temperature model layers hidden dimension dropout penalty "
        "leave_one_out without_bias"
    ),
    "training": (
        "epochs patience batch_size learning_rate weight_decay clip seed mixed_precision cpu threads "
        "continue_from resume"
    ),
    "output": "out overwrite tensorboard csv",
}
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split()}


def _in_group(one: Any) -> Any:
    """Return an option with a parser whose prefix is its group, because tyro prints the prefix as a title."""
    group = _GROUP_OF.get(one.arg.field.intern_name)
    prefix = one.source_parser.extern_prefix
    titles = [title for title in (prefix and f"--{prefix}", group) if title]
    parser = dataclasses.replace(one.source_parser, extern_prefix=", ".join(titles), description="")
    return dataclasses.replace(one, source_parser=parser)


def _place(title: str) -> tuple[bool, int]:
    """Return the sort key for the title of a group: the options of the command itself come first."""
    prefix, _, group = title.rpartition(", ")
    return bool(prefix) or title.startswith("--"), list(GROUPS).index(group) if group in GROUPS else -1


@dataclass(frozen=True)
class GridSettings:
    """The settings that all sweeps share. The sweep for each task extends them."""

    out: Path = Path("runs/sweep")
    """The sweep directory, with one subdirectory per run. To resume a sweep, repeat the command."""
    csv: Path | None = None
    """CSV file for the results of finished runs. The default is `results.csv` in `--out`."""
    seeds: tuple[int, ...] = (0,)
    """Random seeds. Each combination of the other settings is run once per seed."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates to try. The default is the single value of `--run.learning-rate`."""
    tuned: Path | None = None
    """CSV of an earlier sweep on the same data. Each method uses the settings with its best validation result
    in that sweep."""
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    """The number of parallel runs, at least 1, with one thread each."""


@dataclass(frozen=True)
class StepTimeSettings:
    """The settings for timing training steps. A task extends them with the location of its data."""

    batch_size: int | None = None
    """The number of samples per step, at most 1024. The default is the batch size used in training."""
    steps: int = 30
    """The number of batches to time with each loss, at least 1."""
    threads: int = 1
    """The number of PyTorch threads, at most the number of cores."""
