"""The rows of the two-sided projection for given column multipliers, and solvers for its linear systems.

Let w = y * (1 - y) have row sums a and column sums d. The derivative of the column sums of y with respect to
the column multipliers is S = diag(d) - w^T diag(1/a) w. It is a graph Laplacian: symmetric, positive
semidefinite, with nonpositive off-diagonal entries and S 1 = 0. Each Newton step in the forward pass solves a
linear system with S, and so does the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchlml._autograd import operators
from torchlml._autograd.operators import operator


def _forward(x: Tensor, mu: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y, _ = operators.forward(x + mu.to(x.dtype), k, None, None)
    w = torch.addcmul(y, y, y, value=-1)
    sums = torch.stack([y.sum(0), w.sum(0), (w * y).sum(0)])
    return y, _inverse(w.sum(1)), sums.double()


def _inverse(a: Tensor) -> Tensor:
    return torch.where(a > 0, 1 / a, 0)


def _product(y: Tensor, inverse: Tensor, p: Tensor) -> Tensor:
    w = torch.addcmul(y, y, y, value=-1)
    with torch.autocast(w.device.type, enabled=False):  # half precision is not accurate enough
        return torch.mv(w.T, torch.mv(w, p.to(w.dtype)) * inverse).double()


# Returns y = lml(x + mu, k), the inverse row sums of w, and the column sums of y, w and w * y as a float64
# tensor of shape (3, n). x is float32 or float64, and mu is float64.
balanced_forward = operator(
    "balanced_forward(Tensor x, Tensor mu, Tensor k) -> (Tensor, Tensor, Tensor)",
    _forward,
    lambda x, mu, k: (torch.empty_like(x), x.new_empty(x.shape[0]), mu.new_empty(3, x.shape[1])),
)
# Returns the product w^T diag(inverse) w p in float64.
balanced_product = operator(
    "balanced_product(Tensor y, Tensor inverse, Tensor p) -> Tensor",
    _product,
    lambda y, inverse, p: torch.empty_like(p),
)


class Weights(NamedTuple):
    """The weights w = y * (1 - y) of one matrix, with the sums that every product with S needs."""

    y: Tensor  # (R, n): y, or the smaller of y and 1 - y, which has the same w
    inverse: Tensor  # (R,): 1 / a, and 0 for rows whose weights are all 0
    columns: Tensor  # (n,) float64: d

    @property
    def w(self) -> Tensor:
        """(R, n): the weights themselves."""
        return torch.addcmul(self.y, self.y, self.y, value=-1)


def weights(y: Tensor) -> Weights:
    """Compute the weights and their sums from y."""
    w = torch.addcmul(y, y, y, value=-1)
    return Weights(y, _inverse(w.sum(1)), w.sum(0).double())


def conjugate_gradients(
    weights: Weights, rhs: Tensor, free: Tensor | None, anchored: bool, tolerance: float, most: int
) -> tuple[Tensor, bool]:
    """Solve S q = rhs on the free columns without forming S. Returns q and whether it is accurate enough.

    Args:
        weights: The weights of the matrix.
        rhs: (n,) float64.
        free: (n,) bool. Entries of q in columns that are not free are 0. None if all columns are free.
        anchored: Whether some column with positive weights is not free. Otherwise q is determined only up to
            a constant.
        tolerance: The residual at which to stop, relative to `rhs`, in the norm of the preconditioner.
        most: The maximum number of iterations. Every iterate has a positive inner product with `rhs`, so
            stopping early still gives a descent direction.

    Preconditioned by diag(d), S has the eigenvalues 1 - s², where s are the singular values of
    diag(a)^(-1/2) w diag(d)^(-1/2). One eigenvalue is 0, because S 1 = 0. The others are close to 1 unless y
    is nearly a hard assignment, so a few iterations suffice.
    """
    y, inverse, d = weights
    d = d if free is None else torch.where(free, d, 0)
    positive = float(d.min()) > 0
    precondition = d.reciprocal() if positive else _inverse(d)
    residual = rhs if positive else torch.where(d > 0, rhs, 0)
    if not anchored:
        residual = _centered(residual, d)
    q = torch.zeros_like(residual)
    z = residual * precondition
    rho = first = float(residual @ z)
    p = z
    for _ in range(most):
        if rho <= tolerance**2 * first or first == 0:
            return q, True
        # This is -S p. Columns that are not free do not matter: their z and p are 0.
        change = torch.addcmul(balanced_product(y, inverse, p), d, p, value=-1)
        curvature = -float(p @ change)
        if not curvature > 0:  # up to rounding, p is in the null space of S
            return q, False
        alpha = rho / curvature
        q = torch.add(q, p, alpha=alpha)
        residual = torch.add(residual, change, alpha=alpha)
        z = residual * precondition
        before, rho = rho, float(residual @ z)
        p = torch.add(z, p, alpha=rho / before)
    return q, rho <= tolerance**2 * first


def laplacian(weights: Weights) -> Tensor:
    """Return the off-diagonal part of S as a matrix in float64, with zeros on the diagonal."""
    w = weights.w
    with torch.autocast(w.device.type, enabled=False):  # half precision is not accurate enough
        s = -(w.T @ (w * weights.inverse[:, None])).double()
    s.fill_diagonal_(0)
    return s


def dense_solve(
    off_diagonal: Tensor, rhs: Tensor, free: Tensor | None, anchored: bool, noise: Tensor | float = 0.0
) -> Tensor:
    """Solve S q = rhs on the free columns from the off-diagonal part of S, by Cholesky factorization.

    `noise` is the rounding error of `rhs`. It is added to the diagonal. Without it, q would be a quotient
    of two rounding errors in columns with negligible weights.

    Each diagonal entry is the negative sum of the other entries in its row. This sum has no cancellation, so
    S keeps its relative accuracy even if it is nearly singular, which happens if groups of columns are only
    weakly coupled.
    """
    diagonal = -off_diagonal.sum(1) + noise
    kept = (diagonal > 0 if free is None else free & (diagonal > 0)).nonzero().squeeze(1)
    q = torch.zeros_like(rhs)
    if kept.numel() == 0:
        return q
    right, diagonal = rhs[kept], diagonal[kept]
    if not anchored:
        right = _centered(right, diagonal)
    s = off_diagonal[kept][:, kept] + torch.diag(diagonal)
    if not anchored:  # because S 1 = 0, this term is needed to select the solution with mean 0
        s = s + diagonal.mean() / len(diagonal)
    damping = 1e-15
    while True:
        factor, failed = torch.linalg.cholesky_ex(s + torch.diag(damping * diagonal))
        if not failed or damping > 1:
            break
        damping *= 100
    q[kept] = torch.cholesky_solve(right[:, None], factor).squeeze(1)
    return q


def _centered(rhs: Tensor, diagonal: Tensor) -> Tensor:
    """Remove the part of a right-hand side that S q cannot attain, because S q always sums to 0.

    The sum is subtracted in proportion to the diagonal, because a column whose weights are nearly 0 cannot
    compensate for it.
    """
    excess = rhs.sum() / diagonal.sum().clamp(min=torch.finfo(rhs.dtype).tiny)
    return torch.addcmul(rhs, diagonal, excess, value=-1)
