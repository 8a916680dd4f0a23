"""The operators `torch.ops.torchlml.*`: their schemas, and who implements them.

This is the seam where kernels plug in. The schemas are defined here and implemented in plain torch
(`reference.py`, `reference_loss.py`) for every device; a compiled kernel registers the same names under its
device's key and then wins. The arguments are canonical, see there; the derivatives are in `autograd.py` and
`losses/lml.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchlml._core.rows import wide_dtype, work_dtype
from torchlml._kernels import reference, reference_loss
from torchlml._kernels.cpu import native
from torchlml._kernels.cuda import registration

_rows = "Tensor? mask, Tensor? offsets"
library = torch.library.Library("torchlml", "DEF")


def operator(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define `torch.ops.torchlml.*`.

    Args:
        schema: its name and arguments, as in `name(Tensor x) -> Tensor`.
        reference: what it does, in plain torch.
        fake: what shapes and dtypes it gives, for the compiler.
    """
    name = schema.split("(")[0]
    library.define(schema)
    library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torchlml::{name}", fake, lib=library)
    return getattr(torch.ops.torchlml, name).default


library.define(f"solve(Tensor x, Tensor k, {_rows}) -> Tensor")
_settings = "int? samples, float? tolerance, int max_iterations"
library.define(f"solve_bracketing(Tensor x, Tensor k, {_rows}, {_settings}) -> Tensor")
library.define(f"forward(Tensor x, Tensor k, {_rows}) -> (Tensor, Tensor)")
library.define(f"log_forward(Tensor x, Tensor k, {_rows}) -> (Tensor, Tensor)")
library.define(f"backward(Tensor grad, Tensor x, Tensor y, Tensor nu, {_rows}) -> (Tensor, Tensor)")
library.define(f"log_backward(Tensor grad, Tensor x, Tensor log_y, Tensor nu, {_rows}) -> (Tensor, Tensor)")
library.define(f"dual_backward(Tensor grad, Tensor x, Tensor nu, {_rows}) -> (Tensor, Tensor)")
_labels = "Tensor labels, Tensor? starts, Tensor? weight"
library.define(f"loss_forward(Tensor x, Tensor k, {_rows}, {_labels}) -> (Tensor, Tensor)")
library.define(
    f"loss_backward(Tensor grad, Tensor x, Tensor k, Tensor nu, {_rows}, {_labels}) -> (Tensor, Tensor)"
)

for _name in (
    "solve",
    "solve_bracketing",
    "forward",
    "log_forward",
    "backward",
    "log_backward",
    "dual_backward",
):
    library.impl(_name, getattr(reference, _name), "CompositeExplicitAutograd")
for _name in ("loss_forward", "loss_backward"):
    library.impl(_name, getattr(reference_loss, _name), "CompositeExplicitAutograd")

native.load()
registration.register(library)

solve = torch.ops.torchlml.solve.default
solve_bracketing = torch.ops.torchlml.solve_bracketing.default
forward = torch.ops.torchlml.forward.default
log_forward = torch.ops.torchlml.log_forward.default
backward = torch.ops.torchlml.backward.default
log_backward = torch.ops.torchlml.log_backward.default
dual_backward = torch.ops.torchlml.dual_backward.default
loss_forward = torch.ops.torchlml.loss_forward.default
loss_backward = torch.ops.torchlml.loss_backward.default


def _fake_nu(x: Tensor, offsets: Tensor | None) -> Tensor:
    rows = x.shape[0] if offsets is None else offsets.shape[0] - 1
    return x.new_empty((2, rows), dtype=work_dtype(x.dtype))


def _fake_forward(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), _fake_nu(x, offsets)


def _fake_loss_forward(
    x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, *labels: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _fake_nu(x, offsets), _fake_nu(x, offsets)


def _fake_backward(x: Tensor, nu: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), nu.new_empty(nu.shape[1:], dtype=wide_dtype(x.device))


def _fake(name: str, function: Any) -> None:
    torch.library.register_fake(f"torchlml::{name}", function, lib=library)


_fake("solve", lambda x, k, mask, offsets: _fake_nu(x, offsets))
_fake("solve_bracketing", lambda x, k, mask, offsets, *settings: _fake_nu(x, offsets))
_fake("forward", _fake_forward)
_fake("log_forward", _fake_forward)
_fake("backward", lambda grad, x, y, nu, mask, offsets: _fake_backward(x, nu))
_fake("log_backward", lambda grad, x, log_y, nu, mask, offsets: _fake_backward(x, nu))
_fake("dual_backward", lambda grad, x, nu, mask, offsets: _fake_backward(x, nu))
_fake("loss_forward", _fake_loss_forward)
_fake("loss_backward", lambda grad, x, k, nu, *rest: _fake_backward(x, nu))


def _vmap_solve(operator: Any, info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
    """A batch of problems is one problem with more rows."""
    x, k, mask, offsets, *settings = arguments
    batch = info.batch_size

    def batched(value: Tensor, dim: int | None) -> Tensor:
        return value.expand(batch, *value.shape) if dim is None else value.movedim(dim, 0)

    x = batched(x, in_dims[0])
    mask = None if mask is None else batched(mask, in_dims[2])
    if offsets is None:
        rows = x.shape[1]
        x, mask = x.flatten(0, 1), None if mask is None else mask.flatten(0, 1)
    elif in_dims[3] is not None:
        raise ValueError("`offsets` cannot be mapped over by vmap, only `values`, `k` and `mask` can.")
    else:
        rows, size = offsets.shape[0] - 1, x.shape[1]
        starts = torch.arange(batch, device=x.device)[:, None] * size + offsets[:-1]
        offsets = torch.cat([starts.flatten(), starts.new_full((1,), batch * size)])
        x, mask = x.flatten(), None if mask is None else mask.flatten()
    if k.dim() > (in_dims[1] is not None) or in_dims[1] is not None:
        k = batched(k, in_dims[1])
        k = k.reshape(batch, -1).expand(batch, rows).flatten().contiguous()
    nu = operator(x.contiguous(), k, mask if mask is None else mask.contiguous(), offsets, *settings)
    return nu.unflatten(1, (batch, rows)), 1


torch.library.register_vmap(
    "torchlml::solve", lambda info, in_dims, *a: _vmap_solve(solve, info, in_dims, *a), lib=library
)
torch.library.register_vmap(
    "torchlml::solve_bracketing",
    lambda info, in_dims, *a: _vmap_solve(solve_bracketing, info, in_dims, *a),
    lib=library,
)
