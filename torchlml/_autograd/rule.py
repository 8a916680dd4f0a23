"""The dispatch of a call to its kernel: the fast path with an explicit backward, or the differentiable one.

Plain eager and compiled calls go through one `torch.autograd.Function` around the operators, or directly to
the operator if no gradient is requested. Under `torch.func` transforms, in forward-mode differentiation and
for second derivatives, the same numbers come from `implicit.py`. (In torch 2.13, compiling a
`torch.func.grad` silently ignores the backward of a `torch.autograd.Function`, so that combination must never
occur.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchlml._autograd import implicit, operators


@dataclass(frozen=True)
class Rule:
    """A function of rows and its explicit derivative by operators. Call it with canonical arguments.

    Args:
        forward: returns the result and a tuple of the other tensors that `backward` needs.
        backward: takes the gradient, the arguments and that tuple; returns the gradients of the first
            arguments, that of k with one number per row.
        differentiable: computes the result in operations that torch can differentiate, map and compile.
        inputs: the number of leading arguments that have a gradient; the second is k.
    """

    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[..., tuple[Tensor | None, ...]]
    differentiable: Callable[..., Tensor]
    inputs: int = 2

    def __call__(self, *arguments: Tensor | None) -> Tensor:
        # `torch.jit.trace` cannot save a call of a Python function, and it compares its graph with a second
        # one traced without gradients, so both must come from the same operations. The compiler cannot read
        # `_is_tracing`.
        if (
            torch._C._are_functorch_transforms_active()
            or forward_ad._current_level >= 0
            or (not torch.compiler.is_compiling() and torch._C._is_tracing())
        ):
            return self.differentiable(*arguments)
        if torch.is_grad_enabled() and any(
            t.requires_grad for t in arguments[: self.inputs] if t is not None
        ):
            return _Apply.apply(self, *arguments)
        return self.forward(*arguments)[0]


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, *arguments: Tensor | None) -> Tensor:
        result, kept = rule.forward(*arguments)
        ctx.save_for_backward(*arguments, *kept)
        ctx.rule, ctx.number = rule, len(arguments)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rule, saved = ctx.rule, ctx.saved_tensors
        arguments, kept = saved[: ctx.number], saved[ctx.number :]
        inputs, rest = arguments[: rule.inputs], arguments[rule.inputs :]
        found: Any
        if wants_graph():
            found = differentiate_again(lambda *inputs: rule.differentiable(*inputs, *rest), grad, *inputs)
        else:
            dx, dk, *others = rule.backward(grad.contiguous(), *arguments, *kept)
            found = (dx, gradient_of_k(dk, arguments[1]), *others)
        return (None, *found, *(None for _ in rest))


def keeps_both(operator: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """Make the `forward` of a rule from an operator that returns (y, nu), both of which `backward` needs."""

    def forward(*arguments: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        y, nu = operator(*arguments)
        return y, (y, nu)

    return forward


def from_values(operator: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """Make the `backward` of a rule from an operator that takes (grad, x, y, nu, mask, offsets)."""
    return lambda grad, x, k, mask, offsets, y, nu: operator(grad, x, y, nu, mask, offsets)


def _dual_forward(x: Tensor, *rest: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    nu = operators.solve(x, *rest)
    return nu.sum(0).to(x.dtype), (nu,)


def _dual_backward(
    grad: Tensor, x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, nu: Tensor
) -> Any:
    return operators.dual_backward(grad.to(nu.dtype), x, nu, mask, offsets)


# Rules for y, log y and nu of each row.
lml = Rule(keeps_both(operators.forward), from_values(operators.backward), implicit.lml)
log_lml = Rule(keeps_both(operators.log_forward), from_values(operators.log_backward), implicit.log_lml)
lml_dual = Rule(_dual_forward, _dual_backward, implicit.lml_dual)


def is_plain() -> bool:
    """Whether no `torch.func` transform and no forward-mode level is active."""
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def needs_no_graph(*inputs: Any) -> bool:
    """Whether no gradient is requested. At 256 x 100, a Function costs as much as the projection."""
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in inputs))


def wants_graph() -> bool:
    """Whether this backward pass will itself be differentiated or mapped.

    The compiler traces a backward pass with gradients enabled, but does not differentiate the traced graph.
    """
    return (torch.is_grad_enabled() or not is_plain()) and not torch.compiler.is_compiling()


def gradient_of_k(dk: Tensor, k: Tensor) -> Tensor | None:
    """The gradient of k in its original shape: summed if all rows share k, None if k needs none."""
    if not k.requires_grad:
        return None
    return dk.sum() if k.dim() == 0 else dk


def differentiate_again(
    function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor
) -> list[Tensor | None]:
    """Compute the gradients of some inputs as a graph, for a backward pass that is differentiated or mapped.

    `function` consists of differentiable operations; inputs without `requires_grad` get None.
    """
    wanted = [t for t in inputs if t.requires_grad]
    with torch.enable_grad():
        found = iter(torch.autograd.grad(function(*inputs), wanted, grad, create_graph=True))
    return [next(found) if t.requires_grad else None for t in inputs]
