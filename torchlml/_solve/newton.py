"""The careful solver: Newton's method on the logarithm of a ratio, inside a proven bracket.

It is slower than the solver in `fast.py`, but it solves every row.

Let S = sum(y), where y = sigmoid(z) and z = x + nu. The residual S - k must be accurate even when almost
every entry is saturated. Adding up y and subtracting k fails exactly there: half a million entries at
y = 1 - 2e-9 all round to 1, yet together they take 1e-3 from the one entry that is undecided. Therefore each
entry is written as its nearest integer plus or minus t = sigmoid(-|z|), which keeps full relative accuracy:

    S - k = c + P - Q,   c = #(z > 0) - k,   P = sum of t where z <= 0,   Q = sum of t where z > 0.

The slope of S is sum(w), where w = t * (1 - t) >= t / 2, so a relative error of 1e-7 in P and Q causes an
error of at most 2e-7 in nu, for every row.

Let A = P + max(c, 0) and B = Q + max(-c, 0). The row sums to k if A = B. The Newton step on log A - log B is

    step = (log B - log A) / (P' / A + Q' / B),

where P' = dP/dnu and Q' = -dQ/dnu. If all y are small, B is k and A is S, which is nearly exponential in nu,
so the logarithm is nearly linear. In a gap between two logits, A and B are proportional to e^nu and e^-nu,
and one step reaches the middle, whereas Newton's method on S itself would advance by 1 per step. A step that
would leave the bracket stops at the end of the bracket or, after the first few steps, halves the bracket
instead.

The compiled CPU kernel does not use this code. Its fast solver uses Halley's method (`_cpu/csrc/solve.h`),
and its slow solver uses a variant of the method above (`_cpu/csrc/careful.cpp`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchlml._rows import Rows, shifted

# Rows of 10 to 10,000 normally distributed logits take 1 to 6 steps, and the test rows take up to 7. At
# first, a step that would leave the bracket stops at the bracket's end, which is the root itself for tied
# logits with k = 1. After `CUT_STEPS` steps, such a step halves the bracket instead. After `FREE_STEPS`
# steps, every second step halves it, to bound the worst case.
CUT_STEPS = 4
FREE_STEPS = 10
MAX_STEPS = 40
# On devices other than the CPU, the loop does not test for convergence, because that would synchronize. It
# takes as many steps as the test rows need, plus five.
_UNSYNCED_STEPS = 12

Limit = Callable[[Tensor, Tensor, Tensor], Tensor]  # limits a step, given the distances to both bracket ends


def newton(x: Tensor, k: Tensor, m: Tensor, ordinary: Tensor, rows: Rows) -> Tensor:
    """Solve sum(sigmoid(x + nu)) = k for every row.

    Args:
        x: the entries in the work dtype, with -inf for unavailable entries.
        k: the target sums, 0-d or one per row.
        m: the number of available entries in each row.
        ordinary: True for the rows to solve, which have a finite nu; other results are meaningless.
        rows: the division of `x` into rows.

    Returns:
        nu as a tensor (2, R) that contains (hi, lo), where nu = hi + lo, in the dtype of `x`.
    """
    half_gap, state = begin(x, k, m, ordinary, rows)
    unsynced = x.device.type != "cpu"
    for number in range(_UNSYNCED_STEPS if unsynced else MAX_STEPS):
        state, r = evaluate(state, x, k, half_gap, rows)
        if not unsynced and bool(state.settled.all()):
            break
        state = move(state, r, _limit(number))
    return state.best


class State(NamedTuple):
    """The state of the search: nu, its total movement, the bracket around it, and the best nu so far."""

    nu: Tensor
    moved: Tensor
    below: Tensor  # the distance from nu to the lower end of the bracket
    above: Tensor
    best: Tensor
    best_error: Tensor
    settled: Tensor


def begin(x: Tensor, k: Tensor, m: Tensor, ordinary: Tensor, rows: Rows) -> tuple[Tensor, State]:
    """Return half the gap between the k-th largest and the next logit, and the initial state.

    The initial nu places the threshold in the middle of the gap.
    """
    upper = rows.largest(x, k.ceil().long())
    lower = rows.largest(x, k.floor().long() + 1)
    half_gap = (upper.to(rows.wide) - lower) / 2
    middle = -(upper / 2 + lower / 2)
    nu = torch.stack([middle, torch.zeros_like(middle)])
    below, above = (half_gap + offset for offset in order_offsets(k, m))
    unknown = torch.full_like(half_gap, torch.inf)
    return half_gap, State(nu, torch.zeros_like(half_gap), below, above, nu, unknown, ~ordinary)


def evaluate(s: State, x: Tensor, k: Tensor, half_gap: Tensor, rows: Rows) -> tuple[State, Residual]:
    """Evaluate the residual at nu, and find the rows that have converged."""
    epsilon = torch.finfo(x.dtype).eps
    nearest = (half_gap - s.moved.abs()).abs()
    # The nearest entry is known only inside the gap; outside it, nothing underflows.
    scale = torch.where(s.moved.abs() < half_gap, nearest, 0.0)
    r = residual(x, k, s.nu, scale.to(x.dtype), rows)
    error = r.value.abs() / r.slope
    # The rounding error of z is about epsilon * |z|, so a row can stop improving before it reaches the
    # tolerance.
    stalled = (error >= s.best_error / 2) & (s.best_error <= 16 * epsilon * (1 + nearest))
    # Do not change a settled row, so that its result does not depend on how long other rows take.
    better = (error < s.best_error) & ~s.settled
    best, best_error = torch.where(better, s.nu, s.best), torch.where(better, error, s.best_error)
    settled = s.settled | stalled | (best_error <= 2 * epsilon * (1 + scale))
    return s._replace(best=best, best_error=best_error, settled=settled), r


def move(s: State, r: Residual, limit: Limit) -> State:
    """Take the Newton step, as far as `limit` allows."""
    # nu itself becomes one end of the bracket.
    below = torch.where(r.value < 0, 0.0, s.below)
    above = torch.where(r.value > 0, 0.0, s.above)
    step = limit(log_ratio_step(r), below, above)
    nu = add(s.nu, step)
    return s._replace(nu=nu, moved=s.moved + step, below=below + step, above=above - step)


def cut(step: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """Return the step, shortened to stop at the end of the bracket if it would leave the bracket."""
    inside = torch.minimum(torch.maximum(step, -below), above)
    return torch.where(step.isnan(), halve(step, below, above), inside)


def keep_inside(step: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """Return the step, or a step to the middle of the bracket if the given step would leave the bracket."""
    return torch.where((-below < step) & (step < above), step, halve(step, below, above))


def halve(step: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """Return the step to the middle of the bracket."""
    return (above - below) / 2


def _limit(number: int) -> Limit:
    if number < CUT_STEPS:
        return cut
    return keep_inside if number < FREE_STEPS or number % 2 else halve


def order_offsets(k: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Return (below, above): the saturation offsets for which the paper's interval provably contains nu.

    Consider a row with m available entries, denoted by pi in descending order, and a real 0 < k < m. Then

        -pi_{ceil k} - below  <=  nu  <=  -pi_{floor k + 1} + above.

    The paper uses 7 for both, a heuristic that fails for zeros(1098) and k = 1097, where nu is
    log(1097) = 7.0003. At the lower end, the entries before rank j = ceil k contribute at most 1 each, and
    the other m - j + 1 contribute at most sigmoid(-below) each; `below` makes these bounds sum to k. The
    upper end is the mirror image. For an integer k, the offsets are log(m - k) and log(k).
    """
    rank = k.ceil()
    below = ((m - rank + 1) / (k - rank + 1) - 1).log()
    above = (k / (k.floor() + 1 - k)).log()
    return below, above


def log_ratio_step(r: Residual) -> Tensor:
    """Return the Newton step on log A - log B. It is infinite or NaN if A or B is 0."""
    a = r.p + r.c.clamp(min=0)
    b = r.q - r.c.clamp(max=0)
    return (b.log() - a.log()) / (r.dp / a + r.dq / b)


def add(nu: Tensor, step: Tensor) -> Tensor:
    """Return nu + step as a pair (hi, lo): the rounded sum and its rounding error (Knuth's two-sum)."""
    hi, small = nu[0], nu[1] + step.to(nu.dtype)
    total = hi + small
    taken = total - hi
    return torch.stack([total, (hi - (total - taken)) + (small - taken)])


class Residual(NamedTuple):
    """The terms of S - k for each row, multiplied by e^scale: `c`, P, Q and the slopes dP/dnu and -dQ/dnu."""

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


def residual(x: Tensor, k: Tensor, nu: Tensor, scale: Tensor, rows: Rows) -> Residual:
    """Evaluate S - k at `nu` (2, R), with everything multiplied by e^scale.

    In the middle of a gap of 400 between two logits, every t underflows, but the ratio of P to Q still
    determines nu. `scale` (R,), the distance from the threshold to the nearest entry, keeps P and Q in range.
    """
    z = shifted(x, nu, rows)
    up = z > 0
    # e^(scale - |z|). No entry is nearer than `scale`, so the exponent is at most 0. However, rounding may
    # reduce a |z| of 1e20 by thousands. To avoid overflow, the exponent is clamped to 1.
    e = torch.exp((rows.broadcast(scale) - z.abs()).clamp(max=1))
    shrink = rows.broadcast(torch.exp(-scale))
    t = e / (1 + e * shrink)
    w = t / (1 + e * shrink)
    zero = torch.zeros((), dtype=t.dtype, device=t.device)
    c = rows.sum(up) - k
    # If c is 0 and e^scale overflows, the product must be 0 instead of NaN.
    c = torch.where(c == 0, 0.0, c * scale.to(rows.wide).exp())
    return Residual(
        c=c,
        p=rows.sum(torch.where(up, zero, t)),
        q=rows.sum(torch.where(up, t, zero)),
        dp=rows.sum(torch.where(up, zero, w)),
        dq=rows.sum(torch.where(up, w, zero)),
    )
