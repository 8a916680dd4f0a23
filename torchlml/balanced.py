"""The two-sided projection, in which each row sums to k and each column sums to its capacity.

A call solves a batch of problems, or one problem whose rows are sharded across processes.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchlml._arguments import autocasts, check_number, check_real, check_tensor, expand
from torchlml._balanced import Extent, Matrix, project
from torchlml._balanced.linear import balanced_forward

# With several processes, the solver can skip gathering a sample of the rows for its initial guess if, on
# every process, the relative error of the column sums at `start` is at most this value.
NEAR = 0.3
ColumnBound = Literal["exactly", "at_most"]


def balanced_lml(
    x: Tensor,
    k: float | Tensor,
    capacity: float | Tensor | None = None,
    *,
    mask: Tensor | None = None,
    bound: ColumnBound = "exactly",
    start: Tensor | None = None,
    group: Any = None,
) -> Tensor:
    """Project logits onto the matrices with entries in [0, 1], row sums k and column sums `capacity`.

        >>> x = torch.tensor([[2.0, 0.0, -1.0], [2.0, 1.0, 0.0], [3.0, 0.0, 0.0]])
        >>> y = torchlml.balanced_lml(x, 1)
        >>> y.sum(-1).round(decimals=3), y.sum(-2).round(decimals=3)
        (tensor([1., 1., 1.]), tensor([1., 1., 1.]))

    Args:
        x: logits of shape (..., rows, columns). Leading dimensions index independent problems.
        k: the sum of each row: a number, or a tensor that broadcasts to (..., rows). It may be fractional.
        capacity: the sum of each column: a number, or a tensor that broadcasts to (..., columns). By default,
            all columns of a problem get an equal share of the total of `k`.
        mask: a bool tensor that broadcasts to the shape of `x`, with True for entries that may be chosen. All
            other entries get exactly 0.
        bound: "exactly", or "at_most" if the capacities are upper limits on the column sums.
        start: an initial guess for the column multipliers mu, such as the values from the previous training
            step. It broadcasts to (..., columns). It affects the run time, but changes the result only within
            the accuracy stated below.
        group: the processes across which the rows of one matrix are sharded, as a ProcessGroup or a
            one-dimensional DeviceMesh. `x`, `k` and `mask` contain the rows of this process. All other
            arguments must be the same on every process.

    Returns:
        Y, with the shape and dtype of `x`. Under autocast, half-precision inputs give a float32 result.

    Y maximizes sum(x * Y) + H(Y) under these constraints, where H(Y) is the sum of the binary entropies of
    the entries. The solution is y_ij = sigmoid(x_ij + nu_i + mu_j) with one number nu_i per row and one
    number mu_j per column. The relative error of the column sums is at most 1e-9 in float64 and 1e-4 in
    float32. Very large logits, and a `capacity` with a narrower dtype, raise these limits to at most 2e-4.
    Half-precision inputs are converted to float32 for the computation. The first derivatives with respect to
    `x`, `k` and `capacity` are exact. The backward pass solves a linear system with one unknown per column.

    With `bound="exactly"`, `k` and `capacity` must have the same total up to a relative difference of 1e-5.
    The capacities are scaled to the total of `k`, and derivatives include this scaling. With a `group`,
    the gradients are those of the sum of the losses on all processes.
    """
    return balanced(x, k, capacity, mask, bound, start, group).y


def balanced_lml_dual(
    x: Tensor,
    k: float | Tensor,
    capacity: float | Tensor | None = None,
    *,
    mask: Tensor | None = None,
    bound: ColumnBound = "exactly",
    start: Tensor | None = None,
    group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Compute the dual variables nu and mu of `balanced_lml`, where y_ij = sigmoid(x_ij + nu_i + mu_j).

        >>> x = torch.tensor([[2.0, 0.0], [3.0, 0.0]])
        >>> nu, mu = torchlml.balanced_lml_dual(x, 1)
        >>> mu
        tensor([-1.2500,  1.2500])

    The arguments are those of `balanced_lml`.

    Returns:
        nu of shape (..., rows) and mu of shape (..., columns), in the dtype of Y. Adding a constant to mu
        and subtracting it from nu does not change Y, so mu is chosen to have mean 0 over its finite entries.
        With `bound="at_most"`, mu is at most 0 instead. mu is -inf for a capacity of 0 and +inf for a column
        that needs all of its available rows. If such columns account for the whole k of a row, the row's nu
        is -inf, and nu and mu do not determine the row's entries of Y. With a `group`, mu is bitwise
        identical on all processes.

    mu is the bias that a router needs for balance: in each row, the k largest entries of x + mu are also the
    k largest entries of Y.
    """
    found = balanced(x, k, capacity, mask, bound, start, group, dual=True)
    return found.nu, found.mu


class Balanced(NamedTuple):
    """The result of `balanced`: Y and the multipliers nu and mu. nu is empty unless it was requested."""

    y: Tensor
    nu: Tensor
    mu: Tensor


def balanced(
    x: Tensor,
    k: float | Tensor,
    capacity: float | Tensor | None,
    mask: Tensor | None,
    bound: str,
    start: Tensor | None,
    group: Any,
    dual: bool = False,
) -> Balanced:
    """Compute Y and mu, and also nu if `dual` is True. The other arguments are those of `balanced_lml`."""
    # Compiled code gets a graph break here. Eager calls avoid `_not_compiled`, because it imports the
    # compiler.
    if torch.compiler.is_compiling():
        return _not_compiled(x, k, capacity, mask, bound, start, group, dual)
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        raise NotImplementedError(
            "balanced_lml does not support torch.func transforms or forward-mode differentiation, but one of "
            "them is active."
        )
    if group is None:
        own = _read(x, k, capacity, mask, bound, start)
        count, rows, columns = own.x.shape
        if own.uniform is None:
            totals = own.k.detach().sum(1).tolist()
        else:
            totals = [own.uniform * rows] * count
        found = [
            project(matrix, Extent([rows], [total], own.range, own.masked, None), dual)
            for matrix, total in zip(_matrices(own), totals, strict=True)
        ]
        if count == 0:
            found = [(own.x, own.k, own.x.new_zeros(0, columns))]
    else:
        own, extent = _agree(x, k, capacity, mask, bound, start, group)
        (matrix,) = _matrices(own)
        found = [project(matrix, extent, dual)]
    half = x.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if half and autocasts(x.device.type) else x.dtype
    y, nu, mu = (
        (parts[0] if len(parts) == 1 else torch.stack(parts)).to(dtype) for parts in zip(*found, strict=True)
    )
    nu_shape = x.shape[:-1] if dual else (0,)
    return Balanced(y.reshape(x.shape), nu.reshape(nu_shape), mu.reshape(*x.shape[:-2], x.shape[-1]))


_not_compiled = cast(Any, torch)._disable_dynamo(balanced)


def _matrices(own: _Arguments) -> list[Matrix]:
    """Split a batch into its problems."""
    # Use unbind, because the backward pass of indexing would allocate a gradient with the size of the whole
    # batch for every problem.
    absent = [None] * len(own.x)
    parts = zip(
        own.x.unbind(0),
        own.k.unbind(0),
        absent if own.capacity is None else own.capacity.unbind(0),
        absent if own.start is None else own.start.unbind(0),
        strict=True,
    )
    return [
        Matrix(x, k, own.uniform, capacity, start, own.at_most, own.resolution)
        for x, k, capacity, start in parts
    ]


def _agree(
    x: Any, k: Any, capacity: Any, mask: Any, bound: Any, start: Any, group: Any
) -> tuple[_Arguments, Extent]:
    """Check the arguments on all processes, and exchange sizes and totals, in one round of communication."""
    # This import is slow, and few calls need it.
    from torchlml._distributed.group import agreement, fingerprint, label_group

    with agreement(label_group(group), x) as agreed:
        own = _read(x, k, capacity, mask, bound, start)
        if x.dim() != 2:
            raise ValueError(
                f"With `group`, `x` must have two dimensions (rows, columns), but it is {x.dim()}-d."
            )
        same = {
            "function": "balanced_lml",
            "dtype": str(x.dtype),
            "number of columns": x.shape[1],
            "capacity": "None" if own.capacity is None else fingerprint(own.capacity),
            "start": "None" if own.start is None else fingerprint(own.start),
            "bound": bound,
            "gradient requirement": torch.is_grad_enabled()
            and any(isinstance(t, Tensor) and t.requires_grad for t in (x, k, capacity)),
        }
        total = float(own.k.detach().sum())
        agreed.own = {
            "same": same,
            "masked": own.masked,
            "rows": x.shape[0],
            "range": own.range,
            "total": total,
            **_prospects(own, total),
        }
    extent = Extent(
        rows=[int(told["rows"]) for told in agreed.everyone],
        totals=[float(told["total"]) for told in agreed.everyone],
        range=max(float(told["range"]) for told in agreed.everyone),
        masked=any(told["masked"] for told in agreed.everyone),
        processes=agreed.group,
        roomy=all(told["roomy"] for told in agreed.everyone),
        near=all(told["near"] for told in agreed.everyone),
    )
    return own, extent


def _prospects(own: _Arguments, total: float) -> dict[str, bool]:
    """Return the flags `roomy` and `near`.

    `roomy` means that every column has more available rows than it needs, and `near` means that the start is
    near the solution. Each process compares its rows with its share of the capacities. If a flag is True on
    all processes, it is True for all rows together, and the processes can skip a round of communication.
    """
    x, n = own.x[0].detach(), own.x.shape[2]
    if own.at_most or n == 0:  # the shares of the columns are unknown
        return {"roomy": False, "near": False}
    held = torch.ones(n, dtype=torch.float64, device=x.device)
    if own.capacity is not None:
        held = own.capacity[0].detach()
    share = total * held / held.sum()
    roomy = bool((((x > -torch.inf).sum(0) * (1 - 1e-9) > share) | (share == 0)).all())
    near = False
    if own.start is not None:
        k = own.k[0].detach().contiguous()
        sums = balanced_forward(x.contiguous(), own.start[0], k)[2][0]
        near = bool(((sums - share).abs() <= NEAR * share).all())
    return {"roomy": roomy, "near": near}


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class _Arguments(NamedTuple):
    """Validated arguments. The leading dimensions of each tensor are flattened into a single one."""

    x: Tensor  # (B, R, n) float32 or float64, -inf where masked
    k: Tensor  # (B, R) float64
    uniform: float | None  # k, if it is one number without a gradient
    capacity: Tensor | None  # (B, n) float64
    start: Tensor | None  # (B, n) float64
    at_most: bool
    range: float  # the largest finite |x|
    masked: bool
    resolution: float  # the relative rounding error of the given capacities


def _read(x: Any, k: Any, capacity: Any, mask: Any, bound: Any, start: Any) -> _Arguments:
    """Validate and convert the arguments of `balanced_lml` on this process."""
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
    if masked or uniform is None or uniform > columns:
        _check_rows(ks.detach(), (work.detach() > -torch.inf).sum(-1))
    return _Arguments(work, ks, uniform, capacity, start, bound == "at_most", largest, masked, resolution)


def _check_logits(x: Any, mask: Any, bound: Any) -> Tensor | None:
    """Check `x`, `mask` and `bound`, and return the mask expanded to the shape of `x`."""
    check_tensor(x, "x", x)
    if type(x).__name__ == "DTensor":  # by name, because importing the class is slow
        raise TypeError("`x` must be a local tensor, but it is a DTensor. Pass `x.to_local()` and `group`.")
    if x.dtype not in _DTYPES:
        raise TypeError(f"`x` must be float32, float64, bfloat16 or float16, but its dtype is {x.dtype}.")
    if x.dim() < 2:
        raise ValueError(f"`x` must have at least two dimensions (rows, columns), but it is {x.dim()}-d.")
    if bound not in ("exactly", "at_most"):
        raise ValueError(f'`bound` must be "exactly" or "at_most", but it is {bound!r}.')
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        received = (
            f"has dtype {mask.dtype}" if isinstance(mask, Tensor) else f"has type {type(mask).__name__}"
        )
        raise TypeError(f"`mask` must be a bool tensor, but it {received}.")
    check_tensor(mask, "mask", x)
    return expand(mask, "mask", x.shape, "broadcast to the shape of `x`")


def _read_vector(value: Any, name: str, shape: torch.Size, device: torch.device, per: str) -> Tensor:
    """Validate a nonnegative number or tensor and broadcast it to one float64 number per row or column."""
    if not isinstance(value, Tensor):
        check_number(value, name, "a finite nonnegative number or a tensor", 0)
        return torch.full((), float(value), dtype=torch.float64, device=device).expand(shape)
    check_real(value, name, device)
    if value.numel():
        low, high = (float(end) for end in value.detach().aminmax())
        if not 0 <= low <= high < math.inf:
            received = low if not low >= 0 else high
            raise ValueError(f"`{name}` must be finite and at least 0, but it contains {received:g}.")
    accepted = f"be a number or broadcast to one number per {per}"
    return expand(value.to(device).double(), name, shape, accepted)


def _check_values(x: Tensor) -> tuple[float, bool]:
    """Return the largest finite |x| and whether x contains -inf. Raise an error for NaN and +inf."""
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
    """Raise an error if k exceeds `present`, the number of available entries, in any row."""
    wrong = (k > present).nonzero()
    if len(wrong):
        row = tuple(wrong[0].tolist())
        raise ValueError(
            f"`k` must be at most the number of available entries in each row, but row {row[1]} has "
            f"k = {k[row]:g} and {int(present[row])} available entries."
        )
