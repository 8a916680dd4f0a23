"""Labeled rows in all formats that the loss operators accept, and comparisons with exact losses.

`test_losses_operators.py` uses them to test the CPU operators, and `triton_interpreted.py` to test the
interpreted Triton kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.support import truth
from tests.support.gradients import resolved, slack
from tests.support.special_rows import Special

Call = Callable[..., tuple[Tensor, Tensor]]
FORMS = ("one class", "list", "weighted list", "multi-hot", "weighted multi-hot")


@dataclass(frozen=True)
class LabeledRow:
    """A row, its k and mask, and the weight of each of its labels."""

    x: Tensor
    k: float
    mask: Tensor | None
    labels: dict[int, float]


@dataclass(frozen=True)
class Batch:
    """A batch of rows, as arguments of the loss operators."""

    rows: Sequence[LabeledRow]
    x: Tensor
    k: Tensor
    mask: Tensor | None
    offsets: Tensor | None
    labels: Tensor
    starts: Tensor | None
    weight: Tensor | None

    def parts(self, dx: Tensor) -> Sequence[Tensor]:
        return dx.unbind() if self.offsets is None else dx.tensor_split(self.offsets[1:-1])


def draw(form: str, lengths: Sequence[int], dtype: torch.dtype, masked: bool) -> list[LabeledRow]:
    """Draw random rows. The second row has no labels, and some labels of weighted rows have weight 0."""
    g, found = torch.Generator().manual_seed(0), []
    for i, n in enumerate(lengths):
        x = (3 * torch.randn(n, generator=g, dtype=torch.float64)).to(dtype)
        mask = torch.rand(n, generator=g) < 0.7 if masked else None
        places = torch.arange(n) if mask is None else mask.nonzero().flatten()
        if mask is not None:
            x[~mask] = torch.tensor([math.nan, math.inf, 3.0], dtype=dtype).repeat(n)[: n - len(places)]
        k = 0.2 + float(torch.rand((), generator=g)) * max(0.0, len(places) - 0.4)
        number = min(1 if form == "one class" else (1, 0, 40, 3)[i % 4], len(places)) if i != 1 else 0
        chosen = places[torch.randperm(len(places), generator=g)[:number]].tolist()
        counts = [float(torch.randint(4, (), generator=g)) / 2 if "weight" in form else 1.0 for _ in chosen]
        found.append(LabeledRow(x, k, mask, dict(zip(chosen, counts, strict=True))))
    return found


def batch(rows: Sequence[LabeledRow], form: str, packed: bool) -> Batch:
    """Convert rows to arguments of the loss operators, with padding in the label lists."""
    join = torch.cat if packed else torch.stack
    x = join([row.x for row in rows])
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    masks = [row.mask for row in rows]
    mask = None if masks[0] is None else join([m for m in masks if m is not None])
    ends = torch.tensor([row.x.numel() for row in rows]).cumsum(0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    counts = [torch.zeros(row.x.numel(), dtype=work) for row in rows]
    observed = [torch.zeros(row.x.numel(), dtype=torch.bool) for row in rows]
    for row, c, is_label in zip(rows, counts, observed, strict=True):
        for place, count in row.labels.items():
            c[place], is_label[place] = count, True
    starts = None
    if "multi-hot" in form:
        labels, weight = join(observed), join(counts)
    elif packed:
        lists = [[*(int(offsets[i]) + j for j in rows[i].labels), -1] for i in range(len(rows))]
        labels = torch.tensor([label for one in lists for label in one])
        weight = torch.tensor([c for row in rows for c in (*row.labels.values(), 5.0)], dtype=work)
        starts = torch.cat([offsets[:1], torch.tensor([len(one) for one in lists]).cumsum(0)])
    else:
        width = 1 if form == "one class" else max(len(row.labels) for row in rows) + 1
        gap = [-100] * width
        labels = torch.tensor([[*row.labels, *gap][:width] for row in rows])
        weight = torch.tensor([[*row.labels.values(), *[5.0] * width][:width] for row in rows], dtype=work)
    k = torch.tensor([row.k for row in rows], dtype=torch.float64)
    whole = weight if "weight" in form else None
    return Batch(rows, x, k, mask, offsets if packed else None, labels, starts, whole)


def check(call: Call, given: Batch) -> None:
    """Compare the loss and gradients of every row with exact results, within the tolerances for log_lml."""
    x = given.x
    rest = (given.mask, given.offsets, given.labels, given.starts, given.weight)
    loss, nu = call("loss_forward", x, given.k, *rest)
    grad = torch.linspace(0.5, 2, len(given.rows), dtype=nu.dtype)
    dx, dk = call("loss_backward", grad, x, given.k, nu, *rest)
    assert (loss.dtype, dx.dtype, dk.dtype) == (nu.dtype, x.dtype, torch.float64)
    assert loss[1].tolist() == [float(bool(row.labels)) for row in given.rows]
    for i, (row, found) in enumerate(zip(given.rows, given.parts(dx), strict=True)):
        if not any(row.labels.values()):
            assert float(loss[0, i]) == 0
            assert not bool(found.any())
            assert float(dk[i]) == 0
        elif row.x.numel():
            _check_row(row, float(grad[i]), float(loss[0, i]), found, float(dk[i]))


def _check_row(row: LabeledRow, g: float, loss: float, dx: Tensor, dk: float) -> None:
    right = truth.solve(row.x.double().numpy(), row.k, None if row.mask is None else row.mask.tolist())
    if not resolved(right):
        return
    c = np.zeros(row.x.numel())
    for place, count in row.labels.items():
        c[place] = count
    work = torch.float64 if row.x.dtype == torch.float64 else torch.float32
    allowed = slack(right, work)
    log_y = np.where(c > 0, right.log_y, 0.0)
    wanted = -float((c * log_y).sum())
    if max(wanted, -log_y.min()) > torch.finfo(work).max:  # the loss overflows, as log_lml would
        assert loss == math.inf
    else:
        size = float((c * np.maximum(1, np.abs(log_y))).sum())
        assert abs(loss - wanted) <= (2e-6 if work == torch.float32 else 1e-11) * size
    wanted_dx, wanted_dk = right.log_lml_gradient(-g * c)
    effect = g * c * (1 - right.y)
    rounding = 0.0 if row.x.dtype == work else torch.finfo(row.x.dtype).eps / 2
    limit = allowed * (effect + right.p * effect.sum()) + rounding * np.abs(wanted_dx)
    limit += 1e-12 if row.x.dtype == work else torch.finfo(row.x.dtype).smallest_normal
    error = np.abs(dx.double().numpy() - wanted_dx)
    assert bool((error <= limit).all()), (row, error.max())
    if right.sum_w > 1e-30:
        assert abs(dk - wanted_dk) <= 4 * allowed.min() * effect.sum() / right.sum_w


def available(row: Special) -> list[int]:
    """Return the indices of the unmasked entries of a special row, which may be labels."""
    return [j for j in range(len(row.x)) if row.mask is None or row.mask[j]]


def check_special(
    call: Call, rows: Sequence[Special], dtype: torch.dtype, places: Callable[[Special], Sequence[int]]
) -> None:
    """Check special rows in one jagged batch.

    Each row occurs once for each index in `places(row)`, which is then its only label.
    """
    every = [(row, j) for row in rows for j in places(row)]
    ones = [
        LabeledRow(
            torch.tensor(row.x, dtype=dtype),
            row.k,
            torch.tensor(row.mask or [True] * len(row.x)),
            {j: 1.0},
        )
        for row, j in every
    ]
    given = batch(ones, "list", packed=True)
    rest = (given.mask, given.offsets, given.labels, given.starts, given.weight)
    loss, nu = call("loss_forward", given.x, given.k, *rest)
    dx, dk = call("loss_backward", torch.tensor(2.0, dtype=nu.dtype), given.x, given.k, nu, *rest)
    for i, ((row, j), found) in enumerate(zip(every, given.parts(dx), strict=True)):
        wanted = -torch.tensor(row.y[j], dtype=torch.float64).log().to(nu.dtype)
        torch.testing.assert_close(loss[0, i], wanted, rtol=1e-6, atol=1e-6, equal_nan=True, msg=row.name)
        if math.isnan(row.nu):
            assert bool(found.isnan().all()), row.name
            assert math.isnan(dk[i])
        elif math.isinf(row.nu):
            assert not bool(found.any()), row.name
            infinite = sum(
                a == math.inf and (row.mask or [True] * len(row.x))[i] for i, a in enumerate(row.x)
            )
            shares = row.x[j] == math.inf and row.nu < 0 and infinite > row.k > 0
            assert float(dk[i]) == (-2 / row.k if shares else 0), row.name
        else:
            assert bool(found.isfinite().all()), row.name
