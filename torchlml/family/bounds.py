"""At most k, at least k: the projection where k is only a limit of the sum.

In the dual a limit is a clamp: nu = min(nu*, 0) for at most k and max(nu*, 0) for at least k, with nu* the
number that makes the sum exactly k. A row with nu = 0 is called free: it is sigmoid(x), and does not feel k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchlml import autograd, ops
from torchlml.arguments import Canonical, canonical, check_solver
from torchlml.autograd import gradient_of_k, wants_graph
from torchlml.differentiable import solve
from torchlml.rows import row_index, work_dtype
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
    if method is None and autograd.is_plain():
        return c.restore(_Bounded.apply(c.x, c.k, c.mask, c.offsets, bound), dim)
    return c.restore(_differentiable(c, method, bound), dim)


def _differentiable(c: Canonical, solver: Bracketing | None, bound: str) -> Tensor:
    """y in ordinary operations, for every transform."""
    bounded = autograd.lml(c.x, c.k, c.mask, c.offsets, solver)
    free = _spread(_free(c, solver, bound), c.x, c.offsets)
    absent = _absent(c)
    y = torch.where(absent, 0, _sigmoid(torch.where(absent, 0, _wide(c.x))))
    return torch.where(free, y.to(bounded.dtype), bounded)


class _Bounded(torch.autograd.Function):
    """y by the projection's operators, with the free rows put in; a product is cheaper than a `where`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, bound: str
    ) -> Tensor:
        y, nu = ops.forward(x, k, mask, offsets)
        free = _spread(_keeps(nu, bound).to(nu.dtype), x, offsets)
        s = _fast_sigmoid(x, mask)
        y = (y * (1 - free)).addcmul_(s, free).to(x.dtype)
        # The y of free rows serves for nothing below, so it need not be kept as it was.
        ctx.save_for_backward(x, k, mask, offsets, y, nu)
        ctx.bound = bound
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, k, mask, offsets, y, nu = ctx.saved_tensors
        if wants_graph():
            out = _differentiable(Canonical(x, k, mask, offsets, None), None, ctx.bound)
            wanted = [t for t in (x, k) if t.requires_grad]
            found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
            return (*(next(found) if t.requires_grad else None for t in (x, k)), None, None, None)
        free = _keeps(nu, ctx.bound).to(nu.dtype)
        dx, dk = ops.backward(grad.contiguous(), x, y, nu, mask, offsets)
        s = _fast_sigmoid(x, mask)
        slope = (s - s.square()).mul_(grad)
        free_entries = _spread(free, x, offsets)
        dx = (dx * (1 - free_entries)).addcmul_(slope, free_entries)
        return dx.to(x.dtype), gradient_of_k(dk * (1 - free), k), None, None, None


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
    nu = autograd.lml_dual(c.x, c.k, c.mask, c.offsets, check_solver(solver))
    return c.restore_rows(torch.where(nu >= 0 if bound == "at_most" else nu <= 0, 0, nu))


def log_rows(c: Canonical, solver: Bracketing | None, bound: str) -> Tensor:
    """log y of canonical rows."""
    bounded = autograd.log_lml(c.x, c.k, c.mask, c.offsets, solver)
    free = _spread(_free(c, solver, bound), c.x, c.offsets)
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


def _sigmoid(x: Tensor) -> Tensor:
    # torch.sigmoid rounds an entry differently by its place in memory; torch.exp does not. No abs: it has no
    # derivative at 0.
    e = torch.exp(torch.where(x > 0, -x, x))
    return torch.where(x > 0, 1, e) / (1 + e)


def _fast_sigmoid(x: Tensor, mask: Tensor | None) -> Tensor:
    """The same without a graph and without a choice: where e^-x overflows, 1 / (1 + e^-x) is 0 as well."""
    s = torch.neg(_wide(x)).exp_().add_(1).reciprocal_()
    return s if mask is None else s.masked_fill_(~mask, 0)


def _wide(x: Tensor) -> Tensor:
    return x.to(work_dtype(x.dtype))


def _absent(c: Canonical) -> Tensor:
    absent = c.x == -torch.inf
    return absent if c.mask is None else absent | ~c.mask


def _spread(per_row: Tensor, x: Tensor, offsets: Tensor | None) -> Tensor:
    return per_row.unsqueeze(-1) if offsets is None else per_row[row_index(offsets, x.shape[0])]
