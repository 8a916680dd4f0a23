"""How far a row is from summing to k, accurate even when almost every entry is saturated.

Adding up y = sigmoid(z) and subtracting k fails exactly where it matters: half a million entries at
y = 1 - 2e-9 all round to 1, yet together they take 1e-3 from the one entry that is undecided. So each entry
counts as its nearer integer plus or minus t = sigmoid(-|z|), which keeps full relative accuracy:

    S - k = c + P - Q,   c = #(z > 0) - k,   P = sum of t where z <= 0,   Q = sum of t where z > 0.

The slope of S is sum w with w = t (1 - t) >= t / 2, so a relative error of 1e-7 in P and Q is an error of
2e-7 in nu, whatever the row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchlml._rows import Rows


class Residual(NamedTuple):
    """The parts of S - k for each row, all times e^scale: `c`, P, Q and the slopes dP/dnu and -dQ/dnu."""

    c: Tensor
    p: Tensor
    q: Tensor
    dp: Tensor
    dq: Tensor

    @property
    def value(self) -> Tensor:
        return self.c + (self.p - self.q)

    @property
    def slope(self) -> Tensor:
        return self.dp + self.dq


def shifted(x: Tensor, nu: Tensor, rows: Rows) -> Tensor:
    """z = x + nu, nu = hi + lo: x + hi is exact near the threshold, so logits shifted by 1e7 lose nothing."""
    hi, lo = nu
    return (x + rows.spread(hi)) + rows.spread(lo)


def residual(x: Tensor, k: Tensor, nu: Tensor, scale: Tensor, rows: Rows) -> Residual:
    """Evaluate S - k at `nu` (2, R), with everything multiplied by e^scale.

    In the middle of a gap of 400 between two logits every t underflows, and still it is their balance that
    defines nu: `scale` (R,), the distance of the nearest entry from the threshold, keeps them in range.
    """
    z = shifted(x, nu, rows)
    up = z > 0
    # e^scale e^-|z|. No entry is nearer than `scale`, so the exponent is at most 0; but a z of 1e20 may be
    # rounded to be nearer by thousands, which must not overflow: the exponent is then 1.
    e = torch.exp((rows.spread(scale) - z.abs()).clamp(max=1))
    shrink = rows.spread(torch.exp(-scale))
    t = e / (1 + e * shrink)
    w = t / (1 + e * shrink)
    zero = torch.zeros((), dtype=t.dtype, device=t.device)
    c = rows.sum(up) - k
    # 0 times an overflowing e^scale is 0 here, not NaN: the row is on its right step.
    c = torch.where(c == 0, 0.0, c * scale.to(rows.wide).exp())
    return Residual(
        c=c,
        p=rows.sum(torch.where(up, zero, t)),
        q=rows.sum(torch.where(up, t, zero)),
        dp=rows.sum(torch.where(up, zero, w)),
        dq=rows.sum(torch.where(up, w, zero)),
    )
