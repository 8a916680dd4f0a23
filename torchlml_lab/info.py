"""`torchlml info`: show versions, kernels and devices. This requires no extras, only torch."""

import os
import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata

from torchlml_lab.cli_errors import BadInput, answer_help

USAGE = """usage: torchlml info

Show the versions of torchlml, torch and Python, the kernel in use and its
instruction set, the number of threads, the available devices, and which
extras of the package are installed.
"""


def read_arguments(arguments: Sequence[str]) -> None:
    """Print the usage if `--help` was given. Any other argument raises `BadInput`."""
    answer_help(arguments, USAGE)
    if arguments:
        raise BadInput(f"`torchlml info` takes no options, but `{arguments[0]}` was given.")


def main(settings: None = None) -> None:
    """Print the output of `torchlml info`."""
    for name, values in report().items():
        for i, value in enumerate(values):
            sys.stdout.write(f"{name if i == 0 else '':<12}{value}\n")


def report() -> dict[str, list[str]]:
    """Collect the information that `torchlml info` shows.

        >>> report()["python"]
        ['3.12.4']

    Returns:
        One or more lines for each heading.
    """
    import torch  # imported here, so that `--help` does not import torch

    import torchlml

    return {
        "torchlml": [torchlml.__version__],
        "torch": [str(torch.__version__)],
        "python": [platform.python_version()],
        "platform": [platform.platform()],
        "kernel": [kernel()],
        "gpu kernel": [gpu_kernel()],
        "threads": [f"{torch.get_num_threads()} of {os.cpu_count()}"],
        "devices": _devices(),
        "extras": [f"{extra}: {_state(extra)}" for extra in _extras()],
    }


# The common names of the instruction sets that the compiled kernel reports.
_INSTRUCTIONS = {"v3": "AVX2", "v4": "AVX-512"}


def kernel() -> str:
    """Return the name of the CPU kernel, such as `C++ (AVX2)`, or `pure PyTorch` with the reason."""
    from torchlml._cpu import loader

    absence = loader.absence()
    if absence is not None:
        return f"pure PyTorch ({absence})"
    instructions = loader.instruction_set() or ""
    return f"C++ ({_INSTRUCTIONS.get(instructions, instructions)})"


def gpu_kernel() -> str:
    """Return the name of the GPU kernel, such as `Triton 3.7.1`, or why Triton is not used."""
    import torch

    from torchlml._triton import self_test

    gpu = torch.cuda.is_available()
    if self_test.available():
        version = metadata.version("triton")
        return f"Triton {version}" if gpu else f"Triton {version} installed; no GPU detected"
    return "pure PyTorch (Triton is not installed)" if gpu else "Triton not installed; no GPU detected"


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
    except metadata.PackageNotFoundError:  # run from a source directory
        return []


def _state(extra: str) -> str:
    missing = [name for name in _requirements(extra) if not _installed(name)]
    if not missing:
        return "installed"
    return f"missing {', '.join(missing)} (pip install 'torchlml[{extra}]')"


def _requirements(extra: str) -> list[str]:
    """Return the distributions that an extra requires, including those of the extras it refers to."""
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
