"""The command `torchlml`: runs a subcommand and turns every failure into one sentence and an exit code.

Exit codes: 0 on success, 1 if the command failed, 2 for invalid input, 130 if the user interrupted it.
Neither this module nor `commands` imports torch, so `torchlml --help` responds immediately.
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

# ASCII replacements for characters that the output encoding lacks. Any other character becomes "?".
_PLAIN = {"±": "+-", "µ": "u", "×": "x", "…": "..."}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

        >>> main(["--version"])
        torchlml 0.1.0
        0

    Args:
        arguments: The words after `torchlml`. None means `sys.argv[1:]`.

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
        # The reader of a pipe (`torchlml info | head -1`) exited. Otherwise Python would report this at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as stop:  # carries a message if the work can be resumed
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
    """Return the version from the installed metadata, because importing torch takes seconds."""
    try:
        return metadata.version("torchlml")
    except metadata.PackageNotFoundError:  # run from a source directory
        return str(importlib.import_module("torchlml").__version__)


def _help() -> str:
    listed = "\n".join(f"  {name:<15}{summary}" for name, summary in commands.SUMMARIES.items())
    about = (
        "Tools for the Limited Multi-Label (LML) projection: like softmax, but the outputs sum to k and each "
        "is between 0 and 1."
    )
    return f"""usage: torchlml COMMAND [OPTIONS]

{folded(about)}

commands:
{listed}

options:
  -h, --help     show this help
  --version      show the version
  --debug        with any command: print the traceback of an error

Run `torchlml COMMAND --help` to see the options of a command.
"""


def _replace_closed_outputs() -> None:
    """Redirect outputs that the caller closed (`torchlml predict RUN >&-`) to the null device.

    Python sets a closed output to None, and printing to it would fail. The null device also occupies the
    file descriptor of the closed output, so that no file opened later receives it.
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
