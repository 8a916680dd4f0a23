"""The command `torchlml`: finds the subcommand, and turns every failure into one sentence and an exit code.

Exit codes: 0 when all went well, 1 when something failed on the way, 2 when what was asked for cannot be
done, 130 when the user interrupted. A subcommand is a module with `main(arguments)`; it is imported only when
it is called, so that `torchlml info` needs nothing but torch.
"""

import contextlib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import torchlml
from torchlml_lab.errors import BadInput

Settings = TypeVar("Settings")


class Command(NamedTuple):
    """A subcommand: the module whose `main(arguments)` it runs, and what it does in a few words."""

    module: str
    summary: str


COMMANDS = {
    "demo": Command(
        "torchlml_lab.tasks.hidden_labels.demo", "learn the labels nobody wrote down, with five losses"
    ),
    "info": Command("torchlml_lab.info", "print versions, the kernel in use, threads, devices, extras"),
    "gpu-check": Command("torchlml_lab.gpu_check.command", "check and time the kernels on your GPU"),
    "bench": Command("torchlml_lab.bench.command", "time lml beside softmax, topk, sort and sigmoid"),
    "train": Command("torchlml_lab.train", "train a network: a run that can be continued when killed"),
    "sweep": Command("torchlml_lab.sweep", "run a grid of training runs on all cores, into one CSV"),
    "evaluate": Command("torchlml_lab.tasks.scene_graph.evaluate", "all recalls of a scene-graph run"),
    "predict": Command(
        "torchlml_lab.tasks.scene_graph.predict", "print and draw the scene graph of an image"
    ),
    "step-time": Command(
        "torchlml_lab.tasks.scene_graph.step_time", "time a training step of each scene-graph objective"
    ),
    "figures": Command("torchlml_lab.figures.command", "draw a figure of the documentation or a study"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Example:
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
        if error.name is None or error.name.partition(".")[0] == "torchlml":
            return _fail(_sentence(error), 1, debug)
        return _fail(
            f"`torchlml {words[0]}` needs the package `{error.name}`, which is not installed: "
            "run `pip install 'torchlml[lab]'`.",
            2,
            debug,
        )
    except Exception as error:
        return _fail(_sentence(error), 1, debug)


def parse_settings(
    kind: type[Settings], command: str, arguments: Sequence[str], default: Settings
) -> Settings:
    """Reads the options of a subcommand into its settings.

    Args:
        kind: A dataclass whose docstrings are the help.
        command: The subcommand's name.
        arguments: What followed the subcommand's name.
        default: The settings where an option is not given.

    Returns:
        The settings. Wrong options raise `BadInput`; `--help` prints the help and ends the command well.
    """
    import tyro

    # tyro explains a wrong option in a box of several lines; its first paragraph is the sentence we want.
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                kind,
                prog=f"torchlml {command}",
                args=arguments,
                default=default,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        lines = [line.strip("│ ") for line in box.getvalue().splitlines() if not line.startswith(("╭", "╰"))]
        rule = next((i for i, line in enumerate(lines) if set(line) == {"─"}), len(lines))
        said = " ".join(lines[:rule]).rstrip(".")
        raise BadInput(f"{said} (`torchlml {command} --help` explains every option).") from None


def choose(command: str, table: Mapping[str, Command], arguments: Sequence[str]) -> None:
    """Runs the one of a command's parts that its first argument names, as in `torchlml train cifar100`.

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
        importlib.import_module(table[name].module).main(arguments[1:])
    else:
        raise BadInput(f"`torchlml {command}` has no `{name}`: the names are {', '.join(table)}.")


def _dispatch(words: list[str]) -> None:
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        sys.stdout.write(_help())
    elif name == "--version":
        sys.stdout.write(f"torchlml {torchlml.__version__}\n")
    elif name in COMMANDS:
        importlib.import_module(COMMANDS[name].module).main(words[1:])
    else:
        raise BadInput(f"`torchlml` has no command `{name}`: the commands are {', '.join(COMMANDS)}.")


def _help() -> str:
    commands = "\n".join(f"  {name:<10}{command.summary}" for name, command in COMMANDS.items())
    return f"""usage: torchlml COMMAND [OPTIONS]

The Limited Multi-Label projection: like softmax, but a row sums to k and every entry is in (0, 1).

commands (`torchlml COMMAND --help` explains the options of each):
{commands}

options:
  -h, --help  print this help
  --version   print the version
  --debug     with any command: print the traceback when something fails
"""


def _sentence(error: Exception) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    return said if said.endswith((".", "!", "?")) else f"{said}."


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    sys.stderr.write(f"torchlml: {message}\n")
    return code
