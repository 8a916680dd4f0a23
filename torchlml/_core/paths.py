"""How a call reaches its kernel: the fast path with a hand-written backward, or the differentiable one.

Plain eager and compiled calls go through one `torch.autograd.Function` around the operators. Under the
transforms of `torch.func` and under forward-mode differentiation, and for the derivative of a derivative, the
same numbers come from `differentiable.py`; a backward pass that is differentiated itself gets there by
`differentiate_again`, which every `torch.autograd.Function` of the package can use. (In torch 2.13 compiling
a `torch.func.grad` silently ignores the backward of a `torch.autograd.Function`, so that combination must
never meet one.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchlml._core import differentiable, operators
from torchlml.solvers.bracketing import Bracketing


def lml(
    x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, solver: Bracketing | None
) -> Tensor:
    """y of each row."""
    if solver is None and is_plain():
        if needs_no_graph(x, k):
            return operators.forward(x, k, mask, offsets)[0]
        return _Projection.apply(x, k, mask, offsets)
    return differentiable.lml(x, k, mask, offsets, solver)


def log_lml(
    x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, solver: Bracketing | None
) -> Tensor:
    """log y of each row."""
    if solver is None and is_plain():
        if needs_no_graph(x, k):
            return operators.log_forward(x, k, mask, offsets)[0]
        return _LogProjection.apply(x, k, mask, offsets)
    return differentiable.log_lml(x, k, mask, offsets, solver)


def lml_dual(
    x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, solver: Bracketing | None
) -> Tensor:
    """nu of each row."""
    if solver is None and is_plain():
        return _Dual.apply(x, k, mask, offsets)
    return differentiable.lml_dual(x, k, mask, offsets, solver)


def is_plain() -> bool:
    """Is no transform of `torch.func` and no forward-mode level at work?"""
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def needs_no_graph(*inputs: Tensor) -> bool:
    """Does nobody ask for a gradient? At 256 x 100 a Function costs as much as the projection."""
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in inputs))


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
        y, nu = operators.forward(x, k, mask, offsets)
        ctx.save_for_backward(x, k, mask, offsets, y, nu)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, k, mask, offsets, y, nu = ctx.saved_tensors
        if wants_graph():
            again = functools.partial(differentiable.lml, mask=mask, offsets=offsets)
            return (*differentiate_again(again, grad, x, k), None, None)
        dx, dk = operators.backward(grad.contiguous(), x, y, nu, mask, offsets)
        return dx, gradient_of_k(dk, k), None, None


class _LogProjection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
        log_y, nu = operators.log_forward(x, k, mask, offsets)
        ctx.save_for_backward(x, k, mask, offsets, log_y, nu)
        return log_y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, k, mask, offsets, log_y, nu = ctx.saved_tensors
        if wants_graph():
            again = functools.partial(differentiable.log_lml, mask=mask, offsets=offsets)
            return (*differentiate_again(again, grad, x, k), None, None)
        dx, dk = operators.log_backward(grad.contiguous(), x, log_y, nu, mask, offsets)
        return dx, gradient_of_k(dk, k), None, None


class _Dual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
        nu = operators.solve(x, k, mask, offsets)
        ctx.save_for_backward(x, k, mask, offsets, nu)
        return nu.sum(0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, k, mask, offsets, nu = ctx.saved_tensors
        if wants_graph():
            again = functools.partial(differentiable.lml_dual, mask=mask, offsets=offsets)
            return (*differentiate_again(again, grad, x, k), None, None)
        dx, dk = operators.dual_backward(grad.to(nu.dtype).contiguous(), x, nu, mask, offsets)
        return dx, gradient_of_k(dk, k), None, None


def wants_graph() -> bool:
    """Is this backward pass to be differentiated or mapped itself? The compiler only looks like it."""
    return (torch.is_grad_enabled() or not is_plain()) and not torch.compiler.is_compiling()


def gradient_of_k(dk: Tensor, k: Tensor) -> Tensor | None:
    """One number per row, in the form k came in: summed where all rows share it, None where nobody asks."""
    if not k.requires_grad:
        return None
    return dk.sum() if k.dim() == 0 else dk


def differentiate_again(
    function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor
) -> list[Tensor | None]:
    """The gradients of some inputs as a graph, for a backward pass that is differentiated or mapped itself.

    Args:
        function: of the inputs, in differentiable operations.
        grad: the gradient of its result.
        inputs: what came with the forward pass; those without `requires_grad` get None.
    """
    wanted = [t for t in inputs if t.requires_grad]
    with torch.enable_grad():
        found = iter(torch.autograd.grad(function(*inputs), wanted, grad, create_graph=True))
    return [next(found) if t.requires_grad else None for t in inputs]
