"""Solve for the column multipliers mu of the two-sided projection.

For every mu, `lml` solves the rows exactly. It remains to minimize the convex function
f(mu) = sum_i lml_value(x_i + mu, k_i) - dot(c, mu), where c are the capacities. Its gradient is the error of
the column sums, and its Hessian is the Schur complement S in `linear.py`. The initial guess comes from the
caller or from alternating solves of rows and columns, and Newton's method with conjugate gradients refines
it. If that fails, as for nearly hard assignments, the solver follows a path of decreasing temperatures with
dense Newton steps in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchlml._balanced.linear import Weights, balanced_forward, conjugate_gradients, dense_solve, laplacian
from torchlml.projection import lml_dual

if TYPE_CHECKING:  # slow to import, and few calls need it
    from torchlml._distributed.group import LabelGroup

# Relative errors of the column sums: Newton's method stops at `_GOAL`, and results are within `_GUARANTEE`,
# up to rounding errors (see `Problem.guarantee`).
_GOAL = {torch.float32: 7e-5, torch.float64: 1e-11}
_GUARANTEE = {torch.float32: 1e-4, torch.float64: 1e-9}
# Beyond this range, float32 resolves x + mu too coarsely for the guarantee: ulp(256) is 3e-5.
FLOAT32_RANGE = 256.0
# If the start given by the caller has a larger relative error, the solver also computes its own initial
# guess.
FAR = 0.5
_LONGEST_STEP = 30.0


class Correction(NamedTuple):
    """How much the column sums and the Schur complement of the whole matrix differ from those of a sample."""

    mu: Tensor  # (n,) float64: the point at which the corrected sums and derivatives are exact
    sums: Tensor  # (n,) float64
    off_diagonal: Tensor  # (n, n) float64


@dataclass(frozen=True)
class Problem:
    """One matrix with its row sums and column capacities."""

    x: Tensor  # (R, n) float32 or float64, contiguous, -inf where an entry must be 0
    k: Tensor  # () or (R,) float64
    capacity: Tensor  # (n,) float64; 0 for columns in which every entry must be 0
    at_most: bool
    rows: int  # the total number of rows on all processes
    total: float  # the sum of k over these rows
    range: float  # the largest finite |x|
    resolution: float = 0.0  # the relative rounding error of the given capacities
    processes: LabelGroup | None = None
    scale: float = 1.0  # a factor by which column sums are multiplied; above 1 if the rows are a sample
    correction: Correction | None = None

    @cached_property
    def used(self) -> Tensor:
        """(n,) bool: the columns that have a multiplier because their capacity is positive."""
        return self.capacity > 0

    @cached_property
    def all_used(self) -> bool:
        """Whether every column has a multiplier."""
        return not len(self.capacity) or float(self.capacity.min()) > 0

    @cached_property
    def per_capacity(self) -> Tensor:
        """(n,) float64: factors that convert errors to relative errors; 0 for unused columns."""
        scale = self.capacity.clamp(min=1e-6 * self.total / max(len(self.capacity), 1)).reciprocal()
        return scale if self.all_used else torch.where(self.used, scale, 0)

    @property
    def goal(self) -> float:
        """The relative error at which Newton's method stops."""
        return _GOAL[self.x.dtype]

    @property
    def guarantee(self) -> float:
        """The largest relative error that a result may have."""
        rounding = 8 * torch.finfo(torch.float64).eps * self.range + self.resolution
        return min(_GUARANTEE[self.x.dtype] + rounding, 2e-4)

    @cached_property
    def final(self) -> Problem:
        """The problem in a dtype that is accurate enough for the guarantee."""
        return self if self.range <= FLOAT32_RANGE else self.cast(torch.float64)

    def cast(self, dtype: torch.dtype) -> Problem:
        """Return the same problem with x in another dtype."""
        return self if self.x.dtype == dtype else replace(self, x=self.x.to(dtype))


class Point(NamedTuple):
    """A value of mu and the solution of the rows at this mu."""

    mu: Tensor  # (n,) float64
    weights: Weights
    sums: Tensor  # (3, n) float64: the column sums of y, w and w * y
    gradient: Tensor  # (n,) float64: column sums minus capacities
    error: float  # the relative error of the column sums
    off_diagonal: Tensor | None  # the off-diagonal part of the Schur complement, if the steps are dense


def solve(problem: Problem, start: Tensor | None) -> Point:
    """Solve one problem. `start` is an initial guess for mu, or None."""
    final = problem.final
    quick = problem.cast(torch.float32 if problem.range < 1e30 else torch.float64)
    point = None
    if final is not quick and final.x.numel() > 2**14:  # float64 is as fast for smaller matrices
        start = newton(quick, _start(quick, start), 1e-4, 8).mu
        point = evaluate(final, start)
    return finish(problem, newton(final, point or _start(final, start), problem.goal, 12))


def finish(problem: Problem, point: Point) -> Point:
    """Return the point if it is accurate enough. Otherwise try float64, then `follow_path`."""
    if not point.error <= problem.guarantee and problem.final.x.dtype == torch.float32:
        wide, dense = problem.cast(torch.float64), point.off_diagonal is not None
        point = newton(wide, evaluate(wide, point.mu, dense), problem.goal, 12, dense)
    if not point.error <= problem.guarantee:
        check_feasible(problem, point.mu, problem.guarantee)
        point = follow_path(problem.cast(torch.float64), problem.goal)
    if not point.error <= problem.guarantee:
        check_feasible(problem, point.mu, problem.guarantee)
        raise RuntimeError(
            f"balanced_lml did not converge: the relative error of the column sums is {point.error:.1e}. "
            "The problem is probably infeasible, or feasible only with most entries at 0 or 1."
        )
    return point


def _start(problem: Problem, start: Tensor | None) -> Point:
    """Return the given start if it is close to the solution, else the better of the start and a new guess."""
    given = None if start is None else evaluate(problem, normalized(problem, start))
    if given is not None and given.error <= FAR:
        return given
    guess = evaluate(problem, first_guess(problem))
    return given if given is not None and given.error <= guess.error else guess


def check_feasible(problem: Problem, mu: Tensor, slack: float) -> None:
    """Raise an error if the columns with the smallest multipliers prove that there is no solution.

    Consider a set of columns. A row that cannot reach its k with entries outside the set needs the rest from
    entries inside it. By the max-flow min-cut theorem, a problem is feasible if and only if the capacity of
    every set covers these needs. In an infeasible problem, the multipliers of a set with too little capacity
    diverge, so only sets of the columns with the smallest multipliers are tried.
    """
    order = torch.where(problem.capacity > 0, mu, -torch.inf).argsort()
    present = (problem.x[:, order] > -torch.inf).double()
    outside = present.sum(1, keepdim=True) - present.cumsum(1)
    k = problem.k[:, None] if problem.k.dim() else problem.k
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
            f"No solution exists: the rows need a total of at least {needed[worst]:g} from the set of "
            f"columns {{{shown}}}, but the `capacity` of this set sums to {held[worst]:g}."
        )


def sample_size(problem: Problem) -> int:
    """Return the number of rows in a sample whose mean column sum is about 64 (at least 256 rows)."""
    return max(256, math.ceil(64 * problem.capacity.numel() * problem.rows / max(problem.total, 1e-9)))


def take_sample(problem: Problem, size: int) -> Problem:
    """Return the problem restricted to a sample of at least `size` rows, or all rows if there are fewer."""
    step = max(1, problem.x.shape[0] // max(size, 1))
    taken = spread_rows(problem.x.shape[0], -(-problem.x.shape[0] // step), problem.x.device)
    x = problem.x[taken]
    k = problem.k[taken] if problem.k.dim() else problem.k
    total = float(k.sum()) if k.dim() else float(k) * x.shape[0]
    return replace(problem, x=x, k=k, rows=x.shape[0], total=total)


def spread_rows(rows: int, count: int, device: torch.device) -> Tensor:
    """Divide the row indices into `count` equal parts, and return one index from each part.

    The position within a part advances by the golden ratio, modulo 1, from part to part. Evenly spaced rows
    could all be similar, such as the first tokens of sequences of equal length.
    """
    part = torch.arange(count, dtype=torch.float64, device=device)
    place = (part + (part * 0.6180339887498949) % 1) * (rows / max(count, 1))
    return place.long().clamp_(max=max(rows - 1, 0))


def first_guess(problem: Problem) -> Tensor:
    """Estimate mu by alternating exact solves of rows and columns, on a sample if there are many rows."""
    if problem.total <= 0:
        return torch.zeros_like(problem.capacity)
    size = sample_size(problem)
    some = take_sample(problem, size) if problem.x.shape[0] >= 4 * size else problem
    return normalized(problem, alternate(some, problem.capacity * (some.total / problem.total)))


def alternate(problem: Problem, capacity: Tensor) -> Tensor:
    """Alternate exact solves of the rows and of the columns, without communication, and return mu."""
    if problem.range < 1e30:
        problem = problem.cast(torch.float32)
    x = problem.x
    transposed = x.T.contiguous()
    present = (transposed > -torch.inf).sum(1)
    # A column of a sample may have fewer available entries than its share of the capacity. The result is
    # only a guess, so such a capacity is reduced.
    capacity = torch.minimum(capacity, 0.99 * present)
    mu = torch.zeros_like(capacity)
    # With "at_most", the multipliers of columns that reach their capacity decrease gradually, which takes
    # more iterations.
    for _ in range(32 if problem.at_most else 4):
        nu = torch.nan_to_num(lml_dual(x + mu.to(x.dtype), problem.k), posinf=50.0, neginf=-50.0)
        new = lml_dual(transposed + nu, capacity, bound="at_most" if problem.at_most else "exactly").double()
        new = torch.where(new.isfinite(), new, 0)
        change = float((new - mu).abs().max())
        mu = new
        if change < 0.02:
            break
    return mu


def newton(
    problem: Problem, point: Point, goal: float, most: int, dense: bool = False, careful: bool = False
) -> Point:
    """Run at most `most` Newton steps, until the error is at most `goal` or no step helps."""
    best = point
    for _ in range(most):
        if point.error <= goal:
            return point
        found = None
        for target in _targets(problem, point, careful):
            if found is None:
                found = _search(problem, point, _direction(problem, point, target, goal), dense)
        if found is None:
            break
        point = found
        if point.error < best.error:
            best = point
    return best


def evaluate(problem: Problem, mu: Tensor, dense: bool = False) -> Point:
    """Solve the rows at mu, and compute the gradient and, with `dense`, the Schur complement.

    With several processes, this takes one round of communication.
    """
    y, inverse, sums = balanced_forward(problem.x, mu, problem.k)
    weights = Weights(y, inverse, sums[1])
    off_diagonal = laplacian(weights) if dense else None
    if problem.processes is not None:
        mu, sums, off_diagonal = _exchange(problem.processes, mu, sums, off_diagonal)
    if problem.scale != 1:
        sums = sums * problem.scale
        off_diagonal = None if off_diagonal is None else off_diagonal * problem.scale
    gradient = sums[0] - problem.capacity  # 0 in unused columns, in which y is 0
    if problem.correction is not None and off_diagonal is not None:
        lacking = problem.correction.off_diagonal
        moved = mu - problem.correction.mu
        gradient = gradient + problem.correction.sums + lacking @ moved - lacking.sum(1) * moved
        off_diagonal = off_diagonal + lacking
    # With "at_most", a column below its capacity is correct if its multiplier is 0.
    residual = torch.maximum(gradient, mu * problem.capacity) if problem.at_most else gradient
    error = float((residual * problem.per_capacity).abs().max()) if len(mu) else 0.0
    return Point(mu, weights, sums, gradient, error, off_diagonal)


def _exchange(
    processes: LabelGroup, mu: Tensor, sums: Tensor, off_diagonal: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Add up the sums from all processes in one round of communication."""
    from torchlml._distributed.group import add_up

    assert off_diagonal is not None
    n = len(mu)
    parts = processes.gather(torch.cat([mu, sums.flatten(), off_diagonal.flatten()]))
    both = add_up(parts[:, n:])
    # All processes continue from bitwise identical values, even if their arithmetic differs.
    return parts[0, :n].clone(), both[: 3 * n].view(3, n), both[3 * n :].view(n, n)


def _direction(problem: Problem, point: Point, target: Tensor, goal: float) -> Tensor:
    """Return the Newton step for the columns whose multipliers may change."""
    free, anchored = None if problem.all_used else problem.used, False
    if problem.at_most:
        free = problem.used & ((point.mu < 0) | (point.gradient > 0))
        anchored = bool((free != problem.used).any())
    if point.off_diagonal is not None:
        return dense_solve(point.off_diagonal, target, free, anchored, 1e-13 * problem.capacity)
    # A Newton step turns an error e into about e², and accuracy beyond the goal is not needed.
    tolerance = min(0.1, max(0.02 * point.error, 0.1 * goal / point.error, 1e-6))
    return conjugate_gradients(point.weights, target, free, anchored, tolerance, 30)[0]


def _targets(problem: Problem, point: Point, careful: bool) -> list[Tensor]:
    """Return candidates for the target change of the column sums, most promising first."""
    change = -point.gradient
    if careful or point.error > 0.5:
        return [change]
    # Column sums are nearly exponential in mu. With slope d and second derivative r * d, a step t changes
    # them by d * (exp(r * t) - 1) / r. The inverse of this function gives a much better target than its
    # tangent.
    _, slope, third = point.sums.unbind(0)
    ratio = torch.rsub(third / slope, 1, alpha=2).clamp(0.01, 1)
    aim = torch.log1p(ratio * (change / slope)) / ratio * slope
    if not math.isfinite(float(aim.sum())):  # a slope of 0, or a decrease that is too large for the logarithm
        aim = torch.where(aim.isfinite(), aim, change)
    return [aim, change]


def _search(problem: Problem, point: Point, step: Tensor, dense: bool) -> Point | None:
    """Return a suitable point along a step, or None if the search fails.

    The point must halve the error, or it must not be far past the minimum of f along the step. f is convex,
    so a positive slope along the step shows that a point is past the minimum. The slope must not exceed half
    the magnitude of the slope at the start.
    """
    longest = float(step.abs().max())
    if not 0 < longest < math.inf:
        return None
    fraction = min(1.0, _LONGEST_STEP / longest)
    for _ in range(10):
        moved_to = normalized(problem, torch.add(point.mu, step, alpha=fraction))
        found = evaluate(problem, moved_to, dense)
        if found.error < 0.5 * point.error:
            return found
        moved = found.mu - point.mu
        before, after = float(point.gradient @ moved), float(found.gradient @ moved)
        if before < 0 and after <= -0.5 * before:
            return found
        fraction *= min(0.7, max(0.1, -before / (after - before))) if after > before else 0.3
    return None


def follow_path(problem: Problem, goal: float) -> Point:
    """Solve at a high temperature, then halve it until it is 1, each time starting from the last solution."""
    scale = min(1.0, 8.0 / max(problem.range, 1e-300))
    mu = torch.zeros_like(problem.capacity)
    while scale < 1:
        warm = replace(problem, x=problem.x * scale)
        mu = newton(warm, evaluate(warm, mu, True), 1e-3, 50, True, True).mu
        grown = min(1.0, 2 * scale)
        mu, scale = mu * (grown / scale), grown
    return newton(problem, evaluate(problem, mu, True), goal, 200, True, True)


def normalized(problem: Problem, mu: Tensor) -> Tensor:
    """Return mu in a normalized form, with 0 for unused columns.

    With "exactly", mu is shifted so that its mean is 0. Adding a constant to mu does not change Y. With
    "at_most", positive entries are first replaced with 0, because no multiplier of a solution is positive.
    Then mu is shifted so that its largest entry is 0. This shift also lowers f if the capacities exceed the
    total of k.
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
