"""Solve for the dual variable nu of rows whose labels are sharded across processes.

1. Survey, in one round of communication. A process with n_p of the n labels solves its own part of each row
   for k * (n_p / n) instead of k. These targets sum to k, so the root lies between the smallest and the
   largest local nu. If the parts are similar, every local nu is close to the root. The Taylor series of all
   parts give an initial estimate.
2. Evaluation, in one round per iteration. The processes add up the sums from `evaluate` at one point, or at
   several if the interval is wide, until a point is so close to the root that its Taylor series gives the
   root to machine precision.
3. For rows with a wide interval, or a wide gap between logits at the threshold, `threshold.py` first finds
   the entries at the threshold in a few rounds. In a gap wider than 80, the solution has a closed form.

Each sum is one float64 number per row. An entry of y is written as 0 or 1, whichever is nearer, plus or minus
t = sigmoid(-|z|), as in `_solve/newton.py`. The sums include derivatives of S(nu) = sum(sigmoid(x + nu)).
From one evaluation near the root, Taylor series therefore give the root and everything that depends on it
without another round.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from torchlml._autograd import operators
from torchlml._distributed.group import LabelGroup, LabelSplit, add_up
from torchlml._distributed.threshold import find_threshold, solve_gap

# `threshold.py` handles rows whose interval is wider than `_WIDE` or whose entries are all farther than
# `_WIDE` from the threshold. If the gap around the threshold is wider than `_GAP`, it uses a closed form.
_WIDE = 150.0
_GAP = 80.0
# The interval is widened by this margin, because the local roots that bound it have rounding errors.
_MARGIN = 1e-3
# The largest distance at which the Taylor series is used. The fifth-order term is then below the precision of
# the dtype.
_NEAR = {torch.float32: 0.03, torch.float64: 1e-3}
# The number of entries evaluated at once. On the CPU, they fit in the cache and are too few for torch to
# split across threads.
_BLOCK_ON_CPU = 2**15
_BLOCK = 2**24
# Beyond this, e^-|z| is negligible in a row whose nearest entry is within 150 of the threshold.
_FAR = 500.0
_SUMS = 8  # numbers per row and point in the result of `evaluate`


class FiniteLabels(NamedTuple):
    """The labels of this process at finite entries: their rows, logits and weights."""

    row: Tensor
    x: Tensor
    weight: Tensor

    def of(self, rows: Tensor, count: int) -> FiniteLabels:
        """Return the labels in the selected rows, with these rows renumbered from 0."""
        number = torch.full((count,), -1, dtype=torch.int64, device=rows.device)
        number[rows] = torch.arange(rows.numel(), device=rows.device)
        found = number[self.row]
        here = found >= 0
        return FiniteLabels(found[here], self.x[here], self.weight[here])


class _Part(NamedTuple):
    """The columns of this process: entries in the work dtype (-inf if absent), and observed labels."""

    x: Tensor
    k: Tensor  # (R,), float64
    labels: FiniteLabels | None
    marks: Tensor | None


class Solution(NamedTuple):
    """The solution for all rows, identical on every process.

    Each field has one number per row, except that `nu` is a pair (2, R) as in `_torch/careful.py` and `marks`
    has several columns. `log_slope` is log(sum(w)). `share` is y at +inf entries, and `infinite` is their
    number. `free` marks the rows in which nu = 0 satisfies an inequality bound, so that nu depends on
    neither x nor k. For labels with weight c at finite entries, `loss` is the sum of -c * log(y), and
    `change` is the sum of c * (1 - y). `marks` contains the numbers passed to `solve` as `marks`, summed over
    all processes.
    """

    nu: Tensor
    log_slope: Tensor
    share: Tensor
    infinite: Tensor
    free: Tensor
    loss: Tensor
    change: Tensor
    marks: Tensor


class _Survey(NamedTuple):
    ordinary: Tensor
    special: Tensor  # nu for the rows that are not ordinary
    infinite: Tensor
    available: Tensor
    nearest: Tensor
    at_zero: Tensor | None  # S(0) - k; None unless the bound is an inequality
    base: Tensor
    low: Tensor
    high: Tensor
    estimate: Tensor
    width: Tensor  # the width of the interval; infinite if no local root is finite
    marks: Tensor


def prepare(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the entries of this process in the work dtype, with masked entries set to -inf."""
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    return values if mask is None else torch.where(mask, values, -torch.inf)


def solve(
    x: Tensor, k: Tensor, split: LabelSplit, labels: FiniteLabels | None = None, marks: Tensor | None = None
) -> Solution:
    """Solve sum(sigmoid(x + nu)) = k for every row.

    If `split.bound` is an inequality, nu is 0 in the rows in which nu = 0 satisfies it.

    Args:
        x: (R, n), the entries of this process from `prepare`.
        k: 0-d or (R,).
        split: the number of labels on every process, and the bound.
        labels: the labels of this process at finite entries, if their loss is needed.
        marks: (R, c), numbers to sum over all processes in the same round as the survey.
    """
    group, bound = split.group, split.bound
    part = _Part(x.contiguous(), k.to(torch.float64).expand(x.shape[0]), labels, marks)
    s = _survey(part, split)
    free = torch.zeros_like(s.ordinary)
    if s.at_zero is not None:
        limit, keeps = (torch.inf, s.at_zero <= 0) if bound == "at_most" else (-torch.inf, s.at_zero >= 0)
        free = torch.where(s.ordinary, keeps, s.special == limit)
    state = _State(*torch.zeros(5, x.shape[0], dtype=torch.float64, device=x.device))
    state.base[:] = torch.where(s.ordinary & ~free, s.base, 0)
    to_solve = s.ordinary & ~free
    narrow = (s.high - s.low <= _WIDE) & (s.nearest <= _WIDE)
    easy, hard = (to_solve & narrow).nonzero().flatten(), (to_solve & ~narrow).nonzero().flatten()
    low, high, estimate, width = s.low.clone(), s.high.clone(), s.estimate.clone(), s.width.clone()
    closed = hard[:0]
    if hard.numel():
        finite_k, finite = (part.k - s.infinite)[hard], (s.available - s.infinite)[hard]
        found = find_threshold(part.x[hard], finite_k, finite, group)
        state.base[hard], low[hard], high[hard] = found.base, found.low - _MARGIN, found.high + _MARGIN
        estimate[hard], width[hard] = (low[hard] + high[hard]) / 2, high[hard] - low[hard]
        wide = found.gap > _GAP
        closed = hard[wide]
        if closed.numel():
            solved = solve_gap(part.x[closed], found.upper[wide], found.lower[wide], group)
            state.shift[closed], state.log_slope[closed] = solved
        easy = torch.cat([easy, hard[~wide]]).sort().values
    _iterate(part, state, easy, low, high, estimate, width, group)
    if part.labels is not None:
        # Labels in rows without iterations (free or solved in closed form) have not been evaluated yet.
        rest = torch.cat([closed, free.nonzero().flatten()]).sort().values
        if rest.numel():
            own = part.labels.of(rest, x.shape[0])
            of_labels = group.sum(evaluate_labels(own, state.base[rest], state.shift[None, rest])[0])
            state.loss[rest], state.change[rest] = of_labels[:, 0], of_labels[:, 1]
    # Split base + shift into (hi, lo) in the dtype of the entries.
    hi = (state.base + state.shift).to(x.dtype)
    nu = torch.stack([hi, ((state.base - hi.double()) + state.shift).to(x.dtype)])
    nu = torch.where(to_solve | free, nu, torch.stack([s.special, torch.zeros_like(s.special)]).to(nu.dtype))
    share = (part.k / s.infinite).clamp(0, 1)
    share = torch.where(nu[0] == -torch.inf, share, 1).to(nu.dtype)
    return Solution(nu, state.log_slope, share, s.infinite, free, state.loss, state.change, s.marks)


class _State(NamedTuple):
    """The results, which are filled in for different rows at different steps. nu is base + shift."""

    base: Tensor
    shift: Tensor
    log_slope: Tensor
    loss: Tensor
    change: Tensor


def _survey(part: _Part, split: LabelSplit) -> _Survey:
    x, k, group = part.x, part.k, split.group
    rows, labels = x.shape
    finite = x.isfinite()
    column = x.new_zeros(rows, dtype=torch.float64)
    nu = torch.stack([column, column]).to(x.dtype)
    if labels:
        nu = operators.solve(x, k * (labels / split.total), None, None)
    root = torch.where(nu.isfinite().all(0), nu, 0).double()
    local = evaluate(x, root[0], root[1:])[0]
    shifted = (x.double() + root[0, :, None]) + root[1, :, None]
    nearest = torch.where(finite, shifted.abs(), torch.inf)
    message = [
        (x != -torch.inf).sum(-1),
        (x == torch.inf).sum(-1),
        x.isnan().sum(-1),
        torch.where(finite, x, -torch.inf).amax(-1) if labels else column - torch.inf,
        torch.where(finite, x, torch.inf).amin(-1) if labels else column + torch.inf,
        nu[0],
        nu[1],
        nearest.amin(-1) if labels else column + torch.inf,
        column + float(labels > 0),
        *local.unbind(-1),
    ]
    if split.bound != "exactly":  # only inequality bounds need this extra pass over the entries
        zero = evaluate(x, torch.zeros_like(column), torch.zeros_like(root[1:]))[0]
        message += zero[:, :3].unbind(-1)
    marks = column[:, None][:, :0] if part.marks is None else part.marks
    parts = group.gather(torch.cat([torch.stack([number.double() for number in message], -1), marks], -1))
    m, p, undefined = (add_up(parts[..., i]) for i in range(3))
    ordinary = (p < k) & (k < m) & (undefined == 0) & ~k.isnan()
    special = torch.where((k > 0) & (k >= m), torch.inf, -torch.inf)
    special = torch.where((undefined > 0) | k.isnan(), torch.nan, special)
    largest, smallest = parts[..., 3].amax(0), parts[..., 4].amin(0)
    hi, lo, here = parts[..., 5], parts[..., 6], parts[..., 8] > 0
    known = here & hi.isfinite()
    # Roots are stored relative to the root of the first process whose root is finite.
    first = known.to(torch.int8).argmax(0, keepdim=True)
    base = torch.where(known.any(0), hi.gather(0, first).squeeze(0), -(largest / 2 + smallest / 2))
    base = torch.where(base.isfinite(), base, 0)
    place = torch.where(known, (hi - base) + lo, hi)  # infinite roots stay infinite
    low = torch.where(here, place, torch.inf).amin(0) - _MARGIN
    high = torch.where(here, place, -torch.inf).amax(0) + _MARGIN
    odds = ((k - p) / (m - k)).log()
    low = torch.maximum(low, (-largest - base) + (odds - _MARGIN))
    high = torch.minimum(high, (-smallest - base) + (odds + _MARGIN))
    estimate = _estimate(parts[..., 9:17], known, place, parts[..., 0], k, low, high)
    at_zero = None
    if split.bound != "exactly":
        up, down, above = (add_up(parts[..., i]) for i in (17, 18, 19))
        at_zero = (up - k) + (down - above)
    return _Survey(
        ordinary=ordinary,
        special=special,
        infinite=p,
        available=m,
        nearest=parts[..., 7].amin(0),
        at_zero=at_zero,
        base=base,
        low=low,
        high=high,
        estimate=estimate,
        width=torch.where(known.any(0), high - low, torch.inf),
        marks=add_up(parts[..., len(message) :]),
    )


def _estimate(
    parts: Tensor, known: Tensor, place: Tensor, available: Tensor, k: Tensor, low: Tensor, high: Tensor
) -> Tensor:
    """Estimate the point at which the Taylor series of all parts, each around its own root, sum to k."""
    up, down, above, dp, dq, d2, d3, d4 = parts.unbind(-1)
    slope = torch.where(known, dp + dq, 0)
    place = torch.where(known, place, 0)
    total = torch.where(known, up + (down - above), available)
    found = add_up(slope * place) / add_up(slope)
    found = torch.where(found.isfinite(), found, (low + high) / 2)
    for _ in range(4):
        step = (found - place).clamp(-2, 2)
        value = total + step * (slope + step / 2 * (d2 + step / 3 * (d3 + step / 4 * d4)))
        speed = slope + step * (d2 + step / 2 * (d3 + step / 3 * d4))
        move = (add_up(torch.where(known, value, available)) - k) / add_up(torch.where(known, speed, 0))
        found = torch.where(move.isfinite(), found - move.clamp(-1, 1), found)
        found = torch.minimum(torch.maximum(found, low), high)
    return found


def _iterate(
    part: _Part,
    state: _State,
    rows: Tensor,
    low: Tensor,
    high: Tensor,
    estimate: Tensor,
    width: Tensor,
    group: LabelGroup,
) -> None:
    """Evaluate, one round at a time, until every row has a point near its root; store results in `state`."""
    low, high, estimate = low[rows], high[rows], estimate[rows]
    widest = float(width[rows].amax()) if rows.numel() else 0.0
    # Points have the shape (D, R): D = 1 if every row has a good estimate, more otherwise.
    if widest <= 0.3:
        points = estimate[None]
    elif widest <= 1:
        around = torch.tensor([0.0, -0.06, 0.06], dtype=low.dtype, device=low.device)
        points = (estimate + around[:, None]).clamp(low, high)
    else:
        points = _with_even([estimate[None]], low, high, widest)
    number = 0
    while rows.numel():
        number += 1
        x, base, k = part.x[rows], state.base[rows], part.k[rows]
        own = [evaluate(x, base, points)]
        if part.labels is not None:
            own.append(evaluate_labels(part.labels.of(rows, part.k.shape[0]), base, points))
        # Send the points too, so that all processes continue from bitwise identical points.
        parts = group.gather(torch.cat([*own, points[..., None]], -1))
        total, points = add_up(parts[..., :-1]), parts[0, ..., -1]
        up, down, above, dp, dq, d2, d3, d4 = total[..., :_SUMS].unbind(-1)
        r, slope = (up - k) + (down - above), dp + dq
        # The step from each point to the root of its series, computed by bitwise reproducible operations.
        step = torch.where(r == 0, 0, -r / slope)
        for _ in range(3):
            value = r + step * (slope + step / 2 * (d2 + step / 3 * (d3 + step / 4 * d4)))
            speed = slope + step * (d2 + step / 2 * (d3 + step / 3 * d4))
            step = torch.where(r == 0, 0, step - value / speed)
        distance = torch.where(r == 0, 0, (r / slope).abs())
        distance = torch.where(distance.isnan(), torch.inf, distance)
        best = distance.argmin(0, keepdim=True)
        done = distance.gather(0, best).squeeze(0) <= _NEAR[part.x.dtype]
        # The series at the nearest point gives the root and everything that depends on it.
        found, nearest = rows[done], (best[0, done], done.nonzero().flatten())
        h = step[nearest]
        state.shift[found] = points[nearest] + h
        speed = slope[nearest] + h * (d2[nearest] + h / 2 * (d3[nearest] + h / 3 * d4[nearest]))
        state.log_slope[found] = speed.log()
        if part.labels is not None:
            f, a, b, c, e = total[nearest][:, _SUMS:].unbind(-1)
            state.loss[found] = f - h * (a - h / 2 * (b + h / 3 * (c + h / 4 * e)))
            state.change[found] = a - h * (b + h / 2 * (c + h / 3 * e))
        low = torch.where(r <= 0, points, -torch.inf).amax(0).maximum(low)
        high = torch.where(r >= 0, points, torch.inf).amin(0).minimum(high)
        if bool(done.all()):
            return
        points = _next_points(total, points, r, step, low, high, k, number)[:, ~done]
        rows, low, high = rows[~done], low[~done], high[~done]


def _with_even(points: list[Tensor], low: Tensor, high: Tensor, widest: float) -> Tensor:
    """Add evenly spaced points: 8 points in total, or 16 if the widest interval is wider than 10."""
    number = (8 if widest <= 10 else 16) - len(points)
    part = torch.arange(1, number + 1, dtype=low.dtype, device=low.device) / (number + 1)
    return torch.cat([*points, low + (high - low) * part[:, None]])


def _next_points(
    total: Tensor, points: Tensor, r: Tensor, step: Tensor, low: Tensor, high: Tensor, k: Tensor, number: int
) -> Tensor:
    """Return the next points: Newton steps from the points closest to the root.

    If the interval is wide or many rounds have passed, also return evenly spaced points in the interval.
    """
    up, down, above, dp, dq = total[..., :5].unbind(-1)
    slope = dp + dq
    # A Newton step on the logarithm of a ratio, as in `_solve/newton.py`. It also works if the threshold lies
    # in a gap between the logits.
    c = up - k
    a, b = down + c.clamp(min=0), above + (-c).clamp(min=0)
    ratio = points + (b.log() - a.log()) / (dp / a + dq / b)
    guess = torch.where((r / slope).abs() <= 0.5, points + step, ratio)
    guess = torch.where(guess.isnan(), (low + high) / 2, guess).clamp(low, high)
    from_low = guess.gather(0, torch.where(r <= 0, points, -torch.inf).argmax(0, keepdim=True))
    from_high = guess.gather(0, torch.where(r >= 0, points, torch.inf).argmin(0, keepdim=True))
    nearest = guess.gather(0, (r / slope).abs().nan_to_num(torch.inf).argmin(0, keepdim=True))
    width = float((high - low).amax()) if low.numel() else 0.0
    if width <= 1 and number < 8:
        return torch.cat([nearest, from_low, from_high])
    return _with_even([nearest, from_low, from_high, (from_low + from_high) / 2], low, high, width)


def evaluate(x: Tensor, base: Tensor, shift: Tensor) -> Tensor:
    """Compute sums over the entries of each row at nu = base + shift.

    Args:
        x: (R, n), -inf for absent entries.
        base: (R,), float64.
        shift: (D, R), float64; D points are evaluated at once.

    Returns:
        (D, R, 8): the number of entries with z > 0; the sums of t over z <= 0 and over z > 0, and the
        magnitudes of their slopes; the second, third and fourth derivatives of S.
    """
    points, (rows, labels) = shift.shape[0], x.shape
    total = torch.zeros(points, rows, _SUMS, dtype=torch.float64, device=x.device)
    block = _BLOCK_ON_CPU if x.device.type == "cpu" else _BLOCK
    height, width = max(1, block // max(1, labels)), min(labels, block)
    for top, left in itertools.product(range(0, rows, height), range(0, labels, max(1, width))):
        some = slice(top, top + height)
        z = x[some, left : left + width].double() + base[some, None]
        e = torch.exp(-z.clamp(-_FAR, _FAR))
        for i in range(points):
            v = e * torch.exp(-shift[i, some, None])  # e^-z at this point
            y = 1 / (1 + v)
            not_y = v * y
            up = v < 1
            w, tilt = not_y * y, not_y - y
            w_down, tilted = torch.where(up, 0, w), w * tilt
            parts = (
                up.sum(-1),
                torch.where(up, 0, y).sum(-1),
                torch.where(up, not_y, 0).sum(-1),
                w_down.sum(-1),
                (w - w_down).sum(-1),
                tilted.sum(-1),
                (w - 6 * w * w).sum(-1),
                (tilted - 12 * w * tilted).sum(-1),
            )
            total[i, some] += torch.stack([part.double() for part in parts], dim=-1)
    return total


def evaluate_labels(labels: FiniteLabels, base: Tensor, shift: Tensor) -> Tensor:
    """Compute sums over the labels of each row at nu = base + shift.

    Returns:
        (D, R, 5): the sums of -c * log(y), of c * (1 - y), and of c times the first three derivatives of y,
        where c is the weight of a label.
    """
    points, rows = shift.shape
    z = (labels.x.double() + base[labels.row]) + shift[:, labels.row]
    y, not_y = torch.sigmoid(z), torch.sigmoid(-z)
    w = y * not_y
    # softplus is the identity above this threshold: e^-40 is below the precision of float64.
    parts = (softplus(-z, threshold=40), not_y, w, w * (not_y - y), w * (1 - 6 * w))
    found = torch.stack([labels.weight * part for part in parts], dim=-1)
    total = torch.zeros(points, rows, len(parts), dtype=torch.float64, device=z.device)
    return total.index_add(1, labels.row, found)
