"""Calls of the two-sided projection: batches of problems, and one problem whose rows are split."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchlml._arguments import autocasts
from torchlml._balanced.arguments import Arguments, read
from torchlml._balanced.matrix import Extent, Matrix, project
from torchlml._balanced.processes import Processes


class Balanced(NamedTuple):
    """Y with its multipliers. nu has no entries unless it was asked for."""

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
    """Y and mu, and with `dual` nu, with the arguments of `balanced_lml`."""
    # Compiled code leaves its graph here. The detour imports the compiler, so other calls do without it.
    run = _not_compiled if torch.compiler.is_compiling() else _balanced
    return run(x, k, capacity, mask, bound, start, group, dual)


def _balanced(
    x: Tensor,
    k: float | Tensor,
    capacity: float | Tensor | None,
    mask: Tensor | None,
    bound: str,
    start: Tensor | None,
    group: Any,
    dual: bool,
) -> Balanced:
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        raise NotImplementedError(
            "balanced_lml supports plain calls and their first derivatives, but a transform of torch.func or "
            "forward-mode differentiation is active."
        )
    if group is None:
        own = read(x, k, capacity, mask, bound, start)
        count, rows, columns = own.x.shape
        totals = own.k.detach().sum(1).tolist()
        found = [
            project(_matrix(own, i), Extent([rows], [totals[i]], own.range, own.masked, None), dual)
            for i in range(count)
        ]
        if count == 0:
            found = [(own.x, own.k, own.x.new_zeros(0, columns))]
    else:
        own, extent = _agree(x, k, capacity, mask, bound, start, Processes(group))
        found = [project(_matrix(own, 0), extent, dual)]
    half = x.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if half and autocasts(x.device.type) else x.dtype
    y, nu, mu = (
        (parts[0] if len(parts) == 1 else torch.stack(parts)).to(dtype) for parts in zip(*found, strict=True)
    )
    nu_shape = x.shape[:-1] if dual else (0,)
    return Balanced(y.reshape(x.shape), nu.reshape(nu_shape), mu.reshape(*x.shape[:-2], x.shape[-1]))


_not_compiled = cast(Any, torch)._disable_dynamo(_balanced)


def _matrix(own: Arguments, i: int) -> Matrix:
    return Matrix(
        own.x[i],
        own.k[i],
        own.uniform,
        None if own.capacity is None else own.capacity[i],
        None if own.start is None else own.start[i],
        own.at_most,
        own.resolution,
    )


def _agree(
    x: Any, k: Any, capacity: Any, mask: Any, bound: Any, start: Any, processes: Processes
) -> tuple[Arguments, Extent]:
    """Check the arguments on all processes, and exchange the sizes and totals: one round."""
    carries = isinstance(x, Tensor) and x.device.type != "meta"
    device = x.device if carries else torch.device("cpu")

    def read_own() -> tuple[Arguments, dict[str, Any]]:
        own = read(x, k, capacity, mask, bound, start)
        if x.dim() != 2:
            raise ValueError(
                f"With `group`, `x` must have two dimensions (rows, columns), but it is {x.dim()}-d."
            )
        same = {
            "function": "balanced_lml",
            "dtype": str(x.dtype),
            "number of columns": x.shape[1],
            "capacity": _fingerprint(own.capacity),
            "start": _fingerprint(own.start),
            "bound": bound,
            "need for gradients": torch.is_grad_enabled()
            and any(isinstance(t, Tensor) and t.requires_grad for t in (x, k, capacity)),
        }
        told = {"rows": x.shape[0], "total": float(own.k.detach().sum()), "range": own.range}
        return own, {"same": same, "masked": own.masked, **told}

    own, everyone = processes.agree(device, read_own)
    extent = Extent(
        rows=[int(told["rows"]) for told in everyone],
        totals=[float(told["total"]) for told in everyone],
        range=max(float(told["range"]) for told in everyone),
        masked=any(told["masked"] for told in everyone),
        processes=processes,
    )
    return own, extent


def _fingerprint(t: Tensor | None) -> str:
    """A text that tells equal tensors from different ones."""
    if t is None:
        return "None"
    content = bytes(t.detach().cpu().contiguous().flatten().view(torch.uint8).tolist())
    return f"a tensor with the checksum {zlib.crc32(content):08x}"
