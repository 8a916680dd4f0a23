"""Algorithm 1 of Amos, Koltun and Kolter (2019), which evaluates d points per iteration to bracket nu."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from torchlml._arguments import canonical
from torchlml._autograd import implicit
from torchlml._autograd.operators import ROWS, operator
from torchlml._rows import Rows, empty_nu
from torchlml._solve.newton import add, begin, residual
from torchlml._torch.careful import prepare, solve_rows


def lml_bracketing(
    x: Tensor,
    k: float | Tensor,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    samples: int | None = None,
    tolerance: float | None = None,
    max_iterations: int = 100,
) -> Tensor:
    """Compute the dual variable of `lml` with Algorithm 1 of the LML paper (Amos, Koltun and Kolter, 2019).

        >>> x = torch.tensor([2.0, 1.0, 0.0, -1.0])
        >>> nu = torchlml.lml_bracketing(x, 2, samples=20)
        >>> torch.sigmoid(x + nu)
        tensor([0.8176, 0.6225, 0.3775, 0.1824])

    This function is for comparison with the paper. For all other purposes, use `torchlml.lml_dual`, which
    returns the same result and is much faster.

    Args:
        x, k, dim, mask, offsets: as for `torchlml.lml`.
        samples: the number of points evaluated in each iteration (d in the paper), at least 3. The defaults
            are those of the paper: 10 on a CPU and 100 on other devices.
        tolerance: the search stops when the bracket of every row is at most this wide. The default is twice
            the machine epsilon of float64 for float64 inputs, and of float32 for all other inputs.
        max_iterations: the maximum number of iterations.

    Returns:
        nu, as returned by `torchlml.lml_dual`: differentiable, with the shape of `x` without `dim`.

    The initial bracket of the paper extends a constant distance of 7 beyond two of the entries and does not
    always contain nu. Here, the distances depend on k and n, so that the bracket always contains nu. See
    `torchlml._solve.newton.order_offsets`.
    """
    _check_settings(samples, tolerance, max_iterations)
    c = canonical(x, k, dim, mask, offsets, nested=True)
    solve = partial(solve_bracketing, samples=samples, tolerance=tolerance, max_iterations=max_iterations)
    return c.restore_rows(implicit.lml_dual(c.x, c.k, c.mask, c.offsets, solve))


def _check_settings(samples: int | None, tolerance: float | None, max_iterations: int) -> None:
    if samples is not None:
        _check_count("samples", samples, 3)
    if tolerance is not None and (isinstance(tolerance, bool) or not isinstance(tolerance, int | float)):
        raise TypeError(f"`tolerance` must be a number, but it is {tolerance!r}.")
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"`tolerance` must be at least 0, but it is {tolerance}.")
    _check_count("max_iterations", max_iterations, 1)


def _check_count(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be an int, but it is {value!r}.")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, but it is {value}.")


def _solve(
    x: Tensor,
    k: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    samples: int | None,
    tolerance: float | None,
    max_iterations: int,
) -> Tensor:
    """Return nu for all rows, as a tensor of shape (2, R)."""
    values, rows = prepare(x, mask, offsets)
    samples = samples or (10 if x.device.type == "cpu" else 100)
    tolerance = 2 * torch.finfo(values.dtype).eps if tolerance is None else tolerance
    search = partial(_bracket, samples=samples, tolerance=tolerance, max_iterations=max_iterations)
    return solve_rows(values, k, rows, search)


def _bracket(
    x: Tensor,
    k: Tensor,
    m: Tensor,
    ordinary: Tensor,
    rows: Rows,
    *,
    samples: int,
    tolerance: float,
    max_iterations: int,
) -> Tensor:
    """Solve sum(sigmoid(x + nu)) = k for every row by narrowing a bracket around nu.

    The positional arguments and the result are those of `newton.newton`. The keyword arguments are those of
    `lml_bracketing`.
    """
    half_gap, first = begin(x, k, m, ordinary, rows)
    lower, upper = -first.below, first.above
    for _ in range(max_iterations):
        if bool(((upper - lower <= tolerance) | ~ordinary).all()):
            break
        # Evaluate one sample at a time, because evaluating all at once would need `samples` copies of x.
        points = [lower + (upper - lower) * (i / (samples - 1)) for i in range(samples)]
        new_lower, new_upper = points[0], points[-1]
        found = torch.zeros_like(ordinary)
        for point in points:
            scale = (half_gap - point.abs()).clamp(min=0).to(x.dtype)
            value = residual(x, k, add(first.nu, point), scale, rows).value
            new_lower = torch.where(~found & (value <= 0), point, new_lower)
            new_upper = torch.where(~found & (value >= 0), point, new_upper)
            found = found | (value >= 0)
        lower, upper = new_lower, new_upper
    return add(first.nu, (lower + upper) / 2)


solve_bracketing = operator(
    f"solve_bracketing(Tensor x, Tensor k, {ROWS}, int? samples, float? tolerance, int max_iterations)"
    " -> Tensor",
    _solve,
    lambda x, k, mask, offsets, *settings: empty_nu(x, offsets),
    vmap=True,
)
