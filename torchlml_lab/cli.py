"""The command `torchlml`: runs a command, and turns every failure into one sentence and an exit code.

Exit codes: 0 for success, 1 for a failure on the way, 2 for input that is not accepted, 130 for an interrupt
by the user. Neither this module nor `commands` imports torch: `torchlml --help` answers at once.
"""

import codecs
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata

from torchlml_lab import commands
from torchlml_lab.cli_errors import BadInput, sentence
from torchlml_lab.engine.settings import folded

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


def _dispatch(words: list[str]) -> None:
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        sys.stdout.write(_help())
    elif name == "--version":
        sys.stdout.write(f"torchlml {_version()}\n")
    elif name in commands.SUMMARIES:
        commands.run(name, words[1:])
    else:
        said = f"`torchlml` has no command `{name}`"
        known = [*commands.SUMMARIES, "--help", "--version"]
        raise BadInput(commands.unknown(said, name, "commands", known))


def _version() -> str:
    """The version, from what pip recorded: importing torchlml would import torch, which takes seconds."""
    try:
        return metadata.version("torchlml")
    except metadata.PackageNotFoundError:  # run from a folder of sources
        return str(importlib.import_module("torchlml").__version__)


def _help() -> str:
    listed = "\n".join(f"  {name:<10}{summary}" for name, summary in commands.SUMMARIES.items())
    about = (
        "The Limited Multi-Label projection: like softmax, but a row sums to k and every entry is in (0, 1)."
    )
    return f"""usage: torchlml COMMAND [OPTIONS]

{folded(about)}

commands (`torchlml COMMAND --help` explains the options of each):
{listed}

options:
  -h, --help  print this help
  --version   print the version
  --debug     with any command: print the traceback when something fails
"""


def _replace_closed_outputs() -> None:
    """Send the outputs that the caller closed (`torchlml predict RUN >&-`) to the null device.

    Python sets a closed output to None, which nothing can be printed to. The null device also takes the
    number of the closed output, so that no file that is opened later does.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open until the end


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
