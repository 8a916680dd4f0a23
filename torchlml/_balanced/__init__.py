"""One matrix of the two-sided projection: entries known in advance, the solution and its derivative.

`solve.py` finds the multipliers of the columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchlml._balanced.solve import (
    Problem,
    Weights,
    conjugate_gradients,
    dense_solve,
    laplacian,
    sample_size,
    solve,
    weights,
)
from torchlml.projection import lml_dual

if TYPE_CHECKING:  # slow to import, and few calls need it
    from torchlml._distributed.group import LabelGroup

# Up to this many multiplications, the Schur complement as a matrix costs less than iterations.
_SMALL = 2**21
# Totals that differ by rounding are equal. The capacities are scaled to the total of the rows.
_TOTALS = 1e-5


class Matrix(NamedTuple):
    """The arguments of one problem, connected to the graph they come from."""

    x: Tensor  # (R, n) float32 or float64, -inf where masked
    k: Tensor  # (R,) float64
    uniform: float | None  # k, if it is one number without a gradient
    capacity: Tensor | None  # (n,) float64
    start: Tensor | None  # (n,) float64
    at_most: bool
    resolution: float


class Extent(NamedTuple):
    """The sizes of a problem, with a number for each process that holds some of its rows."""

    rows: list[int]
    totals: list[float]  # of k
    range: float  # the largest finite |x|
    masked: bool
    processes: LabelGroup | None


class Settings(NamedTuple):
    """The arguments of a problem that have no derivative."""

    uniform: float | None
    start: Tensor | None
    at_most: bool
    resolution: float
    extent: Extent
    dual: bool


def project(m: Matrix, extent: Extent, dual: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Y, nu and mu of one problem. nu is empty without `dual`."""
    n = m.x.shape[1]
    # The same bits on every process, with the derivative for the k of this one.
    wanted, own = sum(extent.totals), m.k.sum()
    total = own - own.detach() + wanted
    if m.capacity is None:
        capacity = (total / max(n, 1)).expand(n)
    else:
        held = m.capacity.sum()
        _check_totals(wanted, float(held.detach()), m.at_most)
        scaled = not m.at_most and float(held.detach()) > 0
        capacity = m.capacity * (total / held) if scaled else m.capacity
    settings = Settings(m.uniform, m.start, m.at_most, m.resolution, extent, dual)
    return _Project.apply(m.x, m.k, capacity, settings)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, k: Tensor, capacity: Tensor, s: Settings
    ) -> tuple[Tensor, Tensor, Tensor]:
        # y (1 - y) loses the undecided part of an entry that rounds to 1. It is negligible in the
        # gradient of x, but in a decided row the gradients of the multipliers and of k depend on nothing
        # else.
        accurate = s.dual or any(ctx.needs_input_grad[1:3])
        known = _known_entries(x, k, capacity, s)
        mu, y = solve(known.problem, s.start, _sample(known.problem, k, s))
        reduced = known.problem
        nu = lml_dual(reduced.x.to(y.dtype) + mu.to(y.dtype), reduced.k) if accurate else x.new_zeros(0)
        if known.empty is not None and known.full is not None:
            mu = torch.where(known.full, torch.inf, torch.where(known.empty, -torch.inf, mu))
        if known.ones is not None:
            y = torch.where(known.ones, 1, y)
        ctx.settings, ctx.accurate = s, accurate
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*((reduced.x, nu) if accurate else (y,)), mu)
        return y.to(x.dtype), nu if s.dual else x.new_zeros(0), mu

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "balanced_lml has first derivatives only, but a second one is required."
            )
        if ctx.accurate:
            x, nu, mu = ctx.saved_tensors
            e = torch.exp(-((x.double() + nu[:, None].double()) + torch.where(mu.isfinite(), mu, 0)).abs())
            w = torch.nan_to_num(e / (1 + e).square())
        else:
            y, mu = ctx.saved_tensors
            w = torch.addcmul(y, y, y, value=-1)
        return *_gradients(ctx.settings, weights(w), mu, *grads), None


class _Known(NamedTuple):
    """The problem without the columns that are known in advance."""

    problem: Problem
    empty: Tensor | None = None  # (n,) bool: columns with a capacity of 0
    full: Tensor | None = None  # (n,) bool: columns that need all of their available rows
    ones: Tensor | None = None  # (R, n) bool: entries of full columns


def _known_entries(x: Tensor, k: Tensor, capacity: Tensor, s: Settings) -> _Known:
    """Check the capacities and remove the empty and full columns, whose multipliers are infinite."""
    extent = s.extent
    rows, total = sum(extent.rows), sum(extent.totals)
    uniform: float | Tensor = k if s.uniform is None else s.uniform
    problem = Problem(
        x, uniform, capacity, s.at_most, rows, total, extent.range, s.resolution, extent.processes
    )
    if not extent.masked and len(capacity):
        low, high = (float(end) for end in capacity.aminmax())
        if low > 0 and (s.at_most or high < rows * (1 - 1e-12)):
            return _Known(problem)
    present = torch.full_like(capacity, rows)
    if extent.masked:
        present = (x > -torch.inf).sum(0).double()
        if extent.processes is not None:
            present = extent.processes.sum(present)
    if not s.at_most:
        _check_columns(capacity, present)
    empty = capacity == 0
    full = ~empty & (capacity >= present * (1 - 1e-12)) & (not s.at_most)
    ones = None
    if bool(full.any()):
        ones = full & (x > -torch.inf)
        total -= float((present * full).sum())
        capacity = torch.where(full, 0, capacity)
        held = float(capacity.sum())
        if total > 0 and held > 0:
            capacity = capacity * (total / held)  # the given totals may differ slightly
        # A row with too many full columns makes the rest infeasible, which the solver reports.
        problem = replace(
            problem, k=(k - ones.sum(1)).clamp(min=0), capacity=capacity, total=float(capacity.sum())
        )
    if bool((empty | full).any()):
        problem = replace(problem, x=torch.where(empty | full, -torch.inf, x))
    return _Known(problem, empty, full, ones)


def _sample(problem: Problem, k: Tensor, s: Settings) -> Problem | None:
    """If there is no first guess, gather rows from all processes, in proportion to theirs: one round."""
    processes = s.extent.processes
    if processes is None or s.start is not None:
        return None
    x, ks = problem.x, problem.k if isinstance(problem.k, Tensor) else k
    size, total = sample_size(problem), max(sum(s.extent.rows), 1)
    wanted = [min(rows, -(-size * rows // total)) for rows in s.extent.rows]
    own = wanted[processes.rank]
    taken = torch.arange(own, device=x.device) * max(1, x.shape[0] // max(own, 1))
    # The messages have one size. A row with k = 0 has no effect.
    part = x.new_zeros((max(wanted), x.shape[1] + 1), dtype=torch.float32)
    part[:own, :-1] = x[taken]
    part[:own, -1] = ks[taken]
    parts = processes.gather(part).flatten(0, 1)
    x, ks = parts[:, :-1], parts[:, -1].double()
    return replace(problem, x=x, k=ks, rows=len(ks), total=float(ks.sum()))


def _gradients(
    s: Settings, known: Weights, mu: Tensor, d_y: Tensor | None, d_nu: Tensor | None, d_mu: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, k and the capacities from those of Y, nu and mu.

    A change of x, k and c moves (nu, mu) by the solution of J (dnu, dmu) = (dk - w dx 1, dc - (w dx)' 1) with
    J = [diag(a), w; w', diag(d)]. So with J (p, q) = (gradient of nu, gradient of mu), both including the
    contribution through Y, the gradients are w (dY - p - q) for x, p for k and q for c.
    """
    w = known.w
    rows = w.new_zeros(w.shape[0])
    columns = torch.zeros_like(mu)
    d_x = torch.zeros_like(w)
    if d_y is not None:
        d_x = w * d_y.to(w.dtype)
        rows, columns = d_x.sum(1), d_x.sum(0).double()
    if d_nu is not None and d_nu.numel():
        rows = rows + d_nu.to(w.dtype)
    if d_mu is not None:
        columns = columns + torch.where(mu.isfinite(), d_mu, 0).double()
    # Eliminating p leaves the Schur complement for q.
    columns = columns - torch.mv(w.T, rows * known.inverse).double()
    free = mu.isfinite() & ((mu < 0) | (not s.at_most))
    anchored = s.at_most and bool((mu == 0).any())
    q = _solve_columns(known, columns, free, anchored, s.extent.processes)
    p = (rows - torch.mv(w, q.to(w.dtype))) * known.inverse
    return d_x.addcmul_(w, p[:, None] + q.to(w.dtype), value=-1), p.double(), q


def _solve_columns(
    known: Weights, columns: Tensor, free: Tensor, anchored: bool, processes: LabelGroup | None
) -> Tensor:
    n = len(columns)
    off_diagonal = None
    if processes is not None:
        both = processes.sum(torch.cat([columns, laplacian(known).flatten()]))
        columns, off_diagonal = both[:n], both[n:].view(n, n)
    if not anchored:
        # mu has mean 0. The adjoint of this constraint subtracts the mean from all columns.
        columns = torch.where(free, columns - columns[free].sum() / free.sum().clamp(min=1), 0)
    if off_diagonal is not None:
        return dense_solve(off_diagonal, columns, free, anchored)
    if known.w.numel() * n > _SMALL:
        tolerance = 1e-13 if known.w.dtype == torch.float64 else 1e-6
        q, accurate = conjugate_gradients(known, columns, free, anchored, tolerance, 60)
        if accurate:
            return q
    return dense_solve(laplacian(known), columns, free, anchored)


def _check_columns(capacity: Tensor, present: Tensor) -> None:
    """Raise if a column needs more than its available rows, whose number is `present`."""
    wrong = (capacity > present * (1 + _TOTALS)).nonzero()
    if len(wrong):
        column = int(wrong[0])
        raise ValueError(
            "`capacity` must not exceed the number of available rows of a column, but column "
            f"{column} has a capacity of {capacity[column]:g} and {int(present[column])} available rows."
        )


def _check_totals(rows: float, columns: float, at_most: bool) -> None:
    """Raise unless the totals of the row sums and of the capacities are compatible."""
    slack = _TOTALS * max(rows, columns)
    if at_most and columns < rows - slack:
        raise ValueError(
            f"The total of `capacity` must be at least that of `k`, but `k` sums to {rows:g} over the rows "
            f"and `capacity` sums to {columns:g} over the columns."
        )
    if not at_most and abs(columns - rows) > slack:
        raise ValueError(
            f"`k` and `capacity` must have the same total, but `k` sums to {rows:g} over the rows and "
            f"`capacity` sums to {columns:g} over the columns. "
            'With bound="at_most", capacities are upper limits.'
        )
