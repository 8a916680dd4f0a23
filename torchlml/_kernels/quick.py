"""The operators in plain torch, fast: what runs on every device that has no kernel of its own.

Each takes a few passes over the rows and certifies what it found, row by row. The rows that it cannot vouch
for, among them all special ones, go through the careful operators of `reference.py`, and only they do. The
arguments are those of `reference.py`.

A GPU is waited for once in a call, to learn whether there are such rows. While a CUDA graph is captured
nothing may be waited for, so the careful operators do it all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchlml._core.rows import DenseRows, Rows, row_index, work_dtype
from torchlml._kernels import reference
from torchlml._kernels.cpu import native
from torchlml._kernels.reference import Pair
from torchlml.solvers.quick import Quick, can_look, quick

# Packed rows are padded to a power of two, from this one on: the bits of a row then depend on its own length.
_SHORTEST = 16
# Below this sum of w the shares w / sum w have lost digits to underflow.
_LEAST_SLOPE = {torch.float32: 1e-20, torch.float64: 1e-200}
_Dense = Callable[..., tuple[Tensor, Tensor, Tensor]]


def solve(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Tensor:
    """nu of every row."""
    return _project(x, k, mask, offsets, _nothing, lambda *rows: (rows[0], reference.solve(*rows)))[1]


def forward(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Pair:
    """(y, nu)."""
    return _project(x, k, mask, offsets, _y, reference.forward)


def log_forward(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None) -> Pair:
    """(log y, nu)."""
    return _project(x, k, mask, offsets, _log_y, reference.log_forward)


def backward(
    grad: Tensor, x: Tensor, y: Tensor, nu: Tensor, mask: Tensor | None, offsets: Tensor | None
) -> Pair:
    """(dx, dk) of `forward`."""
    return _differentiate(grad, x, y, nu, mask, offsets, _gradient, reference.backward)


def log_backward(
    grad: Tensor, x: Tensor, log_y: Tensor, nu: Tensor, mask: Tensor | None, offsets: Tensor | None
) -> Pair:
    """(dx, dk) of `log_forward`."""
    return _differentiate(grad, x, log_y, nu, mask, offsets, _log_gradient, reference.log_backward)


def shares_of_slope(x: Tensor, nu: Tensor, live: Tensor, rows: Rows) -> Pair:
    """(w / sum w, sum w) like `reference.shares_of_slope`; only rows that need it take logarithms."""
    if rows.count == 0 or not isinstance(rows, DenseRows) or not can_look(x):
        return reference.shares_of_slope(x, nu, live, rows)
    e = _shifted(x, nu).abs_().neg_().exp_()
    scratch = torch.add(e, 1)
    w = e.div_(scratch).div_(scratch)
    total = _sum(w)
    w.div_(total.to(w.dtype).unsqueeze(-1))
    left = (~(total > _LEAST_SLOPE[x.dtype])).nonzero().squeeze(-1)
    if left.numel():
        some = x[left]
        w[left], total[left] = reference.shares_of_slope(some, nu[:, left], live[left], DenseRows(some))
    return w, total


def _nothing(values: Tensor, found: Quick, nu: Tensor) -> Tensor:
    return values


def _y(values: Tensor, found: Quick, nu: Tensor) -> Tensor:
    return found.y()


def _log_y(values: Tensor, found: Quick, nu: Tensor) -> Tensor:
    return logsigmoid(_shifted(values, nu))


def _project(
    x: Tensor,
    k: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    result: Callable[[Tensor, Quick, Tensor], Tensor],
    careful: Callable[..., Pair],
) -> Pair:
    """(`result` of every row, nu)."""
    if x.device.type == "cpu":
        native.warn_of_absence()
    if _too_blind(x, offsets):
        return careful(x, k, mask, offsets)
    values = _values(x, mask)
    if offsets is None:
        found = quick(values, k)
        nu, certified = found.nu(), found.certified
        y = result(values, found, nu).to(x.dtype)
    else:
        y, nu = torch.empty_like(x), values.new_empty(2, offsets.numel() - 1)
        certified = torch.empty_like(nu[0], dtype=torch.bool)
        for group in _by_length(offsets):
            padded = group.pad(values, -torch.inf)
            found = quick(padded, _of(k, group.rows))
            nu[:, group.rows] = own = found.nu()
            certified[group.rows] = found.certified
            group.put(y, result(padded, found, own))
    left = (~certified).nonzero().squeeze(-1)
    if left.numel():
        some = _Some(x, offsets, left)
        own_y, own_nu = careful(some(x), _of(k, left), some(mask), some.offsets)
        some.put(y, own_y)
        nu[:, left] = own_nu
    return y, nu


def _differentiate(
    grad: Tensor,
    x: Tensor,
    y: Tensor,
    nu: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    gradient: _Dense,
    careful: Callable[..., Pair],
) -> Pair:
    """(dx, dk) of every row."""
    if _too_blind(x, offsets) or not can_look(x):
        return careful(grad, x, y, nu, mask, offsets)
    values = _values(x, mask)
    g = grad.to(values.dtype)
    if offsets is None:
        dx, dk, certified = gradient(g, values, nu)
        dx = dx.to(x.dtype)
    else:
        dx, dk = torch.empty_like(x), nu.new_empty(nu.shape[1:], dtype=torch.float64)
        certified = torch.empty_like(dk, dtype=torch.bool)
        for group in _by_length(offsets):
            own, own_dk, good = gradient(group.pad(g, 0.0), group.pad(values, -torch.inf), nu[:, group.rows])
            dk[group.rows], certified[group.rows] = own_dk, good
            group.put(dx, own)
    left = (~certified).nonzero().squeeze(-1)
    if left.numel():
        some = _Some(x, offsets, left)
        arguments = some(grad), some(x), some(y), nu[:, left], some(mask), some.offsets
        own_dx, dk[left] = careful(*arguments)
        some.put(dx, own_dx)
    return dx, dk


def _gradient(g: Tensor, x: Tensor, nu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dk, certified): dx = w (g - dk), dk = (w.g) / sum w."""
    e = _shifted(x, nu).abs_().neg_().exp_()
    scratch = torch.add(e, 1)
    w = e.div_(scratch).div_(scratch)
    total = _sum(w)
    dk = _sum(torch.mul(w, g, out=scratch)) / total
    torch.sub(g, dk.to(g.dtype).unsqueeze(-1), out=scratch)
    return w.mul_(scratch), dk, (total > 0) & dk.isfinite()


def _log_gradient(g: Tensor, x: Tensor, nu: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dk, certified): with a = g (1 - y), dx = a - (w / sum w) sum a, dk = sum a / sum w."""
    z = _shifted(x, nu)
    e = torch.abs(z).neg_().exp_()
    one = torch.add(e, 1)
    # 1 - y is 1 / (1 + e) where z <= 0 and e / (1 + e) elsewhere.
    a = torch.maximum(z.neg_().sign_(), e).div_(one).mul_(g)
    w = e.div_(one).div_(one)
    total, total_a = _sum(w), _sum(a)
    dk = total_a / total
    a.sub_(w.mul_(dk.to(w.dtype).unsqueeze(-1)))
    # Entries at -inf would need to be left out of a, and are found by their sum.
    good = (total > _LEAST_SLOPE[x.dtype]) & dk.isfinite() & _sum(x).isfinite()
    return a, dk, good


def _shifted(x: Tensor, nu: Tensor) -> Tensor:
    """z = (x + hi) + lo of dense rows, as a tensor of its own."""
    return torch.add(x, nu[0].unsqueeze(-1)).add_(nu[1].unsqueeze(-1))


def _sum(t: Tensor) -> Tensor:
    """The sum of each row in float64, the same for every number of threads: a lone row's would be split."""
    return (t.expand(2, -1) if t.shape[0] == 1 else t).sum(-1, dtype=torch.float64)[: t.shape[0]]


def _values(x: Tensor, mask: Tensor | None) -> Tensor:
    values = x.detach().to(work_dtype(x.dtype))
    return (values if mask is None else torch.where(mask, values, -torch.inf)).contiguous()


def _too_blind(x: Tensor, offsets: Tensor | None) -> bool:
    """Is there nothing to solve, or may the device not be waited for?"""
    if can_look(x):
        return x.numel() == 0
    capturing = x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return x.numel() == 0 or capturing or offsets is not None


def _of(k: Tensor, rows: Tensor) -> Tensor:
    return k if k.dim() == 0 else k[rows]


class _Group(NamedTuple):
    """Packed rows of about the same length: which, where their entries are, and which places are padding."""

    rows: Tensor
    place: Tensor
    valid: Tensor

    def pad(self, t: Tensor, fill: float) -> Tensor:
        return torch.where(self.valid, t[self.place.clamp(max=t.numel() - 1)], fill)

    def put(self, packed: Tensor, t: Tensor) -> None:
        packed[self.place[self.valid]] = t[self.valid].to(packed.dtype)


def _by_length(offsets: Tensor) -> Iterator[_Group]:
    lengths = offsets.diff()
    size = _SHORTEST
    below = lengths < 0
    while not bool(below.all()):
        fits = lengths <= size
        rows = (fits & ~below).nonzero().squeeze(-1)
        if rows.numel():
            step = torch.arange(size)
            yield _Group(rows, offsets[rows].unsqueeze(-1) + step, step < lengths[rows].unsqueeze(-1))
        below, size = fits, 2 * size


class _Some:
    """Some of the rows of a matrix or of a packed vector."""

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
