"""The paper's solver: Algorithm 1 of Amos, Koltun and Kolter (2019), bracketing with d samples at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchlml._rows import Rows
from torchlml._solve.newton import add, begin
from torchlml._solve.residual import residual


@dataclass(frozen=True)
class Bracketing:
    """Algorithm 1 with its settings, for the `solver` argument of the projection.

        >>> solver = torchlml.solvers.Bracketing(samples=20)
        >>> torchlml.lml(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2, solver=solver)
        tensor([0.8176, 0.6225, 0.3775, 0.1824])

    Args:
        samples: points tried in each iteration, the paper's d; by default 10 on a CPU and 100 elsewhere, as
            in the paper.
        tolerance: stop when the interval around nu is this narrow; by default twice the machine epsilon, so
            that the answer is the one Newton's method gives.
        max_iterations: stop after so many iterations in any case.

    The interval to start from is the paper's with the right saturation offsets, see `order_offsets`.
    """

    samples: int | None = None
    tolerance: float | None = None
    max_iterations: int = 100

    def __post_init__(self) -> None:
        for name in ("samples", "max_iterations"):
            value = getattr(self, name)
            if not isinstance(value, int) and not (value is None and name == "samples"):
                raise TypeError(f"`{name}` must be an int, but it is {value!r}.")
        if not isinstance(self.tolerance, int | float | None):
            raise TypeError(f"`tolerance` must be a number, but it is {self.tolerance!r}.")
        if self.samples is not None and self.samples < 3:
            raise ValueError(f"`samples` must be at least 3, or nothing narrows, but it is {self.samples}.")
        if self.tolerance is not None and not self.tolerance >= 0:
            raise ValueError(f"`tolerance` must be a number from 0 on, but it is {self.tolerance}.")
        if self.max_iterations < 1:
            raise ValueError(f"`max_iterations` must be at least 1, but it is {self.max_iterations}.")


def bracketing(
    x: Tensor, k: Tensor, m: Tensor, ordinary: Tensor, rows: Rows, settings: Bracketing = Bracketing()
) -> Tensor:
    """Solve sum sigmoid(x + nu) = k for every row; arguments and result are those of `newton`."""
    samples = settings.samples or (10 if x.device.type == "cpu" else 100)
    tolerance = 2 * torch.finfo(x.dtype).eps if settings.tolerance is None else settings.tolerance
    half_gap, first = begin(x, k, m, ordinary, rows)
    lower, upper = -first.below, first.above
    for _ in range(settings.max_iterations):
        if bool(((upper - lower <= tolerance) | ~ordinary).all()):
            break
        # The samples are taken one after the other: together they would need `samples` copies of x.
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
