"""At most k, at least k: the projection where k is only a limit of the sum.

In the dual a limit is a clamp: nu = min(nu*, 0) for at most k and max(nu*, 0) for at least k, with nu* the
number that makes the sum exactly k. A row with nu = 0 is called free: it is sigmoid(x), and does not feel k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchlml._core import operators, paths
from torchlml._core.arguments import Canonical, canonical, check_solver
from torchlml._core.differentiable import sigmoid, solve
from torchlml._core.operators import operator
from torchlml._core.paths import differentiate_again, gradient_of_k, needs_no_graph, wants_graph
from torchlml._core.rows import rows_of, work_dtype
from torchlml._kernels import reference
from torchlml.solvers.bracketing import Bracketing

_BOUNDS = ("exactly", "at_most", "at_least")


def check_bound(bound: str) -> None:
    """Refuse a `bound` that is none of the three."""
    if bound not in _BOUNDS:
        raise ValueError(f'`bound` must be "exactly", "at_most" or "at_least", but it is {bound!r}.')


def lml(
    x: Tensor,
    k: float | Tensor,
    dim: int,
    mask: Tensor | None,
    offsets: Tensor | None,
    solver: str | Bracketing,
    bound: str,
) -> Tensor:
    """y, as `torchlml.lml` gives it for a `bound` that is not "exactly"."""
    c = _canonical(x, k, dim, mask, offsets, bound)
    method = check_solver(solver)
    if method is None and paths.is_plain():
        if needs_no_graph(c.x, c.k):
            return c.restore(_forward(c.x, c.k, c.mask, c.offsets, bound == "at_most")[0], dim)
        return c.restore(_Bounded.apply(c.x, c.k, c.mask, c.offsets, bound), dim)
    return c.restore(_differentiable(c, method, bound), dim)


def _differentiable(c: Canonical, solver: Bracketing | None, bound: str) -> Tensor:
    """y in ordinary operations, for every transform."""
    bounded = paths.lml(c.x, c.k, c.mask, c.offsets, solver)
    free = rows_of(c.x, c.offsets).spread(_free(c, solver, bound))
    absent = _absent(c)
    y = torch.where(absent, 0, sigmoid(torch.where(absent, 0, _wide(c.x))))
    return torch.where(free, y.to(bounded.dtype), bounded)


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, bound: str
    ) -> Tensor:
        y, nu = _forward(x, k, mask, offsets, bound == "at_most")
        ctx.save_for_backward(x, k, mask, offsets, y, nu)
        ctx.bound = bound
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, k, mask, offsets, y, nu = ctx.saved_tensors
        if wants_graph():

            def again(x: Tensor, k: Tensor) -> Tensor:
                return _differentiable(Canonical(x, k, mask, offsets, None), None, ctx.bound)

            return (*differentiate_again(again, grad, x, k), None, None, None)
        dx, dk = _backward(grad.contiguous(), x, y, nu, mask, offsets)
        return dx, gradient_of_k(dk, k), None, None, None


def _reference_forward(
    x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, at_most: bool
) -> tuple[Tensor, Tensor]:
    """(y, nu) like `reference.forward`, with the free rows put in: their nu is exactly 0."""
    y, nu = reference.forward(x, k, mask, offsets)
    values, rows = reference.prepare(x, mask, offsets)
    free = _keeps(nu, "at_most" if at_most else "at_least")
    y = torch.where(rows.spread(free), sigmoid(values).to(y.dtype), y)
    return y, torch.where(free, 0, nu)


def _reference_backward(
    grad: Tensor, x: Tensor, y: Tensor, nu: Tensor, mask: Tensor | None, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(dx, dk) like `reference.backward`; a free row has the derivative of its sigmoids."""
    dx, dk = reference.backward(grad, x, y, nu, mask, offsets)
    values, rows = reference.prepare(x, mask, offsets)
    free = (nu == 0).all(0)
    s = sigmoid(-values.abs())  # not of x: 1 - y has no digits where y rounds to 1
    slope = torch.where(values.isfinite(), s * (1 - s) * grad, 0)
    return torch.where(rows.spread(free), slope.to(dx.dtype), dx), torch.where(free, 0, dk)


_forward = operator(
    "bounded_forward(Tensor x, Tensor k, Tensor? mask, Tensor? offsets, bool at_most) -> (Tensor, Tensor)",
    _reference_forward,
    lambda x, k, mask, offsets, at_most: operators._fake_forward(x, k, mask, offsets),
)
_backward = operator(
    "bounded_backward(Tensor grad, Tensor x, Tensor y, Tensor nu, Tensor? mask, Tensor? offsets)"
    " -> (Tensor, Tensor)",
    _reference_backward,
    lambda grad, x, y, nu, mask, offsets: operators._fake_backward(x, nu),
)


def log_lml(
    x: Tensor,
    k: float | Tensor,
    dim: int,
    mask: Tensor | None,
    offsets: Tensor | None,
    solver: str | Bracketing,
    bound: str,
) -> Tensor:
    """log y, as `torchlml.log_lml` gives it for a `bound` that is not "exactly"."""
    c = _canonical(x, k, dim, mask, offsets, bound)
    return c.restore(log_rows(c, check_solver(solver), bound), dim)


def lml_dual(
    x: Tensor,
    k: float | Tensor,
    dim: int,
    mask: Tensor | None,
    offsets: Tensor | None,
    solver: str | Bracketing,
    bound: str,
) -> Tensor:
    """nu, as `torchlml.lml_dual` gives it for a `bound` that is not "exactly"."""
    c = _canonical(x, k, dim, mask, offsets, bound)
    nu = paths.lml_dual(c.x, c.k, c.mask, c.offsets, check_solver(solver))
    return c.restore_rows(torch.where(nu >= 0 if bound == "at_most" else nu <= 0, 0, nu))


def log_rows(c: Canonical, solver: Bracketing | None, bound: str) -> Tensor:
    """log y of canonical rows."""
    bounded = paths.log_lml(c.x, c.k, c.mask, c.offsets, solver)
    free = rows_of(c.x, c.offsets).spread(_free(c, solver, bound))
    absent = _absent(c)
    # Infinite entries stay out of the graph: the derivative of logsigmoid is not 0 at -inf.
    log_y = torch.where(absent, -torch.inf, logsigmoid(torch.where(absent, 0, _wide(c.x))))
    return torch.where(free, log_y.to(bounded.dtype), bounded)


def _canonical(
    x: Tensor, k: float | Tensor, dim: int, mask: Tensor | None, offsets: Tensor | None, bound: str
) -> Canonical:
    check_bound(bound)
    return canonical(x, k, dim, mask, offsets, any_k=bound == "at_most")


def _free(c: Canonical, solver: Bracketing | None, bound: str) -> Tensor:
    """The rows that keep to the bound by themselves, told by the sign of nu*; a NaN is in none."""
    values = _wide(c.x) if c.mask is None else torch.where(c.mask, _wide(c.x), -torch.inf)
    return _keeps(solve(values, c.k, c.offsets, solver), bound)


def _keeps(nu: Tensor, bound: str) -> Tensor:
    total = nu.sum(0)
    return total >= 0 if bound == "at_most" else total <= 0


def _wide(x: Tensor) -> Tensor:
    return x.to(work_dtype(x.dtype))


def _absent(c: Canonical) -> Tensor:
    absent = c.x == -torch.inf
    return absent if c.mask is None else absent | ~c.mask
