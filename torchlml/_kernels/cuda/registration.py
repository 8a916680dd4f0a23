"""When the Triton kernels run: on CUDA (or ROCm) tensors narrower than float64, where Triton can be imported.

They are used there after `trust.py` has compared them. Everything else on such a device falls back to the
operators in plain torch. Triton and the kernels are imported when the first such tensor arrives, and not
before: `import torchlml` costs nothing more.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch

from torchlml._kernels.cuda import trust

# What a GPU calls for each operator that has a kernel there, by name.
OPERATORS: dict[str, Callable[..., Any]] = {}
_plain: dict[str, Callable[..., Any]] = {}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Places in a row are int32 in the kernels, a block past the end included.
_LONGEST_ROW = 2**31 - 2**15


def by_triton(name: str, place_of_x: int, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The operator `name` by Triton where that is possible, else in plain torch.

    Args:
        name: its name here and in `triton_operators.py`.
        place_of_x: which of its arguments is x.
        plain: the operator in plain torch.
    """

    def run(*arguments: Any) -> Any:
        x = arguments[place_of_x]
        fits = x.dtype in _DTYPES and x.shape[-1] <= _LONGEST_ROW and available()
        if not fits or not trust.trusted(x.device, x.dtype, _kernels(), _plain):
            return plain(*arguments)
        try:
            return getattr(_kernels(), name)(*arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a layout that does not compile: the others may, but who knows how well
            if x.device.type == "cpu":
                raise
            trust.distrust(x.device, x.dtype, f"failed in `{name}`: {type(error).__name__}: {error}")
            return plain(*arguments)

    OPERATORS[name] = run
    _plain[name] = plain
    return run


@functools.cache
def available() -> bool:
    """Is there a Triton to import? torch brings its own wherever it knows GPUs that Triton serves."""
    if find_spec("triton") is None:
        return False
    try:
        _kernels()
    except ImportError:  # a Triton that is installed but cannot be loaded on this machine
        return False
    return True


def description() -> str:
    """What tensors on a GPU use: `triton 3.7.1` or `torch`."""
    return f"triton {metadata.version('triton')}" if available() else "torch (Triton is not installed)"


def _kernels() -> Any:
    return importlib.import_module("torchlml._kernels.cuda.triton_operators")
