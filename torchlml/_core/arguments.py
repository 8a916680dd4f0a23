"""The checks and conversions between what a user passes and the canonical arguments of the operators.

Everything wrong is said here, in one sentence, before anything is computed. The numbers inside `k` and
`offsets` are looked at only in eager calls on the CPU: anywhere else that would stall or stop a trace.
"""

from __future__ import annotations

import functools
import math
import numbers
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchlml._core.rows import wide_dtype
from torchlml.solvers.bracketing import Bracketing

# The last two are what the compiler passes for a number it keeps open.
NUMBERS: tuple[Any, ...] = (int, float, numbers.Real, torch.SymInt, torch.SymFloat)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Canonical(NamedTuple):
    """Arguments as the operators take them, and the shape that the entries have outside."""

    x: Tensor
    k: Tensor
    mask: Tensor | None
    offsets: Tensor | None
    outer: torch.Size | None  # the shape with `dim` moved to the end; None where x is taken as it is

    def restore(self, y: Tensor, dim: int) -> Tensor:
        """Entries in rows, back into the shape they came in."""
        return y if self.outer is None else y.reshape(self.outer).movedim(-1, dim)

    def restore_rows(self, per_row: Tensor) -> Tensor:
        """One number per row, in the shape of x without `dim`."""
        return per_row if self.outer is None else per_row.reshape(self.outer[:-1])


def canonical(
    x: Tensor,
    k: float | Tensor,
    dim: int,
    mask: Tensor | None,
    offsets: Tensor | None,
    *,
    any_k: bool = False,
) -> Canonical:
    """Check the arguments of the projection and bring them into the form of the operators.

    With `any_k`, k may exceed the length of a row: it is a limit, or the bound on it is not 1.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"`x` must be a torch.Tensor, but it is a {type(x).__name__}.")
    if x.dtype not in _DTYPES:
        raise TypeError(f"`x` must be float32, float64, bfloat16 or float16, but its dtype is {x.dtype}.")
    if x.dim() == 0:
        raise ValueError("`x` must have at least one dimension, but it is a 0-d tensor.")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"`dim` must be an int, but it is {dim!r}.")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"`dim` must be from {-x.dim()} to {x.dim() - 1} for this `x`, but it is {dim}.")
    if mask is not None:
        mask = _check_mask(mask, x)
    if x.dtype in (torch.bfloat16, torch.float16) and _autocasts(x.device.type):
        x = x.float()
    if offsets is not None:
        offsets = _check_offsets(offsets, x)
        rows = torch.Size([offsets.numel() - 1])
        k = check_k(k, rows, None, x.device)
        return Canonical(x.contiguous(), k, mask if mask is None else mask.contiguous(), offsets, None)
    n = x.shape[dim]
    if dim not in (-1, x.dim() - 1):
        x = x.movedim(dim, -1)
        mask = None if mask is None else mask.movedim(dim, -1)
    # A mask may leave fewer than k entries, and then k may exceed n as well: all that is left is chosen.
    unlimited = any_k or mask is not None or n == 0
    k = check_k(k, x.shape[:-1], None if unlimited else n, x.device)
    if x.dim() == 2 and x.is_contiguous() and mask is None:
        return Canonical(x, k, None, None, None if dim in (-1, 1) else x.shape)
    outer = x.shape
    rows_shape = (math.prod(outer[:-1]), n)
    flat_mask = None if mask is None else mask.reshape(rows_shape).contiguous()
    return Canonical(x.reshape(rows_shape).contiguous(), k, flat_mask, None, outer)


def check_solver(solver: str | Bracketing) -> Bracketing | None:
    """The settings of the bracketing method, or None for Newton's."""
    if isinstance(solver, Bracketing):
        return solver
    if solver == "newton":
        return None
    if solver == "bracketing":
        return Bracketing()
    raise ValueError(f"`solver` must be 'newton', 'bracketing' or a Bracketing, but it is {solver!r}.")


def check_temperature(temperature: Any) -> None:
    """A positive number, or an error."""
    if not isinstance(temperature, NUMBERS):
        raise TypeError(f"`temperature` must be a positive number, but it is {temperature!r}.")
    if not 0 < temperature < math.inf:
        raise ValueError(f"`temperature` must be a positive number, but it is {temperature!r}.")


def _check_mask(mask: Tensor, x: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        came = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"`mask` must be a bool tensor (True: may be chosen), but it is {came}.")
    if mask.device != x.device:
        raise ValueError(f"`mask` must be on the device of `x`, {x.device}, but it is on {mask.device}.")
    try:
        return mask.expand(x.shape)
    except RuntimeError:
        raise ValueError(
            f"`mask` must broadcast to the shape of `x`, {tuple(x.shape)}, but it is {tuple(mask.shape)}."
        ) from None


def _check_offsets(offsets: Tensor, x: Tensor) -> Tensor:
    if x.dim() != 1:
        raise ValueError(f"With `offsets`, `x` must be a 1-d tensor of packed rows, but it is {x.dim()}-d.")
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int64, torch.int32):
        came = offsets.dtype if isinstance(offsets, Tensor) else type(offsets).__name__
        raise TypeError(f"`offsets` must be an int64 or int32 tensor, but it is {came}.")
    if offsets.dim() != 1 or offsets.numel() == 0:
        raise ValueError(
            "`offsets` must be a 1-d tensor with one more number than there are rows, "
            f"but its shape is {tuple(offsets.shape)}."
        )
    if offsets.device != x.device:
        raise ValueError(f"`offsets` must be on the device of `x`, {x.device}, but is on {offsets.device}.")
    if readable(offsets):
        first, last = int(offsets[0]), int(offsets[-1])
        if first != 0 or last != x.numel():
            raise ValueError(
                f"`offsets` must start at 0 and end at the length of `x`, {x.numel()}, "
                f"but it goes from {first} to {last}."
            )
        if bool((offsets.diff() < 0).any()):
            raise ValueError("`offsets` must not decrease, but it does.")
    return offsets.long().contiguous()


def check_k(k: Any, rows: torch.Size, most: int | None, device: torch.device) -> Tensor:
    """k as a wide tensor, 0-d or flat with one number per row; `most` is the largest k allowed."""
    if not isinstance(k, Tensor):
        if isinstance(k, bool) or not isinstance(k, NUMBERS):
            raise TypeError(f"`k` must be a number or a tensor, but it is {k!r}.")
        _check_range(k, k, most)
        # The same number comes with every call, and a new tensor for it costs as much as all the checks.
        make = _kept_scalar if _untraced() and not torch.is_inference_mode_enabled() else _scalar
        return make(k, wide_dtype(device))
    if k.dtype == torch.bool or k.dtype.is_complex:
        raise TypeError(f"`k` must hold real numbers, but its dtype is {k.dtype}.")
    if k.device != device and k.dim() > 0:
        raise ValueError(f"`k` must be on the device of `x`, {device}, but it is on {k.device}.")
    if readable(k) and k.numel() > 0:
        smallest, largest = k.detach().aminmax()
        _check_range(smallest.item(), largest.item(), most)
    k = k.to(wide_dtype(device))
    if k.dim() == 0:
        return k
    try:
        return k.expand(rows).reshape(-1).contiguous()
    except RuntimeError:
        raise ValueError(
            f"`k` must be a number or broadcast to one number per row, {tuple(rows)}, "
            f"but its shape is {tuple(k.shape)}."
        ) from None


def _check_range(smallest: Any, largest: Any, most: int | None) -> None:
    # A NaN fails every comparison, so it is caught by asking for what is allowed.
    if smallest >= 0 and (largest <= most if most is not None else largest < math.inf):
        return
    came = f"{smallest:g}" if smallest == largest or smallest != smallest else f"{smallest:g} to {largest:g}"
    allowed = "a finite number from 0 on" if most is None else f"from 0 to n = {most}"
    raise ValueError(f"`k` must be {allowed}, but k is {came}.")


def readable(t: Tensor) -> bool:
    """May the numbers in this tensor be looked at without stalling a device or stopping a trace?"""
    return t.device.type == "cpu" and _untraced()


def _untraced() -> bool:
    return (
        not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def _scalar(k: Any, dtype: torch.dtype) -> Tensor:
    # On the CPU whatever the default device: a 0-d tensor goes along with tensors of every device.
    return torch.scalar_tensor(k, dtype=dtype, device="cpu")


_kept_scalar = functools.lru_cache(maxsize=256)(_scalar)


def _autocasts(device: str) -> bool:
    # torch refuses to answer for tensors without data.
    return device != "meta" and torch.is_autocast_enabled(device)
