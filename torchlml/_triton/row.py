"""Operations shared by all kernels: locate a row, read a block, sum over a block, and update nu.

These are device functions, inlined into the kernels. `where` describes a row in memory: (x_ptr, mask_ptr,
start, length). The row is read in blocks. Masked entries, and entries outside the row, are read as -inf,
which does not contribute to any of the sums. Entries are float32. Sums inside a block are tree reductions in
float32 with at most 16 entries per thread. Sums over blocks are in float64, except for the slopes P' and Q'
in `evaluate`.
"""
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

# If the nearest entry on one side of the threshold is farther away than this, the sums over that side are
# multiplied by e^distance to avoid underflow. At this distance, 1 + e^-32 rounds to 1, so sigmoid(-|z|) is
# e^-|z|.
_FAR = tl.constexpr(32.0)
_LARGEST = tl.constexpr(3.0e38)  # replaces an infinite distance, because inf - inf would be NaN
# After a Newton step s, the error is below 4 * s^2, because |S''| <= S' for S(nu) = sum(y). After the last
# step, it is at most 4e-8.
_LAST_STEP = tl.constexpr(1e-4)
# The relative rounding error of z. It exceeds `_LAST_STEP` if the nearest entries are far from the threshold.
_ROUNDING = tl.constexpr(5e-7)
# At first, a step that would leave the bracket stops at the bracket's end. After `_CUT_STEPS` steps, such a
# step divides the bracket instead, and after `_FREE_STEPS` steps, every second step does. The bracket is
# divided alternately at the midpoint of its ends, which is fast for typical logits, and at the median of all
# float32 numbers between them. 32 divisions at the median suffice for any row, even with entries of 1e-30 or
# 3e38.
_CUT_STEPS = tl.constexpr(4)
_FREE_STEPS = tl.constexpr(6)
MAX_STEPS = tl.constexpr(136)
_SETTLED = tl.constexpr(1000)
LENGTH = tl.constexpr(3)  # the index of the length in `where`


@triton.jit
def locate(row, x_ptr, mask_ptr, offsets_ptr, n, size):
    """Return `where` for a row, clamped to the `size` entries even if the offsets are invalid."""
    if offsets_ptr is None:
        start = row.to(tl.int64) * n
        length = n
    else:
        start = tl.minimum(tl.maximum(tl.load(offsets_ptr + row), 0), size)
        end = tl.minimum(tl.maximum(tl.load(offsets_ptr + row + 1), start), size)
        length = (end - start).to(tl.int32)
    return x_ptr, mask_ptr, start, length


@triton.jit
def locate_part(x_ptr, mask_ptr, offsets_ptr, nu_ptr, rows, n, size):
    """Return (row, split, where, hi, lo) for this program, with nu = hi + lo. In unsplit rows, split is 0."""
    row, split = tl.program_id(0), tl.program_id(1)
    where = locate(row, x_ptr, mask_ptr, offsets_ptr, n, size)
    return row, split, where, tl.load(nu_ptr + row), tl.load(nu_ptr + rows + row)


@triton.jit
def read(where, first, BLOCK: tl.constexpr):
    """Read the entries first, first + 1, ... of a row, with -inf past its end."""
    x_ptr, mask_ptr, start, length = where
    i = first + tl.arange(0, BLOCK)
    inside = i < length
    x = tl.load(x_ptr + start + i, mask=inside, other=float("-inf")).to(tl.float32)
    if mask_ptr is not None:
        available = tl.load(mask_ptr + start + i, mask=inside, other=0) != 0
        x = tl.where(available, x, float("-inf"))
    return x


@triton.jit
def leave(pointer, numbers):
    """Store the numbers consecutively, cast to the dtype of the pointer."""
    for i in tl.static_range(len(numbers)):
        tl.store(pointer + i, numbers[i].to(pointer.dtype.element_ty))


@triton.jit
def write(pointer, values, where, first, BLOCK: tl.constexpr):
    """Store a block, rounded once to the dtype of the pointer."""
    _, _, start, length = where
    i = first + tl.arange(0, BLOCK)
    tl.store(pointer + start + i, values.to(pointer.dtype.element_ty), mask=i < length)


@triton.jit
def survey_block(x, side):
    """Count NaN, available and +inf entries, and compute extremes and the sum in logsumexp(side * x)."""
    finite = tl.abs(x) < float("inf")
    undefined = tl.sum((x != x).to(tl.int32), 0)
    m = tl.sum((x != float("-inf")).to(tl.int32), 0)
    p = tl.sum((x == float("inf")).to(tl.int32), 0)
    tilted = side * x
    top = tl.max(tl.where(finite, tilted, float("-inf")), 0)
    bottom = tl.min(tl.where(finite, tilted, float("inf")), 0)
    total = tl.sum(tl.where(finite, tl.exp(tilted - top), 0.0), 0).to(tl.float64)
    return undefined, m, p, top, bottom, total


@triton.jit
def survey(x, where, first, stride, side, BLOCK: tl.constexpr, LOOP: tl.constexpr):
    """Combine the results of `survey_block` for the block `x`, which is on chip, and for all later blocks."""
    undefined, m, p, top, bottom, total = survey_block(x, side)
    if LOOP:
        for at in range(first, where[LENGTH], stride):
            block = read(where, at, BLOCK)
            undefined_, m_, p_, top_, bottom_, total_ = survey_block(block, side)
            undefined, m, p = undefined + undefined_, m + m_, p + p_
            higher = tl.maximum(top, top_)
            total = total * shrink(top, higher) + total_ * shrink(top_, higher)
            top, bottom = higher, tl.minimum(bottom, bottom_)
    return undefined, m, p, top, bottom, total


@triton.jit
def shrink(old, new):
    """Return e^(old - new) for old <= new, and 1 if both are the same infinity."""
    return tl.where(old == new, 1.0, tl.exp(old - new))


@triton.jit
def begin(k, found, side):
    """Return (hi, lo, lower, upper, number, share): the initial state, or the result for a special row.

    `number` counts the steps, and `share` is y at +inf entries. For m available entries, the bracket is
    `logit(k/m) - max x <= nu <= logit(k/m) - min x`. The initial nu is `log k - logsumexp(x)`, or its mirror
    image `logsumexp(-x) - log(m - k)` for side = -1. Each entry of +inf gets y = 1 and reduces k and m by 1.
    """
    undefined, m, p, top, bottom, total = found
    ordinary = (k > p) & (k < m) & (undefined == 0)
    # 1e-37 is a normal float32: a smaller k would be 0 on GPUs that flush subnormal numbers.
    wanted = tl.maximum(k - p, 1e-37).to(tl.float32)
    rest = tl.maximum(m - k, 1e-37).to(tl.float32)
    middle = tl.log(wanted) - tl.log(rest)
    largest = tl.where(side > 0, top, -bottom)
    smallest = tl.where(side > 0, bottom, -top)
    lower, upper = middle - largest, middle - smallest
    log_total = tl.log(total.to(tl.float32))
    few = tl.log(wanted) - log_total
    many = log_total - tl.log(rest)
    hi, lo = two_sum(tl.where(side > 0, -largest, -smallest), tl.where(side > 0, few, many))
    # The bracket is computed in float32, so widen it slightly to keep it valid despite rounding.
    lower -= 1e-6 * tl.abs(lower) + 1e-6
    upper += 1e-6 * tl.abs(upper) + 1e-6
    special = tl.where((k > 0) & (k >= m), float("inf"), float("-inf"))
    special = tl.where((undefined > 0) | (k != k), float("nan"), special)
    hi, lo = tl.where(ordinary, hi, special), tl.where(ordinary, lo, 0.0)
    number = tl.where(ordinary, 0, _SETTLED)
    # Divide in float32, because a float64 division is a function call that spills registers.
    share = tl.minimum(k.to(tl.float32) / tl.maximum(p, 1).to(tl.float32), 1.0)
    share = tl.where((hi == float("-inf")) & (p > 0), share, 1.0)
    return hi, lo, lower, upper, number, share


@triton.jit
def _far(distance):
    return tl.where(distance > _FAR, tl.minimum(distance, _LARGEST), 0.0)


@triton.jit
def evaluate_block(x, hi, lo):
    """Return the contribution of a block to sum(y) - k: (count, below, above, P, Q, P', Q').

    `count` entries are above the threshold. Q and Q' are the sums of t = sigmoid(-|z|) and w = t * (1 - t)
    over these entries, times e^above. P and P' are the sums over the other entries, times e^below. `above`
    and `below` are the distances to the nearest entry on each side, or 0 if the distance is at most `_FAR`.
    """
    z = (x + hi) + lo
    up = z > 0
    distance = tl.abs(z)
    below = _far(tl.min(tl.where(up, float("inf"), distance), 0))
    above = _far(tl.min(tl.where(up, distance, float("inf")), 0))
    e = tl.exp(tl.where(up, above, below) - distance)
    near = tl.where(up, (above == 0).to(tl.float32), (below == 0).to(tl.float32))
    other = 1.0 / (1.0 + near * e)
    t = e * other
    w = t * other
    count = tl.sum(up.to(tl.int32), 0)
    p = tl.sum(tl.where(up, 0.0, t), 0).to(tl.float64)
    q = tl.sum(tl.where(up, t, 0.0), 0).to(tl.float64)
    dp = tl.sum(tl.where(up, 0.0, w), 0)
    dq = tl.sum(tl.where(up, w, 0.0), 0)
    return count, below, above, p, q, dp, dq


@triton.jit
def evaluate(x, where, first, stride, hi, lo, BLOCK: tl.constexpr, LOOP: tl.constexpr):
    """Combine the results of `evaluate_block` for the block `x`, which is on chip, and all later blocks."""
    count, below, above, p, q, dp, dq = evaluate_block(x, hi, lo)
    if LOOP:
        for at in range(first, where[LENGTH], stride):
            block = read(where, at, BLOCK)
            count_, below_, above_, p_, q_, dp_, dq_ = evaluate_block(block, hi, lo)
            nearer = tl.minimum(below, below_)
            old, new = tl.exp(nearer - below), tl.exp(nearer - below_)
            p, dp, below = p * old + p_ * new, dp * old + dp_ * new, nearer
            nearer = tl.minimum(above, above_)
            old, new = tl.exp(nearer - above), tl.exp(nearer - above_)
            q, dq, above = q * old + q_ * new, dq * old + dq_ * new, nearer
            count += count_
    return count, below, above, p, q, dp, dq


@triton.jit
def move(k, hi, lo, lower, upper, number, found):
    """Take one safeguarded step of Newton's method for log A = log B; see `_solve/newton.py`."""
    count, below, above, p, q, dp, dq = found
    surplus = (count - tl.maximum(k, 1e-37)).to(tl.float32)
    fall, rise = tl.exp(-below), tl.exp(-above)
    # `p` is P * e^below and `q` is Q * e^above. A = P + max(c, 0) and B = Q + max(-c, 0), where c is
    # `surplus`. `a` and `b` keep the scale of `p` and `q` if the second term is 0.
    p, q = p.to(tl.float32), q.to(tl.float32)
    a = tl.where(surplus > 0, p * fall + surplus, p)
    b = tl.where(surplus < 0, q * rise - surplus, q)
    da = tl.where(surplus > 0, dp * fall, dp)
    db = tl.where(surplus < 0, dq * rise, dq)
    far_a = tl.where(surplus > 0, 0.0, below)
    far_b = tl.where(surplus < 0, 0.0, above)
    step = (tl.log(b / a) + (far_a - far_b)) / (da / a + db / b)
    last = tl.abs(step) <= tl.maximum(far_a, far_b) * _ROUNDING + _LAST_STEP
    lower = tl.where(step > 0, hi, lower)
    upper = tl.where(step < 0, hi, upper)
    target = hi + step
    outside = (target < lower) | (target > upper) | (target != target)
    end = tl.where(step > 0, upper, lower)
    # Do not halve after a short step, because the row is about to converge.
    crawls = (number >= _FREE_STEPS) & (number % 2 == 1) & (tl.abs(step) > 0.5)
    halve = (outside & (number >= _CUT_STEPS)) | crawls
    middle = tl.where(number % 4 == 1, lower * 0.5 + upper * 0.5, _between(lower, upper))
    jump = tl.where(halve, middle, end)
    hi, lo = two_sum(hi, lo + step)
    jumps = (outside | halve) & (last == 0)
    hi, lo = tl.where(jumps, jump, hi), tl.where(jumps, 0.0, lo)
    number = tl.where(last, _SETTLED, number + 1)
    return hi, lo, lower, upper, number


@triton.jit
def _between(lower, upper):
    """Return the median of all float32 numbers between two numbers."""
    a, b = _order(lower.to(tl.int32, bitcast=True)), _order(upper.to(tl.int32, bitcast=True))
    return _order((a & b) + ((a ^ b) >> 1)).to(tl.float32, bitcast=True)


@triton.jit
def _order(bits):
    """Map the bits of floats to integers in the same order, or back. The function is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def two_sum(a, b):
    """Return a + b exactly, as a pair: the rounded sum and its error (Knuth)."""
    total = a + b
    taken = total - a
    return total, (a - (total - taken)) + (b - taken)


@triton.jit
def iterate(x, where, k, hi, lo, lower, upper, number, BLOCK: tl.constexpr, LOOP: tl.constexpr):
    """Iterate until nu has converged, and return (hi, lo)."""
    while number < MAX_STEPS:
        found = evaluate(x, where, BLOCK, BLOCK, hi, lo, BLOCK, LOOP)
        hi, lo, lower, upper, number = move(k, hi, lo, lower, upper, number, found)
    return hi, lo


@triton.jit
def solve_row(
    x_ptr, k_ptr, mask_ptr, offsets_ptr, nu_ptr, rows, n, size, k_stride,
    BLOCK: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """Solve row program_id(0), store its nu, and return (row, where, its first block x, hi, lo, share)."""
    row = tl.program_id(0)
    where = locate(row, x_ptr, mask_ptr, offsets_ptr, n, size)
    k = tl.load(k_ptr + row * k_stride)
    x = read(where, 0, BLOCK)
    # Start on the side of the smaller of k and n - k, where the initial nu is more accurate.
    side = tl.where(2 * k <= where[LENGTH], 1.0, -1.0)
    found = survey(x, where, BLOCK, BLOCK, side, BLOCK, LOOP)
    hi, lo, lower, upper, number, share = begin(k, found, side)
    hi, lo = iterate(x, where, k, hi, lo, lower, upper, number, BLOCK, LOOP)
    tl.store(nu_ptr + row, hi)
    tl.store(nu_ptr + rows + row, lo)
    return row, where, x, hi, lo, share


@triton.jit
def log1p(e):
    """Compute log(1 + e) for 0 <= e <= 1 with full relative accuracy, using a series.

    log(1 + e) = 2 * artanh(s) with s = e / (2 + e), and artanh(s) = s + s^3 / 3 + s^5 / 5 + ... Since s is at
    most 1/3, the terms after s^15 / 15 sum to less than 2e-9 of the total.
    """
    s = e / (2.0 + e)
    s2 = s * s
    series = 1.0 / 13.0 + s2 * (1.0 / 15.0)
    series = 1.0 / 9.0 + s2 * (1.0 / 11.0 + s2 * series)
    series = 1.0 / 3.0 + s2 * (1.0 / 5.0 + s2 * (1.0 / 7.0 + s2 * series))
    return 2.0 * (s + s * s2 * series)


@triton.jit
def probability(x, hi, lo, share, LOG: tl.constexpr):
    """Compute y or log y for a block, with limits for entries to which the formula does not apply."""
    z = (x + hi) + lo
    e = tl.exp(-tl.abs(z))
    if LOG:
        y = tl.minimum(z, 0.0) - log1p(e)
        infinite, absent = tl.log(share), float("-inf")
    else:
        y = tl.where(z > 0, 1.0, e) / (1.0 + e)
        infinite, absent = share, 0.0
    y = tl.where(x == float("inf"), infinite, y)
    y = tl.where(x == float("-inf"), absent, y)
    return tl.where(hi != hi, float("nan"), y)
