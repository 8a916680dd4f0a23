"""The operators of the LML loss in pure PyTorch: one number per row, and its derivatives.

In addition to the canonical arguments that `careful.py` describes, both operators take, as `*labels`,

- labels: int64 (R, L), the observed classes of each row; or int64 (P,) with `offsets`, positions into x,
  where those of row i are from `starts[i]` to `starts[i + 1]`. Negative values are padding, and no label
  occurs twice. Or a bool tensor with the shape of x, True for observed labels.
- starts: int64 (R + 1,), from 0 to P, for positions; otherwise None.
- weight: the weight of each label, in the work dtype and the shape of `labels`; None for 1.

A label outside its row makes that row NaN; only the CPU checks for it. A row whose labels all have weight 0
has loss 0 and no gradient, even if it contains a NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchlml._rows import Rows, rows_of
from torchlml._solve.newton import shifted
from torchlml._torch import careful, fast
from torchlml._torch.careful import Pair, prepare


class _Observed(NamedTuple):
    """The entries that are labels: their logits, positions and weights (0 for padding), and their rows."""

    is_label: Tensor
    entries: Tensor
    place: Tensor | None
    c: Tensor
    rows: Rows


def loss_forward(x: Tensor, k: Tensor, mask: Tensor | None, offsets: Tensor | None, *labels: Any) -> Pair:
    """((2, R): -sum c log y over the labels of each row, and 1 if the row has a label, else 0; nu)."""
    nu = fast.solve(x, k, mask, offsets)
    values, rows = prepare(x, mask, offsets)
    at = _observe(values, rows, *labels)
    log_share = careful.infinite_share(values, k, nu, rows).log()
    log_y = logsigmoid(shifted(at.entries, nu, at.rows))
    log_y = careful.fill(log_y, at.entries, nu, at.rows, absent=-torch.inf, infinite=log_share)
    loss = at.rows.sum(torch.where(at.c == 0, 0, -at.c * log_y))
    return torch.stack([loss, (at.rows.sum(at.is_label) > 0).to(loss.dtype)]).to(nu.dtype), nu


def loss_backward(
    grad: Tensor, x: Tensor, k: Tensor, nu: Tensor, mask: Tensor | None, offsets: Tensor | None, *labels: Any
) -> Pair:
    """Return (dx, dk) for a gradient that is 0-d or (R,).

    With A = sum c (1 - y) over the labels of a row,

        dx_i = g (A w_i / sum w - c_i (1 - y_i)),    dk = -g A / sum w.
    """
    values, rows = prepare(x, mask, offsets)
    if x.numel() == 0:
        return torch.empty_like(x), nu.new_zeros(nu.shape[1:], dtype=rows.wide)
    at = _observe(values, rows, *labels)
    live = careful.moving(values, nu, rows)
    z = shifted(at.entries, nu, at.rows)
    movable = ~at.entries.isinf() & at.rows.broadcast(nu[0].isfinite())
    own = torch.where(movable, at.c * careful.sigmoid(-z), 0)
    change = grad * at.rows.sum(own)
    share, slope = fast.shares_of_slope(values, nu, live, rows)
    dx = torch.where(live, share * rows.broadcast(change.to(share.dtype)), 0)
    own = own * (grad if grad.dim() == 0 else at.rows.broadcast(grad))
    dx = dx - own if at.place is None else dx.scatter_add(-1, at.place, -own)
    # If k < p, the +inf entries get k/p each, whose logarithm has the derivative 1/k.
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
