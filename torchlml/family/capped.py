"""What the two constrained projections share: their arguments, their operators and the rows without a search.

Both map a row onto {0 <= y <= upper, sum y = k} by y = clip(f(x + nu), 0, upper), with f the exponential or
the identity. Once it is known which entries stop at a bound, nu is an explicit formula of the others: an
operator finds the first as a constant, and plain autograd through the second is exact at every order. Eager
calls on finite, unmasked rows skip what they do not need, and have their gradients written out.

Everything runs in double precision and is rounded once, at the end. Hot loops avoid `torch.where`, which on
a CPU costs several times what a sum or a minimum does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchlml import ops
from torchlml.arguments import NUMBERS, Canonical, canonical, readable
from torchlml.autograd import gradient_of_k, is_plain, wants_graph
from torchlml.rows import DenseRows, RaggedRows, Rows, wide_dtype
from torchlml.solvers.newton import add
from torchlml.solvers.residual import shifted

_Solver = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]
_Rowwise = Callable[[Canonical, Tensor], Tensor]


class Member(NamedTuple):
    """What makes one of the two: see the functions of these names in its file."""

    solve: _Solver
    differentiable: _Rowwise
    values: Callable[[Tensor, Tensor], Tensor]
    moves: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


_library = torch.library.Library("torchlml", "FRAGMENT")
_CHUNK = 65_536


def operator(name: str, solver: _Solver) -> _Solver:
    """Make an operator of a solver, so that it can be compiled and mapped.

    Args:
        name: what comes after `torch.ops.torchlml.`.
        solver: a function of x (-inf: absent, +inf: at its bound), k (R,), upper (like x, or 0-d) and
            offsets, all wide, whose rows all have 0 < k < sum of upper and a finite entry, or are empty. It
            gives nu as a pair (2, R).
    """
    _library.define(f"{name}(Tensor x, Tensor k, Tensor upper, Tensor? offsets) -> Tensor")
    _library.impl(name, solver, "CompositeExplicitAutograd")
    call = getattr(torch.ops.torchlml, name).default
    torch.library.register_fake(
        f"torchlml::{name}", lambda x, k, upper, offsets: x.new_empty((2, k.shape[0])), lib=_library
    )

    def mapped(info: Any, in_dims: Any, x: Tensor, k: Tensor, upper: Tensor, offsets: Tensor | None) -> Any:
        # `upper` travels as a mask does: both have one number beside each entry.
        return ops._vmap_solve(call, info, in_dims, x, k, upper, offsets)

    torch.library.register_vmap(f"torchlml::{name}", mapped, lib=_library)
    return call


def pair(hi: Tensor, lo: Tensor) -> Tensor:
    """hi + lo as a nu, (2, R): what fits in the first, the rest in the second."""
    return add(torch.stack([hi, torch.zeros_like(hi)]), lo)


def at_bounds(saturated: Tensor, limit: Tensor, rows: Rows) -> Tensor:
    """What the saturated entries of each row sum to; `limit` is like x, or (R, 1) where it is one per row."""
    if isinstance(rows, DenseRows) and limit.shape[-1] == 1:
        return rows.sum(saturated) * limit.squeeze(-1)
    return rows.sum(saturated * limit)


def mean_bound(k: Tensor, upper: Tensor, rows: Rows) -> Tensor:
    """The mean bound of each row, as far as it can matter: no entry gets more than k."""
    mean = upper if upper.dim() == 0 else rows.sum(upper) / rows.sum(torch.ones_like(upper)).clamp(min=1)
    return torch.minimum(mean, 2 * k)


def start(x: Tensor, k: Tensor, offsets: Tensor | None) -> Tensor:
    """Where to begin: the nu of lml where it is finite, elsewhere 0."""
    nu = ops.solve(x, k, None, offsets)
    return torch.where(nu.isfinite().all(0), nu, 0)


def project(c: Canonical, upper: Tensor, member: Member) -> Tensor:
    """y of canonical rows; `upper` is 0-d or like x."""
    if _ordinary(c, upper):
        return _Ordinary.apply(c.x, c.k, upper, member)
    return member.differentiable(c, upper.expand(c.x.shape))


def _ordinary(c: Canonical, upper: Tensor) -> bool:
    """Can it be seen that nothing here is special: no mask, no infinity, no row at its limits?"""
    if c.mask is not None or c.offsets is not None or c.x.numel() == 0 or not is_plain():
        return False
    if not all(readable(t) for t in (c.x, c.k, upper)) or not bool(c.x.detach().sum().isfinite()):
        return False
    total = upper.detach() * c.x.shape[1] if upper.dim() == 0 else upper.detach().sum(-1)
    k = c.k.detach()
    return bool(((k > 0) & (k < total)).all())


class _Ordinary(torch.autograd.Function):
    """The projection of finite rows, with the gradients written out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: Tensor, upper: Tensor, member: Member) -> Tensor:
        y, nu = torch.empty_like(x), x.new_empty((2, x.shape[0]), dtype=k.dtype)
        targets = k.expand(x.shape[0])
        # A few rows at a time: what a search writes on the way then stays in the cache.
        step = max(1, _CHUNK // x.shape[1])
        for i in range(0, x.shape[0], step):
            part = slice(i, i + step)
            values, bound = x[part].to(k.dtype), upper if upper.dim() == 0 else upper[part]
            nu[:, part] = member.solve(values, targets[part], bound, None)
            y[part] = member.values(shifted(values, nu[:, part], DenseRows(values)), bound)
        ctx.save_for_backward(x, k, upper, nu)
        ctx.member = member
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, k, upper, nu = ctx.saved_tensors
        if wants_graph():
            y = ctx.member.differentiable(Canonical(x, k, None, None, None), upper.expand(x.shape))
            wanted = [t for t in (x, k, upper) if t.requires_grad]
            found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
            return (*(next(found) if t.requires_grad else None for t in (x, k, upper)), None)
        rows = DenseRows(x)
        g = grad.to(rows.wide)
        # dy = weight (dx + dnu) + at_bound dupper, with dnu such that the sum moves with k.
        weight, at_bound = ctx.member.moves(shifted(x.to(rows.wide), nu, rows), upper)
        dk = rows.sum(weight * g) / rows.sum(weight).clamp(min=torch.finfo(g.dtype).tiny)
        felt = g - rows.spread(dk)
        dx = (weight * felt).to(x.dtype)
        d_upper = at_bound * felt if upper.requires_grad else None
        if d_upper is not None and upper.dim() == 0:
            d_upper = d_upper.sum()
        return dx, gradient_of_k(dk, k), d_upper, None


class CappedRows:
    """Rows with a bound beside each entry, and the nu that an operator found for them.

    `z` is x + nu for the `finite` entries of `ordinary` rows, `upper` is 0 at entries that are `absent`, and
    entries of +inf, `infinite`, are at their bounds. Where the bounds of those make up k or more, they share
    it as if they were tied, and the finite entries are absent.
    """

    def __init__(self, c: Canonical, upper: Tensor, solve: _Solver) -> None:
        self.rows = DenseRows(c.x) if c.offsets is None else _PackedRows(c.x, c.offsets)
        rows, wide = self.rows, wide_dtype(c.x.device)
        x = c.x.to(wide)
        x = x if c.mask is None else torch.where(c.mask, x, -torch.inf)
        self.k = c.k.expand(rows.count)
        self.absent, self.infinite = x == -torch.inf, x == torch.inf
        undefined = rows.sum((x.isnan() | upper.isnan()) & ~self.absent) > 0
        undefined = undefined | self.k.isnan()
        # A factor that makes the value and the gradient of an undefined row NaN.
        self.spoil = torch.where(undefined, torch.nan, 1.0).to(wide)
        shared = rows.sum(torch.where(self.infinite, upper, 0)) >= self.k
        shared = rows.spread(shared & (rows.sum(self.infinite) > 0))
        self.absent = self.absent | (shared & ~self.infinite)
        self.infinite = self.infinite & ~shared
        self.finite = ~(self.absent | self.infinite)
        self.upper = torch.where(self.absent, 0, upper)
        self.nothing = self.k <= 0
        self.everything = self.k >= rows.sum(self.upper)
        self.ordinary = ~(self.nothing | self.everything | undefined)
        # Infinite numbers stay out of the graph: their derivatives would be 0 times infinity.
        moving = self.finite & ~shared & rows.spread(self.ordinary | undefined)
        base = torch.where(moving, x, 0)
        nu = self._solve(solve, base, c.offsets)
        self.z = shifted(base * rows.spread(self.spoil), nu, rows)

    def _solve(self, solve: _Solver, base: Tensor, offsets: Tensor | None) -> Tensor:
        """nu as a constant; rows that need no search are replaced by some that are found at once."""
        ordinary = self.rows.spread(self.ordinary)
        x = torch.where(self.infinite, torch.inf, torch.where(self.absent, -torch.inf, base))
        x = torch.where(ordinary, x, 0)
        upper = torch.where(ordinary, self.upper, 1)
        k = torch.where(self.ordinary, self.k, 0.5)
        return solve(x.detach(), k.detach(), upper.detach(), offsets)

    def finish(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Put the limits where the formula has none, hold rounding inside the bounds, and round."""
        rows = self.rows
        y = y - (y - y.clamp(min=0).minimum(self.upper)).detach()
        y = torch.where(self.absent | rows.spread(self.nothing), 0, y)
        y = torch.where(rows.spread(self.everything & ~self.nothing), self.upper, y)
        return (y * rows.spread(self.spoil)).to(dtype)


class _PackedRows(RaggedRows):
    """Packed rows whose sums can be differentiated and mapped, again and again."""

    def sum(self, t: Tensor) -> Tensor:
        zeros = torch.zeros(self.count, dtype=self.wide, device=t.device)
        return zeros.index_add(0, self.index, t.to(self.wide))


def read(
    x: Tensor,
    k: float | Tensor,
    upper: float | Tensor,
    dim: int,
    mask: Tensor | None,
    offsets: Tensor | None,
) -> tuple[Canonical, Tensor]:
    """Check the arguments of a constrained projection and make them rows; `upper` 0-d or with x's shape."""
    c = canonical(x, k, dim, mask, offsets, any_k=True)
    if isinstance(upper, Tensor):
        if upper.dtype == torch.bool or upper.dtype.is_complex:
            raise TypeError(f"`upper` must hold real numbers, but its dtype is {upper.dtype}.")
        if upper.device != x.device and upper.dim() > 0:
            raise ValueError(
                f"`upper` must be on the device of `x`, {x.device}, but it is on {upper.device}."
            )
    elif isinstance(upper, bool) or not isinstance(upper, NUMBERS):
        raise TypeError(f"`upper` must be a number or a tensor, but it is {upper!r}.")
    wide = wide_dtype(x.device)
    bounds = torch.as_tensor(upper, device=x.device).to(wide)
    if bounds.dim() > 0:
        try:
            bounds = bounds.expand(x.shape)
        except RuntimeError:
            raise ValueError(
                f"`upper` must be a number or broadcast to the shape of `x`, {tuple(x.shape)}, "
                f"but its shape is {tuple(bounds.shape)}."
            ) from None
        bounds = bounds.movedim(dim, -1).reshape(c.x.shape)
    if bounds.numel() > 0 and readable(bounds):
        smallest = bounds.detach().amin().item()
        if not smallest >= 0:
            raise ValueError(f"`upper` must hold numbers from 0 on, but {smallest:g} is in it.")
        if mask is None and offsets is None and readable(c.k):
            room = bounds.detach() * c.x.shape[-1] if bounds.dim() == 0 else bounds.detach().sum(-1)
            _check_room(c.k.detach(), room, upper)
    return c, bounds


def _check_room(k: Tensor, room: Tensor, upper: float | Tensor) -> None:
    """Refuse bounds that leave no room for k; bounds that should sum to k are forgiven their rounding."""
    dtype = upper.dtype if isinstance(upper, Tensor) and upper.is_floating_point() else room.dtype
    missing = k - room * (1 + 16 * torch.finfo(dtype).eps)
    if missing.numel() and bool((missing > 0).any()):
        row = int(missing.argmax())
        room, needed = (t.expand(missing.shape).reshape(-1)[row] for t in (room, k))
        raise ValueError(
            f"`upper` must sum to at least k in each row, but it sums to {room:g} where k is {needed:g}."
        )
