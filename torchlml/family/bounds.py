"""At most k, at least k: the projection where k is only a limit of the sum.

In the dual a limit is a clamp: nu = min(nu*, 0) for at most k and max(nu*, 0) for at least k, with nu* the
number that makes the sum exactly k. A row with nu = 0 is called free: it is sigmoid(x), and does not feel k.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchlml import autograd
from torchlml.arguments import Canonical, canonical, check_solver
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
    bounded = autograd.lml(c.x, c.k, c.mask, c.offsets, method)
    free = _spread(_free(c, method, bound), c)
    absent = _absent(c)
    y = torch.where(absent, 0, _sigmoid(torch.where(absent, 0, _wide(c.x))))
    return c.restore(torch.where(free, y.to(bounded.dtype), bounded), dim)


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
    free = _spread(_free(c, solver, bound), c)
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
    nu = solve(values, c.k, c.offsets, solver).sum(0)
    return nu >= 0 if bound == "at_most" else nu <= 0


def _sigmoid(x: Tensor) -> Tensor:
    # torch.sigmoid rounds an entry differently by its place in memory; torch.exp does not. No abs: it has no
    # derivative at 0.
    e = torch.exp(torch.where(x > 0, -x, x))
    return torch.where(x > 0, 1, e) / (1 + e)


def _wide(x: Tensor) -> Tensor:
    return x.to(work_dtype(x.dtype))


def _absent(c: Canonical) -> Tensor:
    absent = c.x == -torch.inf
    return absent if c.mask is None else absent | ~c.mask


def _spread(per_row: Tensor, c: Canonical) -> Tensor:
    if c.offsets is None:
        return per_row.unsqueeze(-1)
    return per_row[row_index(c.offsets, c.x.shape[0])]
