"""The command `torchlml`: finds the subcommand, and turns every failure into one sentence and an exit code.

Exit codes: 0 when all went well, 1 when something failed on the way, 2 when what was asked for cannot be
done, 130 when the user interrupted. A subcommand is a module with `main(arguments)`; it is imported only when
it is called, so that `torchlml info` needs nothing but torch, and `torchlml --help` not even that.
"""

import codecs
import importlib
import inspect
import io
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from typing import Any, NamedTuple, TypeVar

from torchlml_lab.cli_errors import BadInput, did_you_mean, options, refusal, sentence

Settings = TypeVar("Settings")


class Command(NamedTuple):
    """A subcommand: its function, as `module:function`, and a short description."""

    function: str
    summary: str

    def run(self, arguments: Sequence[str]) -> None:
        """Import the module and call the function, which is `main` where only a module is named."""
        run_function(self.function, arguments)


COMMANDS = {
    "demo": Command(
        "torchlml_lab.studies.digits.demo", "learn the labels nobody wrote down, with five losses"
    ),
    "which-k": Command("torchlml_lab.studies.digits.which_k", "measure what a wrong k costs"),
    "info": Command("torchlml_lab.info", "print versions, the kernel in use, threads, devices, extras"),
    "gpu-check": Command("torchlml_lab.gpu_check.check_gpu", "check and time the kernels on your GPU"),
    "bench": Command("torchlml_lab.bench.benchmarks", "time the layer, its relatives and the losses"),
    "train": Command(
        "torchlml_lab.commands:train", "train a network: a run that can be continued when killed"
    ),
    "sweep": Command("torchlml_lab.commands:sweep", "run a grid of training runs on all cores, into one CSV"),
    "evaluate": Command("torchlml_lab.commands:evaluate", "measure a run with its best weights"),
    "predict": Command("torchlml_lab.commands:predict", "print and draw a prediction of a run"),
    "step-time": Command("torchlml_lab.commands:step_time", "time a training step with each loss of a task"),
    "figures": Command("torchlml_lab.figures.gallery", "draw a figure of the documentation or a study"),
}

# What stands for a character that the output's encoding does not have; any other becomes a question mark.
_PLAIN = {"±": "+-", "µ": "u", "×": "x", "…": "..."}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

        >>> main(["--version"])
        torchlml 0.1.0
        0

    Args:
        arguments: What follows `torchlml`; those of the process when None.

    Returns:
        The exit code.
    """
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
    except SystemExit as stop:  # after `--help`
        return int(stop.code or 0)
    except BrokenPipeError:
        # The reader of a pipe (`torchlml info | head -1`) left early; Python would say so again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as stop:  # with a sentence where something can be continued
        return _fail(str(stop) or "Interrupted.", 130, debug)
    except BadInput as error:
        return _fail(str(error), 2, debug)
    except ModuleNotFoundError as error:
        package = (error.name or "torchlml").partition(".")[0]
        if package in ("torchlml", "torchlml_lab"):
            return _fail(sentence(error), 1, debug)
        install = "torch" if package == "torch" else "'torchlml[lab]'"
        said = f"`torchlml {words[0]}` needs the package `{package}`, which is not installed: "
        return _fail(f"{said}run `pip install {install}`.", 2, debug)
    except Exception as error:
        return _fail(sentence(error), 1, debug)


def run_function(name: str, arguments: Sequence[str]) -> None:
    """Import `module:function` (`main` where only a module is named) and call it with the arguments."""
    module, _, function = name.partition(":")
    getattr(importlib.import_module(module), function or "main")(arguments)


def parse_settings(
    kind: type[Settings],
    command: str,
    arguments: Sequence[str],
    default: Settings,
    about: str | None = None,
) -> Settings:
    """Read the options of a subcommand into its settings.

    Args:
        kind: A dataclass whose docstrings are the help.
        command: The subcommand's name.
        arguments: What followed the subcommand's name.
        default: The settings where an option is not given.
        about: What the command does, for the help; by default the docstring of `kind`.

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
            description=_folded(about or kind.__doc__ or "", indent=" "),
            args=arguments,
            default=default,
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
        )


def answer_help(arguments: Sequence[str], usage: str) -> None:
    """Print the usage of a command that reads its arguments itself, if that is asked for, and end it well.

    Args:
        arguments: What followed the command's name.
        usage: How it is called and what it does; the option `--help` is added.
    """
    if list(arguments) in (["-h"], ["--help"]):
        sys.stdout.write(f"{usage}\noptions:\n  -h, --help  print this help\n")
        raise SystemExit(0)


def choose(command: str, table: Mapping[str, Command], arguments: Sequence[str]) -> None:
    """Run the one of a command's parts that its first argument names, as in `torchlml train cifar100`.

    Args:
        command: The subcommand's name.
        table: The parts by name.
        arguments: What followed the subcommand's name.
    """
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        parts = "\n".join(f"  {part:<18}{entry.summary}" for part, entry in table.items())
        sys.stdout.write(f"usage: torchlml {command} NAME [OPTIONS]\n\nnames:\n{parts}\n")
    elif name in table:
        table[name].run(arguments[1:])
    elif name.startswith("-"):
        names = ", ".join(table)
        raise BadInput(f"`torchlml {command}` takes a name before options like `{name}`: one of {names}.")
    else:
        raise BadInput(_unknown(f"`torchlml {command}` has no `{name}`", name, "names", table))


def _dispatch(words: list[str]) -> None:
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        sys.stdout.write(_help())
    elif name == "--version":
        sys.stdout.write(f"torchlml {_version()}\n")
    elif name in COMMANDS:
        COMMANDS[name].run(words[1:])
    else:
        said = f"`torchlml` has no command `{name}`"
        raise BadInput(_unknown(said, name, "commands", [*COMMANDS, "--help", "--version"]))


def _unknown(said: str, name: str, what: str, known: Mapping[str, object] | Sequence[str]) -> str:
    near = did_you_mean(name, known)
    listed = ", ".join(one for one in known if not one.startswith("-"))
    return f"{said}{near}" if near else f"{said}: the {what} are {listed}."


def _version() -> str:
    """The version, from what pip recorded: importing torchlml would import torch, which takes seconds."""
    try:
        return metadata.version("torchlml")
    except metadata.PackageNotFoundError:  # run from a folder of sources
        return str(importlib.import_module("torchlml").__version__)


def _help() -> str:
    commands = "\n".join(f"  {name:<10}{command.summary}" for name, command in COMMANDS.items())
    about = (
        "The Limited Multi-Label projection: like softmax, but a row sums to k and every entry is in (0, 1)."
    )
    return f"""usage: torchlml COMMAND [OPTIONS]

{_folded(about)}

commands (`torchlml COMMAND --help` explains the options of each):
{commands}

options:
  -h, --help  print this help
  --version   print the version
  --debug     with any command: print the traceback when something fails
"""


def _folded(text: str, indent: str = "") -> str:
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
