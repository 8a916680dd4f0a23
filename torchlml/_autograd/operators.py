"""The operators `torch.ops.torchlml.*`; each is defined by one call to `operator`.

An operator has a schema, an implementation in pure PyTorch for every device, and a function that returns the
shapes of its results to the compiler. A kernel for one device is registered under the same name and the
dispatch key of that device, and is then called instead. `_cpu/csrc/bindings.cpp` registers the CPU kernels,
and `operator` registers the Triton kernels of `_triton/operators.py`. The arguments are in the canonical form
described in `_torch/careful.py`. The derivatives are in `rule.py` and `loss.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import register_decomposition

from torchlml._cpu import loader
from torchlml._rows import empty_gradients, empty_nu
from torchlml._torch import careful, fast, onnx
from torchlml._triton import self_test

_library = torch.library.Library("torchlml", "DEF")
Operator = Callable[..., Any]


def operator(
    schema: str,
    implementation: Operator,
    shapes: Operator,
    *,
    for_onnx: Operator | None = None,
    triton: bool = False,
    vmap: bool = False,
) -> Operator:
    """Define an operator `torch.ops.torchlml.*` and return it.

    Args:
        schema: its name and arguments, as in `name(Tensor x) -> Tensor`.
        implementation: the operator in pure PyTorch.
        shapes: returns empty results with the right shapes and dtypes, for the compiler.
        for_onnx: the operator decomposed into operations that `torch.onnx.export` supports; see
            `_torch/onnx.py`.
        triton: whether the function with this name in `_triton/operators.py` is called on a GPU.
        vmap: whether to support `torch.vmap`, by combining the batch into one problem with more rows. The
            operator must then take (x, k, a tensor with the shape of x or None, offsets, settings...) and
            return a tensor of shape (2, R), like `solve`.
    """
    name, _, rest = schema.partition("(")
    # The compiled kernel has already defined some operators, for programs without Python.
    if not hasattr(torch.ops.torchlml, name):
        _library.define(schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    defined: Operator = getattr(torch.ops.torchlml, name).default
    if for_onnx is not None:
        shapes = _and_tell_inductor(defined, shapes)
        register_decomposition(defined)(for_onnx)
        # Without this registration, the compiler would derive dynamic shapes from the decomposition.
        register_decomposition(defined, type="meta")(shapes)
    torch.library.register_fake(f"torchlml::{name}", shapes, lib=_library)
    if triton:
        names = [argument.split()[1] for argument in rest.partition(")")[0].split(", ")]
        _library.impl(name, self_test.by_triton(name, names.index("x"), implementation), "CUDA")
    if vmap:
        torch.library.register_vmap(
            f"torchlml::{name}", lambda info, dims, *a: _as_more_rows(defined, info, dims, *a), lib=_library
        )
    return defined


def _and_tell_inductor(defined: Operator, shapes: Operator) -> Operator:
    """Return `shapes`, which every compilation calls, extended to register a lowering with Inductor.

    If the environment variable CI is set, Inductor rejects an operator that has a decomposition but no
    lowering; this check is meant for PyTorch's own operators. Importing Inductor takes three seconds, so the
    lowering is registered only once something else has imported it.
    """

    def shapes_while_compiling(*arguments: Any) -> Any:
        lowering = sys.modules.get("torch._inductor.lowering")
        if lowering is not None and defined not in lowering.lowerings:
            lowering.make_fallback(defined, lowering.constrain_to_fake_tensors, warn=False)
        return shapes(*arguments)

    return shapes_while_compiling


def empty_values(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return uninitialized tensors for y (or log y) and for nu."""
    return torch.empty_like(x), empty_nu(x, offsets)


def _as_more_rows(operator: Operator, info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
    """Apply the vmap rule, which combines a batch of problems into one problem with more rows."""
    x, k, per_entry, offsets, *settings = arguments
    batch = info.batch_size

    def batched(value: Tensor, dim: int | None) -> Tensor:
        return value.expand(batch, *value.shape) if dim is None else value.movedim(dim, 0)

    x = batched(x, in_dims[0])
    size = x.shape[1]  # the number of rows in each problem, or of entries if the rows are ragged
    rows = size if offsets is None else offsets.shape[0] - 1
    x = x.flatten(0, 1).contiguous()
    per_entry = None if per_entry is None else batched(per_entry, in_dims[2]).flatten(0, 1).contiguous()
    if in_dims[3] is not None:
        raise ValueError("`offsets` must not be batched by vmap; only `x`, `k` and `mask` can be.")
    if offsets is not None:
        starts = torch.arange(batch, device=x.device)[:, None] * size + offsets[:-1]
        offsets = torch.cat([starts.flatten(), starts.new_full((1,), batch * size)])
    if k.dim() > 0:
        k = batched(k, in_dims[1]).reshape(batch, -1).expand(batch, rows).flatten().contiguous()
    return operator(x, k, per_entry, offsets, *settings).unflatten(1, (batch, rows)), 1


def _gradients(grad: Tensor, x: Tensor, y: Tensor, nu: Tensor, *rows: Tensor | None) -> tuple[Tensor, Tensor]:
    return empty_gradients(x, nu)


# Schemas, or parts of schemas, that several operators share.
ROWS = "Tensor? mask, Tensor? offsets"
_FORWARD = f"(Tensor x, Tensor k, {ROWS}) -> (Tensor, Tensor)"
_BACKWARD = f"(Tensor grad, Tensor x, Tensor y, Tensor nu, {ROWS}) -> (Tensor, Tensor)"
_LABELS = "Tensor labels, Tensor? starts, Tensor? weight"

loader.load()

solve = operator(
    f"solve(Tensor x, Tensor k, {ROWS}) -> Tensor",
    fast.solve,
    lambda x, k, mask, offsets: empty_nu(x, offsets),
    for_onnx=onnx.solve,
    triton=True,
    vmap=True,
)
forward = operator(f"forward{_FORWARD}", fast.forward, empty_values, for_onnx=onnx.forward, triton=True)
log_forward = operator(
    f"log_forward{_FORWARD}", fast.log_forward, empty_values, for_onnx=onnx.log_forward, triton=True
)
backward = operator(f"backward{_BACKWARD}", fast.backward, _gradients, triton=True)
log_backward = operator(f"log_backward{_BACKWARD}", fast.log_backward, _gradients, triton=True)
dual_backward = operator(
    f"dual_backward(Tensor grad, Tensor x, Tensor nu, {ROWS}) -> (Tensor, Tensor)",
    careful.dual_backward,
    lambda grad, x, nu, *rows: empty_gradients(x, nu),
    triton=True,
)
loss_forward = operator(
    f"loss_forward(Tensor x, Tensor k, {ROWS}, {_LABELS}) -> (Tensor, Tensor)",
    fast.loss_forward,
    lambda x, k, mask, offsets, *labels: (empty_nu(x, offsets), empty_nu(x, offsets)),
    triton=True,
)
loss_backward = operator(
    f"loss_backward(Tensor grad, Tensor x, Tensor k, Tensor nu, {ROWS}, {_LABELS}) -> (Tensor, Tensor)",
    fast.loss_backward,
    _gradients,
    triton=True,
)


def _loss_backward_in_place(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    dx, dk = loss_backward(grad, x, *rest)
    x.copy_(dx)
    return dk


# Overwrites x with dx and returns dk. Only the compiled kernel does this without additional memory.
loss_backward_in_place = operator(
    f"loss_backward_in_place(Tensor grad, Tensor(a!) x, Tensor k, Tensor nu, {ROWS}, {_LABELS}) -> Tensor",
    _loss_backward_in_place,
    lambda grad, x, k, nu, *rest: empty_gradients(x, nu)[1],
)
