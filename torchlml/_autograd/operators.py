"""The operators `torch.ops.torchlml.*`: one call of `operator` defines one, those of the family likewise.

This is where kernels plug in. An operator has a schema, an implementation in plain torch for every device,
and the shapes of its results for the compiler; a compiled kernel registers the same name under the key of its
device (`cpu/csrc/bindings.cpp`, `cuda/triton_operators.py`) and is then called instead. The arguments are
canonical, see `reference.py` and `reference_loss.py`; the derivatives are in `paths.py` and `losses/lml.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import register_decomposition

from torchlml._cpu import loader as native
from torchlml._rows import wide_dtype, work_dtype
from torchlml._torch import careful as reference
from torchlml._torch import fast as quick
from torchlml._torch import loss as reference_loss
from torchlml._torch import onnx as exported
from torchlml._triton import self_test as trust

_library = torch.library.Library("torchlml", "DEF")
Operator = Callable[..., Any]


def operator(
    schema: str,
    reference: Operator,
    shapes: Operator,
    *,
    exported: Operator | None = None,
    triton: bool = False,
    vmap: bool = False,
) -> Operator:
    """Define `torch.ops.torchlml.*` and give it back.

    Args:
        schema: its name and arguments, as in `name(Tensor x) -> Tensor`.
        reference: what it does, in plain torch.
        shapes: empty results of the right shapes and dtypes, for the compiler.
        exported: what it does, in operations that exporters know, see `_kernels/exported.py`.
        triton: on a GPU the function of this name in `cuda/triton_operators.py` is called.
        vmap: it can be mapped by `torch.vmap`, as one problem with more rows. The operator then takes
            (x, k, a tensor like x or None, offsets, settings...) and gives (2, R), as `solve` does.
    """
    name, _, rest = schema.partition("(")
    if not hasattr(torch.ops.torchlml, name):  # the compiled kernel defines some, for programs without Python
        _library.define(schema)
    _library.impl(name, reference, "CompositeExplicitAutograd")
    defined: Operator = getattr(torch.ops.torchlml, name).default
    if exported is not None:
        shapes = _and_tell_inductor(defined, shapes)
        register_decomposition(defined)(exported)
        # The compiler would otherwise take the shapes from there, for sizes that it keeps open.
        register_decomposition(defined, type="meta")(shapes)
    torch.library.register_fake(f"torchlml::{name}", shapes, lib=_library)
    if triton:
        names = [argument.split()[1] for argument in rest.partition(")")[0].split(", ")]
        _library.impl(name, trust.by_triton(name, names.index("x"), reference), "CUDA")
    if vmap:
        torch.library.register_vmap(
            f"torchlml::{name}", lambda info, dims, *a: _as_more_rows(defined, info, dims, *a), lib=_library
        )
    return defined


def _and_tell_inductor(defined: Operator, shapes: Operator) -> Operator:
    """`shapes`, which every compilation calls, and through it Inductor learns to call the operator as it is.

    Where the environment variable CI is set, Inductor refuses an operator that has a decomposition but no
    lowering: a check that torch made for its own operators. Importing Inductor to say so takes three seconds,
    so it is said when somebody else has imported it.
    """

    def shapes_while_compiling(*arguments: Any) -> Any:
        lowering = sys.modules.get("torch._inductor.lowering")
        if lowering is not None and defined not in lowering.lowerings:
            lowering.make_fallback(defined, lowering.constrain_to_fake_tensors, warn=False)
        return shapes(*arguments)

    return shapes_while_compiling


def empty_nu(x: Tensor, offsets: Tensor | None) -> Tensor:
    """Room for nu of each row, (2, R)."""
    rows = x.shape[0] if offsets is None else offsets.shape[0] - 1
    return x.new_empty((2, rows), dtype=work_dtype(x.dtype))


def empty_values(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Room for y or log y, and nu."""
    return torch.empty_like(x), empty_nu(x, offsets)


def empty_gradients(x: Tensor, nu: Tensor) -> tuple[Tensor, Tensor]:
    """Room for dx and dk."""
    return torch.empty_like(x), nu.new_empty(nu.shape[1:], dtype=wide_dtype(x.device))


def _as_more_rows(operator: Operator, info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
    """The rule for vmap: a batch of problems is one problem with more rows."""
    x, k, beside, offsets, *settings = arguments
    batch = info.batch_size

    def batched(value: Tensor, dim: int | None) -> Tensor:
        return value.expand(batch, *value.shape) if dim is None else value.movedim(dim, 0)

    x = batched(x, in_dims[0])
    size = x.shape[1]  # the rows of each problem, or its packed entries
    rows = size if offsets is None else offsets.shape[0] - 1
    x = x.flatten(0, 1).contiguous()
    beside = None if beside is None else batched(beside, in_dims[2]).flatten(0, 1).contiguous()
    if in_dims[3] is not None:
        raise ValueError("`offsets` cannot be mapped over by vmap, only `values`, `k` and `mask` can.")
    if offsets is not None:
        starts = torch.arange(batch, device=x.device)[:, None] * size + offsets[:-1]
        offsets = torch.cat([starts.flatten(), starts.new_full((1,), batch * size)])
    if k.dim() > 0:
        k = batched(k, in_dims[1]).reshape(batch, -1).expand(batch, rows).flatten().contiguous()
    return operator(x, k, beside, offsets, *settings).unflatten(1, (batch, rows)), 1


def _gradients(grad: Tensor, x: Tensor, y: Tensor, nu: Tensor, *rows: Tensor | None) -> tuple[Tensor, Tensor]:
    return empty_gradients(x, nu)


# What most operators take and give.
ROWS = "Tensor? mask, Tensor? offsets"
_FORWARD = f"(Tensor x, Tensor k, {ROWS}) -> (Tensor, Tensor)"
_BACKWARD = f"(Tensor grad, Tensor x, Tensor y, Tensor nu, {ROWS}) -> (Tensor, Tensor)"
_LABELS = "Tensor labels, Tensor? starts, Tensor? weight"

native.load()

solve = operator(
    f"solve(Tensor x, Tensor k, {ROWS}) -> Tensor",
    quick.solve,
    lambda x, k, mask, offsets: empty_nu(x, offsets),
    exported=exported.solve,
    triton=True,
    vmap=True,
)
solve_bracketing = operator(
    f"solve_bracketing(Tensor x, Tensor k, {ROWS}, int? samples, float? tolerance, int max_iterations)"
    " -> Tensor",
    reference.solve_bracketing,
    lambda x, k, mask, offsets, *settings: empty_nu(x, offsets),
    vmap=True,
)
forward = operator(f"forward{_FORWARD}", quick.forward, empty_values, exported=exported.forward, triton=True)
log_forward = operator(
    f"log_forward{_FORWARD}", quick.log_forward, empty_values, exported=exported.log_forward, triton=True
)
backward = operator(f"backward{_BACKWARD}", quick.backward, _gradients, triton=True)
log_backward = operator(f"log_backward{_BACKWARD}", quick.log_backward, _gradients, triton=True)
dual_backward = operator(
    f"dual_backward(Tensor grad, Tensor x, Tensor nu, {ROWS}) -> (Tensor, Tensor)",
    reference.dual_backward,
    lambda grad, x, nu, *rows: empty_gradients(x, nu),
    triton=True,
)
loss_forward = operator(
    f"loss_forward(Tensor x, Tensor k, {ROWS}, {_LABELS}) -> (Tensor, Tensor)",
    reference_loss.loss_forward,
    lambda x, k, mask, offsets, *labels: (empty_nu(x, offsets), empty_nu(x, offsets)),
    triton=True,
)
loss_backward = operator(
    f"loss_backward(Tensor grad, Tensor x, Tensor k, Tensor nu, {ROWS}, {_LABELS}) -> (Tensor, Tensor)",
    reference_loss.loss_backward,
    _gradients,
    triton=True,
)


def _loss_backward_in_place(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
    dx, dk = loss_backward(grad, x, *rest)
    x.copy_(dx)
    return dk


# x becomes dx. Only the compiled kernel does that without room for both.
loss_backward_in_place = operator(
    f"loss_backward_in_place(Tensor grad, Tensor(a!) x, Tensor k, Tensor nu, {ROWS}, {_LABELS}) -> Tensor",
    _loss_backward_in_place,
    lambda grad, x, k, nu, *rest: empty_gradients(x, nu)[1],
)
