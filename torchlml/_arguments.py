"""Validate `x`, `k`, `mask` and `offsets`, and convert them to the form that the operators expect.

All validation of these arguments happens before any computation: here, in `_rows.py` for nested tensors, and
in `balanced.py` for `balanced_lml`. The values of a tensor `k` and of `offsets` are checked here only if the
tensor is on the CPU and the call is eager: reading them would otherwise synchronize the device or break a
trace.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
import sys
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchlml._rows import Jagged, read_nested, wide_dtype

Bound = Literal["exactly", "at_most", "at_least"]

# Under torch.compile, dynamic Python numbers have one of the last two types.
NUMBERS: tuple[Any, ...] = (int, float, numbers.Real, torch.SymInt, torch.SymFloat)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_LARGEST = sys.float_info.max  # a larger int cannot be converted to a float


class Canonical(NamedTuple):
    """Validated arguments in the form that the operators expect, and the original shape."""

    x: Tensor  # (R, n), or (N,) with offsets
    k: Tensor  # 0-d or (R,)
    mask: Tensor | None  # bool, with the shape of x
    offsets: Tensor | None  # (R + 1,)
    outer: torch.Size | None  # the original shape with `dim` moved to the end, or None if x was not reshaped
    jagged: Jagged | None = None  # the layout of a nested input; `x` then contains its values

    @property
    def row_shape(self) -> torch.Size:
        """The shape of a result with one number per row: the original shape without `dim`."""
        if self.outer is not None and self.offsets is None:
            return self.outer[:-1]
        return torch.Size([self.x.shape[0] if self.offsets is None else self.offsets.shape[0] - 1])

    def restore(self, y: Tensor, dim: int) -> Tensor:
        """Restore a result with one number per entry to the original shape."""
        if self.jagged is not None:
            assert self.outer is not None
            return self.jagged.wrap(y.reshape(self.outer).movedim(-1, self.jagged.dim))
        return y if self.outer is None else y.reshape(self.outer).movedim(-1, dim)

    def restore_rows(self, per_row: Tensor) -> Tensor:
        """Restore a result with one number per row to the original shape without `dim`."""
        if self.jagged is not None:
            return self.jagged.wrap_rows(per_row.reshape(self.row_shape))
        return per_row if self.outer is None else per_row.reshape(self.outer[:-1])


def canonical(
    x: Tensor,
    k: float | Tensor,
    dim: int,
    mask: Tensor | None,
    offsets: Tensor | None,
    *,
    any_k: bool = False,
    name: str = "x",
    nested: bool = False,
    sharded: bool = False,
) -> Canonical:
    """Validate the arguments of the projection and convert them to the form that the operators expect.

    With `any_k`, k may exceed the length of a row. With `nested`, x may be a nested tensor. With `sharded`, x
    contains only part of each row, because the rows are sharded across processes. `name` is the name of x in
    error messages. Under autocast, half-precision inputs are converted to float32, as in `torch.softmax`.
    """
    if isinstance(x, Tensor) and x.is_nested:
        if not nested:
            raise TypeError(f"`{name}` must be a dense tensor for this function, but it is nested.")
        plain, jagged = read_nested(x, k, dim, mask, offsets, name, readable(x))
        c = canonical(*plain, any_k=any_k, name=name)
        return c._replace(outer=c.x.shape if c.outer is None else c.outer, jagged=jagged)
    if sharded and offsets is not None:
        raise ValueError(
            "`offsets` must be None if rows are sharded across processes, but it was given; pass dense rows."
        )
    check_tensor(x, name)
    if x.dtype not in _DTYPES:
        raise TypeError(
            f"`{name}` must be float32, float64, bfloat16 or float16, but its dtype is {x.dtype}."
        )
    if x.dim() == 0:
        raise ValueError(f"`{name}` must have at least one dimension, but it is a 0-d tensor.")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"`dim` must be an int, but it is {dim!r}.")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"`dim` must be from {-x.dim()} to {x.dim() - 1} for this `{name}`, but it is {dim}."
        )
    if mask is not None:
        mask = _check_mask(mask, x, name)
    if x.dtype in (torch.bfloat16, torch.float16) and autocasts(x.device.type):
        x = x.float()
    if offsets is not None:
        offsets = _check_offsets(offsets, x, name)
        rows = torch.Size([offsets.shape[0] - 1])
        k = check_k(k, rows, None, x.device, name)
        return Canonical(x.contiguous(), k, mask if mask is None else mask.contiguous(), offsets, None)
    n = x.shape[dim]
    if isinstance(k, Tensor) and k.dim() == x.dim() and k.shape[dim] == 1:
        k = k.squeeze(dim)  # the result of a reduction with keepdim=True
    if dim not in (-1, x.dim() - 1):
        x = x.movedim(dim, -1)
        mask = None if mask is None else mask.movedim(dim, -1)
    # A mask may leave fewer than k entries available, in which case all of them are chosen. With a mask, k
    # may therefore exceed n.
    unlimited = any_k or mask is not None or n == 0
    k = check_k(k, x.shape[:-1], None if unlimited else n, x.device, name)
    if x.dim() == 2 and x.is_contiguous() and mask is None:
        return Canonical(x, k, None, None, None if dim in (-1, 1) else x.shape)
    outer = x.shape
    rows_shape = (math.prod(outer[:-1]), n)
    flat_mask = None if mask is None else mask.reshape(rows_shape).contiguous()
    # Reshaping a matrix to its own shape would only add a node to the autograd graph.
    flat = x if x.dim() == 2 else x.reshape(rows_shape)
    return Canonical(flat.contiguous(), k, flat_mask, None, outer)


def check_tensor(t: Any, name: str, like: Tensor | None = None, owner: str = "`x`") -> None:
    """Raise an error unless `t` is a dense tensor and, if `like` is given, on the same device as `like`."""
    if not isinstance(t, Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor, but its type is {type(t).__name__}.")
    if t.layout != torch.strided or (like is not None and t.is_nested):
        came = "it is nested" if t.is_nested else f"its layout is {t.layout}"
        raise TypeError(f"`{name}` must be a dense tensor, but {came}.")
    if like is not None and t.device != like.device:
        raise ValueError(
            f"`{name}` must be on the device of {owner}, {like.device}, but it is on {t.device}."
        )


def check_number(value: Any, name: str, accepted: str, least: float | None = None) -> None:
    """Raise an error unless `value` is a number and, if `least` is given, finite and at least `least`."""
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise TypeError(f"`{name}` must be {accepted}, but it is {value!r}.")
    if least is not None and not least <= value <= _LARGEST:
        received = _show(value) if abs(value) > _LARGEST else value
        raise ValueError(f"`{name}` must be {accepted}, but it is {received}.")


def check_integer_k(k: Any, most: int | None = None) -> int:
    """Return k as an int. Raise an error if it is not an integer from 1 to `most`."""
    try:
        k = operator.index(k)
    except TypeError:
        raise TypeError(f"`k` must be an integer, but it is {k!r}.") from None
    if k < 1 or (most is not None and k > most):
        accepted = "at least 1" if most is None else f"from 1 to {most} for these logits"
        raise ValueError(f"`k` must be {accepted}, but it is {_show(k)}.")
    return k


def check_bound(bound: Bound) -> Bound:
    """Return `bound`. Raise an error if it is not one of the three options."""
    if bound not in ("exactly", "at_most", "at_least"):
        raise ValueError(f'`bound` must be "exactly", "at_most" or "at_least", but it is {bound!r}.')
    return bound


def check_temperature(temperature: Any) -> None:
    """Raise an error unless `temperature` is a positive number."""
    check_number(temperature, "temperature", "a positive number")
    if not 0 < temperature < math.inf:
        raise ValueError(f"`temperature` must be a positive number, but it is {temperature!r}.")


def _check_mask(mask: Tensor, x: Tensor, name: str) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        came = (
            f"its dtype is {mask.dtype}" if isinstance(mask, Tensor) else f"its type is {type(mask).__name__}"
        )
        raise TypeError(f"`mask` must be a bool tensor (True for entries that may be chosen), but {came}.")
    check_tensor(mask, "mask", x, f"`{name}`")
    return expand(mask, "mask", x.shape, f"broadcast to the shape of `{name}`")


def _check_offsets(offsets: Tensor, x: Tensor, name: str) -> Tensor:
    if x.dim() != 1:
        raise ValueError(
            f"With `offsets`, `{name}` must be a 1-d tensor of concatenated rows, but it is {x.dim()}-d."
        )
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int64, torch.int32):
        kind = type(offsets).__name__
        came = f"its dtype is {offsets.dtype}" if isinstance(offsets, Tensor) else f"its type is {kind}"
        raise TypeError(f"`offsets` must be an int64 or int32 tensor, but {came}.")
    check_tensor(offsets, "offsets", x, f"`{name}`")
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ValueError(
            "`offsets` must be a 1-d tensor with one more entry than there are rows, "
            f"but its shape is {tuple(offsets.shape)}."
        )
    if readable(offsets):
        first, last = int(offsets[0]), int(offsets[-1])
        if first != 0 or last != x.numel():
            raise ValueError(
                f"`offsets` must start at 0 and end at the length of `{name}`, {x.numel()}, "
                f"but it starts at {first} and ends at {last}."
            )
        if bool((offsets.diff() < 0).any()):
            index = int((offsets.diff() < 0).nonzero()[0]) + 1
            raise ValueError(
                f"`offsets` must be in nondecreasing order, but it decreases at index {index}, from "
                f"{int(offsets[index - 1])} to {int(offsets[index])}."
            )
    return offsets.long().contiguous()


def check_limit(k: Any) -> None:
    """Raise an error unless k is finite and at least 0. Unlike `check_k`, this does not need the logits."""
    if isinstance(k, Tensor):
        check_k(k, k.shape, None, k.device)
    else:
        check_k(k, torch.Size(), None, torch.device("cpu"))


def check_k(k: Any, rows: torch.Size, most: int | None, device: torch.device, name: str = "x") -> Tensor:
    """Check k and return it in the wide dtype, with shape () or (R,). `most` is the largest valid k."""
    if not isinstance(k, Tensor):
        if isinstance(k, bool) or not isinstance(k, NUMBERS):
            raise TypeError(f"`k` must be a number or a tensor, but it is {k!r}.")
        # Test for valid values instead of invalid ones, because a NaN fails every comparison.
        if not 0 <= k <= (_LARGEST if most is None else most):
            raise _out_of_range(k, k, most)
        # Cache the tensor: most programs pass the same k in every call, and creating a tensor takes as long
        # as all the checks together.
        make = cached_scalar if is_eager() else _scalar
        return make(k, device.type)
    if k.is_nested:
        raise TypeError(f"`k` must be a dense tensor for this `{name}`, but it is nested.")
    check_real(k, "k", device, name)
    if readable(k) and k.numel() > 0:
        smallest, largest = (end.item() for end in k.detach().aminmax())
        if not 0 <= smallest <= largest <= (_LARGEST if most is None else most):
            raise _out_of_range(smallest, largest, most)
    k = k.to(wide_dtype(device))
    if k.dim() == 0:
        return k
    if k.dim() == len(rows) + 1 and k.shape[-1] == 1:
        k = k.squeeze(-1)
    return expand(k, "k", rows, "be a number or broadcast to one number per row").reshape(-1).contiguous()


def expand(t: Tensor, name: str, shape: torch.Size, accepted: str) -> Tensor:
    """Broadcast `t` to `shape`, or raise an error in which `accepted` completes "`name` must ..."."""
    try:
        return t.expand(shape)
    except RuntimeError:
        came = f"but its shape is {tuple(t.shape)}"
        raise ValueError(f"`{name}` must {accepted}, {tuple(shape)}, {came}.") from None


def check_real(t: Tensor, name: str, device: torch.device, owner: str = "x") -> None:
    """Raise an error unless `t` is real and on `device`. A 0-d CPU tensor is accepted for every device."""
    if t.dtype == torch.bool or t.dtype.is_complex:
        raise TypeError(f"`{name}` must contain real numbers, but its dtype is {t.dtype}.")
    if t.device != device and (t.dim() > 0 or t.device.type != "cpu"):
        raise ValueError(f"`{name}` must be on the device of `{owner}`, {device}, but it is on {t.device}.")


def _out_of_range(smallest: Any, largest: Any, most: int | None) -> ValueError:
    came = f"is {_show(smallest)}"
    if smallest != largest and smallest == smallest:
        came = f"ranges from {_show(smallest)} to {_show(largest)}"
    allowed = "finite in float64 and at least 0" if most is None else f"from 0 to n = {most}"
    return ValueError(f"`k` must be {allowed}, but k {came}.")


def _show(number: Any) -> str:
    if isinstance(number, int) and abs(number) > _LARGEST:
        return f"an integer with {number.bit_length()} bits"
    return f"{number:g}"


def readable(*tensors: Tensor | None) -> bool:
    """Whether the values of these tensors can be read without synchronizing a device or breaking a trace."""
    return is_eager() and all(t is None or t.device.type == "cpu" for t in tensors)


def is_eager() -> bool:
    """Whether no compiler, transform, dispatch mode or tracer is active."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._is_tracing()
    )


def is_plain() -> bool:
    """Whether neither a `torch.func` transform nor forward-mode differentiation is active."""
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def is_sharded(x: Any, group: Any = None) -> bool:
    """Whether a call is distributed across processes: it has a `group`, or `x` is a DTensor."""
    if group is not None:
        return True
    # Do not import this module, because that takes longer than importing torchlml. Unless the caller has
    # imported it, `x` cannot be a DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def _scalar(k: Any, device: str) -> Tensor:
    if not isinstance(k, (int, float, torch.SymInt, torch.SymFloat)):
        k = float(k)  # a Fraction or a NumPy scalar
    # Use the CPU, regardless of the default device: a 0-d CPU tensor works with tensors on any device.
    return torch.scalar_tensor(k, dtype=wide_dtype(torch.device(device)), device="cpu")


@functools.lru_cache(maxsize=256)
def cached_scalar(k: Any, device: str) -> Tensor:
    """Return `k` as a cached 0-d tensor in the wide dtype of a device type."""
    # A tensor created in inference mode cannot be saved for the backward pass of a later call.
    with torch.inference_mode(False):
        return _scalar(k, device)


def autocasts(device: str) -> bool:
    """Whether autocast is enabled for a device type. False for "meta", for which torch raises an error."""
    return device != "meta" and torch.is_autocast_enabled(device)
