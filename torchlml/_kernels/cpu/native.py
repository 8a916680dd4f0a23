"""Finding and loading the compiled kernel, where there is one.

`TORCHLML_KERNEL=torch` keeps to plain torch, on a GPU too; `TORCHLML_KERNEL=native` insists on the compiled
kernel, and on a GPU uses Triton's without comparing them first (`cuda/trust.py`); without either, a kernel is
used when it is installed and loads. `TORCHLML_ISA=baseline|v3|v4` makes the
kernel use a lesser x86-64 level than the processor has, to test it.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from pathlib import Path

import torch

# What gives an installation without the kernel one, in the folder of the sources.
REPAIR = "pip install --no-build-isolation --force-reinstall --no-deps ."
_library: ctypes.CDLL | None = None
_absence = "it was not compiled when torchlml was installed"
_warned = False


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
    global _library, _absence
    choice = requested()
    if choice == "torch":
        _absence = "`TORCHLML_KERNEL` is 'torch'"
    if choice == "torch" or _library is not None:
        return
    path = next(Path(__file__).parent.glob("_C*.so"), None)
    if path is None:
        if choice == "native":
            raise _refusal(
                "`TORCHLML_KERNEL` is 'native', but this installation of torchlml has no compiled kernel: "
                "install it with `pip install --no-build-isolation` beside torch and a C++ compiler."
            )
        return
    try:
        torch.ops.load_library(path)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        problem = f"its compiled kernel does not load: {error}"
        _absence = f"it does not load: {error}"
        if choice == "native":
            raise _refusal(f"`TORCHLML_KERNEL` is 'native', but torchlml cannot obey: {problem}") from error
        warnings.warn(f"torchlml falls back to plain torch, as {problem}", stacklevel=2)
        return
    library.torchlml_instruction_set.restype = ctypes.c_char_p
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
    return f"{_absence}; in the folder of its sources, with a C++ compiler, `{REPAIR}` compiles it"


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


requested()  # before any operator is defined: an import that fails later than that cannot be tried again
