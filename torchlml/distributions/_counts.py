"""Independent Bernoulli variables conditioned on k successes: the probability of k successes, and marginals.

All functions take rows in folded form. A row of logits z, which include a constant shift called the tilt, is
split into A, the entries above 0, and B, the other entries. `b = sigmoid(-|z|)`, at most 1/2, is the
probability of the less likely outcome of an entry: a failure in A, or a success in B. An entry with this
outcome is said to be on the other side. The number of successes is k if and only if the successes in B exceed
the failures in A by d = k - |A|. Two results describe the conditional distribution:

- `log_ratio`: log of the sum over |S| = k of exp(-sum_{i in SΔA} |z_i|), the normalizer relative to A.
- `tail`: for each entry, the probability that it is on the other side, given k successes.

No step subtracts large numbers, so small results have full relative accuracy. The conditional distribution
does not depend on the tilt, so derivatives with respect to z need no derivative of the tilt. All operations
are differentiable PyTorch operations.

The variance V = sum(b * (1 - b)) of the number of successes, called the count, selects one of three methods:

- V < 1/64: nearly all probability is on the set A. Elementary symmetric polynomials up to order 5 suffice.
- V < 18: a discrete Fourier transform of the distribution of the count. Entries with small b contribute power
  sums, and the few other entries contribute factors.
- V >= 18: the same transform, where all entries contribute power sums through the Chebyshev series of the
  logarithm. That series converges slowly only at high frequencies, whose weight is negligible here.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

# Below this variance, polynomials up to order 5 leave a relative error below (V / 2)^8 / 6!^2 in 1 - P(A).
_QUIET = 1 / 64
# At or above this variance, frequencies near π have weight below exp(-2 * 18) = 2e-16.
BUSY = 18.0
_ORDER = 5
_OUTER = 0.05  # entries with smaller b contribute power sums: |b * w| <= 0.1
_OUTER_POWERS = 16
_BASE = 8  # L powers are formed as x^(8a + c) from only 8 + L / 8 arrays
# Elements per temporary array: small enough for the cache, large enough to hide the overhead of a call.
_CHUNK = 2**16
_FACTORS = 2**19


def conditional(b: Tensor, above: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `log_ratio` and `tail`.

    Args:
        b: (R, n) float64, the probability that an entry is on the other side, from 0 to 1/2.
        above: (R, n) bool, the set A.
        d: (R,) float64 with integer values, k - |A|.

    Returns:
        `log_ratio` (R,) and `tail` (R, n), differentiable in `b`.
    """
    n = b.shape[-1]
    variance = variance_of(b.detach())
    quiet, busy = variance < _QUIET, variance >= BUSY
    rows = max(1, _CHUNK // max(1, n))
    # The middle method stores a factor for each frequency and each large b. There are at most
    # V / (0.05 * 0.95) large values of b.
    largest = float(torch.where(busy, 0, variance).max()) if len(b) else 0.0
    factors = min(n, largest / (_OUTER * (1 - _OUTER))) * _half(largest, n)
    rows_of_middle = max(1, min(rows, int(_FACTORS / max(1, factors))))
    methods = ((quiet, _quiet, rows), (~quiet & ~busy, _middle, rows_of_middle), (busy, _busy, rows))
    indices, log_ratios, tails = [], [], []
    for selected, method, size in methods:
        index = selected.nonzero().squeeze(-1)
        every = len(index) == len(b)
        given = [t if every else t[index] for t in (b, above, d, variance)]
        for part in zip(*(t.split(size) for t in given), strict=True) if len(index) else ():
            log_ratio, tail = method(*part)
            log_ratios.append(log_ratio)
            tails.append(tail)
        if every and tails:
            return _joined(log_ratios), _joined(tails)
        indices.append(index)
    if not tails:
        return b.sum(-1), b
    order = torch.cat(indices).argsort()
    return torch.cat(log_ratios)[order], torch.cat(tails)[order]


def _joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def variance_of(b: Tensor) -> Tensor:
    """Return the variance of the count for each row."""
    return (b - b * b).sum(-1)


def _quiet(b: Tensor, above: Tensor, d: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the results for V < 1/64, where d = 0, from e_j(odds in A) * e_j(odds in B) for j <= 5.

    e_j is the j-th elementary symmetric polynomial.
    """
    odds = b / (1 - b)
    in_a = torch.where(above, odds, 0)
    of_a, of_b = _symmetric(in_a), _symmetric(odds - in_a)
    orders = range(1, _ORDER + 1)
    rest = torch.stack([of_a[j] * of_b[j] for j in orders]).sum(0)
    # Without entry i, e_j(B \ i) = e_j(B) - odds_i * e_{j-1}(B \ i). If this is expanded, it is the same
    # polynomial in odds_i for all i.
    tail = torch.zeros_like(odds)
    for power in reversed(range(_ORDER)):
        shifted = [(of_a[j], of_b[j - 1 - power], of_b[j], of_a[j - 1 - power]) for j in orders if j > power]
        entering = torch.stack([a * rest_b for a, rest_b, _, _ in shifted]).sum(0)
        leaving = torch.stack([b_ * rest_a for _, _, b_, rest_a in shifted]).sum(0)
        tail = torch.where(above, leaving.unsqueeze(-1), entering.unsqueeze(-1)) - tail * odds
    return rest.log1p(), tail * odds / (1 + rest).unsqueeze(-1)


def _symmetric(odds: Tensor) -> list[Tensor]:
    """Compute the elementary symmetric polynomials e_0 to e_5 of each row by Newton's identities.

    The error of e_j is about eps * e_1^j / j!, which is negligible compared with e_1, because e_1 is below
    1/64.
    """
    power, sums = odds, [odds.sum(-1)]
    for _ in range(_ORDER - 1):
        power = power * odds
        sums.append(power.sum(-1))
    e = [torch.ones_like(sums[0])]
    for j in range(1, _ORDER + 1):
        terms = [(-1) ** (i - 1) * sums[i - 1] * e[j - i] for i in range(1, j + 1)]
        e.append(torch.stack(terms).sum(0) / j)
    return e


def _middle(b: Tensor, above: Tensor, d: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the results for 1/64 <= V < 18, with power sums if b is small, and factors otherwise."""
    rows, n = b.shape
    angle = angles(float(variance.max()), n, b)
    u, v = angle.cos() - 1, angle.sin()  # w = exp(iθ) - 1 = u + iv
    side = side_of(above, b)
    # An entry of B contributes the factor 1 + b * w, and an entry of A its conjugate. Padding has b = 0.
    inner = b.detach() > _OUTER
    row, column = inner.nonzero(as_tuple=True)
    place = torch.arange(len(row), device=b.device) - torch.searchsorted(row, row)
    width = int(inner.sum(-1).max())
    packed = b.new_zeros(rows, width).index_put((row, place), b[row, column]).unsqueeze(-1)
    sign = b.new_zeros(rows, width).index_put((row, place), side[row, column]).unsqueeze(-1)
    factor = torch.complex(1 + packed * u, packed * sign * v)
    # For the entries with small b, log(1 + b * w) = -sum_l (-w)^l * b^l / l.
    powers_of_b = _Powers(b)
    sums, signed = powers_of_b.sums(b.masked_fill(inner, 0), side, _OUTER_POWERS)  # sums of b^(l + 1)
    order = torch.arange(1, _OUTER_POWERS + 1, device=b.device).unsqueeze(-1)
    powers = (-torch.complex(u, v)) ** order
    log_others = torch.complex(
        sums @ (powers.real / -order), signed @ (powers.imag / -order) - d.unsqueeze(-1) * angle
    )
    c = log_others.exp() * _product(factor)
    log_p, real, imaginary = _normalize(c.real, c.imag)
    # Let D be the real part of sum_m c_m * w_m / (1 + b * w_m), with the conjugate of w_m for entries in A.
    # Then the tail is b * (1 + (1 - b) * D).
    even, odd = powers_of_b.polynomials(-real @ powers.real.T, imaginary @ powers.imag.T)
    ratio = torch.complex(u.expand(factor.shape), sign * v) / factor
    direct = (real.unsqueeze(1) * ratio.real - imaginary.unsqueeze(1) * ratio.imag).sum(-1)
    slope = (even + side * odd).index_put((row, column), direct[row, place])
    return log_p - (-b).log1p().sum(-1), b + (b - b * b) * slope


def _busy(b: Tensor, above: Tensor, d: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the results for V >= 18 from power sums of all entries."""
    side = side_of(above, b)
    smallest, largest = (float(value) for value in variance.aminmax())
    angle, terms = angles(largest, b.shape[-1], b), series_terms(smallest)
    powers = _Powers(side * (1 - 2 * b))
    size, phase = _generating_function(powers, b, side, variance, angle, terms)
    phase = phase - d.unsqueeze(-1) * angle
    log_p, real, imaginary = _normalize(size * phase.cos(), size * phase.sin())
    # D is as in `_middle`. The series follows from
    # w / (1 + y * w) = 2i * sin(θ/2) * (1 + 2 * sum_l (iτ)^l * T_l(1 - 2y)) with τ = tan(θ/4), where y is the
    # success probability of an entry: b in B and 1 - b in A.
    from_real, from_imaginary = _slope_series(len(angle) - 1, terms)
    (slope,) = powers.polynomials(real @ from_real.to(b.device) + imaginary @ from_imaginary.to(b.device))
    return log_p - (-b).log1p().sum(-1), b + (b - b * b) * (side * slope)


def generating_function(b: Tensor, side: Tensor, variance: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Return the absolute value and the argument of the mean of exp(iθX).

    X is the number of successes in B minus the number of failures in A. Every row must have a variance of at
    least `BUSY`.
    """
    powers = _Powers(side * (1 - 2 * b))
    return _generating_function(powers, b, side, variance, angle, series_terms(float(variance.min())))


def _generating_function(
    powers: _Powers, b: Tensor, side: Tensor, variance: Tensor, angle: Tensor, terms: int
) -> tuple[Tensor, Tensor]:
    """Compute `generating_function` from the powers of x = 1 - 2b in B and of -x in A."""
    even, odd = (t.to(b.device) for t in _log_series(len(angle) - 1, terms))
    plain, signed = powers.sums(2 * b, side, terms)
    is_odd = torch.arange(terms, device=b.device) % 2 == 1
    size, phase = torch.where(is_odd, signed, plain) @ even, torch.where(is_odd, plain, signed) @ odd
    # The absolute value is at most exp(-V * (1 - cos θ)). Where this bound is negligible, the series may not
    # have converged, and the value is set to 0.
    relevant = variance.unsqueeze(-1) * (1 - angle.cos()) < 42
    return torch.where(relevant, size, -torch.inf).exp(), phase


def series_terms(variance: float) -> int:
    """Return a length L of the Chebyshev series such that exp(-V * (1 - cos θ)) * tan(θ/4)^L < 3e-16."""
    return 24 if variance < 100 else 16 if variance < 1e4 else 8


@functools.lru_cache(maxsize=64)
def _log_series(half: int, terms: int) -> tuple[Tensor, Tensor]:
    """Return matrices that map sums of 2b * x^l to the log of the generating function.

    The first matrix is for its real part, the second for its imaginary part. Here x = 1 - 2b. Both matrices
    have shape (terms, half + 1). They follow from
    log(1 + b * w) = -2 * sum_l (iτ)^l * (T_l(x) - 1) / l with τ = tan(θ/4). The series converges because the
    singularity in x is on the Bernstein ellipse with parameter 1 / τ. Expressing T_l(x) - 1 through
    1 - x^j = sum_{i<j} 2b * x^i keeps entries with tiny b accurate.
    """
    order = torch.arange(1, terms + 1)
    angle = _grid(half)
    weights = 2 * (angle / 4).tan().unsqueeze(-1) ** order / order * _alternating(order)
    chebyshev = _chebyshev(terms)[1:, 1:]
    even, odd = ((weights * (order % 2 == parity)) @ chebyshev for parity in (0, 1))
    even, odd = (each.flip(-1).cumsum(-1).flip(-1).T.contiguous() for each in (even, odd))
    return even, odd


@functools.lru_cache(maxsize=64)
def _slope_series(half: int, terms: int) -> tuple[Tensor, Tensor]:
    """Return matrices that map the real and imaginary parts of c to the polynomial coefficients of D.

    D is a polynomial in x = 1 - 2y, with y as in `_busy`. Both matrices have shape (half + 1, terms).
    """
    order = torch.arange(terms)
    angle = _grid(half).unsqueeze(-1)
    weights = -4 * (angle / 2).sin() * (angle / 4).tan() ** order * _alternating(order)
    weights[:, 0] /= 2
    real, imaginary = (weights * (order % 2 == parity) @ _chebyshev(terms - 1) for parity in (1, 0))
    return real, imaginary


def _chebyshev(degree: int) -> Tensor:
    """Return the coefficients of the Chebyshev polynomials T_0 to T_degree, one polynomial per row."""
    t = torch.zeros(degree + 1, degree + 1, dtype=torch.float64)
    t[0, 0] = t[1, 1] = 1
    for i in range(2, degree + 1):
        t[i, 1:] = 2 * t[i - 1, :-1]
        t[i] -= t[i - 2]
    return t


def _alternating(order: Tensor) -> Tensor:
    """Return the signs (-1)^floor(l / 2), which are +, +, -, -, ... from l = 0 on."""
    return 1 - (order // 2 % 2) * 2


def angles(variance: float, n: int, like: Tensor) -> Tensor:
    """Return the angles θ_m = 2πm/M below π at which the generating function of the count is evaluated.

    M is odd to avoid θ = π, where the factor 1 + b * (exp(iθ) - 1) of an entry vanishes for b = 1/2. By
    Bernstein's inequality, the count differs from its mean by M or more with a probability below
    2 * exp(-44), so aliasing is smaller than rounding errors.
    """
    return _grid(_half(variance, n)).to(like.device)


def _half(variance: float, n: int) -> int:
    half = math.ceil((14 + math.sqrt(215 + 88 * variance)) / 2)
    return min(8 * -(-half // 8), -(-n // 2))  # multiples of 8, so that cached tables are reused


def _grid(half: int) -> Tensor:
    return torch.arange(half + 1, dtype=torch.float64) * (2 * math.pi / (2 * half + 1))


def _normalize(real: Tensor, imaginary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logarithm of the mean of the terms c_m, and the real and imaginary parts of c_m / sum(c).

    Each term with m > 0 is counted together with its conjugate.
    """
    twice = torch.full_like(real[0], 2.0)
    twice[0] = 1.0
    real, imaginary = real * twice, imaginary * twice
    total = real.sum(-1, keepdim=True)
    return (total.squeeze(-1) / twice.sum()).log(), real / total, imaginary / total


def side_of(above: Tensor, like: Tensor) -> Tensor:
    """Return -1 for entries in A and 1 for entries in B."""
    return 1 - 2 * above.to(like.dtype)


def _product(factor: Tensor) -> Tensor:
    """Compute the product over the middle dimension, by repeatedly multiplying one half by the other."""
    while factor.shape[1] > 1:
        half = factor.shape[1] // 2
        product = factor[:, :half] * factor[:, half : 2 * half]
        factor = torch.cat([product, factor[:, 2 * half :]], 1) if factor.shape[1] % 2 else product
    return factor.squeeze(1) if factor.shape[1] else factor.new_ones(len(factor), factor.shape[2])


class _Powers:
    """The powers of every entry of x (R, n).

    Only x^0 to x^7 and x^8 are stored, from which x^(8a + c) is computed as (x^8)^a * x^c.
    """

    def __init__(self, x: Tensor) -> None:
        self._pieces = [(_stacked(torch.ones_like(y), y, _BASE), _eighth(y)) for y in x.split(_CHUNK, -1)]

    def sums(self, weights: Tensor, side: Tensor, terms: int) -> tuple[Tensor, Tensor]:
        """Return the row sums of `weights * x^l` and `side * weights * x^l` for l < terms, as (R, terms)."""
        split = (t.split(_CHUNK, -1) for t in (weights, side))
        plain, signed = [], []
        for (low, high), w, sign in zip(self._pieces, *split, strict=True):
            left = _stacked(w, high, terms // _BASE)
            plain.append(left @ low.transpose(1, 2))
            signed.append((left * sign.unsqueeze(1)) @ low.transpose(1, 2))
        of_w, of_sign = (torch.stack(each).sum(0).reshape(len(weights), terms) for each in (plain, signed))
        # Matrix products add terms one by one, but the first sums need the accuracy of pairwise summation.
        return (
            torch.cat([weights.sum(-1, keepdim=True), of_w[:, 1:]], -1),
            torch.cat([(weights * side).sum(-1, keepdim=True), of_sign[:, 1:]], -1),
        )

    def polynomials(self, *coefficients: Tensor) -> list[Tensor]:
        """Evaluate polynomials, given by their coefficients (R, terms), at every entry of a row."""
        rows, terms = coefficients[0].shape
        blocks = torch.cat(coefficients, -1).reshape(rows, -1, _BASE)
        pieces = []
        for low, high in self._pieces:
            values = (blocks @ low).reshape(rows, len(coefficients), terms // _BASE, -1)
            result = values[:, :, -1]
            for i in reversed(range(terms // _BASE - 1)):
                result = torch.addcmul(values[:, :, i], result, high.unsqueeze(1))
            pieces.append(result)
        return list(_joined(pieces, -1).unbind(1))


def _stacked(first: Tensor, x: Tensor, count: int) -> Tensor:
    """Stack `first`, `first * x`, `first * x^2` and so on into a tensor (R, count, n)."""
    powers = [first]
    if torch.is_grad_enabled() and (first.requires_grad or x.requires_grad):
        for _ in range(count - 1):
            powers.append(powers[-1] * x)
        return torch.stack(powers, 1)
    # If no derivatives are needed, write directly to the result: copies would take most of the time.
    result = first.new_empty(first.shape[0], count, first.shape[1])
    result[:, 0] = first
    for i in range(1, count):
        torch.mul(result[:, i - 1], x, out=result[:, i])
    return result


def _eighth(x: Tensor) -> Tensor:
    square = x * x
    fourth = square * square
    return fourth * fourth
