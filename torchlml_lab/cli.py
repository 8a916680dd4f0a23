"""The `torchlml` command, which runs a subcommand and reports a failure with a message and an exit code.

The exit code is 0 on success, 1 if the command fails, 2 for invalid input or a missing package, and 130 if
the user interrupts the command.
Neither this module nor `commands` imports torch, so `torchlml --help` responds immediately.
"""

import codecs
import dataclasses
import importlib
import io
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from torchlml_lab import commands
from torchlml_lab.cli_errors import BadInput, did_you_mean, options, sentence
from torchlml_lab.commands import Command
from torchlml_lab.engine.settings import TrainSettings, folded, parse_settings, read_settings
from torchlml_lab.figures.settings import AllSettings
from torchlml_lab.files import check_folder, read_json

# ASCII replacements for characters that the output encoding cannot represent. All others become "?".
_PLAIN = {"±": "+-", "µ": "u", "×": "x", "…": "..."}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

        >>> main(["--version"])
        torchlml 0.1.0
        0

    Args:
        arguments: The arguments after `torchlml`. None means `sys.argv[1:]`.

    Returns:
        The exit code.
    """
    _replace_closed_outputs()
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    if debug:
        words.remove("--debug")
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("torchlml-plain", _plain)
        sys.stdout.reconfigure(errors="torchlml-plain")
    try:
        _dispatch(words)
        sys.stdout.flush()
        return 0
    except SystemExit as stop:  # after `--help`, or after an error that tyro itself prints
        return int(stop.code or 0)
    except BrokenPipeError:
        # The process reading our output has exited, as in `torchlml info | head -1`. Redirect stdout, because
        # Python flushes it at exit and would report the broken pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as stop:  # its message says how to resume, if that is possible
        return _fail(str(stop) or "Interrupted.", 130, debug)
    except BadInput as error:
        return _fail(str(error), 2, debug)
    except ModuleNotFoundError as error:
        package = (error.name or "torchlml").partition(".")[0]
        if package in ("torchlml", "torchlml_lab"):
            return _fail(sentence(error), 1, debug)
        install = "torch" if package == "torch" else "'torchlml[lab]'"
        said = f"`torchlml {words[0]}` needs the package `{package}`, which is not installed. "
        return _fail(f"{said}Run `pip install {install}`.", 2, debug)
    except Exception as error:
        return _fail(sentence(error), 1, debug)


def _dispatch(words: list[str]) -> None:
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        sys.stdout.write(_help())
    elif name == "--version":
        sys.stdout.write(f"torchlml {_version()}\n")
    elif name in commands.SUMMARIES:
        _run(name, words[1:])
    else:
        said = f"`torchlml` has no command `{name}`"
        known = [*commands.SUMMARIES, "--help", "--version"]
        raise BadInput(_unknown(said, name, "commands", known))


def _run(name: str, arguments: Sequence[str]) -> None:
    """Run a command listed in `commands.SUMMARIES` with the arguments that follow its name."""
    if name in commands.SINGLE:
        call(name, commands.SINGLE[name], arguments)
    elif name == "train":
        _choose(name, {task: entry.train for task, entry in commands.TASKS.items()}, arguments)
    elif name == "sweep":
        _choose(name, {task: entry.sweep for task, entry in commands.TASKS.items()}, arguments)
    elif name == "bench":
        _choose(name, commands.BENCHMARKS, arguments)
    elif name == "figures":
        _choose(name, commands.FIGURES | {"all": commands.ALL_FIGURES}, arguments)
    else:
        _ask_task(name, arguments)


def call(name: str, command: Command, arguments: Sequence[str]) -> None:
    """Parse the options of a command, then import its module and call its function.

    Args:
        name: The command as typed, such as `train multilabel`.
        command: The command's entry in the tables of `commands`.
        arguments: The arguments after the name. Invalid options raise `BadInput`.
    """
    kind = _load(command.settings)
    if not isinstance(kind, type):
        settings = kind(arguments)
    elif issubclass(kind, TrainSettings):
        settings = read_settings(kind, name, arguments, _default(kind, command.required))
    else:
        settings = parse_settings(kind, name, arguments, _default(kind, command.required))
    _load(command.function)(settings)


def _default(kind: type[Any], required: Sequence[str]) -> Any:
    """Return the default settings, with required settings marked as missing."""
    import tyro  # imported here, because it takes about 0.1 s and is not needed to list the commands

    return dataclasses.replace(kind(), **dict.fromkeys(required, tyro.MISSING))


def draw_all(settings: AllSettings) -> None:
    """Draw all figures whose data exists. If some fail, raise the first error after drawing the others."""
    from torchlml_lab.engine.output import new_console
    from torchlml_lab.plots import NotMadeYet

    check_folder("--out", settings.out)
    errors: list[BadInput] = []
    for name, figure in commands.FIGURES.items():
        try:
            suffix = _load(figure.settings)().out.suffix
            call(f"figures {name}", figure, ["--out", str(settings.out / f"{name}{suffix}")])
        except NotMadeYet as missing:
            new_console().print(f"Not drawn: {name}. {missing}", soft_wrap=True)
        except BadInput as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _unknown(said: str, name: str, what: str, known: Mapping[str, object] | Sequence[str]) -> str:
    """Append the most similar known name to an error message, or all known names if none is similar."""
    near = did_you_mean(name, known)
    listed = ", ".join(one for one in known if not one.startswith("-"))
    return f"{said}{near}" if near else f"{said}. The {what} are {listed}."


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(f"torchlml_lab.{module}"), attribute)


def _choose(command: str, table: Mapping[str, Command], arguments: Sequence[str]) -> None:
    """Run the command that the first argument names, as in `torchlml train cifar100`."""
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        parts = "\n".join(f"  {part:<18}{entry.summary}" for part, entry in table.items())
        sys.stdout.write(f"usage: torchlml {command} NAME [OPTIONS]\n\nnames:\n{parts}\n")
    elif name in table:
        call(f"{command} {name}", table[name], arguments[1:])
    elif name.startswith("-"):
        names = ", ".join(table)
        raise BadInput(f"Missing NAME before `{name}`. `torchlml {command}` takes one of {names}.")
    else:
        raise BadInput(_unknown(f"Unknown NAME `{name}` for `torchlml {command}`", name, "names", table))


def _ask_task(name: str, arguments: Sequence[str]) -> None:
    """Run a command on an existing run. The first argument is the run directory, which records the task."""
    by_task: dict[str, Command | None] = {
        task: getattr(entry, name.replace("-", "_")) for task, entry in commands.TASKS.items()
    }
    first = arguments[0] if arguments else ""
    without_run = by_task["scene-graph"]  # the only task whose data can be given without a run
    if name == "step-time" and first.startswith("--") and first != "--help" and without_run is not None:
        call(name, without_run, arguments)
        return
    run = first if first and not first.startswith("-") else None
    if {"-h", "--help"} & set(arguments) and (run is None or not (Path(run) / "run.json").exists()):
        task = by_task.get(first)
        if task is not None:
            call(name, task, ["--help"])
        else:
            _explain(name, by_task)
        return
    if run is None:
        raise BadInput(f"Missing RUN directory. Usage: `torchlml {name} RUN`.")
    path = Path(run) / "run.json"
    if not path.exists():
        raise BadInput(f"`{run}` is not a run directory. Create one with `torchlml train`.")
    experiment = read_json(path, dict).get("experiment")
    if not isinstance(experiment, str):
        raise BadInput(f"`{path}` is damaged: the name of the task is missing.")
    if experiment not in commands.TASKS:
        raise BadInput(f"`{run}` is a run of the task `{experiment}`, which this version does not support.")
    command = by_task[experiment]
    if command is None:
        able = ", ".join(task for task, one in by_task.items() if one is not None)
        said = f"`{run}` is a run of the task `{experiment}`, {commands.CANNOT[name]}"
        raise BadInput(f"{said}. `torchlml {name}` supports only runs of these tasks: {able}.")
    call(name, command, arguments)


def _explain(name: str, by_task: Mapping[str, Command | None]) -> None:
    """List the names of the options for each supported task, because the task is unknown without a run."""
    listed = []
    for task, command in by_task.items():
        if command is not None:
            names = [option for option in options(_load(command.settings)()) if option != "--run"]
            width = shutil.get_terminal_size().columns
            first, others = f"  {task:<14}", " " * 16
            listed.append(
                textwrap.fill(" ".join(names), width, initial_indent=first, subsequent_indent=others)
            )
    summary = commands.SUMMARIES[name]
    about = f"{summary[0].upper()}{summary[1:]}. The options depend on the run's task:"
    more = f"Run `torchlml {name} RUN --help` or `torchlml {name} TASK --help` to see their descriptions."
    parts = (f"usage: torchlml {name} RUN [OPTIONS]", folded(about), "\n".join(listed), folded(more))
    sys.stdout.write("\n\n".join(parts) + "\n")


def _version() -> str:
    """Return the version from the package metadata, because importing torch takes seconds."""
    try:
        return metadata.version("torchlml")
    except metadata.PackageNotFoundError:  # run from a source directory
        return str(importlib.import_module("torchlml").__version__)


def _help() -> str:
    listed = "\n".join(f"  {name:<15}{summary}" for name, summary in commands.SUMMARIES.items())
    about = (
        "Tools for the Limited Multi-Label (LML) projection, a counterpart of softmax whose outputs sum to k "
        "instead of 1. Each output is between 0 and 1."
    )
    return f"""usage: torchlml COMMAND [OPTIONS]

{folded(about)}

commands:
{listed}

options:
  -h, --help     show this help
  --version      show the version
  --debug        print a traceback if the command fails (works with any command)

Run `torchlml COMMAND --help` to see the options of a command.
"""


def _replace_closed_outputs() -> None:
    """Redirect output streams that the caller closed (`torchlml predict RUN >&-`) to the null device.

    Python sets a closed stream to None, and printing to it would fail. The null device also occupies the
    closed stream's file descriptor, which would otherwise be assigned to the next file that is opened.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - stays open


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in missing), error.end


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    sys.stderr.write(f"torchlml: {message}\n")
    return code
