"""The fast operators in pure PyTorch, for every device without a dedicated kernel.

Each operator takes a few passes over the rows and certifies its result row by row. Rows without a
certificate, which include all rows without a finite nu, are computed by the careful operators in
`careful.py`. The arguments are those of `careful.py`.

On a GPU, a forward call with dense rows synchronizes once to find out whether there are rows without a
certificate. The careful operators, which do not synchronize, compute ragged rows and gradients on a GPU. They
also compute all rows while a CUDA graph is captured, because no synchronization is possible then.

The LML loss operators also take, as `*labels`,

- labels: int64 (R, L), the observed classes of each row. With `offsets`, it is int64 (P,) and contains
  positions in x; those of row i are `labels[starts[i]:starts[i + 1]]`. In both cases, negative numbers are
  padding, and no label occurs twice. Alternatively, `labels` is a bool tensor with the shape of x that is
  True for observed labels.
- starts: int64 (R + 1,), from 0 to P, if `labels` contains positions; otherwise None.
- weight: the weight of each label, in the work dtype and the shape of `labels`; None if all weights are 1.

A label outside its row makes the loss and the gradient of that row NaN. (`_targets.py` rejects such a label
only if it can read the labels without synchronizing.) A row whose labels all have weight 0 has loss 0 and
gradient 0, even if it contains a NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchlml._cpu import loader
from torchlml._rows import DenseRows, Rows, row_index, rows_of, shifted, sum_rows, work_dtype
from torchlml._solve.fast import FastSolution, on_host, solve_fast
from torchlml._torch import careful
from torchlml._torch.careful import Pair

# Ragged rows are padded to a power of two of at least this size, so that rounding depends only on the length.
_SHORTEST = 16
# Below this sum of w, the shares w / sum(w) have lost digits to underflow.
_LEAST_SLOPE = {torch.float32: 1e-20, torch.float64: 1e-200}
_sum = partial(sum_rows, dtype=torch.float64)


def solve(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
    """Compute nu for every row."""
    return _project(x, k, mask, offsets, None, lambda *rows: (rows[0], careful.solve(*rows)))[1]


def forward(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Pair:
    """Return (y, nu)."""
    return _project(x, k, mask, offsets, lambda values, found, nu: found.y(), careful.forward)


def log_forward(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Pair:
    """Return (log y, nu)."""

    def result(values: Tensor, found: FastSolution, nu: Tensor) -> Tensor:
        return logsigmoid(_shifted(values, nu))

    return _project(x, k, mask, offsets, result, careful.log_forward)


def backward(grad: Tensor, x: Tensor, y: Tensor, nu: Tensor, *rows: Tensor | None) -> Pair:
    """Return (dx, dk) for `forward`."""
    return _differentiate(_gradient, careful.backward, grad, x, y, nu, *rows)


def log_backward(grad: Tensor, x: Tensor, log_y: Tensor, nu: Tensor, *rows: Tensor | None) -> Pair:
    """Return (dx, dk) for `log_forward`."""
    return _differentiate(_log_gradient, careful.log_backward, grad, x, log_y, nu, *rows)


def shares_of_slope(x: Tensor, nu: Tensor, live: Tensor, rows: Rows) -> Pair:
    """Like `careful.shares_of_slope`, but compute logarithms only in rows in which w underflows."""
    if rows.count == 0 or not isinstance(rows, DenseRows) or not on_host(x):
        return careful.shares_of_slope(x, nu, live, rows)
    e = _shifted(x, nu).abs_().neg_().exp_()
    scratch = torch.add(e, 1)
    w = e.div_(scratch).div_(scratch)
    total = _sum(w)
    w.div_(total.to(w.dtype).unsqueeze(-1))
    left = (~(total > _LEAST_SLOPE[x.dtype])).nonzero().squeeze(-1)
    if left.numel():
        some = x[left]
        w[left], total[left] = careful.shares_of_slope(some, nu[:, left], live[left], DenseRows(some))
    return w, total


def _project(
    x: Tensor,
    k: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    result: Callable[[Tensor, FastSolution, Tensor], Tensor] | None,
    fallback: Callable[..., Pair],
) -> Pair:
    """Return (`result` for every row, nu). If `result` is None, return (x, nu) without copying x."""
    if x.device.type == "cpu":
        loader.warn_of_absence()
    if _needs_careful(x, offsets):
        return fallback(x, k, mask, offsets)
    values = _values(x, mask)
    if offsets is None:
        found = solve_fast(values, k)
        nu, certified = found.nu(), found.certified
        y = x if result is None else result(values, found, nu).to(x.dtype)
    else:
        nu = values.new_empty(2, offsets.numel() - 1)
        certified = torch.empty_like(nu[0], dtype=torch.bool)
        groups, padded_results = list(_by_length(offsets)), []
        for group in groups:
            padded = group.pad(values)
            found = solve_fast(padded, _of(k, group.rows))
            nu[:, group.rows] = own = found.nu()
            certified[group.rows] = found.certified
            if result is not None:
                padded_results.append(result(padded, found, own))
        y = x if result is None else _unpad(groups, padded_results, offsets, x.numel()).to(x.dtype)
    left = (~certified).nonzero().squeeze(-1)
    if left.numel():
        some = _Some(x, offsets, left)
        own_y, own_nu = fallback(some(x), _of(k, left), some(mask), some.offsets)
        if result is not None:
            some.put(y, own_y)
        nu[:, left] = own_nu
    return y, nu


def _differentiate(
    gradient: Callable[..., tuple[Tensor, Tensor, Tensor]],
    fallback: Callable[..., Pair],
    grad: Tensor,
    x: Tensor,
    y: Tensor,
    nu: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
) -> Pair:
    """Return (dx, dk) for every row."""
    # Padding ragged rows takes longer than the careful operator. On a GPU, looking for rows without a
    # certificate would synchronize.
    if x.numel() == 0 or offsets is not None or not on_host(x):
        return fallback(grad, x, y, nu, mask, offsets)
    values = _values(x, mask)
    dx, dk, certified = gradient(grad.to(values.dtype), values, nu)
    dx = dx.to(x.dtype)
    left = (~certified).nonzero().squeeze(-1)
    if left.numel():
        own_mask = None if mask is None else mask[left]
        dx[left], dk[left] = fallback(grad[left], x[left], y[left], nu[:, left], own_mask, None)
    return dx, dk


def _gradient(g: Tensor, x: Tensor, nu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx, dk, certified), where dx = w * (g - dk) and dk = sum(w * g) / sum(w)."""
    e = _shifted(x, nu).abs_().neg_().exp_()
    scratch = torch.add(e, 1)
    w = e.div_(scratch).div_(scratch)
    total = _sum(w)
    dk = _sum(torch.mul(w, g, out=scratch)) / total
    torch.sub(g, dk.to(g.dtype).unsqueeze(-1), out=scratch)
    return w.mul_(scratch), dk, (total > 0) & dk.isfinite()


def _log_gradient(g: Tensor, x: Tensor, nu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx, dk, certified).

    With a = g * (1 - y), dx = a - (w / sum(w)) * sum(a) and dk = sum(a) / sum(w).
    """
    z = _shifted(x, nu)
    e = torch.abs(z).neg_().exp_()
    one = torch.add(e, 1)
    # 1 - y is 1 / (1 + e) if z <= 0 and e / (1 + e) otherwise.
    a = torch.maximum(z.neg_().sign_(), e).div_(one).mul_(g)
    w = e.div_(one).div_(one)
    total, total_a = _sum(w), _sum(a)
    dk = total_a / total
    a.sub_(w.mul_(dk.to(w.dtype).unsqueeze(-1)))
    # Do not certify rows with entries of -inf, which would have to be excluded from `a`. The sum of x over
    # such a row is infinite.
    good = (total > _LEAST_SLOPE[x.dtype]) & dk.isfinite() & _sum(x).isfinite()
    return a, dk, good


def _shifted(x: Tensor, nu: Tensor) -> Tensor:
    """Return z = (x + hi) + lo for dense rows, as a new tensor."""
    return torch.add(x, nu[0].unsqueeze(-1)).add_(nu[1].unsqueeze(-1))


def _values(x: Tensor, mask: Tensor | None) -> Tensor:
    values = x.detach().to(work_dtype(x.dtype))
    return (values if mask is None else torch.where(mask, values, -torch.inf)).contiguous()


def _needs_careful(x: Tensor, offsets: Tensor | None) -> bool:
    """Whether x is empty or, on a GPU, the rows are ragged or a CUDA graph is being captured."""
    if on_host(x):
        return x.numel() == 0
    capturing = x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return x.numel() == 0 or capturing or offsets is not None


def _of(k: Tensor, rows: Tensor) -> Tensor:
    return k if k.dim() == 0 else k[rows]


class _Group(NamedTuple):
    """Ragged rows of similar length: their indices, starts and lengths, and the padded length."""

    rows: Tensor
    start: Tensor
    length: Tensor
    size: int

    def pad(self, values: Tensor) -> Tensor:
        """Return the rows as a matrix, padded with -inf."""
        step = torch.arange(self.size)
        place = (self.start.unsqueeze(-1) + step).clamp_(max=values.numel() - 1)
        padded = values.index_select(0, place.view(-1)).view(place.shape)
        return torch.where(step < self.length.unsqueeze(-1), padded, -torch.inf)


def _by_length(offsets: Tensor) -> Iterator[_Group]:
    lengths = offsets.diff()
    size, shorter = _SHORTEST, torch.zeros_like(lengths, dtype=torch.bool)
    while not bool(shorter.all()):
        fits = lengths <= size
        rows = (fits & ~shorter).nonzero().squeeze(-1)
        if rows.numel():
            yield _Group(rows, offsets[rows], lengths[rows], size)
        shorter, size = fits, 2 * size


def _unpad(groups: list[_Group], padded: list[Tensor], offsets: Tensor, entries: int) -> Tensor:
    """Concatenate the rows of all groups in their original order."""
    first, begin = torch.empty_like(offsets[1:]), 0
    for group in groups:
        first[group.rows] = begin + group.size * torch.arange(group.rows.numel())
        begin += group.size * group.rows.numel()
    place = (first - offsets[:-1]).index_select(0, row_index(offsets, entries)).add_(torch.arange(entries))
    return torch.cat([part.reshape(-1) for part in padded]).index_select(0, place)


class _Some:
    """A selection of rows from a matrix or from a ragged vector."""

    def __init__(self, x: Tensor, offsets: Tensor | None, rows: Tensor) -> None:
        self._place = rows
        self.offsets = None
        if offsets is not None:
            lengths = offsets.diff()[rows]
            self.offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            chosen = torch.zeros_like(offsets[1:], dtype=torch.bool).index_fill_(0, rows, True)
            self._place = chosen[row_index(offsets, x.numel())].nonzero().squeeze(-1)

    def __call__(self, t: Any) -> Any:
        return None if t is None else t[self._place]

    def put(self, t: Tensor, own: Tensor) -> None:
        t[self._place] = own


class _Observed(NamedTuple):
    """The listed labels: their logits, positions and weights (0 for padding), and their rows.

    If `labels` is a bool tensor, all entries are included, with weight 0 unless they are labels, and `place`
    is None.
    """

    is_label: Tensor
    entries: Tensor
    place: Tensor | None
    c: Tensor
    rows: Rows


def loss_forward(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, *labels: Any) -> Pair:
    """Return (losses, nu).

    `losses[0]` contains the loss of each row, -sum(c * log(y)), where c is the weight of a label. `losses[1]`
    is 1 for rows with a label and 0 for other rows.
    """
    nu = solve(x, k, mask, offsets)
    values, rows = careful.prepare(x, mask, offsets)
    at = _observe(values, rows, *labels)
    log_share = careful.infinite_share(values, k, nu, rows).log()
    log_y = logsigmoid(shifted(at.entries, nu, at.rows))
    log_y = careful.fill(log_y, at.entries, nu, at.rows, absent=-torch.inf, infinite=log_share)
    loss = at.rows.sum(torch.where(at.c == 0, 0, -at.c * log_y))
    return torch.stack([loss, (at.rows.sum(at.is_label) > 0).to(loss.dtype)]).to(nu.dtype), nu


def loss_backward(
    grad: Tensor, x: Tensor, k: Tensor, nu: Tensor, mask: Tensor | None, offsets: Tensor | None, *labels: Any
) -> Pair:
    """Return (dx, dk) for `loss_forward`, given a gradient g of shape () or (R,).

    With A = sum(c * (1 - y)) over the labels of a row,

        dx_i = g * (A * w_i / sum(w) - c_i * (1 - y_i)),    dk = -g * A / sum(w).
    """
    values, rows = careful.prepare(x, mask, offsets)
    if x.numel() == 0:
        return torch.empty_like(x), nu.new_zeros(nu.shape[1:], dtype=rows.wide)
    at = _observe(values, rows, *labels)
    live = careful.moving(values, nu, rows)
    z = shifted(at.entries, nu, at.rows)
    movable = ~at.entries.isinf() & at.rows.broadcast(nu[0].isfinite())
    own = torch.where(movable, at.c * careful.sigmoid(-z), 0)
    change = grad * at.rows.sum(own)
    share, slope = shares_of_slope(values, nu, live, rows)
    dx = torch.where(live, share * rows.broadcast(change.to(share.dtype)), 0)
    own = own * (grad if grad.dim() == 0 else at.rows.broadcast(grad))
    dx = dx - own if at.place is None else dx.scatter_add(-1, at.place, -own)
    # If k < p, log y = log(k/p) at each +inf entry. Its derivative with respect to k is 1/k.
    tied = at.rows.sum(torch.where(at.entries == torch.inf, at.c, 0))
    follows_k = (nu[0] == -torch.inf) & (k > 0) & (k < rows.sum(values == torch.inf)) & (tied != 0)
    dk = torch.where(nu[0].isinf() | (change == 0), 0, -change / slope)
    dk = torch.where(follows_k, -grad * tied / k, dk)
    dx, dk = careful.finish(dx, dk, x, nu, rows)
    counts = at.rows.sum(at.c != 0) > 0
    return torch.where(rows.broadcast(counts), dx, 0), torch.where(counts, dk, 0)


def _observe(
    values: Tensor, rows: Rows, labels: Tensor, starts: Tensor | None, weight: Tensor | None
) -> _Observed:
    if labels.dtype == torch.bool:
        is_label, entries, place, label_rows = labels, values, None, rows
    else:
        is_label, label_rows = labels >= 0, rows_of(labels, starts)
        place = labels.clamp(0, max(values.shape[-1] - 1, 0))
        entries = torch.full_like(labels, torch.nan, dtype=values.dtype)
        if values.numel():
            entries = torch.where(labels > place, torch.nan, values.gather(-1, place))
    c = is_label.to(values.dtype) if weight is None else torch.where(is_label, weight, 0)
    return _Observed(is_label, entries, place, c, label_rows)
