"""The autograd rules for the projection: an explicit backward pass, or differentiable operations.

Plain eager and compiled calls go through one `torch.autograd.Function` around the operators, or directly to
the operator if no gradient is requested. Under `torch.func` transforms, in forward-mode differentiation and
for second derivatives, `implicit.py` computes the same values. (In torch 2.13, a compiled call to
`torch.func.grad` silently ignores the `backward` method of a `torch.autograd.Function`, so that combination
must never occur.)

`LML`, `LOG_LML` and `LML_DUAL` map each bound on the sum to a function of canonical rows (x, k, mask,
offsets). In the dual problem, an inequality bound clamps nu: it is min(nu*, 0) for at most k and max(nu*, 0)
for at least k, where nu* makes the sum exactly k. A row with nu = 0 is called free: its y is sigmoid(x) and
does not depend on k.

`fast_lml` is a fast path for the most common call to `lml`: eager, with a float32 or float64 matrix on the
CPU, a plain number k and no other arguments. For a 256 x 100 matrix, general argument handling and the
general autograd Function take as long as the backward pass of the projection itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import logsigmoid

from torchlml._arguments import Bound, cached_scalar, is_eager, is_plain
from torchlml._autograd import implicit, operators
from torchlml._autograd.implicit import sigmoid
from torchlml._autograd.operators import ROWS, empty_values, operator
from torchlml._rows import empty_gradients, rows_of, work_dtype
from torchlml._torch import careful, fast, onnx


@dataclass(frozen=True)
class Rule:
    """A function of rows with an explicit backward pass. Call it with canonical arguments.

    Args:
        forward: returns the result, followed by the other tensors that `backward` needs.
        backward: takes the gradient, the arguments and these tensors; returns the gradients of the first
            `inputs` arguments. The gradient of k has one number per row.
        differentiable: computes the result with operations that torch can differentiate, vmap and compile.
        inputs: the number of leading arguments that have a gradient; the second is k.
        keeps_result: whether `backward` also takes the result, before the other tensors.
    """

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Tensor | None, ...]]
    differentiable: Callable[..., Tensor]
    inputs: int = 2
    keeps_result: bool = False

    def __call__(self, *arguments: Tensor | None) -> Tensor:
        # `torch.jit.trace` cannot save a call to a Python function. It also compares its graph with one
        # traced without gradients, so both must consist of the same operations. The compiler cannot call
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
        result: Tensor = self.forward(*arguments)[0]
        return result


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, *arguments: Tensor | None) -> Tensor:
        result, *others = rule.forward(*arguments)
        kept = (result, *others) if rule.keeps_result else others
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


def _value_rule(
    forward: Callable[..., Any], backward: Callable[..., Any], differentiable: Callable[..., Tensor]
) -> Rule:
    """Return the rule for forward(x, k, mask, offsets) -> (y, nu) and its backward pass."""
    return Rule(
        forward,
        lambda grad, x, k, mask, offsets, y, nu: backward(grad, x, y, nu, mask, offsets),
        differentiable,
        keeps_result=True,
    )


def _dual_forward(x: Tensor, *rest: Tensor | None) -> tuple[Tensor, Tensor]:
    nu = operators.solve(x, *rest)
    return nu.sum(0).to(x.dtype), nu


def _dual_backward(
    grad: Tensor, x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, nu: Tensor
) -> Any:
    return operators.dual_backward(grad.to(nu.dtype), x, nu, mask, offsets)


# Rules for y, log y and nu of each row.
lml = _value_rule(operators.forward, operators.backward, implicit.lml)
log_lml = _value_rule(operators.log_forward, operators.log_backward, implicit.log_lml)
lml_dual = Rule(_dual_forward, _dual_backward, implicit.lml_dual)


def needs_no_graph(*inputs: Any) -> bool:
    """Whether no gradient is requested, so that no autograd Function is needed.

    For a 256 x 100 matrix, a Function adds as much time as the projection itself takes.
    """
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in inputs))


def wants_graph() -> bool:
    """Whether this backward pass will itself be differentiated or mapped by vmap.

    The compiler traces a backward pass with gradients enabled, but does not differentiate the traced graph.
    """
    return (torch.is_grad_enabled() or not is_plain()) and not torch.compiler.is_compiling()


def gradient_of_k(dk: Tensor, k: Tensor) -> Tensor | None:
    """Return the gradient of k in the shape of k: summed if all rows share k, None if it is not needed."""
    if not k.requires_grad:
        return None
    return dk.sum() if k.dim() == 0 else dk


def differentiate_again(
    function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor
) -> list[Tensor | None]:
    """Compute gradients that can be differentiated again, or mapped by vmap.

    `function` consists of differentiable operations. An input without `requires_grad` gets None.
    """
    wanted = [t for t in inputs if t.requires_grad]
    with torch.enable_grad():
        found = iter(torch.autograd.grad(function(*inputs), wanted, grad, create_graph=True))
    return [next(found) if t.requires_grad else None for t in inputs]


def _is_free(nu: Tensor, at_most: bool) -> Tensor:
    """Whether sigmoid(x) satisfies the bound in each row, based on the sign of nu*; False for NaN."""
    total = nu.sum(0)
    return total >= 0 if at_most else total <= 0


def _with_free_rows(
    bounded: Tensor,
    x: Tensor,
    k: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    at_most: bool,
    function: Callable[[Tensor], Tensor],
    absent: float,
) -> Tensor:
    """Return `function(x)` in the free rows and `bounded` in all other rows."""
    values = x.to(work_dtype(x.dtype))
    values = values if mask is None else torch.where(mask, values, -torch.inf)
    free = _is_free(operators.solve(values.detach(), k.detach(), None, offsets), at_most)
    # Keep entries of -inf out of the graph, because the derivative of logsigmoid is not 0 there.
    present = values != -torch.inf
    own = torch.where(present, function(torch.where(present, values, 0)), absent)
    return torch.where(rows_of(x, offsets).broadcast(free), own.to(bounded.dtype), bounded)


def _bounded_log_lml(
    x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, *, at_most: bool
) -> Tensor:
    bounded = log_lml(x, k, mask, offsets)
    return _with_free_rows(bounded, x, k, mask, offsets, at_most, logsigmoid, absent=-torch.inf)


def _bounded_dual(
    x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, *, at_most: bool
) -> Tensor:
    nu = lml_dual(x, k, mask, offsets)
    return torch.where(nu >= 0 if at_most else nu <= 0, 0, nu)


def _reference_forward(
    x: Tensor,
    k: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    at_most: bool,
    forward: Callable[..., tuple[Tensor, Tensor]] = fast.forward,
) -> tuple[Tensor, Tensor]:
    """Return (y, nu) like `forward`, except that y is sigmoid(x) and nu is exactly 0 in free rows."""
    y, nu = forward(x, k, mask, offsets)
    values, rows = careful.prepare(x, mask, offsets)
    free = _is_free(nu, at_most)
    y = torch.where(rows.broadcast(free), sigmoid(values).to(y.dtype), y)
    return y, torch.where(free, 0, nu)


def _reference_backward(
    grad: Tensor, x: Tensor, y: Tensor, nu: Tensor, mask: Tensor | None, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (dx, dk) like `fast.backward`, but with the derivative of sigmoid(x) in free rows."""
    dx, dk = fast.backward(grad, x, y, nu, mask, offsets)
    values, rows = careful.prepare(x, mask, offsets)
    free = (nu == 0).all(0)
    s = sigmoid(-values.abs())  # not sigmoid(x), because 1 - y has no correct digits if y rounds to 1
    slope = torch.where(values.isfinite(), s * (1 - s) * grad, 0)
    return torch.where(rows.broadcast(free), slope.to(dx.dtype), dx), torch.where(free, 0, dk)


_bounded_forward = operator(
    f"bounded_forward(Tensor x, Tensor k, {ROWS}, bool at_most) -> (Tensor, Tensor)",
    _reference_forward,
    lambda x, k, mask, offsets, at_most: empty_values(x, k, mask, offsets),
    for_onnx=lambda x, k, mask, offsets, at_most: _reference_forward(
        x, k, mask, offsets, at_most, onnx.forward
    ),
)
_bounded_backward = operator(
    f"bounded_backward(Tensor grad, Tensor x, Tensor y, Tensor nu, {ROWS}) -> (Tensor, Tensor)",
    _reference_backward,
    lambda grad, x, y, nu, *rows: empty_gradients(x, nu),
)


def _bounded_lml(at_most: bool) -> Rule:
    def differentiable(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
        bounded = lml(x, k, mask, offsets)
        return _with_free_rows(bounded, x, k, mask, offsets, at_most, sigmoid, absent=0.0)

    return _value_rule(
        lambda *arguments: _bounded_forward(*arguments, at_most), _bounded_backward, differentiable
    )


_Functions = dict[Bound, Callable[..., Tensor]]
LML: _Functions = {
    "exactly": lml,
    "at_most": _bounded_lml(True),
    "at_least": _bounded_lml(False),
}
LOG_LML: _Functions = {
    "exactly": log_lml,
    "at_most": partial(_bounded_log_lml, at_most=True),
    "at_least": partial(_bounded_log_lml, at_most=False),
}
LML_DUAL: _Functions = {
    "exactly": lml_dual,
    "at_most": partial(_bounded_dual, at_most=True),
    "at_least": partial(_bounded_dual, at_most=False),
}


def fast_lml(x: Any, k: Any, dim: Any) -> Tensor | None:
    """Compute lml(x, k, dim), or return None if the fast path does not apply.

    Type checks are exact, because subclasses of tensors and numbers may override anything.
    """
    if not (
        is_eager()
        and type(x) is Tensor
        and (type(k) is int or type(k) is float)
        and (type(dim) is int and dim == -1)
        and (x.dtype is torch.float32 or x.dtype is torch.float64)
        and x.is_cpu
        and x.layout is torch.strided
        and not x.is_nested
        and x.dim() == 2
        and 0 <= k <= x.shape[1]
        and x.is_contiguous()
        and forward_ad._current_level < 0
    ):
        return None
    number = cached_scalar(k, "cpu")
    if x.requires_grad and torch.is_grad_enabled():
        return _fast_apply(x, number)
    y: Tensor = operators.forward(x, number, None, None)[0]
    return y


class _FastApply(torch.autograd.Function):
    """The same function as the rule `lml`, with a gradient for x only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: Tensor) -> Tensor:
        y: Tensor
        y, nu = operators.forward(x, k, None, None)
        ctx.save_for_backward(x, k, y, nu)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        x, k, y, nu = ctx.saved_tensors
        if wants_graph():
            dx = differentiate_again(lambda x: implicit.lml(x, k, None, None), grad, x)[0]
        else:
            dx = operators.backward(grad.contiguous(), x, y, nu, None, None)[0]
        return dx, None


# Bypass the check for `torch.func` transforms in `Function.apply`, because none is active here.
_fast_apply = super(torch.autograd.Function, _FastApply).apply
