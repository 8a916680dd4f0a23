"""What the two constrained projections share: their arguments, their operators and the rows without a search.

Both map a row onto {0 <= y <= upper, sum y = k} by y = clip(f(x + nu), 0, upper), with f the exponential or
the identity. Once it is known which entries stop at a bound, nu is an explicit formula of the others: an
operator finds the first as a constant, and plain autograd through the second is exact at every order.

Everything runs in double precision and is rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchlml import ops
from torchlml.arguments import _NUMBERS, Canonical, _readable, canonical
from torchlml.rows import DenseRows, RaggedRows, wide_dtype
from torchlml.solvers.newton import add
from torchlml.solvers.residual import shifted

_Solver = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]
_library = torch.library.Library("torchlml", "FRAGMENT")


def operator(name: str, solver: _Solver) -> _Solver:
    """Make an operator of a solver, so that it can be compiled and mapped.

    Args:
        name: what comes after `torch.ops.torchlml.`.
        solver: a function of x (-inf: absent, +inf: at its bound), k (R,), upper (like x) and offsets, all
            wide, whose rows all have 0 < k < sum of upper and a finite entry, or are empty. It gives nu as a
            pair (2, R).
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
    """Check the arguments of a constrained projection and make them rows; `upper` gets the shape of x."""
    c = canonical(x, k, dim, mask, offsets, any_k=True)
    if isinstance(upper, Tensor):
        if upper.dtype == torch.bool or upper.dtype.is_complex:
            raise TypeError(f"`upper` must hold real numbers, but its dtype is {upper.dtype}.")
        if upper.device != x.device and upper.dim() > 0:
            raise ValueError(
                f"`upper` must be on the device of `x`, {x.device}, but it is on {upper.device}."
            )
    elif isinstance(upper, bool) or not isinstance(upper, _NUMBERS):
        raise TypeError(f"`upper` must be a number or a tensor, but it is {upper!r}.")
    wide = wide_dtype(x.device)
    bounds = torch.as_tensor(upper, device=x.device).to(wide)
    try:
        bounds = bounds.expand(x.shape)
    except RuntimeError:
        raise ValueError(
            f"`upper` must be a number or broadcast to the shape of `x`, {tuple(x.shape)}, "
            f"but its shape is {tuple(bounds.shape)}."
        ) from None
    bounds = bounds.movedim(dim, -1).reshape(c.x.shape)
    if bounds.numel() > 0 and _readable(bounds):
        smallest = bounds.detach().amin().item()
        if not smallest >= 0:
            raise ValueError(f"`upper` must hold numbers from 0 on, but {smallest:g} is in it.")
        if mask is None and offsets is None and _readable(c.k):
            _check_room(c.k.detach(), bounds.detach(), upper)
    return c, bounds


def _check_room(k: Tensor, bounds: Tensor, upper: float | Tensor) -> None:
    """Refuse bounds that leave no room for k; bounds that should sum to k are forgiven their rounding."""
    dtype = upper.dtype if isinstance(upper, Tensor) and upper.is_floating_point() else bounds.dtype
    room = bounds.sum(-1)
    missing = (k - room * (1 + 16 * torch.finfo(dtype).eps)).reshape(-1)
    row = int(missing.argmax())
    if missing[row] > 0:
        needed = k if k.dim() == 0 else k[row]
        raise ValueError(
            f"`upper` must sum to at least k in each row, but it sums to {room[row]:g} where k is {needed:g}."
        )
