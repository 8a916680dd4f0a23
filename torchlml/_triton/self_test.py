"""Decide when the Triton kernels run: on a GPU, for dtypes narrower than float64, if Triton is installed.

Before their first use for a device and dtype, the kernels are compared with pure PyTorch on a few dozen rows.
If a kernel differs, does not compile or fails, pure PyTorch is used from then on, and a warning is issued.
`TORCHLML_KERNEL=torch` disables the kernels. `TORCHLML_KERNEL=native` uses them without the self-test, and so
does `torchlml gpu-check`, which has its own test. Only layouts for short rows are tested, because every other
layout would have to be compiled just for the test.

Triton and the kernels are imported when they are first needed, so that they do not slow down
`import torchlml`.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from torchlml._cpu import loader

Operator = Callable[..., Any]
_Key = tuple[torch.device, torch.dtype]
# The largest rounding differences between correct kernels, relative to max(1, |expected|). They are larger in
# half precision, because the results are rounded to it at the end.
_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_ENTRIES = 40
# In the kernels, positions in a row are int32, including positions up to one block past its end.
_LONGEST_ROW = 2**31 - 2**15

# The function that is called on a GPU for each operator with a Triton kernel, by operator name.
OPERATORS: dict[str, Operator] = {}
_plain: dict[str, Operator] = {}  # the same operators in pure PyTorch
_results: dict[_Key, bool] = {}
_skipped = False


def by_triton(name: str, place_of_x: int, plain: Operator) -> Operator:
    """Return a function that calls the Triton kernel `name` if possible, and otherwise calls `plain`."""

    def run(*arguments: Any) -> Any:
        x = arguments[place_of_x]
        fits = x.dtype in _TOLERANCE and x.shape[-1] <= _LONGEST_ROW and available()
        if not fits or not passes(x.device, x.dtype, _kernels()):
            return plain(*arguments)
        try:
            return getattr(_kernels(), name)(*arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # this layout failed, so do not trust other layouts either
            if x.device.type == "cpu":
                raise
            disable(x.device, x.dtype, f"failed in `{name}`: {type(error).__name__}: {error}")
            return plain(*arguments)

    OPERATORS[name] = run
    _plain[name] = plain
    return run


@functools.cache
def available() -> bool:
    """Whether Triton can be imported. PyTorch builds for GPUs that Triton supports include it."""
    if find_spec("triton") is None:
        return False
    try:
        _kernels()
    except ImportError:  # Triton is installed but cannot be loaded on this machine
        return False
    return True


def _kernels() -> Any:
    return importlib.import_module("torchlml._triton.operators")


def skip() -> None:
    """Use the kernels in this process without the self-test."""
    global _skipped
    _skipped = True


def passes(device: torch.device, dtype: torch.dtype, kernels: Any) -> bool:
    """Whether the kernels may run for a device and dtype; by default, the first call runs the self-test.

    `kernels` has one function per operator, named like the operator, as in `operators.py`.
    """
    choice = loader.requested()
    if choice or _skipped or _interpreted(device):
        return choice != "torch" or _interpreted(device)
    key = (device, dtype)
    if key not in _results:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # the comparison synchronizes, which is not possible during graph capture
        _results[key] = True
        try:
            found = difference(device, dtype, kernels)
        except Exception as error:  # the compiler may raise any exception
            found = f"failed to run: {type(error).__name__}: {error}"
        if found is not None:
            disable(device, dtype, found)
    return _results[key]


def disable(device: torch.device, dtype: torch.dtype, found: str) -> None:
    """Use pure PyTorch for this device and dtype from now on, and warn."""
    _results[device, dtype] = False
    warnings.warn(
        f"torchlml uses pure PyTorch for {dtype} on {device} from now on, because its Triton kernels "
        f"{found}. Please run `torchlml gpu-check` and attach the file it writes to an issue.",
        stacklevel=4,
    )


def difference(device: torch.device, dtype: torch.dtype, kernels: Any) -> str | None:
    """Return a description of the first difference from pure PyTorch, or None."""
    for name, arguments in _calls(device, dtype):
        expected, got = _plain[name](*arguments), getattr(kernels, name)(*arguments)
        pairs = [(expected, got)] if isinstance(expected, Tensor) else list(zip(expected, got, strict=True))
        for place, (right, found) in enumerate(pairs):
            # nu is a pair (hi, lo), and only the sum of the two must agree.
            nu = name == "solve" or (name.endswith("forward") and place == 1)
            worst = _distance(right.double().sum(0) if nu else right, found.double().sum(0) if nu else found)
            if not worst <= _TOLERANCE[dtype]:
                return f"differ from pure PyTorch by up to {worst:.1e} in `{name}`"
    return None


def _distance(expected: Tensor, got: Tensor) -> float:
    expected, got = expected.double(), got.double()
    apart = (got - expected).abs() / expected.abs().clamp(min=1)
    same = (got == expected) | (got.isnan() & expected.isnan())
    return float(torch.where(same, 0.0, apart).nan_to_num(nan=torch.inf).max())


def _calls(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield (operator name, arguments) for calls that cover every operator.

    The rows have different scales. Some are masked or ragged, and some contain NaN or -inf.
    """
    for x, k, mask, offsets, labels in _problems(device, dtype):
        rows = mask, offsets
        yield "solve", (x, k, *rows)
        yield "forward", (x, k, *rows)
        yield "log_forward", (x, k, *rows)
        yield "loss_forward", (x, k, *rows, *labels)
        y, nu = _plain["forward"](x, k, *rows)
        log_y, _ = _plain["log_forward"](x, k, *rows)
        per_row = torch.linspace(-1, 1, nu.shape[1], device=device)
        grad = torch.linspace(-1, 1, x.numel(), device=device).reshape(x.shape).to(dtype)
        yield "backward", (grad, x, y, nu, *rows)
        yield "log_backward", (grad, x, log_y, nu, *rows)
        yield "dual_backward", (per_row, x, nu, *rows)
        yield "loss_backward", (per_row, x, k, nu, *rows, *labels)


_Problem = tuple[Tensor, Tensor, Tensor | None, Tensor | None, tuple[Tensor, Tensor | None, None]]


def _problems(device: torch.device, dtype: torch.dtype) -> Iterator[_Problem]:
    generator = torch.Generator().manual_seed(0)
    count = 24
    scale = torch.tensor([0.01, 1.0, 3.0, 12.0]).repeat(count // 4).unsqueeze(-1)
    x = (torch.randn(count, _ENTRIES, generator=generator) * scale).to(device, dtype)
    k = torch.linspace(0.5, _ENTRIES - 0.5, count, dtype=torch.float64).to(device)
    labels = torch.tensor([[3, 17]]).expand(count, 2).contiguous().to(device)
    yield x, k, None, None, (labels, None, None)
    mask = (torch.rand(count, _ENTRIES, generator=generator) > 0.2).index_fill(1, torch.tensor([3, 17]), True)
    special = x.clone()
    special[0, 5], special[1, 6], special[2] = torch.nan, -torch.inf, 0.0
    k = k.clone()
    k[3], k[4] = 0.0, _ENTRIES
    yield special, k, mask.to(device), None, (labels, None, None)
    offsets = torch.tensor([0, 40, 41, 140, 500, 960], device=device)
    packed_k = torch.tensor([2.0, 0.5, 30.0, 3.0, 400.0], dtype=torch.float64, device=device)
    positions = torch.tensor([7, 40, 99, 200, 900], device=device)
    starts = torch.arange(6, device=device)
    yield x.flatten(), packed_k, None, offsets, (positions, starts, None)


def _interpreted(device: torch.device) -> bool:
    """Whether the kernels run in Triton's interpreter, as in CPU tests, which check results themselves."""
    return device.type == "cpu"
