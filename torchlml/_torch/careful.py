"""Accurate operators in pure PyTorch, for tests and for rows that `fast.py` cannot certify.

The arguments have a canonical form, which is the same for every operator and every kernel:

- x: (R, n), or (N,) with `offsets` (R + 1,).
- mask: bool with the shape of x, or None.
- k: 0-d or (R,), in float64 (float32 on Apple GPUs).
- nu: (2, R), the pair (hi, lo) in the work dtype. For a row without a finite nu, hi is -inf, +inf or NaN.

A row has m available entries (True in the mask and not -inf), of which p are +inf.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchlml._rows import Rows, rows_of, shifted, work_dtype
from torchlml._solve.newton import newton

Pair = tuple[Tensor, Tensor]
_Function = Callable[..., Tensor]


def solve(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
    """Compute nu for every row by Newton's method."""
    x, rows = prepare(x, mask, offsets)
    return solve_rows(x, k, rows, newton)


def forward(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Pair:
    """Return (y, nu)."""
    return project(x, k, *prepare(x, mask, offsets), newton)


def log_forward(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Pair:
    """Return (log y, nu) without computing y."""
    return project(x, k, *prepare(x, mask, offsets), newton, logsigmoid)


def backward(
    grad: Tensor, x: Tensor, y: Tensor, nu: Tensor, mask: Tensor | None, offsets: Tensor | None
) -> Pair:
    """Return (dx, dk) for `forward`: dx = w * (g - dk), dk = sum(w * g) / sum(w), w = y * (1 - y)."""
    g, values, rows, live = _begin_backward(grad, x, nu, mask, offsets)
    t = sigmoid(-shifted(values, nu, rows).abs())
    # If k < p, the +inf entries get k/p each. They depend on k as tied entries do, but not on any finite x.
    tied = (values == torch.inf) & (y > 0) & (y < 1) & rows.broadcast(nu[0].isinf())
    w = torch.where(live, t * (1 - t), tied.to(t.dtype))
    total = rows.sum(w)
    dk = torch.where(total > 0, rows.sum(torch.where(live | tied, w * g, 0)) / total, 0)
    dx = torch.where(live, w * (g - rows.broadcast(dk.to(g.dtype))), 0)
    return finish(dx, dk, x, nu, rows)


def log_backward(
    grad: Tensor, x: Tensor, log_y: Tensor, nu: Tensor, mask: Tensor | None, offsets: Tensor | None
) -> Pair:
    """Return (dx, dk) for `log_forward`.

    With a = g * (1 - y), dx = a - (w / sum(w)) * sum(a) and dk = sum(a) / sum(w).
    """
    g, values, rows, live = _begin_backward(grad, x, nu, mask, offsets)
    a = torch.where(live, g * sigmoid(-shifted(values, nu, rows)), 0)
    total_a = rows.sum(a)
    share, slope = shares_of_slope(values, nu, live, rows)
    dx = torch.where(live, a - share * rows.broadcast(total_a.to(a.dtype)), 0)
    # If k < p, log y = log(k/p) at each +inf entry. Its derivative with respect to k is 1/k = 1 / (p * y).
    tied = (values == torch.inf) & (log_y < 0) & log_y.isfinite() & rows.broadcast(nu[0].isinf())
    tied_dk = rows.sum(torch.where(tied, g * torch.exp(-log_y.to(g.dtype)), 0)) / rows.sum(tied).clamp(min=1)
    dk = torch.where(nu[0].isinf(), tied_dk, torch.where(total_a == 0, 0, total_a / slope))
    return finish(dx, dk, x, nu, rows)


def dual_backward(grad: Tensor, x: Tensor, nu: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Pair:
    """Return (dx, dk) for nu itself: dx = -g * w / sum(w), dk = g / sum(w)."""
    values, rows = prepare(x, mask, offsets)
    live = moving(values, nu, rows)
    share, slope = shares_of_slope(values, nu, live, rows)
    dx = torch.where(live, -share * rows.broadcast(grad), 0)
    dk = torch.where(nu[0].isinf() | (grad == 0), 0, grad / slope)
    return finish(dx, dk, x, nu, rows)


def _begin_backward(
    grad: Tensor, x: Tensor, nu: Tensor, mask: Tensor | None, offsets: Tensor | None
) -> tuple[Tensor, Tensor, Rows, Tensor]:
    """Return the gradient in the work dtype, the prepared entries, their rows, and the mask from `moving`."""
    values, rows = prepare(x, mask, offsets)
    return grad.to(values.dtype), values, rows, moving(values, nu, rows)


def prepare(x: Tensor, mask: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Rows]:
    """Return the entries in the work dtype, with masked entries set to -inf, and the rows they form."""
    values = x.to(work_dtype(x.dtype))
    if mask is not None:
        values = torch.where(mask, values, -torch.inf)
    return values, rows_of(x, offsets)


def sigmoid(z: Tensor) -> Tensor:
    """Compute the logistic function; the result is bitwise independent of an entry's position in memory."""
    # The rounding of torch.sigmoid depends on the position in memory, but that of torch.exp does not.
    e = torch.exp(-z.abs())
    return torch.where(z > 0, 1, e) / (1 + e)


def solve_rows(x: Tensor, k: Tensor, rows: Rows, solver: _Function) -> Tensor:
    """Compute nu for prepared rows. `solver` handles ordinary rows; in other rows, nu is infinite or NaN."""
    m = rows.sum(x != -torch.inf)
    p = rows.sum(x == torch.inf)
    undefined = (rows.sum(x.isnan()) > 0) | k.isnan()
    ordinary = (p < k) & (k < m) & ~undefined
    hi = torch.where((k > 0) & (k >= m), torch.inf, -torch.inf)
    hi = torch.where(undefined, torch.nan, hi).to(x.dtype)
    nu = torch.stack([hi, torch.zeros_like(hi)])
    if x.numel() == 0:
        return nu
    return torch.where(ordinary, solver(x, k, m, ordinary, rows), nu)


def project(
    x: Tensor, k: Tensor, values: Tensor, rows: Rows, solver: _Function, log_sigmoid: _Function | None = None
) -> Pair:
    """Return (y, nu) for prepared values, or (log y, nu) if `log_sigmoid` is given."""
    nu = solve_rows(values, k, rows, solver)
    z, absent, share = shifted(values, nu, rows), 0.0, infinite_share(values, k, nu, rows)
    if log_sigmoid is not None:
        absent, share = -torch.inf, share.log()
    return fill((log_sigmoid or sigmoid)(z), values, nu, rows, absent, share).to(x.dtype), nu


def infinite_share(x: Tensor, k: Tensor, nu: Tensor, rows: Rows) -> Tensor:
    """Return y at the +inf entries of each row: k/p if there are p >= k such entries, and 1 otherwise."""
    share = (k / rows.sum(x == torch.inf)).clamp(0, 1)
    return torch.where(nu[0] == -torch.inf, share, 1).to(x.dtype)


def fill(y: Tensor, x: Tensor, nu: Tensor, rows: Rows, absent: float, infinite: Tensor) -> Tensor:
    """Replace y where the formula does not apply: at infinite and absent entries, and in undefined rows."""
    y = torch.where(x == torch.inf, rows.broadcast(infinite), y)
    y = torch.where(x == -torch.inf, absent, y)
    return torch.where(rows.broadcast(nu[0].isnan()), torch.nan, y)


def moving(x: Tensor, nu: Tensor, rows: Rows) -> Tensor:
    """Return a mask of the entries whose y varies with x and k: finite entries in rows with a finite nu."""
    return x.isfinite() & rows.broadcast(nu[0].isfinite())


def shares_of_slope(x: Tensor, nu: Tensor, live: Tensor, rows: Rows) -> Pair:
    """Return (w / sum(w), sum(w)); the first is a softmax of log w, accurate even if every w underflows."""
    z = shifted(x, nu, rows)
    log_w = torch.where(live, logsigmoid(z) + logsigmoid(-z), -torch.inf)
    largest = rows.max(log_w)
    largest = torch.where(largest.isfinite(), largest, 0)
    w = torch.exp(log_w - rows.broadcast(largest))
    total = rows.sum(w)
    return w / rows.broadcast(total.to(w.dtype)), total * largest.to(total.dtype).exp()


def finish(dx: Tensor, dk: Tensor, x: Tensor, nu: Tensor, rows: Rows) -> Pair:
    """Set the gradients of undefined rows to NaN, and cast each gradient to its final dtype."""
    undefined = nu[0].isnan()
    dx = torch.where(rows.broadcast(undefined), torch.nan, dx)
    return dx.to(x.dtype), torch.where(undefined, torch.nan, dk).to(rows.wide)
