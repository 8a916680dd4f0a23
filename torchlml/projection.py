"""The Limited Multi-Label projection: `lml`, its logarithm, its dual variable, and the layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchlml._arguments import (
    Bound,
    Solver,
    canonical,
    check_bound,
    check_limit,
    check_solver,
    check_temperature,
)
from torchlml._autograd import inequality as bounds
from torchlml._autograd.fast_path import common_lml
from torchlml._distributed import is_spread


def lml(
    x: Tensor,
    k: float | Tensor,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    solver: Solver = "newton",
    bound: Bound = "exactly",
    group: Any = None,
) -> Tensor:
    """Project logits onto the points of the unit cube that sum to k: like softmax, but the rows sum to k.

        >>> torchlml.lml(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2)
        tensor([0.8176, 0.6225, 0.3775, 0.1824])

    Args:
        x: logits, of any shape; also a nested tensor of the layout `torch.jagged`, which gives one like it.
        k: how many to choose. A number, or a tensor that broadcasts to the shape of `x` without `dim` (with
            `offsets`: one number per row). It need not be whole, and it is differentiable.
        dim: the dimension that sums to k.
        mask: bool, True where an entry may be chosen; broadcasts to `x`. The others are exactly 0.
        offsets: for packed rows of different lengths: `x` is 1-d and row i is `x[offsets[i]:offsets[i + 1]]`.
        solver: "newton", "bracketing" (Algorithm 1 of the paper) or a `torchlml.solvers.Bracketing`.
        bound: "exactly", or "at_most" or "at_least" where k is only a limit of the sum: rows whose sigmoids
            keep to it by themselves are just these sigmoids. For "at_most", k may exceed n.
        group: the processes among which the entries of each row are split, a ProcessGroup or a DeviceMesh of
            one dimension: `x` and `mask` hold this process's entries, in the order of the ranks, and all else
            is the same everywhere. A DTensor needs no group, and gives a DTensor.

    Returns:
        y, with the shape and dtype of `x`.

    y minimises -x.y - H(y), H the binary entropy, over 0 <= y <= 1 and sum y = k, which makes it
    y = sigmoid(x + nu) with one number nu per row. Its derivative is dy/dx = diag(w) - w w' / sum w with
    w = y (1 - y), and dy/dk = w / sum w. lml(x, 1) is close to a softmax, but not one.

    Rows without an ordinary answer get its limit: entries of -inf are 0 and do not count; where k or fewer
    entries are left, they are 1; p entries of +inf are 1, or k/p each if p > k; a NaN makes its row NaN.
    """
    if mask is None and offsets is None and group is None and solver == "newton" and bound == "exactly":
        y = common_lml(x, k, dim)
        if y is not None:
            return y
    return _project("lml", x, k, dim, mask, offsets, solver, bound, group)


def log_lml(
    x: Tensor,
    k: float | Tensor,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    solver: Solver = "newton",
    bound: Bound = "exactly",
    group: Any = None,
) -> Tensor:
    """The logarithm of `lml`, as log_softmax is to softmax: right also where lml rounds to 0 or 1.

        >>> torchlml.log_lml(torch.tensor([400.0, 0.0]), 1)
        tensor([   0., -200.])

    Arguments as for `lml`. Returns log y, with the shape and dtype of `x`.

    log y = logsigmoid(x + nu), and its derivative keeps its size however wrong the logits are:
    d log y_j / dx = (1 - y_j) (e_j - w / sum w).
    """
    return _project("log_lml", x, k, dim, mask, offsets, solver, bound, group)


def lml_dual(
    x: Tensor,
    k: float | Tensor,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    solver: Solver = "newton",
    bound: Bound = "exactly",
    group: Any = None,
) -> Tensor:
    """The dual variable of `lml`: the number nu for which sigmoid(x + nu) sums to k. -nu is the threshold.

        >>> torchlml.lml_dual(torch.zeros(4), 1)  # log(1/3)
        tensor(-1.0986)

    Arguments as for `lml`.

    Returns:
        nu, with the shape of `x` without `dim` (with `offsets`: one number per row) and the dtype of `x`;
        -inf for k = 0 and +inf where k entries or fewer are available. With `bound`, 0 where it is kept.
    """
    return _project("lml_dual", x, k, dim, mask, offsets, solver, bound, group)


def _project(
    name: str,
    x: Tensor,
    k: float | Tensor,
    dim: int,
    mask: Tensor | None,
    offsets: Tensor | None,
    solver: Solver,
    bound: Bound,
    group: Any,
) -> Tensor:
    if is_spread(x, group):
        from torchlml._distributed.calls import spread_projection

        return spread_projection(name, x, k, dim, mask, offsets, solver, bound, group)
    c = canonical(x, k, dim, mask, offsets, any_k=check_bound(bound) == "at_most", nested=True)
    result: Tensor = getattr(bounds, name)(c, check_solver(solver), bound)
    if c.outer is None:
        return result
    return c.restore_rows(result) if name == "lml_dual" else c.restore(result, dim)


class LML(nn.Module):
    """The projection as a layer: the last layer of a network that must choose k of n things.

        >>> model = nn.Sequential(nn.Linear(64, 100), torchlml.LML(k=5))
        >>> model(torch.randn(3, 64)).shape
        torch.Size([3, 100])

    Args:
        k: how many to choose, as for `lml`.
        dim: the dimension that sums to k.
        temperature: the logits are divided by it: towards 0 the layer becomes a hard top-k.
        solver: "newton" or "bracketing", as for `lml`.
        bound: "exactly", "at_most" or "at_least", as for `lml`.

    `forward` takes the logits and, by keyword, `mask` and `offsets` as `lml` does.
    """

    def __init__(
        self,
        k: float | Tensor,
        dim: int = -1,
        temperature: float = 1.0,
        solver: Solver = "newton",
        bound: Bound = "exactly",
    ) -> None:
        super().__init__()
        check_limit(k)
        check_temperature(temperature)
        check_solver(solver)
        check_bound(bound)
        self.k = k
        self.dim = dim
        self.temperature = temperature
        self.solver = solver
        self.bound = bound

    def forward(self, x: Tensor, *, mask: Tensor | None = None, offsets: Tensor | None = None) -> Tensor:
        # What is no tensor is refused below.
        scaled = x / self.temperature if self.temperature != 1 and isinstance(x, Tensor) else x
        return lml(scaled, self.k, self.dim, mask=mask, offsets=offsets, solver=self.solver, bound=self.bound)

    def extra_repr(self) -> str:
        settings = f"k={self.k}, dim={self.dim}, temperature={self.temperature}, solver={self.solver!r}"
        return settings if self.bound == "exactly" else f"{settings}, bound={self.bound!r}"
