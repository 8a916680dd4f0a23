"""The value of the projection: to lml what logsumexp is to softmax."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchlml._core import operators
from torchlml._core.arguments import canonical
from torchlml._core.differentiable import DifferentiableRows
from torchlml._core.operators import operator
from torchlml._core.paths import differentiate_again, gradient_of_k, is_plain, wants_graph
from torchlml._core.rows import rows_of
from torchlml._kernels import reference
from torchlml.solvers.residual import shifted

_Sum = Callable[[Tensor], Tensor]


def lml_value(
    x: Tensor,
    k: float | Tensor,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The most that x.y + H(y) reaches over 0 <= y <= 1 and sum y = k; its gradient is lml(x, k).

        >>> torchlml.lml_value(torch.zeros(4), 1)  # 4 log 4 - 3 log 3
        tensor(2.2493)

    Arguments as for `torchlml.lml`.

    Returns:
        The value, with the shape of `x` without `dim` (with `offsets`: one number per row) and the dtype of
        `x`. Towards small temperatures T, T * lml_value(x / T, k) becomes the sum of the k largest entries.

    With H the binary entropy it is sum softplus(x + nu) - k nu; the derivative for k is -nu. For k = 0 it is
    0, where k entries or fewer are available it is their sum, and k then has no gradient. An entry of +inf
    makes it +inf, unless k is 0.
    """
    c = canonical(x, k, dim, mask, offsets)
    value = _Value.apply if is_plain() else _differentiable
    return c.restore_rows(value(c.x, c.k, c.mask, c.offsets))


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
        value, nu = _operator(x, k, mask, offsets)
        ctx.save_for_backward(x, k, mask, offsets, nu)
        return value.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, k, mask, offsets, nu = ctx.saved_tensors
        if wants_graph():
            again = functools.partial(_differentiable, mask=mask, offsets=offsets)
            return (*differentiate_again(again, grad, x, k), None, None)
        y, _ = operators.forward(x, k, mask, offsets)
        dx = y.mul_(rows_of(x, offsets).spread(grad))
        dk = torch.where(nu[0].isinf(), 0, -grad * nu.to(k.dtype).sum(0))
        return dx, gradient_of_k(dk, k), None, None


def _reference(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """(value, nu): one wide number per row, and nu as `solve` gives it."""
    values, rows = reference.prepare(x, mask, offsets)
    nu = reference.solve(x, k, mask, offsets)
    z = shifted(values, nu, rows)
    up = z > 0
    # Infinite entries need no care here: e^-inf is 0, and +inf belongs in the sum.
    rest = rows.sum(torch.log1p(torch.exp(-z.abs())))
    tops = rows.sum(torch.where(up, values, 0))
    value = tops + (rows.sum(up) - k) * nu.to(rows.wide).sum(0) + rest
    return _fill(value, values, k, nu[0], rows.sum), nu


_operator = operator(
    "value(Tensor x, Tensor k, Tensor? mask, Tensor? offsets) -> (Tensor, Tensor)",
    _reference,
    lambda x, k, mask, offsets: (
        operators._fake_nu(x, offsets)[0].to(k.dtype),
        operators._fake_nu(x, offsets),
    ),
)


def _differentiable(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
    """The same in ordinary operations. What nu adds to the first derivative is 0, to the second it is not."""
    rows = DifferentiableRows(x, k, mask, offsets)
    values = x.to(rows.z.dtype)
    values = values if mask is None else torch.where(mask, values, -torch.inf)
    live = values.isfinite() & rows.spread(rows.hi.isfinite())
    nu = (torch.where(rows.hi.isinf(), 0, rows.hi) + rows.lo) + rows.correction
    finite = torch.where(live, values, 0)
    value = _value(finite, rows.z, live, k.to(nu.dtype), nu, rows.sum)
    return _fill(value, values, k, rows.hi, rows.sum).to(x.dtype)


def _value(x: Tensor, z: Tensor, live: Tensor, k: Tensor, nu: Tensor, total: _Sum) -> Tensor:
    """sum softplus(z) - k nu, with each entry's share of nu taken out: for k near n they would cancel."""
    up = live & (z > 0)
    # Without abs, which has no derivative at 0.
    rest = torch.log1p(torch.exp(torch.where(z > 0, -z, z)))
    count = total(up.to(z.dtype))
    return total(torch.where(up, x, 0)) + (count - k) * nu + total(torch.where(live, rest, 0))


def _fill(value: Tensor, x: Tensor, k: Tensor, hi: Tensor, total: _Sum) -> Tensor:
    """Put the limits where the formula has none: k = 0, k entries or fewer, entries of +inf."""
    available = x != -torch.inf
    value = torch.where(hi == torch.inf, total(torch.where(available, x, 0)), value)
    value = torch.where(hi == -torch.inf, 0, value)
    infinite = total((x == torch.inf).to(value.dtype)) > 0
    return torch.where(infinite & (k > 0) & ~hi.isnan(), torch.inf, value)
