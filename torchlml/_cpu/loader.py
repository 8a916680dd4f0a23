"""Finding and loading the compiled kernel, where there is one.

`TORCHLML_KERNEL=torch` keeps to plain torch, on a GPU too; `TORCHLML_KERNEL=native` insists on the compiled
kernel, and on a GPU uses Triton's without comparing them first (`cuda/trust.py`); without either, a kernel is
used when it is installed and loads. `TORCHLML_ISA=baseline|v3|v4` makes the
kernel use a lesser x86-64 level than the processor has, to test it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import warnings
from importlib import metadata
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import torch

OLDEST = (2, 10)  # the first torch whose stable ABI has what the kernel uses
_REASON = "_absent.txt"  # setup.py writes it where there is no kernel
_library: ctypes.CDLL | None = None
_absence = "it is not in this installation"
_warned = False


def check_torch(version: str) -> None:
    """Refuse a torch that is too old, before anything else can fail for it."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        raise _refusal(
            f"torchlml needs torch {OLDEST[0]}.{OLDEST[1]} or newer, and this is torch {version}: "
            "run `pip install --upgrade torch`."
        )


def requested() -> str:
    """What TORCHLML_KERNEL asks for: "torch", "native", or nothing."""
    choice = os.environ.get("TORCHLML_KERNEL", "")
    if choice not in ("", "torch", "native"):
        raise _refusal(
            "The environment variable `TORCHLML_KERNEL` must be 'torch' or 'native', or not be set, "
            f"but it is {choice!r}."
        )
    return choice


def _refusal(sentence: str) -> ImportError:
    """What `import torchlml` raises; its `name` tells it from the absence of another package."""
    return ImportError(sentence, name="torchlml")


def load() -> None:
    """Load the compiled kernel, if it is there and wanted."""
    global _library, _absence, _warned
    choice = requested()
    if choice == "torch":
        _absence = "`TORCHLML_KERNEL` is 'torch'"
    if choice == "torch" or _library is not None:
        return
    folder = Path(__file__).parent
    path = next((path for path in folder.glob("_C*") if path.suffix in (".so", ".pyd")), None)
    if path is None:
        reason = folder / _REASON
        if reason.exists():
            _absence = f"when torchlml was installed, {reason.read_text(encoding='utf-8').strip()}"
        if choice == "native":
            raise _refusal(f"`TORCHLML_KERNEL` is 'native', but there is no compiled kernel: {absence()}.")
        return
    try:
        torch.ops.load_library(path)
        library = ctypes.CDLL(str(path))
        library.torchlml_instruction_set.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:  # broken, of another platform; not torchlml's
        _absence = f"{path.name} does not load ({error})"
        if choice == "native":
            raise _refusal(f"`TORCHLML_KERNEL` is 'native', but {absence()}.") from error
        _warned = True
        warnings.warn(f"torchlml falls back to plain torch, which is slower: {absence()}.", stacklevel=2)
        return
    _library = library


def loaded() -> bool:
    """Is the compiled kernel in use?"""
    return _library is not None


def absence() -> str | None:
    """Why there is no compiled kernel and what helps, or None if it is in use."""
    if loaded():
        return None
    if requested() == "torch":
        return _absence
    return f"{_absence}; with a C++ compiler and torch installed, `{_repair()}` compiles it"


def _repair() -> str:
    """The command that installs torchlml anew from where it came: a folder, an archive, or an index."""
    try:
        came_from = metadata.distribution("torchlml").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # run from a folder of sources
        return "python setup.py build_ext --inplace"
    source, editable = "torchlml", ""
    if came_from is not None:
        origin = json.loads(came_from)
        source = origin["url"]
        if source.startswith("file:"):
            source = url2pathname(urlparse(source).path)
        editable = "--editable " if origin.get("dir_info", {}).get("editable") else ""
    # Not from the cache: there pip keeps the wheel without a kernel that it has built before.
    return f"pip install --force-reinstall --no-deps --no-cache-dir {editable}{source}"


def warn_of_absence() -> None:
    """Say once that calls on the CPU are slow for want of the kernel, if nobody asked for plain torch."""
    global _warned
    if _warned or loaded() or requested() == "torch":
        return
    _warned = True
    warnings.warn(
        f"torchlml computes in plain torch, several times slower than with its compiled kernel: {absence()}.",
        stacklevel=3,
    )


def instruction_set() -> str | None:
    """The instruction set that the compiled kernel uses ("baseline", "v3" or "v4"), or None without one."""
    return None if _library is None else _library.torchlml_instruction_set().decode()


# Before any operator is defined: an import that fails later than that cannot be tried again.
check_torch(str(torch.__version__))
requested()
