"""The two-sided projection: k entries per row and a capacity for each column."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from torchlml._balanced.calls import balanced

ColumnBound = Literal["exactly", "at_most"]


def balanced_lml(
    x: Tensor,
    k: float | Tensor,
    capacity: float | Tensor | None = None,
    *,
    mask: Tensor | None = None,
    bound: ColumnBound = "exactly",
    start: Tensor | None = None,
    group: Any = None,
) -> Tensor:
    """Project logits onto matrices in the unit cube whose rows sum to k and columns to `capacity`.

        >>> x = torch.tensor([[2.0, 0.0, -1.0], [2.0, 1.0, 0.0], [3.0, 0.0, 0.0]])
        >>> y = torchlml.balanced_lml(x, 1)
        >>> y.sum(-1).round(decimals=3), y.sum(-2).round(decimals=3)
        (tensor([1., 1., 1.]), tensor([1., 1., 1.]))

    Args:
        x: logits of shape (..., rows, columns). Leading dimensions are independent problems.
        k: the sum of each row: a number, or a tensor that broadcasts to (..., rows). It may be fractional.
        capacity: the sum of each column: a number, or a tensor that broadcasts to (..., columns). By default
            all columns of a problem get the same share, the total of `k` divided by the number of columns.
        mask: bool, True where an entry may be chosen; broadcasts to `x`. The others are exactly 0.
        bound: "exactly", or "at_most" where the capacities are upper limits of the column sums.
        start: a first guess of the column multipliers mu, such as those of the previous training step. It
            broadcasts to (..., columns) and changes the run time, and the result only within its accuracy.
        group: the processes that hold the rows of one matrix, a ProcessGroup or a one-dimensional DeviceMesh.
            `x`, `k` and `mask` hold the rows of this process. The other arguments are the same on all.

    Returns:
        Y, with the shape and dtype of `x`.

    Y maximizes x.Y + H(Y), H the binary entropy, under these constraints, which makes it
    y_ij = sigmoid(x_ij + nu_i + mu_j) with one number per row and one per column. The relative error of the
    column sums is at most 1e-9 in float64 and 1e-4 in float32; half precision is computed in float32. The
    first derivatives for `x`, `k` and `capacity` are exact. They solve a linear system with one unknown per
    column.

    `k` and `capacity` must have the same total up to a relative difference of 1e-5. The capacities are scaled
    to the total of `k`, which also determines their derivatives. With a `group`, gradients are those of the
    sum of the losses of all processes.
    """
    return balanced(x, k, capacity, mask, bound, start, group).y


def balanced_lml_dual(
    x: Tensor,
    k: float | Tensor,
    capacity: float | Tensor | None = None,
    *,
    mask: Tensor | None = None,
    bound: ColumnBound = "exactly",
    start: Tensor | None = None,
    group: Any = None,
) -> tuple[Tensor, Tensor]:
    """The dual variables of `balanced_lml`: nu and mu with Y = sigmoid(x + nu + mu).

        >>> x = torch.tensor([[2.0, 0.0], [3.0, 0.0]])
        >>> nu, mu = torchlml.balanced_lml_dual(x, 1)
        >>> mu
        tensor([-1.2500,  1.2500])

    Arguments as for `balanced_lml`.

    Returns:
        nu of shape (..., rows) and mu of shape (..., columns), in the dtype of `x`. A constant can be moved
        from mu to nu: mu has the mean 0 over its finite entries, and with `bound="at_most"` it is at most 0.
        It is -inf for a capacity of 0 and +inf for a column that needs all of its available rows. With a
        `group`, all processes get the same mu, bit for bit.

    mu is the bias that a router needs for balance: the k largest entries of x + mu are the k largest of Y.
    """
    found = balanced(x, k, capacity, mask, bound, start, group, dual=True)
    return found.nu, found.mu
