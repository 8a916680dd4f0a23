"""The value of the projection: to lml what logsumexp is to softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from torchlml._arguments import canonical
from torchlml._autograd import operators
from torchlml._autograd.implicit import SolvedRows
from torchlml._autograd.operators import ROWS, empty_nu, operator
from torchlml._autograd.rule import Rule
from torchlml._rows import Rows, rows_of
from torchlml._solve.residual import shifted
from torchlml._torch import careful as reference
from torchlml._torch import fast as quick


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
    c = canonical(x, k, dim, mask, offsets, nested=True)
    return c.restore_rows(_value(c.x, c.k, c.mask, c.offsets))


def _forward(x: Tensor, *rest: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    value, nu = _operator(x, *rest)
    return value.to(x.dtype), (nu,)


def _backward(
    grad: Tensor, x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, nu: Tensor
) -> tuple[Tensor, Tensor]:
    """(dx, dk): y and -nu, each times the gradient of its row."""
    y, _ = operators.forward(x, k, mask, offsets)
    dk = torch.where(nu[0].isinf(), 0, -grad * nu.to(k.dtype).sum(0))
    return y.mul_(rows_of(x, offsets).spread(grad)), dk


def _reference(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """(value, nu): one wide number per row, and nu as `solve` gives it."""
    values, rows = reference.prepare(x, mask, offsets)
    nu = quick.solve(x, k, mask, offsets)
    z = shifted(values, nu, rows)
    up = z > 0
    # Infinite entries need no care here: e^-inf is 0, and +inf belongs in the sum.
    rest = rows.sum(torch.log1p(torch.exp(-z.abs())))
    tops = rows.sum(torch.where(up, values, 0))
    value = tops + (rows.sum(up) - k) * nu.to(rows.wide).sum(0) + rest
    return _fill(value, values, k, nu[0], rows), nu


_operator = operator(
    f"value(Tensor x, Tensor k, {ROWS}) -> (Tensor, Tensor)",
    _reference,
    lambda x, k, mask, offsets: (empty_nu(x, offsets)[0].to(k.dtype), empty_nu(x, offsets)),
)


def _differentiable(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
    """The same in ordinary operations. What nu adds to the first derivative is 0, to the second it is not."""
    solved = SolvedRows(x, k, mask, offsets)
    rows, hi, z = solved.rows, solved.hi, solved.z
    values = x.to(z.dtype)
    values = values if mask is None else torch.where(mask, values, -torch.inf)
    live = values.isfinite() & rows.spread(hi.isfinite())
    nu = (torch.where(hi.isinf(), 0, hi) + solved.lo) + solved.correction
    # sum softplus(z) - k nu, with each entry's share of nu taken out: for k near n they would cancel.
    up = live & (z > 0)
    # Without abs, which has no derivative at 0.
    rest = torch.log1p(torch.exp(torch.where(z > 0, -z, z)))
    tops = rows.sum(torch.where(up, torch.where(live, values, 0), 0))
    value = tops + (rows.sum(up.to(z.dtype)) - k.to(nu.dtype)) * nu + rows.sum(torch.where(live, rest, 0))
    return _fill(value, values, k, hi, rows).to(x.dtype)


def _fill(value: Tensor, x: Tensor, k: Tensor, hi: Tensor, rows: Rows) -> Tensor:
    """Put the limits where the formula has none: k = 0, k entries or fewer, entries of +inf."""
    available = x != -torch.inf
    value = torch.where(hi == torch.inf, rows.sum(torch.where(available, x, 0)), value)
    value = torch.where(hi == -torch.inf, 0, value)
    infinite = rows.sum(x == torch.inf) > 0
    return torch.where(infinite & (k > 0) & ~hi.isnan(), torch.inf, value)


_value = Rule(_forward, _backward, _differentiable)
