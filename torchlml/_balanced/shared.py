"""The two-sided projection of one matrix whose rows are sharded across processes.

The solver needs only a few rounds of communication. A sample of rows from all processes serves as a model
of the matrix. Every process has the same sample and minimizes the objective of this model without
communication. One round of communication then gives the exact column sums and their exact derivative at the
minimum. They are used to correct the model, and the minimum of the corrected model is the next point. The
error of each point is about a tenth of the square of the previous error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchlml._balanced.solve import (
    FLOAT32_RANGE,
    Correction,
    Point,
    Problem,
    alternate,
    evaluate,
    finish,
    follow_path,
    newton,
    normalized,
    sample_size,
    spread_rows,
)
from torchlml._distributed.group import LabelGroup

# The relative errors at which the solver stops. They are just below the guaranteed errors, because more
# digits would not be worth another round of communication.
_GOAL = {torch.float32: 7e-5, torch.float64: 7e-10}


class Sample(NamedTuple):
    """Sampled rows from all processes, and the number of available rows in each column."""

    x: Tensor  # (S, n) float32, or float64 if float32 is not accurate enough
    k: Tensor  # (S,) float64
    present: Tensor  # (n,) float64


def gather_sample(problem: Problem, rows: list[int], processes: LabelGroup) -> Sample:
    """Gather a sample of the rows from all processes, or all rows if there are few.

    This takes one round of communication. Every process contributes rows in proportion to its number of rows.

    Args:
        problem: The problem, with the rows of this process.
        rows: The number of rows on each process.
        processes: The processes that hold the rows.
    """
    x, n = problem.x, problem.x.shape[1]
    size, total = sample_size(problem), max(sum(rows), 1)
    if total <= 2 * size:
        size = total
    wanted = [min(count, -(-size * count // total)) for count in rows]
    own = wanted[processes.rank]
    taken = spread_rows(x.shape[0], own, x.device)
    # All messages must have the same size. They are padded with rows that have k = 0 and thus no effect.
    dtype = torch.float32 if problem.range <= FLOAT32_RANGE else torch.float64
    part = x.new_zeros((max(wanted) + 2, n + 1), dtype=dtype)
    part[:own, :-1] = x[taken]
    part[:own, -1] = problem.k[taken] if problem.k.dim() else problem.k
    present = (x > -torch.inf).sum(0)
    part[-2, :-1], part[-1, :-1] = present // 4096, present % 4096  # exact in float32
    parts = processes.gather(part)
    high, low = parts[:, -2:, :-1].double().sum(0).unbind(0)
    found = parts[:, :-2].flatten(0, 1)
    k = found[:, -1].double().contiguous()
    return Sample(found[:, :-1].contiguous(), k, 4096 * high + low)


def solve_shared(problem: Problem, start: Tensor | None, sample: Sample | None) -> Point:
    """Solve one problem whose rows are sharded across processes.

    Args:
        problem: The problem, with the rows of this process.
        start: An initial guess for mu, or None.
        sample: Sampled rows from all processes, or None if `start` is known to be near the solution.
    """
    final, goal = problem.final, _GOAL[problem.x.dtype]
    if sample is None:
        assert start is not None
        best = evaluate(final, normalized(problem, start), True)
    else:
        model = _model(final, sample)
        point = best = evaluate(final, _guess(model, start), True)
        for _ in range(6):
            if point.error <= goal or point.error > 2 * best.error:
                break
            found = evaluate(final, _next(model, point, goal), True)
            if torch.equal(found.mu, point.mu):  # no progress; mu is identical on all processes, so all stop
                break
            point = found
            if point.error < best.error:
                best = point
    return finish(problem, newton(final, best, goal, 10, True))


def _model(problem: Problem, sample: Sample) -> Problem:
    """Return the problem with the rows of a sample instead of its own rows."""
    total = float(sample.k.sum())
    scale = problem.total / total if total > 0 else 1.0
    return replace(
        problem, x=sample.x.to(problem.x.dtype), k=sample.k, rows=len(sample.k), processes=None, scale=scale
    )


def _guess(model: Problem, start: Tensor | None) -> Tensor:
    """Solve the sampled problem approximately, without communication, and return its multipliers mu."""
    if model.total <= 0:
        return torch.zeros_like(model.capacity)
    points = [evaluate(model, normalized(model, alternate(model, model.capacity / model.scale)), True)]
    if start is not None:
        points.append(evaluate(model, normalized(model, start), True))
    point = newton(model, min(points, key=lambda point: point.error), 1e-4, 30, True)
    # If the sample is the whole matrix and Newton's method failed, follow a path of decreasing temperatures,
    # which is more robust.
    if model.scale < 1.001 and not point.error <= 1e-3:
        point = follow_path(model.cast(torch.float64), 1e-4)
    return point.mu


def _next(model: Problem, point: Point, goal: float) -> Tensor:
    """Correct the model with the exact sums at a point, and return the mu that minimizes the model.

    This requires no communication.
    """
    own = evaluate(model, point.mu, True)
    assert own.off_diagonal is not None
    assert point.off_diagonal is not None
    sums, derivative = point.sums[0] - own.sums[0], point.off_diagonal - own.off_diagonal
    exact = own._replace(gradient=point.gradient, error=point.error)
    # If the derivative is corrected, the model may not be convex. In that case, correct only the sums.
    for lacking in (derivative, torch.zeros_like(derivative)):
        corrected = replace(model, correction=Correction(point.mu, sums, lacking))
        first = exact._replace(off_diagonal=own.off_diagonal + lacking)
        found = newton(corrected, first, 0.1 * goal, 30, True)
        if found.error <= 0.1 * point.error:
            break
    return found.mu
