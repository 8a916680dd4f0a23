"""Argument validation of the two-sided projection: row sums, capacities and the conditions between them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchlml._arguments import check_bound, check_number, check_real, check_tensor, expand

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Totals that differ by rounding are equal. The capacities are scaled to the total of the rows.
TOTALS = 1e-5


class Arguments(NamedTuple):
    """Checked arguments with one leading dimension for the problems."""

    x: Tensor  # (B, R, n) float32 or float64, -inf where masked
    k: Tensor  # (B, R) float64
    uniform: float | None  # k, if it is one number without a gradient
    capacity: Tensor | None  # (B, n) float64
    start: Tensor | None  # (B, n) float64
    at_most: bool
    range: float  # the largest finite |x|
    masked: bool
    resolution: float  # the relative rounding error of the given capacities


def read(x: Any, k: Any, capacity: Any, mask: Any, bound: Any, start: Any) -> Arguments:
    """Check the arguments that need no comparison with each other."""
    mask = _check_logits(x, mask, bound)
    *batch, rows, columns = x.shape
    device, count = x.device, math.prod(batch)
    per_column = torch.Size([*batch, columns])
    ks = _read_vector(k, "k", x.shape[:-1], device, "row").reshape(count, rows)
    uniform = None if isinstance(k, Tensor) and (k.dim() or k.requires_grad) else float(k)
    resolution = 0.0
    if capacity is not None:
        if isinstance(capacity, Tensor) and capacity.dtype.is_floating_point:
            resolution = 4 * torch.finfo(capacity.dtype).eps
        capacity = _read_vector(capacity, "capacity", per_column, device, "column").reshape(count, columns)
    if start is not None:
        check_tensor(start, "start", x)
        check_real(start, "start", device)
        start = expand(start.detach().double(), "start", per_column, "broadcast to one number per column")
        start = torch.nan_to_num(start, 0.0, 0.0, 0.0).reshape(count, columns)
    work = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    if mask is not None:
        work = torch.where(mask, work, -torch.inf)
    work = work.reshape(count, rows, columns)
    largest, masked = _check_values(work.detach())
    _check_rows(ks.detach(), (work.detach() > -torch.inf).sum(-1) if masked else torch.full_like(ks, columns))
    return Arguments(work, ks, uniform, capacity, start, bound == "at_most", largest, masked, resolution)


def _check_logits(x: Any, mask: Any, bound: Any) -> Tensor | None:
    """Check `x`, `mask` and `bound`, and return the mask in the shape of x."""
    check_tensor(x, "x")
    if type(x).__name__ == "DTensor":  # by its name, because importing the class takes long
        raise TypeError("`x` must be a local tensor, but it is a DTensor. Pass `x.to_local()` and `group`.")
    if x.dtype not in _DTYPES:
        raise TypeError(f"`x` must be float32, float64, bfloat16 or float16, but its dtype is {x.dtype}.")
    if x.dim() < 2:
        raise ValueError(f"`x` must have at least two dimensions (rows, columns), but it is {x.dim()}-d.")
    if check_bound(bound) == "at_least":
        raise ValueError('`bound` must be "exactly" or "at_most", but it is "at_least".')
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        received = mask.dtype if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise TypeError(f"`mask` must be a bool tensor, but it is {received}.")
    check_tensor(mask, "mask", x)
    return expand(mask, "mask", x.shape, "broadcast to the shape of `x`")


def _read_vector(value: Any, name: str, shape: torch.Size, device: torch.device, per: str) -> Tensor:
    """A number or tensor as float64, broadcast to one number per row or column; finite and at least 0."""
    if not isinstance(value, Tensor):
        check_number(value, name, "a number or a tensor", 0)
        return torch.full(shape, float(value), dtype=torch.float64, device=device)
    check_real(value, name, device)
    if value.numel():
        low, high = (float(end) for end in value.detach().aminmax())
        if not 0 <= low <= high < math.inf:
            received = low if not low >= 0 else high
            raise ValueError(f"`{name}` must be finite and at least 0, but it contains {received:g}.")
    accepted = f"be a number or broadcast to one number per {per}"
    return expand(value.to(device).double(), name, shape, accepted)


def _check_values(x: Tensor) -> tuple[float, bool]:
    """The largest finite magnitude in x, and whether x has entries of -inf. NaN and +inf raise an error."""
    if x.numel() == 0:
        return 0.0, False
    low, high = (float(end) for end in x.aminmax())
    if math.isnan(low) or high == math.inf:
        received = "NaN" if math.isnan(low) else "+inf"
        raise ValueError(
            f"`x` must contain finite numbers, or -inf for masked entries, but it contains {received}."
        )
    masked = low == -math.inf
    if masked:
        low = float(torch.where(x == -torch.inf, torch.inf, x).min())
    return max(abs(end) if math.isfinite(end) else 0.0 for end in (low, high)), masked


def _check_rows(k: Tensor, present: Tensor) -> None:
    """Every row must have enough available entries. `present` is their number in each row."""
    wrong = (k > present).nonzero()
    if len(wrong):
        row = tuple(wrong[0].tolist())
        raise ValueError(
            f"`k` must not exceed the number of available entries of a row, but row {row[1]} has "
            f"k = {k[row]:g} and {int(present[row])} available entries."
        )


def check_columns(capacity: Tensor, present: Tensor) -> None:
    """No column may need more than its available rows, whose number is `present`."""
    wrong = (capacity > present * (1 + TOTALS)).nonzero()
    if len(wrong):
        column = int(wrong[0])
        raise ValueError(
            "`capacity` must not exceed the number of available rows of a column, but column "
            f"{column} has a capacity of {capacity[column]:g} and {int(present[column])} available rows."
        )


def check_totals(rows: float, columns: float, at_most: bool) -> None:
    """The totals of the row sums and of the capacities must fit together."""
    slack = TOTALS * max(rows, columns)
    if at_most and columns < rows - slack:
        raise ValueError(
            f"The total of `capacity` must be at least that of `k`, but `k` sums to {rows:g} over the rows "
            f"and `capacity` sums to {columns:g} over the columns."
        )
    if not at_most and abs(columns - rows) > slack:
        raise ValueError(
            f"`k` and `capacity` must have the same total, but `k` sums to {rows:g} over the rows and "
            f"`capacity` sums to {columns:g} over the columns. "
            'With bound="at_most", capacities are upper limits.'
        )
