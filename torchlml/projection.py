"""The Limited Multi-Label projection `lml`, its logarithm, dual variable and value, and the module `LML`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchlml._arguments import Bound, canonical, check_bound, check_limit, check_temperature, is_sharded
from torchlml._autograd import operators, rule
from torchlml._autograd.implicit import SolvedRows
from torchlml._autograd.operators import ROWS, operator
from torchlml._autograd.rule import fast_lml
from torchlml._rows import Rows, empty_nu, rows_of, shifted
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
    """Project each row of logits onto the vectors with entries in [0, 1] that sum to k.

        >>> torchlml.lml(torch.tensor([2.0, 1.0, 0.0, -1.0]), 2)
        tensor([0.8176, 0.6225, 0.3775, 0.1824])

    Args:
        x: logits of any shape, or a nested tensor with the layout `torch.jagged`, for which the result is
            also nested.
        k: the number of entries to choose. A number, or a tensor that broadcasts to the shape of `x` without
            `dim` (with `offsets`: one number per row). It may be fractional, and the result is differentiable
            with respect to it.
        dim: the dimension along which the result sums to k.
        mask: a bool tensor that broadcasts to the shape of `x`, with True for entries that may be chosen. All
            other entries get exactly 0.
        offsets: row boundaries of a ragged batch. `x` is then 1-d, and row i is
            `x[offsets[i]:offsets[i + 1]]`.
        bound: "exactly", "at_most" or "at_least". With the last two, k only limits the sum: a row of
            `sigmoid(x)` that already satisfies the limit is returned unchanged. With "at_most", k may exceed
            the number of entries.
        group: the processes across which the entries of each row are sharded, as a ProcessGroup or a
            one-dimensional DeviceMesh. `x` and `mask` contain only the shard of this process. The shards are
            ordered by rank. All other arguments must be the same on every process. If `x` is a DTensor, no
            group is needed, and the result is also a DTensor.

    Returns:
        y, with the shape and dtype of `x`. Under autocast, half-precision inputs give a float32 result.

    y maximizes dot(x, y) + H(y) subject to 0 <= y <= 1 and sum(y) = k, where H(y) is the sum of the binary
    entropies of the entries. The solution is y = sigmoid(x + nu) with one number nu per row. Its derivatives
    are dy/dx = diag(w) - outer(w, w) / sum(w) and dy/dk = w / sum(w), where w = y * (1 - y). lml(x, 1) is
    similar to softmax(x), but not equal to it.

    An entry is available unless it is masked or -inf. Unavailable entries get 0. If at most k entries are
    available, each of them gets 1. If p entries are +inf, each of them gets 1, or k/p if p > k. These values
    are limits of the solution. A NaN makes its whole row NaN.
    """
    if type(x) is Tensor and group is None:
        if mask is None and offsets is None and bound == "exactly":
            y = fast_lml(x, k, dim)
            if y is not None:
                return y
    elif is_sharded(x, group):
        from torchlml._distributed.projection import project

        return project("lml", x, k, dim, mask, offsets, bound, group)
    any_k = bound != "exactly" and check_bound(bound) == "at_most"
    c = canonical(x, k, dim, mask, offsets, any_k=any_k, nested=True)
    return c.restore(rule.LML[bound](c.x, c.k, c.mask, c.offsets), dim)


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
    """Compute the logarithm of `lml`, accurately even where `lml` rounds to 0 or 1.

        >>> torchlml.log_lml(torch.tensor([400.0, 0.0]), 1)
        tensor([   0., -200.])

    The arguments are those of `lml`.

    Returns:
        log(y), where y = lml(x, k), with the shape and dtype of `x`.

    log(y) equals logsigmoid(x + nu). Its derivative does not vanish, no matter how small y is:
    d(log y_j)/dx = (1 - y_j) * (e_j - w / sum(w)), where e_j is the j-th unit vector and w = y * (1 - y).
    """
    if is_sharded(x, group):
        from torchlml._distributed.projection import project

        return project("log_lml", x, k, dim, mask, offsets, bound, group)
    any_k = bound != "exactly" and check_bound(bound) == "at_most"
    c = canonical(x, k, dim, mask, offsets, any_k=any_k, nested=True)
    return c.restore(rule.LOG_LML[bound](c.x, c.k, c.mask, c.offsets), dim)


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
    """Compute the dual variable nu of `lml`, for which sigmoid(x + nu) sums to k.

        >>> torchlml.lml_dual(torch.zeros(4), 1)  # log(1/3)
        tensor(-1.0986)

    The arguments are those of `lml`.

    Returns:
        nu, with the shape of `x` without `dim` (with `offsets`: one number per row) and the dtype of `x`. It
        is -inf if k = 0 and +inf if at most k entries are available. With `bound` "at_most" or "at_least", it
        is 0 for rows that already satisfy the limit.

    -nu acts as a threshold: `lml` is above 1/2 for the entries of `x` that exceed -nu.
    """
    if is_sharded(x, group):
        from torchlml._distributed.projection import project

        return project("lml_dual", x, k, dim, mask, offsets, bound, group)
    any_k = bound != "exactly" and check_bound(bound) == "at_most"
    c = canonical(x, k, dim, mask, offsets, any_k=any_k, nested=True)
    return c.restore_rows(rule.LML_DUAL[bound](c.x, c.k, c.mask, c.offsets))


def lml_value(
    x: Tensor,
    k: float | Tensor,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Compute the maximum of dot(x, y) + H(y) over 0 <= y <= 1 with sum(y) = k. Its gradient is lml(x, k).

        >>> torchlml.lml_value(torch.zeros(4), 1)  # 4 * log(4) - 3 * log(3)
        tensor(2.2493)

    Args:
        x, k, dim, mask, offsets: as for `lml`.

    Returns:
        The value, with the shape of `x` without `dim` (with `offsets`: one number per row) and the dtype of
        `x`.

    H(y) is the sum of the binary entropies of the entries. The value equals sum(softplus(x + nu)) - k * nu,
    and its derivative with respect to k is -nu. As the temperature T goes to 0, T * lml_value(x / T, k)
    approaches the sum of the k largest entries. The value is 0 for k = 0. If at most k entries are available,
    the value is their sum, and its derivative with respect to k is 0. An entry of +inf makes the value +inf,
    unless k is 0.
    """
    c = canonical(x, k, dim, mask, offsets, nested=True)
    return c.restore_rows(_value(c.x, c.k, c.mask, c.offsets))


class LML(nn.Module):
    """The projection `lml` as a module, typically the last layer of a network that chooses k of n items.

        >>> model = nn.Sequential(nn.Linear(64, 100), torchlml.LML(k=5))
        >>> model(torch.randn(3, 64)).shape
        torch.Size([3, 100])

    Args:
        k: the number of entries to choose, as for `lml`.
        dim: the dimension along which the result sums to k.
        temperature: the number by which the logits are divided. As it goes to 0, the layer approaches a hard
            top-k.
        bound: "exactly", "at_most" or "at_least", as for `lml`.
        group: the processes across which the entries of each row are sharded, as for `lml`.

    `forward` takes the logits and the keyword arguments `mask` and `offsets` of `lml`.
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
        # Do not divide an input that is not a tensor, so that `lml` can reject it.
        scaled = x / self.temperature if self.temperature != 1 and isinstance(x, Tensor) else x
        return lml(scaled, self.k, self.dim, mask=mask, offsets=offsets, bound=self.bound, group=self.group)

    def extra_repr(self) -> str:
        settings = f"k={self.k}, dim={self.dim}, temperature={self.temperature}"
        return settings if self.bound == "exactly" else f"{settings}, bound={self.bound!r}"


def _value_forward(x: Tensor, *rest: Tensor | None) -> tuple[Tensor, Tensor]:
    value, nu = _value_operator(x, *rest)
    return value.to(x.dtype), nu


def _value_backward(
    grad: Tensor, x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, nu: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to x and k: y and -nu, each times the output gradient of its row."""
    y, _ = operators.forward(x, k, mask, offsets)
    dk = torch.where(nu[0].isinf(), 0, -grad * nu.to(k.dtype).sum(0))
    return y.mul_(rows_of(x, offsets).broadcast(grad)), dk


def _value_reference(
    x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the value of each row, in the wide dtype, and nu in the format that `solve` returns."""
    values, rows = careful.prepare(x, mask, offsets)
    nu = fast.solve(x, k, mask, offsets)
    z = shifted(values, nu, rows)
    up = z > 0
    # Infinite entries need no special handling here: e^-inf is 0, and +inf belongs in the sum.
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
    """Compute the value with differentiable operations.

    The derivatives of nu affect only second and higher derivatives of the value.
    """
    solved = SolvedRows(x, k, mask, offsets)
    rows, hi, z = solved.rows, solved.hi, solved.z
    values = x.to(z.dtype)
    values = values if mask is None else torch.where(mask, values, -torch.inf)
    live = values.isfinite() & rows.broadcast(hi.isfinite())
    nu = (torch.where(hi.isinf(), 0, hi) + solved.lo) + solved.correction
    # This is sum(softplus(z)) - k * nu, with all multiples of nu collected in one term, because they nearly
    # cancel for k near n.
    up = live & (z > 0)
    # Avoid abs, which has no derivative at 0.
    rest = torch.log1p(torch.exp(torch.where(z > 0, -z, z)))
    tops = rows.sum(torch.where(up, torch.where(live, values, 0), 0))
    value = tops + (rows.sum(up.to(z.dtype)) - k.to(nu.dtype)) * nu + rows.sum(torch.where(live, rest, 0))
    return _fill_value(value, values, k, hi, rows).to(x.dtype)


def _fill_value(value: Tensor, x: Tensor, k: Tensor, hi: Tensor, rows: Rows) -> Tensor:
    """Fill in the limit of the value where the formula does not apply.

    The formula does not apply if k = 0, if at most k entries are available, or if an entry is +inf.
    """
    available = x != -torch.inf
    value = torch.where(hi == torch.inf, rows.sum(torch.where(available, x, 0)), value)
    value = torch.where(hi == -torch.inf, 0, value)
    infinite = rows.sum(x == torch.inf) > 0
    return torch.where(infinite & (k > 0) & ~hi.isnan(), torch.inf, value)


_value = rule.Rule(_value_forward, _value_backward, _value_differentiable)
