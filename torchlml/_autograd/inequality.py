"""At most k, at least k: the projection where k is only a limit of the sum.

In the dual a limit is a clamp: nu = min(nu*, 0) for at most k and max(nu*, 0) for at least k, with nu* the
number that makes the sum exactly k. A row with nu = 0 is called free: it is sigmoid(x), and does not depend
on k.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchlml._arguments import Bound, Canonical
from torchlml._autograd import rule as paths
from torchlml._autograd.implicit import sigmoid, solve
from torchlml._autograd.operators import ROWS, empty_gradients, empty_values, operator
from torchlml._autograd.rule import Rule, from_values, keeps_both
from torchlml._rows import rows_of, work_dtype
from torchlml._torch import careful as reference
from torchlml._torch import fast as quick
from torchlml._torch import onnx as exported
from torchlml.solvers.bracketing import Bracketing


def lml(c: Canonical, solver: Bracketing | None, bound: Bound) -> Tensor:
    """y of canonical rows."""
    if bound == "exactly":
        return paths.lml(c.x, c.k, c.mask, c.offsets, solver=solver)
    if solver is None:
        return _RULES[bound](c.x, c.k, c.mask, c.offsets)
    return _differentiable(c, solver, bound)


def log_lml(c: Canonical, solver: Bracketing | None, bound: Bound) -> Tensor:
    """log y of canonical rows."""
    limited = paths.log_lml(c.x, c.k, c.mask, c.offsets, solver=solver)
    if bound == "exactly":
        return limited
    # Infinite entries stay out of the graph: the derivative of logsigmoid is not 0 at -inf.
    return _with_free_rows(limited, c, solver, bound, logsigmoid, absent=-torch.inf)


def lml_dual(c: Canonical, solver: Bracketing | None, bound: Bound) -> Tensor:
    """nu of canonical rows."""
    nu = paths.lml_dual(c.x, c.k, c.mask, c.offsets, solver=solver)
    if bound == "exactly":
        return nu
    return torch.where(nu >= 0 if bound == "at_most" else nu <= 0, 0, nu)


def _differentiable(c: Canonical, solver: Bracketing | None, bound: Bound) -> Tensor:
    """y in ordinary operations, for every transform."""
    limited = paths.lml(c.x, c.k, c.mask, c.offsets, solver=solver)
    return _with_free_rows(limited, c, solver, bound, sigmoid, absent=0.0)


def _with_free_rows(
    limited: Tensor,
    c: Canonical,
    solver: Bracketing | None,
    bound: Bound,
    function: Callable[[Tensor], Tensor],
    absent: float,
) -> Tensor:
    """The rows that do not keep to the bound by themselves from `limited`, the others by the function."""
    x = c.x.to(work_dtype(c.x.dtype))
    x = x if c.mask is None else torch.where(c.mask, x, -torch.inf)
    free = _keeps(solve(x, c.k, c.offsets, solver), bound)
    there = x != -torch.inf
    own = torch.where(there, function(torch.where(there, x, 0)), absent)
    return torch.where(rows_of(c.x, c.offsets).spread(free), own.to(limited.dtype), limited)


def _keeps(nu: Tensor, bound: Bound) -> Tensor:
    """Does a row keep to the bound by itself? The sign of nu* says so; a NaN does not."""
    total = nu.sum(0)
    return total >= 0 if bound == "at_most" else total <= 0


def _reference_forward(
    x: Tensor,
    k: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    at_most: bool,
    forward: Callable[..., tuple[Tensor, Tensor]] = quick.forward,
) -> tuple[Tensor, Tensor]:
    """(y, nu) like `reference.forward`, with the free rows put in: their nu is exactly 0."""
    y, nu = forward(x, k, mask, offsets)
    values, rows = reference.prepare(x, mask, offsets)
    free = _keeps(nu, "at_most" if at_most else "at_least")
    y = torch.where(rows.spread(free), sigmoid(values).to(y.dtype), y)
    return y, torch.where(free, 0, nu)


def _reference_backward(
    grad: Tensor, x: Tensor, y: Tensor, nu: Tensor, mask: Tensor | None, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(dx, dk) like `reference.backward`; a free row has the derivative of its sigmoids."""
    dx, dk = quick.backward(grad, x, y, nu, mask, offsets)
    values, rows = reference.prepare(x, mask, offsets)
    free = (nu == 0).all(0)
    s = sigmoid(-values.abs())  # not of x: 1 - y has no digits where y rounds to 1
    slope = torch.where(values.isfinite(), s * (1 - s) * grad, 0)
    return torch.where(rows.spread(free), slope.to(dx.dtype), dx), torch.where(free, 0, dk)


_forward = operator(
    f"bounded_forward(Tensor x, Tensor k, {ROWS}, bool at_most) -> (Tensor, Tensor)",
    _reference_forward,
    lambda x, k, mask, offsets, at_most: empty_values(x, k, mask, offsets),
    exported=lambda x, k, mask, offsets, at_most: _reference_forward(
        x, k, mask, offsets, at_most, exported.forward
    ),
)
_backward = operator(
    f"bounded_backward(Tensor grad, Tensor x, Tensor y, Tensor nu, {ROWS}) -> (Tensor, Tensor)",
    _reference_backward,
    lambda grad, x, y, nu, *rows: empty_gradients(x, nu),
)


def _rule(bound: Bound) -> Rule:
    def differentiable(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
        return _differentiable(Canonical(x, k, mask, offsets, None), None, bound)

    forward = keeps_both(lambda *arguments: _forward(*arguments, bound == "at_most"))
    return Rule(forward, from_values(_backward), differentiable)


_RULES = {"at_most": _rule("at_most"), "at_least": _rule("at_least")}
