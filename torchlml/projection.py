"""The Limited Multi-Label projection: `lml`, its logarithm, dual variable and value, and the layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchlml._arguments import (
    Bound,
    canonical,
    check_bound,
    check_limit,
    check_temperature,
)
from torchlml._autograd import inequality, operators
from torchlml._autograd.fast_path import fast_lml
from torchlml._autograd.implicit import SolvedRows
from torchlml._autograd.operators import ROWS, operator
from torchlml._autograd.rule import Rule
from torchlml._distributed import is_sharded
from torchlml._rows import Rows, empty_nu, rows_of
from torchlml._solve.newton import shifted
from torchlml._torch import careful, fast


def lml(
    x: Tensor,
    k: float | Tensor,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
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
    if mask is None and offsets is None and group is None and bound == "exactly":
        y = fast_lml(x, k, dim)
        if y is not None:
            return y
    if is_sharded(x, group):
        from torchlml._distributed import calls

        return calls.project("lml", x, k, dim, mask, offsets, bound, group)
    c = canonical(x, k, dim, mask, offsets, any_k=check_bound(bound) == "at_most", nested=True)
    return c.restore(inequality.LML[bound](c.x, c.k, c.mask, c.offsets), dim)


def log_lml(
    x: Tensor,
    k: float | Tensor,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
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
    if is_sharded(x, group):
        from torchlml._distributed import calls

        return calls.project("log_lml", x, k, dim, mask, offsets, bound, group)
    c = canonical(x, k, dim, mask, offsets, any_k=check_bound(bound) == "at_most", nested=True)
    return c.restore(inequality.LOG_LML[bound](c.x, c.k, c.mask, c.offsets), dim)


def lml_dual(
    x: Tensor,
    k: float | Tensor,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
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
    if is_sharded(x, group):
        from torchlml._distributed import calls

        return calls.project("lml_dual", x, k, dim, mask, offsets, bound, group)
    c = canonical(x, k, dim, mask, offsets, any_k=check_bound(bound) == "at_most", nested=True)
    return c.restore_rows(inequality.LML_DUAL[bound](c.x, c.k, c.mask, c.offsets))


def lml_value(
    x: Tensor,
    k: float | Tensor,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The most that x.y + H(y) reaches over 0 <= y <= 1 and sum y = k; its gradient is lml(x, k).

        >>> torchlml.lml_value(torch.zeros(4), 1)  # 4 log 4 - 3 log 3
        tensor(2.2493)

    Arguments as for `torchlml.lml`.

    Returns:
        The value, with the shape of `x` without `dim` (with `offsets`: one number per row) and the dtype of
        `x`. Towards small temperatures T, T * lml_value(x / T, k) becomes the sum of the k largest entries.

    With H the binary entropy it is sum softplus(x + nu) - k nu; the derivative for k is -nu. For k = 0 it is
    0, where k entries or fewer are available it is their sum, and k then has no gradient. An entry of +inf
    makes it +inf, unless k is 0.
    """
    c = canonical(x, k, dim, mask, offsets, nested=True)
    return c.restore_rows(_value(c.x, c.k, c.mask, c.offsets))


class LML(nn.Module):
    """The projection as a layer: the last layer of a network that must choose k of n things.

        >>> model = nn.Sequential(nn.Linear(64, 100), torchlml.LML(k=5))
        >>> model(torch.randn(3, 64)).shape
        torch.Size([3, 100])

    Args:
        k: how many to choose, as for `lml`.
        dim: the dimension that sums to k.
        temperature: the logits are divided by it: towards 0 the layer becomes a hard top-k.
        bound: "exactly", "at_most" or "at_least", as for `lml`.
        group: the processes that share the entries of each row, as for `lml`.

    `forward` takes the logits and, by keyword, `mask` and `offsets` as `lml` does.
    """

    def __init__(
        self,
        k: float | Tensor,
        dim: int = -1,
        temperature: float = 1.0,
        bound: Bound = "exactly",
        group: Any = None,
    ) -> None:
        super().__init__()
        check_limit(k)
        check_temperature(temperature)
        check_bound(bound)
        self.k = k
        self.dim = dim
        self.temperature = temperature
        self.bound = bound
        self.group = group

    def forward(self, x: Tensor, *, mask: Tensor | None = None, offsets: Tensor | None = None) -> Tensor:
        # `lml` rejects inputs that are not tensors.
        scaled = x / self.temperature if self.temperature != 1 and isinstance(x, Tensor) else x
        return lml(scaled, self.k, self.dim, mask=mask, offsets=offsets, bound=self.bound, group=self.group)

    def extra_repr(self) -> str:
        settings = f"k={self.k}, dim={self.dim}, temperature={self.temperature}"
        return settings if self.bound == "exactly" else f"{settings}, bound={self.bound!r}"


def _value_forward(x: Tensor, *rest: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    value, nu = _value_operator(x, *rest)
    return value.to(x.dtype), (nu,)


def _value_backward(
    grad: Tensor, x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, nu: Tensor
) -> tuple[Tensor, Tensor]:
    """(dx, dk): y and -nu, each times the gradient of its row."""
    y, _ = operators.forward(x, k, mask, offsets)
    dk = torch.where(nu[0].isinf(), 0, -grad * nu.to(k.dtype).sum(0))
    return y.mul_(rows_of(x, offsets).broadcast(grad)), dk


def _value_reference(
    x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(value, nu): one wide number per row, and nu as `solve` gives it."""
    values, rows = careful.prepare(x, mask, offsets)
    nu = fast.solve(x, k, mask, offsets)
    z = shifted(values, nu, rows)
    up = z > 0
    # Infinite entries need no care here: e^-inf is 0, and +inf belongs in the sum.
    rest = rows.sum(torch.log1p(torch.exp(-z.abs())))
    tops = rows.sum(torch.where(up, values, 0))
    value = tops + (rows.sum(up) - k) * nu.to(rows.wide).sum(0) + rest
    return _fill_value(value, values, k, nu[0], rows), nu


_value_operator = operator(
    f"value(Tensor x, Tensor k, {ROWS}) -> (Tensor, Tensor)",
    _value_reference,
    lambda x, k, mask, offsets: (empty_nu(x, offsets)[0].to(k.dtype), empty_nu(x, offsets)),
)


def _value_differentiable(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
    """The same in ordinary operations. What nu adds to the first derivative is 0, to the second it is not."""
    solved = SolvedRows(x, k, mask, offsets)
    rows, hi, z = solved.rows, solved.hi, solved.z
    values = x.to(z.dtype)
    values = values if mask is None else torch.where(mask, values, -torch.inf)
    live = values.isfinite() & rows.broadcast(hi.isfinite())
    nu = (torch.where(hi.isinf(), 0, hi) + solved.lo) + solved.correction
    # sum softplus(z) - k nu, with each entry's share of nu taken out: for k near n they would cancel.
    up = live & (z > 0)
    # Without abs, which has no derivative at 0.
    rest = torch.log1p(torch.exp(torch.where(z > 0, -z, z)))
    tops = rows.sum(torch.where(up, torch.where(live, values, 0), 0))
    value = tops + (rows.sum(up.to(z.dtype)) - k.to(nu.dtype)) * nu + rows.sum(torch.where(live, rest, 0))
    return _fill_value(value, values, k, hi, rows).to(x.dtype)


def _fill_value(value: Tensor, x: Tensor, k: Tensor, hi: Tensor, rows: Rows) -> Tensor:
    """Put the limits where the formula has none: k = 0, k entries or fewer, entries of +inf."""
    available = x != -torch.inf
    value = torch.where(hi == torch.inf, rows.sum(torch.where(available, x, 0)), value)
    value = torch.where(hi == -torch.inf, 0, value)
    infinite = rows.sum(x == torch.inf) > 0
    return torch.where(infinite & (k > 0) & ~hi.isnan(), torch.inf, value)


_value = Rule(_value_forward, _value_backward, _value_differentiable)
