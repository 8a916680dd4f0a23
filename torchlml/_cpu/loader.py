"""Find and load the compiled kernel, if it is installed.

`TORCHLML_KERNEL=torch` selects pure PyTorch, even on a GPU. `TORCHLML_KERNEL=native` requires the compiled
kernel, and on a GPU uses the Triton kernels without their self-test (`_triton/self_test.py`). By default, the
compiled kernel is used if it is installed and can be loaded, and the Triton kernels are used if they pass the
self-test. `TORCHLML_ISA=baseline|v3|v4` restricts the compiled kernel to a lower x86-64 level than the
processor supports, for tests.
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

OLDEST = (2, 10)  # the first torch version whose stable ABI provides everything the kernel uses
_REASON = "_absent.txt"  # contains the reason if setup.py did not build the kernel
_library: ctypes.CDLL | None = None
_absence = "this installation does not include it"
_warned = False


def check_torch(version: str) -> None:
    """Raise an error if torch is too old, because later errors would not reveal the cause."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        raise _import_error(
            f"torchlml requires torch {OLDEST[0]}.{OLDEST[1]} or newer, but the installed version is "
            f"{version}. Run `pip install --upgrade torch`."
        )


def requested() -> str:
    """Return the kernel that TORCHLML_KERNEL selects: "torch", "native" or "" for the default."""
    choice = os.environ.get("TORCHLML_KERNEL", "")
    if choice not in ("", "torch", "native"):
        raise _import_error(
            "The environment variable `TORCHLML_KERNEL` must be 'torch', 'native' or unset, "
            f"but it is {choice!r}."
        )
    return choice


def _import_error(message: str) -> ImportError:
    """Return an ImportError whose `name` is "torchlml".

    The name distinguishes it from the error that Python raises for a missing package.
    """
    return ImportError(message, name="torchlml")


def load() -> None:
    """Load the compiled kernel, if it is installed and not disabled."""
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
            raise _import_error(
                f"`TORCHLML_KERNEL` is 'native', but there is no compiled kernel: {absence()}."
            )
        return
    try:
        torch.ops.load_library(path)
        library = ctypes.CDLL(str(path))
        library.torchlml_instruction_set.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:  # damaged, or a library of another platform or package
        _absence = f"{path.name} could not be loaded ({error})"
        if choice == "native":
            raise _import_error(f"`TORCHLML_KERNEL` is 'native', but {absence()}.") from error
        _warned = True
        warnings.warn(f"torchlml falls back to pure PyTorch, which is slower: {absence()}.", stacklevel=2)
        return
    _library = library


def loaded() -> bool:
    """Whether the compiled kernel is in use."""
    return _library is not None


def absence() -> str | None:
    """Return why the compiled kernel is not in use and how to build it, or None if it is in use."""
    if loaded():
        return None
    if requested() == "torch":
        return _absence
    return f"{_absence}; with a C++ compiler and torch installed, `{_repair()}` compiles it"


def _repair() -> str:
    """Return the command that reinstalls torchlml from its source: a directory, archive or package index."""
    try:
        came_from = metadata.distribution("torchlml").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # running from a source directory
        return "python setup.py build_ext --inplace"
    source, editable = "torchlml", ""
    if came_from is not None:
        origin = json.loads(came_from)
        source = origin["url"]
        if source.startswith("file:"):
            source = url2pathname(urlparse(source).path)
        editable = "--editable " if origin.get("dir_info", {}).get("editable") else ""
    # Bypass the cache, in which pip may have stored a wheel without the kernel.
    return f"pip install --force-reinstall --no-deps --no-cache-dir {editable}{source}"


def warn_of_absence() -> None:
    """Warn once that calls on the CPU are slow without the kernel, unless pure PyTorch was requested."""
    global _warned
    if _warned or loaded() or requested() == "torch":
        return
    _warned = True
    warnings.warn(
        f"torchlml uses pure PyTorch, which is several times slower than its compiled kernel: {absence()}.",
        stacklevel=3,
    )


def instruction_set() -> str | None:
    """Return the instruction set of the kernel ("baseline", "v3" or "v4"), or None if it is not loaded."""
    return None if _library is None else _library.torchlml_instruction_set().decode()


# Check before any operator is defined, because an import that fails later cannot be retried.
check_torch(str(torch.__version__))
requested()
