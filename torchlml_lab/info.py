"""`torchlml info`: what is installed and what will run. Needs nothing but torch."""

import os
import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata

from torchlml_lab.cli_errors import BadInput, answer_help

USAGE = """usage: torchlml info

Prints the versions of torchlml, torch and Python, which kernel is in use and
for which instruction set, how many threads torch uses, the devices it sees,
and which of the package's extras are installed.
"""


def read_arguments(arguments: Sequence[str]) -> None:
    """Print the usage if that is asked for; anything else raises `BadInput`."""
    answer_help(arguments, USAGE)
    if arguments:
        raise BadInput(f"`torchlml info` takes no options, and `{arguments[0]}` was given.")


def main(settings: None = None) -> None:
    """Print what `report` found, one line each."""
    for name, values in report().items():
        for i, value in enumerate(values):
            sys.stdout.write(f"{name if i == 0 else '':<12}{value}\n")


def report() -> dict[str, list[str]]:
    """Collect what `torchlml info` prints.

        >>> report()["python"]
        ['3.12.4']

    Returns:
        For each subject one or more lines.
    """
    import torch  # in functions, so that options are read without it

    import torchlml
    from torchlml._triton import self_test

    return {
        "torchlml": [torchlml.__version__],
        "torch": [str(torch.__version__)],
        "python": [platform.python_version()],
        "platform": [platform.platform()],
        "kernel": [kernel()],
        "gpu kernel": [self_test.description()],
        "threads": [f"{torch.get_num_threads()} of {os.cpu_count()}"],
        "devices": _devices(),
        "extras": [f"{extra}: {_state(extra)}" for extra in _extras()],
    }


def kernel() -> str:
    """Name the kernel that CPU tensors use: `native (x86-64-v3)`, or `torch` and why it is not the other."""
    from torchlml._cpu import loader

    absence = loader.absence()
    return (
        f"native ({loader.instruction_set()})"
        if absence is None
        else f"torch (no compiled kernel: {absence})"
    )


def _devices() -> list[str]:
    import torch

    found = ["cpu"]
    if torch.cuda.is_available():
        found += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return found


def _extras() -> list[str]:
    try:
        return sorted(metadata.metadata("torchlml").get_all("Provides-Extra") or [])
    except metadata.PackageNotFoundError:  # run from a folder of sources
        return []


def _state(extra: str) -> str:
    missing = [name for name in _requirements(extra) if not _installed(name)]
    if not missing:
        return "installed"
    return f"without {', '.join(missing)} (pip install 'torchlml[{extra}]')"


def _requirements(extra: str) -> list[str]:
    """The distributions an extra asks for, those of the extras it includes too."""
    names: list[str] = []
    for line in metadata.requires("torchlml") or []:
        requirement, _, marker = line.partition(";")
        if re.search(rf"""extra == ['"]{re.escape(extra)}['"]""", marker):
            name, included = re.match(r"([\w.-]+)\s*(?:\[([\w.,\s-]*)\])?", requirement).groups()  # type: ignore[union-attr]
            if name == "torchlml":
                names += [other for part in included.split(",") for other in _requirements(part.strip())]
            else:
                names.append(name)
    return names


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
