"""The LML loss as two operators, `torch.ops.torchlml.loss_forward` and `loss_backward`, in plain torch.

One pass gives the loss and all that its derivative needs; no matrix of probabilities is written. A compiled
kernel registers the same names under its device's key. Arguments, beside the canonical ones of
`reference.py`:

- labels: (R, L) int64, the classes of each row once each, -1 for none; or None where `label_weights` has the
  shape of x, a multi-hot (the only form of packed rows).
- label_weights: c, in the work dtype, of the shape of `labels` (None: 1 each) or of x; 0 means no label.
- loss: (R,) in the work dtype, -sum_j c_j log y_j over the labels j of the row.
- stats: (2, R) in the work dtype, A = sum_j c_j (1 - y_j) over the labels and log sum_i w_i over the row:

      dx_i = grad (A w_i / sum w - c_i (1 - y_i)),    dk = -grad A / sum w.

Rows that are not ordinary, in this order:

- no label: loss 0, stats (0, inf), dx 0, whatever the entries are;
- nu is NaN: loss, A and dx NaN;
- hi = +-inf: dx 0, stats (0, inf); but where p > k > 0 entries are +inf: A = sum of c over those of them that
  are labels and log sum w = log k, so that the formula for dk holds.

A label whose entry is absent (masked or -inf) makes the loss +inf and adds nothing to A; one at +inf neither
costs nor adds anything where nu is finite. Entries that are not finite have dx = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchlml import ops
from torchlml.reference import _fill, _live, _prepare, _share
from torchlml.rows import DenseRows, Rows, work_dtype
from torchlml.solvers.residual import shifted


def loss_forward(
    x: Tensor,
    k: Tensor,
    labels: Tensor | None,
    label_weights: Tensor | None,
    mask: Tensor | None,
    offsets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, nu, stats)."""
    values, rows = _prepare(x, mask, offsets)
    nu = ops.solve(x, k, mask, offsets)
    entries = values if labels is None else values.gather(-1, labels.clamp(min=0))
    c = _weights(labels, label_weights, values.dtype)
    z = shifted(entries, nu, rows)
    share = _share(values, k, nu, rows)
    log_y = _fill(logsigmoid(z), entries, nu, rows, absent=-torch.inf, infinite=share.log())
    loss = rows.sum(torch.where(c == 0, 0, -c * log_y))
    total = rows.sum(torch.where(_live(entries, nu, rows) & (c != 0), c * torch.sigmoid(-z), 0))
    log_w, largest = _log_slopes(values, nu, rows)
    slope = rows.sum(torch.exp(log_w - rows.spread(largest))).log() + largest
    # Below, the rows that are not ordinary.
    tied = (nu[0] == -torch.inf) & (share < 1) & (share > 0)
    tied_total = rows.sum(torch.where(entries == torch.inf, c, 0))
    total = torch.where(tied, tied_total, total)
    slope = torch.where(nu[0].isinf(), torch.where(tied, k.log(), torch.inf), slope)
    no_label = rows.sum(c != 0) == 0
    total = torch.where(no_label, 0, torch.where(nu[0].isnan(), torch.nan, total))
    slope = torch.where(no_label, torch.inf, slope)
    stats = torch.stack([total, slope]).to(values.dtype)
    return loss.to(values.dtype), nu, stats


def loss_backward(
    grad: Tensor,
    x: Tensor,
    nu: Tensor,
    stats: Tensor,
    labels: Tensor | None,
    label_weights: Tensor | None,
    mask: Tensor | None,
    offsets: Tensor | None,
) -> Tensor:
    """dx; `grad` is (R,) in the work dtype."""
    values, rows = _prepare(x, mask, offsets)
    total, slope = stats
    log_w, _ = _log_slopes(values, nu, rows)
    dx = rows.spread(grad * total) * torch.exp(log_w - rows.spread(slope))
    entries = values if labels is None else values.gather(-1, labels.clamp(min=0))
    c = _weights(labels, label_weights, values.dtype)
    own = torch.where(c == 0, 0, rows.spread(grad) * c * torch.sigmoid(-shifted(entries, nu, rows)))
    dx = dx - own if labels is None else dx.scatter_add(-1, labels.clamp(min=0), -own)
    dx = torch.where(_live(values, nu, rows), dx, 0)
    return torch.where(rows.spread(total.isnan()), torch.nan, dx).to(x.dtype)


def _weights(labels: Tensor | None, label_weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    if labels is None:
        assert label_weights is not None
        return label_weights
    return (labels >= 0).to(dtype) if label_weights is None else torch.where(labels >= 0, label_weights, 0)


def _log_slopes(values: Tensor, nu: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """log w of every entry, -inf where it has no derivative, and the largest of each row, or 0."""
    z = shifted(values, nu, rows).abs()
    log_w = torch.where(_live(values, nu, rows), -z - 2 * torch.log1p(torch.exp(-z)), -torch.inf)
    if isinstance(rows, DenseRows) and rows.length == 0:
        return log_w, nu.new_zeros(rows.count)
    largest = rows.max(log_w)
    return log_w, torch.where(largest.isfinite(), largest, 0)


_labelled = "Tensor? labels, Tensor? label_weights, Tensor? mask, Tensor? offsets"
_library = torch.library.Library("torchlml", "FRAGMENT")
_library.define(f"loss_forward(Tensor x, Tensor k, {_labelled}) -> (Tensor, Tensor, Tensor)")
_library.define(f"loss_backward(Tensor grad, Tensor x, Tensor nu, Tensor stats, {_labelled}) -> Tensor")
_library.impl("loss_forward", loss_forward, "CompositeExplicitAutograd")
_library.impl("loss_backward", loss_backward, "CompositeExplicitAutograd")

forward = torch.ops.torchlml.loss_forward.default
backward = torch.ops.torchlml.loss_backward.default


def _fake_forward(
    x: Tensor,
    k: Tensor,
    labels: Tensor | None,
    label_weights: Tensor | None,
    mask: Tensor | None,
    offsets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    count = x.shape[0] if offsets is None else offsets.shape[0] - 1
    loss = x.new_empty(count, dtype=work_dtype(x.dtype))
    return loss, loss.new_empty(2, count), loss.new_empty(2, count)


def _fake_backward(grad: Tensor, x: Tensor, *arguments: Tensor | None) -> Tensor:
    return torch.empty_like(x)


torch.library.register_fake("torchlml::loss_forward", _fake_forward, lib=_library)
torch.library.register_fake("torchlml::loss_backward", _fake_backward, lib=_library)
