"""The two-sided projection of one matrix, which fixes row sums and column sums, and its derivative.

This module removes the columns whose entries are known in advance. `solve.py` finds the multipliers of the
other columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchlml._arguments import cached_scalar
from torchlml._balanced.linear import Weights, conjugate_gradients, dense_solve, laplacian, weights
from torchlml._balanced.solve import Point, Problem, solve
from torchlml.projection import lml_dual

if TYPE_CHECKING:  # slow to import, and few calls need it
    from torchlml._distributed.group import LabelGroup

# Up to this many multiplications, forming the Schur complement as a matrix is faster than an iterative solve.
_SMALL = 2**21
# Totals with a smaller relative difference count as equal, and the capacities are scaled to the total of k.
_TOTALS = 1e-5


class Matrix(NamedTuple):
    """The arguments of one problem, still attached to the autograd graph."""

    x: Tensor  # (R, n) float32 or float64, -inf where masked
    k: Tensor  # (R,) float64
    uniform: float | None  # k, if it is one number without a gradient
    capacity: Tensor | None  # (n,) float64
    start: Tensor | None  # (n,) float64
    at_most: bool
    resolution: float


class Extent(NamedTuple):
    """Properties of a problem over all processes that hold its rows. Each list has one entry per process."""

    rows: list[int]
    totals: list[float]  # the sums of k
    range: float  # the largest finite |x|
    masked: bool
    processes: LabelGroup | None
    roomy: bool = False  # whether every column is known to have more available rows than it needs
    near: bool = False  # whether the start is known to be near the solution


class Settings(NamedTuple):
    """The arguments of a problem that have no derivative."""

    uniform: float | None
    start: Tensor | None
    at_most: bool
    resolution: float
    extent: Extent
    dual: bool


def project(m: Matrix, extent: Extent, dual: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute Y, nu and mu for one problem. nu is empty unless `dual` is True."""
    n = m.x.shape[1]
    # The total is bitwise identical on every process and has a derivative with respect to this process's k.
    wanted = sum(extent.totals)
    total: float | Tensor = wanted
    if m.k.requires_grad:
        own = m.k.sum()
        total = own - own.detach() + wanted
    if m.capacity is None:
        share = total / max(n, 1)
        capacity = torch.as_tensor(share, dtype=torch.float64, device=m.x.device).expand(n)
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
        # If y rounds to 1, y * (1 - y) is 0. This error is negligible in the gradient with respect to x. But
        # if all entries of a row are close to 0 or 1, the derivatives of the multipliers and the derivatives
        # with respect to k and the capacities depend on these small weights, so the backward pass recomputes
        # the weights from nu.
        accurate = s.dual or any(ctx.needs_input_grad[1:3])
        known, point = _solve(x.contiguous(), k, capacity, s)
        mu, y = point.mu, point.weights.y
        reduced = known.problem
        nu = lml_dual(reduced.x.to(y.dtype) + mu.to(y.dtype), reduced.k) if accurate else x.new_zeros(0)
        if known.empty is not None and known.full is not None:
            mu = torch.where(known.full, torch.inf, torch.where(known.empty, -torch.inf, mu))
        if known.ones is not None:
            y = torch.where(known.ones, 1, y)
        ctx.settings, ctx.accurate = s, accurate
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*((reduced.x, nu) if accurate else (y, *point.weights[1:])), mu)
        return y.to(x.dtype), nu if s.dual else x.new_zeros(0), mu

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "balanced_lml supports only first derivatives, but a second derivative was requested."
            )
        if ctx.accurate:
            x, nu, mu = ctx.saved_tensors
            e = torch.exp(-((x.double() + nu[:, None].double()) + torch.where(mu.isfinite(), mu, 0)).abs())
            known = weights(torch.nan_to_num(e / (1 + e)))
        else:
            *parts, mu = ctx.saved_tensors
            known = Weights(*parts)
        return *_gradients(ctx.settings, known, mu, *grads), None


def _solve(x: Tensor, k: Tensor, capacity: Tensor, s: Settings) -> tuple[_Known, Point]:
    """Remove the entries that are known in advance, and solve for the remaining ones."""
    if s.extent.processes is None:
        known = _known_entries(x, k, capacity, s, None)
        return known, solve(known.problem, s.start)
    from torchlml._balanced.shared import gather_sample, solve_shared

    sample = None
    if not (s.extent.near and (s.extent.roomy or not s.extent.masked)):
        sample = gather_sample(_problem(x, k, capacity, s), s.extent.rows, s.extent.processes)
    known = _known_entries(x, k, capacity, s, None if sample is None else sample.present)
    if sample is not None and known.empty is not None and known.full is not None:
        kept_x, kept_k, _ = _without(sample.x, sample.k, known.empty, known.full)
        sample = sample._replace(x=kept_x, k=kept_k)
    return known, solve_shared(known.problem, s.start, sample)


def _problem(x: Tensor, k: Tensor, capacity: Tensor, s: Settings) -> Problem:
    extent = s.extent
    ks = k.contiguous() if s.uniform is None else cached_scalar(s.uniform, "cpu")
    rows, total = sum(extent.rows), sum(extent.totals)
    return Problem(x, ks, capacity, s.at_most, rows, total, extent.range, s.resolution, extent.processes)


class _Known(NamedTuple):
    """The problem without the columns whose entries are known in advance."""

    problem: Problem
    empty: Tensor | None = None  # (n,) bool: columns with a capacity of 0
    full: Tensor | None = None  # (n,) bool: columns whose capacity is their number of available rows
    ones: Tensor | None = None  # (R, n) bool: the available entries of full columns, which are 1


def _known_entries(x: Tensor, k: Tensor, capacity: Tensor, s: Settings, present: Tensor | None) -> _Known:
    """Check the capacities and remove the empty and full columns, whose multipliers are infinite.

    `present` is the number of available rows in each column over all processes, if they have already
    exchanged it. If it is None, it is computed from `x`.
    """
    extent, problem = s.extent, _problem(x, k, capacity, s)
    roomy = s.at_most or extent.roomy  # no column is full
    if not extent.masked or roomy:
        low, high = (float(end) for end in capacity.aminmax()) if len(capacity) else (0.0, 0.0)
        if low > 0 and (roomy or high < problem.rows * (1 - 1e-12)):
            return _Known(problem)
        present = torch.full_like(capacity, problem.rows)
    elif present is None:
        present = (x > -torch.inf).sum(0).double()
    if not roomy:
        _check_columns(capacity, present)
    empty = capacity == 0
    full = ~empty & (capacity >= present * (1 - 1e-12)) & (not roomy)
    total, ones = problem.total, None
    if bool(full.any()):
        total -= float((present * full).sum())
        capacity = torch.where(full, 0, capacity)
        held = float(capacity.sum())
        if total > 0 and held > 0:
            capacity = capacity * (total / held)  # the given totals may differ slightly
        x, k, ones = _without(x, k, empty, full)
        problem = replace(problem, x=x, k=k, capacity=capacity, total=float(capacity.sum()))
    elif bool(empty.any()):
        problem = replace(problem, x=_without(x, k, empty, full)[0])
    return _Known(problem, empty, full, ones)


def _without(x: Tensor, k: Tensor, empty: Tensor, full: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x and k without the entries in empty and full columns, and a mask of entries in full columns."""
    ones = full & (x > -torch.inf)
    # If a row has too many full columns, the remaining problem is infeasible, which the solver reports.
    return torch.where(empty | full, -torch.inf, x), (k - ones.sum(1)).clamp(min=0), ones


def _gradients(
    s: Settings, known: Weights, mu: Tensor, d_y: Tensor | None, d_nu: Tensor | None, d_mu: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients for x, k and the capacities c from the gradients for Y, nu and mu.

    Let w = y * (1 - y) have row sums a and column sums d, and let J = [diag(a), w; w^T, diag(d)]. If x, k and
    c change by dx, dk and dc, then nu and mu change by dnu and dmu, the solution of
    J (dnu, dmu) = (dk - row sums of w * dx, dc - column sums of w * dx). Let p and q be the solution of
    J (p, q) = (g_nu, g_mu), where the gradients g_nu and g_mu include the contributions through Y. With the
    gradient g_Y for Y, the gradients are w_ij * (g_Y_ij - p_i - q_j) for x_ij, p for k and q for c.
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
        # The free entries of mu have mean 0. The adjoint of this constraint subtracts the mean over the free
        # columns from each of them.
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
    """Raise an error if the capacity of a column exceeds `present`, its number of available rows."""
    wrong = (capacity > present * (1 + _TOTALS)).nonzero()
    if len(wrong):
        column = int(wrong[0])
        raise ValueError(
            "`capacity` must be at most the number of available rows in each column, but column "
            f"{column} has a capacity of {capacity[column]:g} and {int(present[column])} available rows."
        )


def _check_totals(rows: float, columns: float, at_most: bool) -> None:
    """Raise an error unless the total of the row sums and the total of the capacities are compatible."""
    slack = _TOTALS * max(rows, columns)
    if at_most and columns < rows - slack:
        raise ValueError(
            f"The total of `capacity` must be at least the total of `k`, but `k` sums to {rows:g} over the "
            f"rows and `capacity` sums to {columns:g} over the columns."
        )
    if not at_most and abs(columns - rows) > slack:
        raise ValueError(
            f"`k` and `capacity` must have the same total, but `k` sums to {rows:g} over the rows and "
            f"`capacity` sums to {columns:g} over the columns. "
            'With bound="at_most", capacities are upper limits.'
        )
