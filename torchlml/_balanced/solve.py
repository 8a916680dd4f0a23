"""The column multipliers mu of the two-sided projection.

The rows are solved exactly for every mu, by `lml`. It remains to minimize the convex function
f(mu) = sum_i lml_value(x_i + mu, k_i) - c.mu, whose gradient is the error of the column sums and whose
Hessian is a Schur complement. A first guess comes from a sample of the rows, and Newton's method with
conjugate gradients finishes. If that fails, as for nearly hard assignments, the solver follows a path
of falling temperatures with dense Newton steps in float64.

With w = y (1 - y), row sums a and column sums d, the derivative of the column sums with respect to the column
multipliers is S = diag(d) - w' diag(1/a) w. It is a graph Laplacian: symmetric, positive semidefinite, with
nonpositive off-diagonal entries and S 1 = 0. Solving with S is a Newton step in the forward pass, and it is
the whole backward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchlml.projection import lml, lml_dual

if TYPE_CHECKING:  # slow to import, and few calls need it
    from torchlml._distributed.group import LabelGroup

# Relative errors of the column sums: Newton's method stops at the first, the second is guaranteed.
_GOAL = {torch.float32: 7e-5, torch.float64: 1e-11}
_GUARANTEE = {torch.float32: 1e-4, torch.float64: 1e-9}
# Beyond this range, float32 resolves x + mu too coarsely for the guarantee: ulp(256) is 3e-5.
_FLOAT32_RANGE = 256.0
_LONGEST_STEP = 30.0


@dataclass(frozen=True)
class Problem:
    """One matrix with its row sums and column capacities."""

    x: Tensor  # (R, n) float32 or float64, -inf where an entry must be 0
    k: float | Tensor  # a number or (R,) float64
    capacity: Tensor  # (n,) float64; 0 for columns without an entry
    at_most: bool
    rows: int  # the number of rows, of all processes together
    total: float  # the sum of k over these rows
    range: float  # the largest finite |x|
    resolution: float = 0.0  # the relative rounding error of the given capacities
    processes: LabelGroup | None = None

    @cached_property
    def used(self) -> Tensor:
        """(n,) bool: the columns with a multiplier."""
        return self.capacity > 0

    @cached_property
    def all_used(self) -> bool:
        """Whether every column has a multiplier."""
        return bool(self.used.all())

    @cached_property
    def per_capacity(self) -> Tensor:
        """(n,) float64: turns errors of the column sums into relative errors; 0 for unused columns."""
        scale = self.capacity.clamp(min=1e-6 * self.total / max(len(self.capacity), 1))
        return torch.where(self.used, 1 / scale, 0)

    def cast(self, dtype: torch.dtype) -> Problem:
        """The same problem in another dtype."""
        return replace(self, x=self.x.to(dtype))


class Point(NamedTuple):
    """A value of mu and the solution of the rows there."""

    mu: Tensor  # (n,) float64
    y: Tensor  # (R, n)
    gradient: Tensor  # (n,) float64: column sums minus capacities
    error: float  # relative
    off_diagonal: Tensor | None  # of the Schur complement, if the steps are dense


class Solution(NamedTuple):
    """The multipliers of the columns and Y."""

    mu: Tensor  # (n,) float64
    y: Tensor  # (R, n), float64 where float32 does not suffice


def solve(problem: Problem, start: Tensor | None, sample: Problem | None = None) -> Solution:
    """Solve one problem.

    Args:
        problem: The problem; with several processes, the rows of this process.
        start: A first guess of mu, or None.
        sample: With several processes and no first guess, some rows of all processes.
    """
    dtype = problem.x.dtype
    narrow = dtype == torch.float32 and problem.range <= _FLOAT32_RANGE
    final = problem if narrow else problem.cast(torch.float64)
    quick = torch.float32 if problem.range < 1e30 else torch.float64
    if start is None:
        mu = first_guess((sample or problem).cast(quick), problem)
    else:
        mu = _normalized(problem, start)
    goal = _GOAL[dtype]
    rounding = 8 * torch.finfo(final.x.dtype).eps * problem.range + problem.resolution
    guarantee = min(_GUARANTEE[dtype] + rounding, 2e-4)
    if problem.processes is not None:
        point = _newton(final, mu, goal, 10, True)
    else:
        if not narrow and final.x.numel() > 2**14:  # below, float64 is as fast
            mu = _newton(problem.cast(quick), mu, 1e-4, 8).mu
        point = _newton(final, mu, goal, 12)
    if not point.error <= guarantee:
        check_feasible(problem, point.mu, guarantee)
        point = _follow_path(final.cast(torch.float64), goal)
    if not point.error <= guarantee:
        check_feasible(problem, point.mu, guarantee)
        raise RuntimeError(
            f"balanced_lml did not converge: the relative error of the column sums is {point.error:.1e}. "
            "The problem is probably infeasible, or feasible only with most entries at 0 or 1."
        )
    return Solution(point.mu, point.y)


def check_feasible(problem: Problem, mu: Tensor, slack: float) -> None:
    """Raise an error if the columns with the smallest multipliers prove that there is no solution.

    Consider a set of columns. A row that cannot reach its k with entries outside the set needs the rest from
    entries inside it. By the max-flow min-cut theorem, a problem is feasible if and only if the capacity of
    every set covers these needs. In an infeasible problem, the multipliers of a set that is too small
    diverge, so the sets to try are those of the columns with the smallest multipliers.
    """
    order = torch.where(problem.capacity > 0, mu, -torch.inf).argsort()
    present = (problem.x[:, order] > -torch.inf).double()
    outside = present.sum(1, keepdim=True) - present.cumsum(1)
    k = problem.k[:, None] if isinstance(problem.k, Tensor) else problem.k
    needed = (k - outside).clamp(min=0).sum(0)
    if problem.processes is not None:
        needed = problem.processes.sum(needed)
    held = problem.capacity[order].cumsum(0)
    excess = needed - held * (1 + slack)
    worst = int(excess.argmax()) if len(excess) else 0
    if len(excess) and float(excess[worst]) > 1e-9 * problem.total:
        columns = sorted(order[: worst + 1].tolist())
        shown = ", ".join(map(str, columns[:8])) + (", ..." if len(columns) > 8 else "")
        raise ValueError(
            f"No solution exists: the rows need a total of at least {needed[worst]:g} from the columns "
            f"{shown}, but the `capacity` of these columns sums to {held[worst]:g}."
        )


def sample_size(problem: Problem) -> int:
    """The number of rows that give a column of mean size a sum of about 64."""
    return max(256, math.ceil(64 * problem.capacity.numel() * problem.rows / max(problem.total, 1e-9)))


def take_sample(problem: Problem, size: int) -> Problem:
    """At least `size` evenly spaced rows."""
    step = max(1, problem.x.shape[0] // max(size, 1))
    x = problem.x[::step]
    k = problem.k[::step] if isinstance(problem.k, Tensor) else problem.k
    total = float(k.sum()) if isinstance(k, Tensor) else k * x.shape[0]
    return replace(problem, x=x, k=k, rows=x.shape[0], total=total)


def first_guess(problem: Problem, whole: Problem) -> Tensor:
    """mu from alternating exact solves of the rows and of the columns, on a sample if there are many rows."""
    if whole.total <= 0 or problem.total <= 0:
        return torch.zeros_like(whole.capacity)
    size = sample_size(whole)
    if problem.x.shape[0] >= 4 * size:
        problem = take_sample(problem, size)
    x = problem.x
    transposed = x.T.contiguous()
    present = (transposed > -torch.inf).sum(1)
    # A sample may have fewer entries than its part of a capacity. The result is only a guess, so it may
    # cheat.
    capacity = torch.minimum(problem.capacity * (problem.total / whole.total), 0.99 * present)
    mu = torch.zeros_like(problem.capacity)
    for _ in range(4):
        nu = torch.nan_to_num(lml_dual(x + mu.to(x.dtype), problem.k), posinf=50.0, neginf=-50.0)
        new = lml_dual(transposed + nu, capacity, bound="at_most" if problem.at_most else "exactly").double()
        new = torch.where(new.isfinite(), new, 0)
        change = float((new - mu).abs().max())
        mu = new
        if change < 0.02:
            break
    return _normalized(whole, mu)


def _newton(
    problem: Problem, mu: Tensor, goal: float, most: int, dense: bool = False, careful: bool = False
) -> Point:
    """Newton's method from mu, until the error is at most `goal`, no step helps, or `most` are taken."""
    scratch = torch.empty_like(problem.x)
    point = best = _evaluate(problem, mu, dense, scratch)
    known = None
    for _ in range(most):
        if point.error <= goal:
            return point
        some = point.y[:: max(1, len(point.y) // 256)].clone()
        if known is None and not dense:
            # Large new tensors cost more in page faults than in arithmetic, so w replaces y.
            w = point.y.addcmul_(point.y, point.y, value=-1)
            known, point = weights(w.float()), point._replace(y=w)
        found = None
        for target in _targets(problem, point, some, known, careful):
            if found is None:
                step = _direction(problem, point, target, known, goal)
                found = _search(problem, point, step, dense, scratch)
        if found is None:
            break
        if found.error > 0.05 * point.error:  # otherwise the weights have hardly changed
            known = None
        point = found
        if point.error < best.error:
            best = point
    # Without dense steps, the y of the best point may have been overwritten.
    return best if dense or point is best else _evaluate(problem, best.mu, dense, scratch)


def _evaluate(problem: Problem, mu: Tensor, dense: bool, scratch: Tensor) -> Point:
    """The rows at mu, the gradient, and with `dense` the Schur complement: one round between processes."""
    # A new tensor for the sum would cost as much in page faults as the sum.
    y = lml(torch.add(problem.x, mu.to(problem.x.dtype), out=scratch), problem.k)
    sums = y.sum(0).double()
    off_diagonal = laplacian(weights(torch.addcmul(y, y, y, value=-1))) if dense else None
    if problem.processes is not None:
        from torchlml._distributed.group import add_up

        n = len(sums)
        assert off_diagonal is not None
        parts = problem.processes.gather(torch.cat([mu, sums, off_diagonal.flatten()]))
        # All processes continue from the same bits, even if their arithmetic differs.
        mu = parts[0, :n]
        both = add_up(parts[:, n:])
        sums, off_diagonal = both[:n], both[n:].view(n, n)
    gradient = sums - problem.capacity  # 0 in unused columns, which have no entries
    # With a limit, a column below its capacity is right if its multiplier is 0.
    residual = torch.maximum(gradient, mu * problem.capacity) if problem.at_most else gradient
    error = float((residual * problem.per_capacity).abs().max()) if len(sums) else 0.0
    return Point(mu, y, gradient, error, off_diagonal)


def _direction(problem: Problem, point: Point, target: Tensor, known: Weights | None, goal: float) -> Tensor:
    """The Newton step on the columns that are free to move."""
    free, anchored = problem.used, False
    if problem.at_most:
        free = problem.used & ((point.mu < 0) | (point.gradient > 0))
        anchored = bool((free != problem.used).any())
    if known is None:
        assert point.off_diagonal is not None
        return dense_solve(point.off_diagonal, target, free, anchored, 1e-13 * problem.capacity)
    # An error e becomes about e², and accuracy beyond the goal is not needed.
    tolerance = min(0.1, max(0.02 * point.error, 0.1 * goal / point.error, 1e-6))
    return conjugate_gradients(known, target, free, anchored, tolerance, 30)[0]


def _targets(
    problem: Problem, point: Point, some: Tensor, known: Weights | None, careful: bool
) -> list[Tensor]:
    """The changes of the column sums to aim at, the most promising first. `some` are rows of Y."""
    change = -point.gradient
    if careful or point.error > 0.5:
        return [change]
    # Column sums are nearly exponential in mu. With slope d and second derivative r d they change by
    # d (exp(r t) - 1) / r, whose inverse aims much better than its tangent. Some rows suffice for r.
    slope, ratio = problem.capacity - change, torch.ones_like(change)
    if known is not None:
        w = some - some * some
        slope = known.columns
        # A NaN fails below, as do slopes of 0.
        ratio = (1 - 2 * ((w * some).sum(0) / w.sum(0))).double().clamp(0.01, 1)
    aim = slope / ratio * torch.log1p(ratio * change / slope)
    return [torch.where(aim.isfinite(), aim, change), change]


def _search(problem: Problem, point: Point, step: Tensor, dense: bool, scratch: Tensor) -> Point | None:
    """A point along a step that does not go far past the minimum of f, or None.

    f is convex, so its slope along the step decides: it must not exceed half the slope at the start.
    """
    longest = float(step.abs().max())
    if not 0 < longest < math.inf:
        return None
    fraction = min(1.0, _LONGEST_STEP / longest)
    for _ in range(10):
        found = _evaluate(problem, _normalized(problem, point.mu + fraction * step), dense, scratch)
        moved = found.mu - point.mu
        before, after = float(point.gradient @ moved), float(found.gradient @ moved)
        if (before < 0 and after <= -0.5 * before) or found.error < 0.5 * point.error:
            return found
        fraction *= min(0.7, max(0.1, -before / (after - before))) if after > before else 0.3
    return None


def _follow_path(problem: Problem, goal: float) -> Point:
    """Solve at a high temperature and halve it down to 1, each solution being the first guess of the next."""
    scale = min(1.0, 8.0 / max(problem.range, 1e-300))
    mu = torch.zeros_like(problem.capacity)
    while scale < 1:
        mu = _newton(replace(problem, x=problem.x * scale), mu, 1e-3, 50, True, True).mu
        grown = min(1.0, 2 * scale)
        mu, scale = mu * (grown / scale), grown
    return _newton(problem, mu, goal, 200, True, True)


def _normalized(problem: Problem, mu: Tensor) -> Tensor:
    """The representative of mu: Y does not change if a constant is added.

    With equal totals the mean is 0. With limits the largest multiplier is 0, which lowers f further.
    """
    if problem.all_used and not problem.at_most:
        return mu - mu.mean()
    used = problem.used
    if not bool(used.any()):
        return torch.zeros_like(mu)
    if problem.at_most:
        mu = mu.clamp(max=0)
        return torch.where(used, mu - mu[used].max(), 0)
    return torch.where(used, mu - mu[used].mean(), 0)


class Weights(NamedTuple):
    """w = y (1 - y) of one matrix, with the sums that every product with S needs."""

    w: Tensor  # (R, n)
    inverse: Tensor  # (R,): 1 / a, and 0 for rows without an undecided entry
    columns: Tensor  # (n,) float64: d


def weights(w: Tensor) -> Weights:
    """The weights with their sums."""
    a = w.sum(1)
    return Weights(w, torch.where(a > 0, 1 / a, 0), w.sum(0).double())


def conjugate_gradients(
    weights: Weights, rhs: Tensor, free: Tensor, anchored: bool, tolerance: float, most: int
) -> tuple[Tensor, bool]:
    """Solve S q = rhs on the free columns without forming S. Returns q and whether it is accurate enough.

    Args:
        weights: The weights of the matrix.
        rhs: (n,) float64.
        free: (n,) bool. The other entries of q are 0.
        anchored: Whether a column with undecided entries is not free. Otherwise q is determined up to a
            constant.
        tolerance: The residual at the end, relative to `rhs`, in the norm of the preconditioner.
        most: The largest number of iterations. Every iterate has a positive inner product with `rhs`, so an
            early stop still gives a direction of descent.

    Preconditioned by diag(d), S has the eigenvalues 1 - s², where s are the singular values of the normalized
    weights. They are close to 1 unless the logits are nearly a hard assignment, so a few iterations suffice.
    """
    w, inverse, d = weights
    free = free & (d > 0)
    precondition = torch.where(free, 1 / d, 0)
    residual = torch.where(free, rhs, 0) if anchored else _centered(rhs, d, free)
    q = torch.zeros_like(residual)
    z = residual * precondition
    rho = first = float(residual @ z)
    p = z
    for _ in range(most):
        if rho <= tolerance**2 * first or first == 0:
            return q, True
        t = torch.mv(w, p.to(w.dtype)).mul_(inverse)
        s_p = d * p - torch.mv(w.T, t).double()  # the other columns do not matter: their z and p are 0
        curvature = float(p @ s_p)
        if not curvature > 0:  # due to rounding: p is in the null space of S
            return q, False
        alpha = rho / curvature
        q = torch.add(q, p, alpha=alpha)
        residual = torch.sub(residual, s_p, alpha=alpha)
        z = residual * precondition
        before, rho = rho, float(residual @ z)
        p = torch.add(z, p, alpha=rho / before)
    return q, rho <= tolerance**2 * first


def laplacian(weights: Weights) -> Tensor:
    """S as a matrix in float64, up to its diagonal: minus the products of the weights."""
    w, inverse, _ = weights
    s = -(w.T @ (w * inverse[:, None])).double()
    s.fill_diagonal_(0)
    return s


def dense_solve(
    off_diagonal: Tensor, rhs: Tensor, free: Tensor, anchored: bool, noise: Tensor | float = 0.0
) -> Tensor:
    """Solve S q = rhs on the free columns from the off-diagonal part of S, by Cholesky factorization.

    `noise` is the rounding error of `rhs`. It is added to the diagonal, so that columns without undecided
    entries do not move by the quotient of two rounding errors.

    The diagonal is the negative sum of the rest of its row. Nothing cancels in it, so S keeps its relative
    accuracy where it is nearly singular: where groups of columns hardly exchange weight.
    """
    diagonal = -off_diagonal.sum(1) + noise
    free = free & (diagonal > 0)
    kept = free.nonzero().squeeze(1)
    q = torch.zeros_like(rhs)
    if kept.numel() == 0:
        return q
    right = (rhs if anchored else _centered(rhs, diagonal, free))[kept]
    diagonal = diagonal[kept]
    s = off_diagonal[kept][:, kept] + torch.diag(diagonal)
    if not anchored:  # S 1 = 0, and this term makes the solution unique: the one with mean 0
        s = s + diagonal.mean() / len(diagonal)
    damping = 1e-15
    while True:
        factor, failed = torch.linalg.cholesky_ex(s + torch.diag(damping * diagonal))
        if not failed or damping > 1:
            break
        damping *= 100
    q[kept] = torch.cholesky_solve(right[:, None], factor).squeeze(1)
    return q


def _centered(rhs: Tensor, diagonal: Tensor, free: Tensor) -> Tensor:
    """Remove the part of a right-hand side that no q reaches: S q sums to 0.

    The sum is subtracted in proportion to the diagonal, because a decided column cannot compensate for it.
    """
    diagonal = torch.where(free, diagonal, 0)
    rhs = torch.where(free, rhs, 0)
    return rhs - diagonal * (rhs.sum() / diagonal.sum().clamp(min=torch.finfo(rhs.dtype).tiny))
