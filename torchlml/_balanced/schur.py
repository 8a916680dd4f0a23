"""Linear systems with the Schur complement of the two-sided projection.

With w = y (1 - y), row sums a and column sums d, the derivative of the column sums with respect to the column
multipliers is S = diag(d) - w' diag(1/a) w. It is a graph Laplacian: symmetric, positive semidefinite, with
nonpositive off-diagonal entries and S 1 = 0. Solving with it is a Newton step forwards and the whole of the
backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Weights(NamedTuple):
    """w = y (1 - y) of one matrix, with what every product with S needs."""

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

    Preconditioned by diag(d), S has the eigenvalues 1 - s², s the singular values of the normalized matrix of
    weights. They are close to 1 unless the logits are nearly a hard assignment, so a few iterations do.
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
        s_p = torch.where(free, d * p - torch.mv(w.T, t).double(), 0)
        curvature = float(p @ s_p)
        if not curvature > 0:  # rounding: p is a direction that S does not see
            return q, False
        alpha = rho / curvature
        q = q + alpha * p
        residual = residual - alpha * s_p
        z = residual * precondition
        before, rho = rho, float(residual @ z)
        p = z + (rho / before) * p
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
    if not anchored:  # S 1 = 0, and this term makes the solution with the mean 0 the only one
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

    The sum is taken from the columns in proportion to the diagonal: a decided column could not make up for
    it.
    """
    diagonal = torch.where(free, diagonal, 0)
    rhs = torch.where(free, rhs, 0)
    return rhs - diagonal * (rhs.sum() / diagonal.sum().clamp(min=torch.finfo(rhs.dtype).tiny))
