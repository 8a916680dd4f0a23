"""Finding and loading the compiled kernel, where there is one.

`TORCHLML_KERNEL=torch` keeps to plain torch, `TORCHLML_KERNEL=native` insists on the compiled kernel;
without either, the kernel is used when it is installed and loads. `TORCHLML_ISA=baseline|v3|v4` makes the
kernel use a lesser x86-64 level than the processor has, to test it.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from pathlib import Path

import torch

_library: ctypes.CDLL | None = None


def _requested() -> str:
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
    global _library
    choice = _requested()
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
        if choice == "native":
            raise _refusal(f"`TORCHLML_KERNEL` is 'native', but torchlml cannot obey: {problem}") from error
        warnings.warn(f"torchlml falls back to plain torch, as {problem}", stacklevel=2)
        return
    library.torchlml_instruction_set.restype = ctypes.c_char_p
    _library = library


def loaded() -> bool:
    """Is the compiled kernel in use?"""
    return _library is not None


def instruction_set() -> str | None:
    """The instruction set that the compiled kernel uses ("baseline", "v3" or "v4"), or None without one."""
    return None if _library is None else _library.torchlml_instruction_set().decode()


_requested()  # before any operator is defined: an import that fails later than that cannot be tried again
