"""The dual variable nu of rows whose labels are sharded across processes.

1. Survey, one round. Every process solves its own part with the compiled kernel, for its share k n_p / n of
   k. The shares sum to k, so the root lies between the smallest and the largest of these nu. If the parts are
   similar, all of these nu are close to the root. The Taylor series of all parts give an initial estimate.
2. Evaluations, one round each: the sums of `sums.py` at one point, or at several if the interval is wide,
   until a point is so close to the root that its Taylor series gives the root to machine precision.
3. For rows with a wide interval, or a wide gap between logits at the threshold, `sums.select` first finds
   the entries at the threshold in a few rounds. In a gap wider than 80 the solution has a closed form.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchlml._autograd import operators
from torchlml._distributed import sums
from torchlml._distributed.group import LabelGroup, LabelSplit, add_up
from torchlml._distributed.sums import FiniteLabels, evaluate, evaluate_labels, select
from torchlml._solve.newton import order_offsets

# Selection handles intervals wider than this, and thresholds farther than this from every entry.
_WIDE = 150.0
_GAP = 80.0
# The local roots, which bound the interval, are exact only up to the rounding of their dtype.
_MARGIN = 1e-3
# The largest distance for the Taylor series: the fifth order is then below the precision of the dtype.
_NEAR = {torch.float32: 0.03, torch.float64: 1e-3}
_POINTS = 8
_MANY_POINTS = 16
_FEW_WIDTH = 10.0


class _Part(NamedTuple):
    """The columns of this process: entries in the work dtype (-inf if absent), and observed labels."""

    x: Tensor
    k: Tensor  # (R,), float64
    labels: FiniteLabels | None
    marks: Tensor | None


class Solution(NamedTuple):
    """The solution of all rows, identical on every process. Each field has one number per row.

    `nu` is a pair (2, R) as in `_torch/careful.py`. `log_slope` is log sum w. `share` is y of +inf entries,
    `infinite` their number. `free` marks rows that satisfy a bound with nu = 0, which is then constant.
    `loss` is the sum of -c log y over the labels at finite entries, and `change` is the sum of c (1 - y).
    `marks` contains the sums over all processes of the numbers passed to `solve` as `marks`.
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
    special: Tensor  # nu of the rows that are not ordinary
    infinite: Tensor
    available: Tensor
    nearest: Tensor
    at_zero: Tensor | None  # S(0) - k, for a bound
    base: Tensor
    low: Tensor
    high: Tensor
    estimate: Tensor
    width: Tensor  # the width of the interval; infinite if no local root is finite
    marks: Tensor


def solve(
    x: Tensor, k: Tensor, split: LabelSplit, labels: FiniteLabels | None = None, marks: Tensor | None = None
) -> Solution:
    """Solve sum sigmoid(x + nu) = k for every row.

    With a bound in `split`, nu is 0 in rows in which nu = 0 satisfies the bound.

    Args:
        x: (R, n), the entries of this process in the work dtype, -inf for absent ones.
        k: 0-d or (R,).
        split: the labels of all processes.
        labels: the labels of this process at finite entries, for their loss.
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
        found = _at_threshold(part, s, hard, group)
        state.base[hard], low[hard], high[hard] = found.base, found.low, found.high
        estimate[hard], width[hard] = (found.low + found.high) / 2, found.high - found.low
        closed = hard[found.gap > _GAP]
        if closed.numel():
            _close(part, state, closed, found, group)
        easy = torch.cat([easy, hard[found.gap <= _GAP]]).sort().values
    _iterate(part, state, easy, low, high, estimate, width, group)
    if part.labels is not None:
        # The labels of rows that were not iterated (in a closed-form gap, or free) are not evaluated yet.
        rest = torch.cat([closed, free.nonzero().flatten()]).sort().values
        if rest.numel():
            _label_round(part, state, rest, group)
    # Split base + shift exactly into (hi, lo) in the dtype of the entries.
    hi = (state.base + state.shift).to(x.dtype)
    nu = torch.stack([hi, ((state.base - hi.double()) + state.shift).to(x.dtype)])
    nu = torch.where(to_solve | free, nu, torch.stack([s.special, torch.zeros_like(s.special)]).to(nu.dtype))
    share = (part.k / s.infinite).clamp(0, 1)
    share = torch.where(nu[0] == -torch.inf, share, 1).to(nu.dtype)
    return Solution(nu, state.log_slope, share, s.infinite, free, state.loss, state.change, s.marks)


class _State(NamedTuple):
    """The results, filled in for different rows at different steps; nu = base + shift."""

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
    if split.bound != "exactly":  # an extra pass over the entries that only a bound needs
        zero = evaluate(x, torch.zeros_like(column), torch.zeros_like(root[1:]))[0]
        message += zero[:, : sums.DP].unbind(-1)
    marks = column[:, None][:, :0] if part.marks is None else part.marks
    parts = group.gather(torch.cat([torch.stack([number.double() for number in message], -1), marks], -1))
    m, p, undefined = (add_up(parts[..., i]) for i in range(3))
    ordinary = (p < k) & (k < m) & (undefined == 0) & ~k.isnan()
    special = torch.where((k > 0) & (k >= m), torch.inf, -torch.inf)
    special = torch.where((undefined > 0) | k.isnan(), torch.nan, special)
    largest, smallest = parts[..., 3].amax(0), parts[..., 4].amin(0)
    hi, lo, here = parts[..., 5], parts[..., 6], parts[..., 8] > 0
    known = here & hi.isfinite()
    # Roots are stored relative to that of the first process with a finite root.
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
    width = torch.where(known.any(0), high - low, torch.inf)
    nearest = parts[..., 7].amin(0)
    at_zero = None
    if split.bound != "exactly":
        up, down, above = (add_up(parts[..., i]) for i in (17, 18, 19))
        at_zero = (up - k) + (down - above)
    return _Survey(
        ordinary=ordinary,
        special=special,
        infinite=p,
        available=m,
        nearest=nearest,
        at_zero=at_zero,
        base=base,
        low=low,
        high=high,
        estimate=estimate,
        width=width,
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


class _Threshold(NamedTuple):
    upper: Tensor
    lower: Tensor
    gap: Tensor
    base: Tensor
    low: Tensor
    high: Tensor


def _at_threshold(part: _Part, s: _Survey, rows: Tensor, group: LabelGroup) -> _Threshold:
    """Find the entries around the threshold, and the interval that they imply."""
    k, m = (part.k - s.infinite)[rows], (s.available - s.infinite)[rows]
    upper, lower = select(part.x[rows], k.ceil().long(), (k.floor() + 1).long(), group)
    below, above = order_offsets(k, m)
    half = upper / 2 - lower / 2
    base = -(upper / 2 + lower / 2)
    return _Threshold(upper, lower, 2 * half, base, -half - below - _MARGIN, half + above + _MARGIN)


def _close(part: _Part, state: _State, rows: Tensor, found: _Threshold, group: LabelGroup) -> None:
    """Compute nu in a gap, where S - k = P e^nu - Q e^-nu to machine precision. P and Q take one round.

    The threshold can lie in a gap only if k is an integer, and k entries are then above it.
    """
    upper, lower = found.upper[found.gap > _GAP], found.lower[found.gap > _GAP]
    p, q = group.sum(sums.gap_sums(part.x[rows], upper, lower)).unbind(-1)
    state.shift[rows] = (q.log() - p.log()) / 2
    half = upper / 2 - lower / 2
    state.log_slope[rows] = (p.log() + q.log()) / 2 + torch.log(torch.full_like(p, 2)) - half


def _label_round(part: _Part, state: _State, rows: Tensor, group: LabelGroup) -> None:
    """Compute the label sums of rows whose nu is known, in one round."""
    assert part.labels is not None
    labels = part.labels.of(rows, part.k.shape[0])
    found = group.sum(evaluate_labels(labels, state.base[rows], state.shift[None, rows])[0])
    state.loss[rows], state.change[rows] = found[:, sums.F], found[:, sums.A]


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
    near = _NEAR[part.x.dtype]
    points = _first_points(low[rows], high[rows], estimate[rows], width[rows])
    low, high = low[rows], high[rows]
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
        r = (total[..., sums.UP] - k) + (total[..., sums.P] - total[..., sums.Q])
        slope = total[..., sums.DP] + total[..., sums.DQ]
        distance = torch.where(r == 0, 0, (r / slope).abs())
        distance = torch.where(distance.isnan(), torch.inf, distance)
        best = distance.argmin(0, keepdim=True)
        done = distance.gather(0, best).squeeze(0) <= near
        _finish(state, rows[done], total[:, done], points[:, done], r[:, done], best[:, done])
        low = torch.where(r <= 0, points, -torch.inf).amax(0).maximum(low)
        high = torch.where(r >= 0, points, torch.inf).amin(0).minimum(high)
        if bool(done.all()):
            return
        points = _next_points(total, points, r, slope, low, high, k, number)[:, ~done]
        rows, low, high = rows[~done], low[~done], high[~done]


def _finish(state: _State, rows: Tensor, total: Tensor, points: Tensor, r: Tensor, best: Tensor) -> None:
    """Compute the root and everything that depends on it, by the Taylor series at the nearest point."""
    t = total.gather(0, best[..., None].expand(1, -1, total.shape[-1]))[0]
    r, point = r.gather(0, best)[0], points.gather(0, best)[0]
    slope, d2, d3, d4 = t[:, sums.DP] + t[:, sums.DQ], t[:, sums.D2], t[:, sums.D3], t[:, sums.D4]
    step = _taylor_root(r, slope, d2, d3, d4)
    state.shift[rows] = point + step
    state.log_slope[rows] = (slope + step * (d2 + step / 2 * (d3 + step / 3 * d4))).log()
    if t.shape[-1] > sums.SUMS:
        f, a, b, c, e = t[:, sums.SUMS :].unbind(-1)
        state.loss[rows] = f - step * (a - step / 2 * (b + step / 3 * (c + step / 4 * e)))
        state.change[rows] = a - step * (b + step / 2 * (c + step / 3 * e))


def _taylor_root(r: Tensor, slope: Tensor, d2: Tensor, d3: Tensor, d4: Tensor) -> Tensor:
    """Return the step to the root of the series, using only bitwise reproducible operations."""
    step = torch.where(r == 0, 0, -r / slope)
    for _ in range(3):
        value = r + step * (slope + step / 2 * (d2 + step / 3 * (d3 + step / 4 * d4)))
        speed = slope + step * (d2 + step / 2 * (d3 + step / 3 * d4))
        step = torch.where(r == 0, 0, step - value / speed)
    return step


def _first_points(low: Tensor, high: Tensor, estimate: Tensor, width: Tensor) -> Tensor:
    """Return the first points (D, R): one point if every row has a good estimate, several otherwise."""
    widest = float(width.amax()) if width.numel() else 0.0
    if widest <= 0.3:
        return estimate[None]
    if widest <= 1:
        near = torch.tensor([0.0, -0.06, 0.06], dtype=low.dtype, device=low.device)
        return (estimate + near[:, None]).clamp(low, high)
    return torch.cat([estimate[None], _evenly(low, high, _number(widest) - 1)])


def _number(width: float) -> int:
    return _POINTS if width <= _FEW_WIDTH else _MANY_POINTS


def _evenly(low: Tensor, high: Tensor, number: int) -> Tensor:
    part = torch.arange(1, number + 1, dtype=low.dtype, device=low.device) / (number + 1)
    return low + (high - low) * part[:, None]


def _next_points(
    total: Tensor, points: Tensor, r: Tensor, slope: Tensor, low: Tensor, high: Tensor, k: Tensor, number: int
) -> Tensor:
    """Return the next points: Newton steps from the points closest to the root, and points between them."""
    series = points + _taylor_root(r, slope, total[..., sums.D2], total[..., sums.D3], total[..., sums.D4])
    # Newton's step on the logarithm of a ratio, as in `_solve/newton.py`; it also works in a gap.
    c = total[..., sums.UP] - k
    a = total[..., sums.P] + c.clamp(min=0)
    b = total[..., sums.Q] + (-c).clamp(min=0)
    ratio = points + (b.log() - a.log()) / (total[..., sums.DP] / a + total[..., sums.DQ] / b)
    guess = torch.where((r / slope).abs() <= 0.5, series, ratio)
    guess = torch.where(guess.isnan(), (low + high) / 2, guess).clamp(low, high)
    from_low = guess.gather(0, torch.where(r <= 0, points, -torch.inf).argmax(0, keepdim=True))
    from_high = guess.gather(0, torch.where(r >= 0, points, torch.inf).argmin(0, keepdim=True))
    nearest = guess.gather(0, (r / slope).abs().nan_to_num(torch.inf).argmin(0, keepdim=True))
    width = float((high - low).amax()) if low.numel() else 0.0
    if width <= 1 and number < 8:
        return torch.cat([nearest, from_low, from_high])
    centres = [nearest, from_low, from_high, (from_low + from_high) / 2]
    return torch.cat([*centres, _evenly(low, high, _number(width) - len(centres))])
