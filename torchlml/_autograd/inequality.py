"""The projection with the bounds "at most k" and "at least k" on the sum.

In the dual, a bound is a clamp: nu = min(nu*, 0) for at most k and max(nu*, 0) for at least k, where nu*
makes the sum exactly k. A row with nu = 0 is called free: it is sigmoid(x) and does not depend on k.

`LML`, `LOG_LML` and `LML_DUAL` map each bound to a function of canonical rows (x, k, mask, offsets).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchlml._arguments import Bound
from torchlml._autograd import operators, rule
from torchlml._autograd.implicit import sigmoid
from torchlml._autograd.operators import ROWS, empty_values, operator
from torchlml._autograd.rule import Rule, from_values, keeps_both
from torchlml._rows import empty_gradients, rows_of, work_dtype
from torchlml._torch import careful, fast, onnx


def _is_free(nu: Tensor, at_most: bool) -> Tensor:
    """Whether sigmoid(x) of each row satisfies the bound, from the sign of nu*; False for NaN."""
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
    """Combine `function` of x in the free rows with `bounded` in the others."""
    values = x.to(work_dtype(x.dtype))
    values = values if mask is None else torch.where(mask, values, -torch.inf)
    free = _is_free(operators.solve(values.detach(), k.detach(), None, offsets), at_most)
    # Keep entries of -inf out of the graph, because the derivative of logsigmoid is not 0 there.
    present = values != -torch.inf
    own = torch.where(present, function(torch.where(present, values, 0)), absent)
    return torch.where(rows_of(x, offsets).broadcast(free), own.to(bounded.dtype), bounded)


def _log_lml(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, *, at_most: bool) -> Tensor:
    bounded = rule.log_lml(x, k, mask, offsets)
    return _with_free_rows(bounded, x, k, mask, offsets, at_most, logsigmoid, absent=-torch.inf)


def _lml_dual(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, *, at_most: bool) -> Tensor:
    nu = rule.lml_dual(x, k, mask, offsets)
    return torch.where(nu >= 0 if at_most else nu <= 0, 0, nu)


def _reference_forward(
    x: Tensor,
    k: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    at_most: bool,
    forward: Callable[..., tuple[Tensor, Tensor]] = fast.forward,
) -> tuple[Tensor, Tensor]:
    """Return (y, nu) like `careful.forward`, except that nu is exactly 0 in free rows."""
    y, nu = forward(x, k, mask, offsets)
    values, rows = careful.prepare(x, mask, offsets)
    free = _is_free(nu, at_most)
    y = torch.where(rows.broadcast(free), sigmoid(values).to(y.dtype), y)
    return y, torch.where(free, 0, nu)


def _reference_backward(
    grad: Tensor, x: Tensor, y: Tensor, nu: Tensor, mask: Tensor | None, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (dx, dk) like `careful.backward`; a free row has the derivative of its sigmoids."""
    dx, dk = fast.backward(grad, x, y, nu, mask, offsets)
    values, rows = careful.prepare(x, mask, offsets)
    free = (nu == 0).all(0)
    s = sigmoid(-values.abs())  # not of x, because 1 - y has no correct digits if y rounds to 1
    slope = torch.where(values.isfinite(), s * (1 - s) * grad, 0)
    return torch.where(rows.broadcast(free), slope.to(dx.dtype), dx), torch.where(free, 0, dk)


_forward = operator(
    f"bounded_forward(Tensor x, Tensor k, {ROWS}, bool at_most) -> (Tensor, Tensor)",
    _reference_forward,
    lambda x, k, mask, offsets, at_most: empty_values(x, k, mask, offsets),
    for_onnx=lambda x, k, mask, offsets, at_most: _reference_forward(
        x, k, mask, offsets, at_most, onnx.forward
    ),
)
_backward = operator(
    f"bounded_backward(Tensor grad, Tensor x, Tensor y, Tensor nu, {ROWS}) -> (Tensor, Tensor)",
    _reference_backward,
    lambda grad, x, y, nu, *rows: empty_gradients(x, nu),
)


def _bounded_lml(at_most: bool) -> Rule:
    def differentiable(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
        bounded = rule.lml(x, k, mask, offsets)
        return _with_free_rows(bounded, x, k, mask, offsets, at_most, sigmoid, absent=0.0)

    forward = keeps_both(lambda *arguments: _forward(*arguments, at_most))
    return Rule(forward, from_values(_backward), differentiable)


_Functions = dict[Bound, Callable[..., Tensor]]
LML: _Functions = {
    "exactly": rule.lml,
    "at_most": _bounded_lml(True),
    "at_least": _bounded_lml(False),
}
LOG_LML: _Functions = {
    "exactly": rule.log_lml,
    "at_most": partial(_log_lml, at_most=True),
    "at_least": partial(_log_lml, at_most=False),
}
LML_DUAL: _Functions = {
    "exactly": rule.lml_dual,
    "at_most": partial(_lml_dual, at_most=True),
    "at_least": partial(_lml_dual, at_most=False),
}
