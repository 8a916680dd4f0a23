"""Code shared by `constrained_softmax` and `constrained_sparsemax`.

Both functions project a row onto {0 <= y <= upper, sum(y) = k}. The result is y = clip(f(x + nu), 0, upper),
where f is the exponential or the identity. `upper` is the cap on an entry, and an entry at its cap is called
saturated. Given the sets of saturated entries and of entries at 0, there is an explicit formula for nu in
terms of the other entries. An operator finds nu, which determines these sets. They are constants for
autograd, so differentiating the formula gives exact derivatives of every order.

Calls outside `torch.func` transforms, forward-mode differentiation and `torch.jit.trace` use separate
operators with explicit gradients.

The pure PyTorch version computes in the wide dtype (see `wide_dtype`) and rounds once, at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchlml._arguments import Canonical, canonical, check_number, check_real, expand, readable
from torchlml._autograd import operators
from torchlml._autograd.operators import ROWS, operator
from torchlml._autograd.rule import Rule
from torchlml._rows import DenseRows, Rows, empty_nu, rows_of, shifted, wide_dtype
from torchlml._solve.newton import add

_Solver = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]


class ConstrainedProjection:
    """One of the two constrained projections: its operators and its gradient, built from three functions.

    Args:
        name: the prefix of the operator names NAME_forward, NAME_backward and NAME_dual.
        solve: a function of x, k (R,), upper (0-d, or with the shape of x) and offsets. The first three are
            in the wide dtype. x is -inf for absent entries and +inf for entries known to be saturated. Every
            row has 0 < k < sum(upper) and a finite entry, or is empty. The function returns nu with shape
            (2, R), as `pair` does.
        values: a function that computes y from `CappedRows` with differentiable operations.
        moves: a function that returns dy/dz for each entry of `CappedRows`, and a mask of the saturated
            entries.
    """

    def __init__(
        self,
        name: str,
        solve: _Solver,
        values: Callable[[CappedRows], Tensor],
        moves: Callable[[CappedRows], tuple[Tensor, Tensor]],
    ) -> None:
        self._solve, self._values, self._moves = solve, values, moves
        entries = "Tensor x, Tensor k, Tensor upper"
        self.forward = operator(
            f"{name}_forward({entries}, {ROWS}) -> (Tensor, Tensor)",
            self.reference_forward,
            lambda x, k, upper, mask, offsets: (torch.empty_like(x), empty_nu(x, offsets).to(k.dtype)),
        )
        self.backward = operator(
            f"{name}_backward(Tensor grad, {entries}, Tensor nu, {ROWS}, bool for_upper)"
            " -> (Tensor, Tensor, Tensor)",
            self.reference_backward,
            _empty_gradients,
        )
        # The vmap rule treats `upper` like the mask of `operators.solve`: both have one value per entry.
        self.dual = operator(
            f"{name}_dual({entries}, Tensor? offsets) -> Tensor",
            solve,
            lambda x, k, upper, offsets: x.new_empty((2, k.shape[0])),
            vmap=True,
        )
        self._rule = Rule(self.forward, self._backward, self._differentiable, inputs=3)

    def __call__(self, c: Canonical, upper: Tensor) -> Tensor:
        """Compute y for canonical rows. `upper` is 0-d or has the shape of x."""
        return self._rule(c.x, c.k, upper, c.mask, c.offsets)

    def _backward(self, grad: Tensor, x: Tensor, k: Tensor, upper: Tensor, *rest: Any) -> Any:
        *rows, nu = rest
        dx, dk, d_upper = self.backward(grad, x, k, upper, nu, *rows, upper.requires_grad)
        if not upper.requires_grad:
            return dx, dk, None
        return dx, dk, d_upper.sum() if upper.dim() == 0 else d_upper

    def _differentiable(self, *arguments: Any) -> Tensor:
        """Compute y with differentiable operations, which support every transform."""
        return self._values(CappedRows(self.dual, *arguments))

    def reference_forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Return y and nu. nu is -inf if all y are 0, +inf if all are saturated, and NaN if y is NaN."""
        r = CappedRows(self._solve, *arguments)
        limit = torch.where(r.nothing, -torch.inf, torch.inf)
        limit = torch.where(r.undefined, torch.nan, limit).to(r.nu.dtype)
        nu = torch.where(r.ordinary, r.nu, torch.stack([limit, torch.zeros_like(limit)]))
        return self._values(r), nu

    def reference_backward(
        self, grad: Tensor, x: Tensor, k: Tensor, upper: Tensor, nu: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients for x, k and upper. If upper is 0-d, its gradient is summed over each row.

        The differential of y is dy = weight * (dx + dnu) + saturated * dupper, where dnu is determined by
        sum(dy) = dk.
        """
        mask, offsets, for_upper = rest
        found = torch.where(nu[0].isfinite(), nu, 0)
        r = CappedRows(lambda *_: found, x, k, upper, mask, offsets)
        rows, ordinary = r.rows, r.rows.broadcast(r.ordinary)
        weight, saturated = self._moves(r)
        weight = torch.where(ordinary & (weight > 0), weight, 0)
        saturated = torch.where(ordinary, saturated, rows.broadcast(r.everything & ~r.nothing) & ~r.absent)
        g = torch.where((weight > 0) | saturated, grad.to(rows.wide), 0)
        dk = rows.sum(weight * g) / rows.sum(weight).clamp(min=torch.finfo(g.dtype).tiny) * r.spoil
        relative = g - rows.broadcast(dk)
        dx = torch.where(r.moving, weight * relative, 0) * rows.broadcast(r.spoil)
        d_upper = torch.where(saturated, relative, 0) * rows.broadcast(r.spoil)
        if not for_upper:
            d_upper = d_upper.new_empty(0)
        elif upper.dim() == 0:
            d_upper = rows.sum(d_upper)
        return dx.to(x.dtype), dk, d_upper


def _empty_gradients(
    grad: Tensor, x: Tensor, k: Tensor, upper: Tensor, nu: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, for_upper = rest
    per_row = nu.new_empty(nu.shape[1])
    d_upper = per_row if upper.dim() == 0 else torch.empty_like(upper)
    return torch.empty_like(x), per_row, d_upper.clone() if for_upper else nu.new_empty(0)


def pair(hi: Tensor, lo: Tensor) -> Tensor:
    """Represent hi + lo as a nu of shape (2, R): the rounded sum and its rounding error."""
    return add(torch.stack([hi, torch.zeros_like(hi)]), lo)


def sum_at_caps(saturated: Tensor, limit: Tensor, rows: Rows) -> Tensor:
    """Sum the caps of the saturated entries in each row.

    `limit` has the shape of x, or shape (R, 1) for one cap per row.
    """
    if isinstance(rows, DenseRows) and limit.shape[-1] == 1:
        return rows.sum(saturated) * limit.squeeze(-1)
    return rows.sum(saturated * limit)


def mean_cap(k: Tensor, upper: Tensor, rows: Rows) -> Tensor:
    """Return the mean cap of each row, limited to 2 * k.

    No entry exceeds k, so a cap of 2 * k has no effect.
    """
    mean = upper if upper.dim() == 0 else rows.sum(upper) / rows.sum(torch.ones_like(upper)).clamp(min=1)
    return torch.minimum(mean, 2 * k)


def start(x: Tensor, k: Tensor, offsets: Tensor | None) -> Tensor:
    """Return the initial nu: the nu of `lml` if it is finite, and otherwise 0."""
    nu = operators.solve(x, k, None, offsets)
    return torch.where(nu.isfinite().all(0), nu, 0)


class CappedRows:
    """Rows with a cap for each entry, and the nu that an operator found for them.

    `ordinary` rows have a finite nu that a solver must find, and `z` is x + nu for their `finite` entries.
    `upper` is 0 for `absent` entries. Entries of +inf (`infinite`) are saturated. If their caps sum to k or
    more, they share k like tied entries, and the finite entries count as absent.
    """

    def __init__(
        self, solve: _Solver, x: Tensor, k: Tensor, upper: Tensor, mask: Tensor | None, offsets: Tensor | None
    ) -> None:
        self.rows = rows_of(x, offsets, differentiable=True)
        rows, wide = self.rows, wide_dtype(x.device)
        self.dtype = x.dtype
        upper = upper.expand(x.shape)
        x = x.to(wide)
        x = x if mask is None else torch.where(mask, x, -torch.inf)
        self.k = k.expand(rows.count)
        self.absent, self.infinite = x == -torch.inf, x == torch.inf
        undefined = (rows.sum((x.isnan() | upper.isnan()) & ~self.absent) > 0) | self.k.isnan()
        self.undefined = undefined
        # A factor that makes the value and the gradient of an undefined row NaN.
        self.spoil = torch.where(undefined, torch.nan, 1.0).to(wide)
        shared = rows.sum(torch.where(self.infinite, upper, 0)) >= self.k
        shared = rows.broadcast(shared & (rows.sum(self.infinite) > 0))
        self.absent = self.absent | (shared & ~self.infinite)
        self.infinite = self.infinite & ~shared
        self.finite = ~(self.absent | self.infinite)
        self.upper = torch.where(self.absent, 0, upper)
        self.nothing = self.k <= 0
        self.everything = self.k >= rows.sum(self.upper)
        self.ordinary = ~(self.nothing | self.everything | undefined)
        # Keep infinite values out of the graph, because their derivatives would be 0 times infinity.
        self.moving = self.finite & ~shared & rows.broadcast(self.ordinary | undefined)
        base = torch.where(self.moving, x, 0)
        # nu is a constant for autograd. Rows that need no solver are replaced by trivial rows.
        ordinary = rows.broadcast(self.ordinary)
        x = torch.where(self.infinite, torch.inf, torch.where(self.absent, -torch.inf, base))
        x, upper = torch.where(ordinary, x, 0), torch.where(ordinary, self.upper, 1)
        k = torch.where(self.ordinary, self.k, 0.5)
        self.nu = solve(x.detach(), k.detach(), upper.detach(), offsets)
        self.z = shifted(base * rows.broadcast(self.spoil), self.nu, rows)

    def finish(self, y: Tensor) -> Tensor:
        """Fill in the limits where the formula does not apply, clamp y between 0 and the caps, and round."""
        rows = self.rows
        y = y - (y - y.clamp(min=0).minimum(self.upper)).detach()
        y = torch.where(self.absent | rows.broadcast(self.nothing), 0, y)
        y = torch.where(rows.broadcast(self.everything & ~self.nothing), self.upper, y)
        return (y * rows.broadcast(self.spoil)).to(self.dtype)


def read(
    x: Tensor, k: float | Tensor, upper: float | Tensor, dim: int, mask: Tensor | None, offsets: Tensor | None
) -> tuple[Canonical, Tensor]:
    """Check the arguments of a constrained projection and convert them to rows and caps.

    The caps are 0-d or have the shape of the rows.
    """
    c = canonical(x, k, dim, mask, offsets, any_k=True)
    if isinstance(upper, Tensor):
        check_real(upper, "upper", x.device)
    else:
        check_number(upper, "upper", "a number or a tensor")
        if isinstance(upper, int) and abs(upper) > sys.float_info.max:
            received = f"an integer with {upper.bit_length()} bits"
            raise ValueError(f"`upper` must be nonnegative and fit in float64, but it is {received}.")
    wide = wide_dtype(x.device)
    caps = torch.as_tensor(upper, device=x.device).to(wide)
    if caps.dim() > 0:
        caps = expand(caps, "upper", x.shape, "be a number or broadcast to the shape of `x`")
        caps = caps.movedim(dim, -1).reshape(c.x.shape).contiguous()
    if caps.numel() > 0 and readable(caps):
        smallest = caps.detach().amin().item()
        if not smallest >= 0:
            raise ValueError(f"`upper` must be nonnegative, but it contains {smallest:g}.")
        if mask is None and offsets is None and readable(c.k):
            room = caps.detach() * c.x.shape[-1] if caps.dim() == 0 else caps.detach().sum(-1)
            _check_room(c.k.detach(), room, upper)
    return c, caps


def _check_room(k: Tensor, room: Tensor, upper: float | Tensor) -> None:
    """Raise an error if the caps of a row sum to less than k by more than rounding errors."""
    dtype = upper.dtype if isinstance(upper, Tensor) and upper.is_floating_point() else room.dtype
    # Tolerate rounding errors: if the caller passes upper = k / n, rounded to the dtype of `upper`, the caps
    # may sum to slightly less than k.
    missing = k - room * (1 + 16 * torch.finfo(dtype).eps)
    if missing.numel() and bool((missing > 0).any()):
        row = int(missing.argmax())
        room, needed = (t.expand(missing.shape).reshape(-1)[row] for t in (room, k))
        raise ValueError(
            f"`upper` must sum to at least k in each row, but it sums to {room:g} in a row with "
            f"k = {needed:g}."
        )
