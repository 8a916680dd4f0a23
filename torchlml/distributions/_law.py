"""The distribution P(S) ∝ exp(sum_{i in S} x_i) over the sets S of exactly k entries, and sampling from it.

The logits x of each row are shifted by the dual variable nu of `lml`, called the tilt: with z = x + nu,
independent coin flips with probabilities sigmoid(z) have k successes on average. Given exactly k successes,
the set of successes has the distribution P. `_counts` computes this conditional distribution. This module
prepares rows, including those with infinite logits, and provides derivatives.

Samples are exact. Independent coin flips have exactly k successes with a probability of about
1 / sqrt(2πV), where V is the variance of the number of successes. For small V, the coins are flipped until
exactly k succeed. For large V, the entries are drawn block by block, in random order: half of them, then half
of the rest, and so on. A block is accepted with a probability proportional to the probability, computed by
`_counts`, that the remaining coins bring the total to k. This is rejection sampling from the exact
conditional distribution. It needs about 2.4 * n flips per set instead of n * sqrt(2πV).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from torchlml.distributions._counts import (
    BUSY,
    angles,
    conditional,
    generating_function,
    side_of,
    variance_of,
)
from torchlml.projection import lml_dual

_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """Make a function run eagerly even inside `torch.compile`, because its control flow depends on values."""
    # Importing the compiler takes seconds, so it is imported only when something is being compiled.
    disabled = torch._disable_dynamo(function)  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "This computation does not support `torch.func` transforms, because its method depends on "
                "the values of the logits. Pass a batch instead of using `vmap`, and differentiate with "
                "`torch.autograd`."
            )
        chosen = disabled if torch.compiler.is_compiling() else function
        return chosen(*arguments, **keywords)

    return cast(_Function, call)


class Law:
    """The distribution over sets that each row of logits defines.

    Args:
        x: (R, n) logits. Entries of -inf are never chosen, and entries of +inf are always chosen. If more
            than k entries are +inf, k of them are chosen uniformly at random.
        k: (R,) int64, the sizes of the sets.

    If a row contains a NaN, or if fewer than k of its entries can be chosen, all results for the row are NaN.
    The properties and the results of methods are differentiable with respect to the logits. The attributes
    below are not.

    Attributes:
        forced: (R, n) bool, the entries that are chosen because their logit is +inf, or None. All other
            attributes describe the choice of the other entries.
        k: (R,) int64, the number of entries to choose in addition to the forced ones.
        nu: (R,) float64, the tilt.
        above: (R, n) bool, the set A of the entries with z > 0.
        b: (R, n) float64, the probability that an entry is on the other side, as in `_counts`.
        d: (R,) float64, k - |A|.
        log_ratio, tail: as in `_counts`.
    """

    def __init__(self, x: Tensor, k: Tensor) -> None:
        self._given, values = x, x.detach().double()
        self._diverges = (
            (values == torch.inf).any(-1) & (k > 0) if bool((values == torch.inf).any()) else None
        )
        values, self._infinite, self.forced, self.k = _without_infinities(values, k)
        available = values > -torch.inf
        most = available.sum(-1)
        bad = (self.k < 0) | (self.k > most) | values.isnan().any(-1)
        certain = (self.k <= 0) | (self.k >= most) | bad
        nu = lml_dual(values, torch.where(bad, 0, self.k).to(values.dtype))
        self.nu = torch.where(certain, 0, nu)
        # If a row has only one possible set, z is set to 0 in the row, so that the probability is exactly 1.
        self._certain = certain.unsqueeze(-1) if bool(certain.any()) else None
        self._bad = bad if bool(bad.any()) else None
        self._shift: Tensor = self.nu.unsqueeze(-1)
        if self._certain is not None:
            self._shift = torch.where(self._certain & available, -values, self._shift)
        z = values + self._shift
        self.above = z > 0
        if self._certain is not None:
            self.above = torch.where(self._certain, available & (self.k > 0).unsqueeze(-1), self.above)
        self.d = (self.k - self.above.sum(-1)).to(values.dtype)
        self._sum_of_a = torch.where(self.above, values, 0).sum(-1)
        self.b = self._other_side(z)
        self.log_ratio, self.tail = self._conditional(self.b)

    def of(self, x: Tensor) -> Law:
        """Return the same distribution, differentiable with respect to `x`, which must equal the logits."""
        law = copy.copy(self)
        law._given = x
        return law

    @property
    def z(self) -> Tensor:
        """The tilted logits, (R, n) in float64."""
        x = self._given.double()
        return (x if self._infinite is None else torch.where(*self._infinite, x)) + self._shift

    def _other_side(self, z: Tensor) -> Tensor:
        # The derivative of |z| at 0 is 0 in torch, so |z| is used only if no derivative is needed.
        folded = torch.where(self.above, -z, z) if z.requires_grad else -z.abs()
        b = folded.sigmoid()
        return b if self._certain is None else torch.where(self._certain, 0, b)

    def _conditional(self, b: Tensor) -> tuple[Tensor, Tensor]:
        log_ratio, tail = conditional(b, self.above, self.d)
        if self._bad is not None:
            log_ratio = torch.where(self._bad, torch.nan, log_ratio)
            tail = torch.where(self._bad.unsqueeze(-1), torch.nan, tail)
        return log_ratio, tail

    def inclusion_of(self, z: Tensor) -> Tensor:
        """Compute the inclusion probabilities of tilted logits with differentiable operations."""
        tail = self._conditional(self._other_side(z))[1]
        return torch.where(self.above, 1 - tail, tail)

    @property
    def inclusion(self) -> Tensor:
        """The probability (R, n) that each entry is in the set."""
        pi: Tensor = _Inclusion.apply(self.z, self)
        return pi if self.forced is None else torch.where(self.forced, 1.0, pi)

    @property
    def variance(self) -> Tensor:
        """The variance (R, n) of each entry: p * (1 - p) for the inclusion probability p.

        It is accurate even if p rounds to 1.
        """
        pi: Tensor = _Inclusion.apply(self.z, self)
        return _with_value(pi - pi * pi, self.tail - self.tail * self.tail)

    @property
    def log_normalizer(self) -> Tensor:
        """The logarithm (R,) of the sum of exp(sum_{i in S} x_i) over all sets S."""
        value = self._sum_of_a - self.d * self.nu + self.log_ratio
        value = _with_value(_LogNormalizer.apply(self.z, self), value)
        return value if self._diverges is None else torch.where(self._diverges, torch.inf, value)

    @property
    def entropy(self) -> Tensor:
        """The entropy (R,), which is the expectation of -log P(S)."""
        z = self.z
        # All terms are nonnegative except the logarithm of a probability inside `log_ratio`, which is small
        # compared with the sum.
        value = self.log_ratio + torch.where(self.tail == 0, 0, self.tail * z.detach().abs()).sum(-1)
        pi: Tensor = _Inclusion.apply(z, self)
        expected = (pi * torch.where(z.detach() > -torch.inf, z, 0)).sum(-1)
        return _with_value(_LogNormalizer.apply(z, self) - expected, value)

    def cross_entropy(self, other: Law) -> Tensor:
        """Return the expectation (R,) of -log Q(S), where Q is the `other` distribution."""
        z, pi = other.z, self.inclusion
        # Compute the probability that an entry does not have its more likely outcome under Q. The result is
        # accurate even if pi or 1 - pi rounds to 1.
        pi_value, complement = (
            torch.where(self.above == side, 1 - self.tail, self.tail) for side in (True, False)
        )
        if self.forced is not None:
            complement = torch.where(self.forced, 0.0, complement)
            pi_value = torch.where(self.forced, 1.0, pi_value)
        expected = other.above if other.forced is None else other.above | other.forced
        value = torch.where(expected, complement, pi_value)
        deviation = _with_value(torch.where(expected, 1 - pi, pi), value)
        cost = torch.where(other.above, z, -z)
        cost = torch.where((value == 0) & cost.isinf(), 0, cost)
        return (deviation * cost).sum(-1) + other._relative_normalizer(z)

    def log_prob(self, chosen: Tensor) -> Tensor:
        """Return the log probability (..., R) of sets given as a bool tensor (..., R, n)."""
        z, present = self.z, chosen if self.forced is None else chosen & ~self.forced
        # No term of sum_S z - sum_A z is positive: the terms are -z for members of A missing from S, and z
        # for members of S not in A.
        cost = torch.where(present == self.above, 0, torch.where(self.above, -z, z)).sum(-1)
        result = cost - self._relative_normalizer(z)
        if self.forced is None:
            return result
        return torch.where((self.forced & ~chosen).any(-1), -torch.inf, result)

    def log_prob_of_indices(self, index: Tensor) -> Tensor:
        """Return the log probability (..., R) of sets of indices (..., R, L), which are padded with -1."""
        n = self.z.shape[-1]
        places = torch.where(index < 0, n, index)  # padding goes to a column that is dropped
        chosen = torch.zeros(*index.shape[:-1], n + 1, dtype=torch.bool, device=index.device)
        return self.log_prob(chosen.scatter_(-1, places, True)[..., :n])

    def log_prob_containing(self, observed: Tensor) -> Tensor:
        """Return the log probability (R,) that the set contains all `observed` entries.

        For the observed entries Y, it is sum_Y x + log e_{k - |Y|}(x without Y) - log e_k(x), where e_j is
        the j-th elementary symmetric polynomial of exp(x). Each normalizer has its own tilt and is computed
        relative to a set, so that the result is a sum of small terms.
        """
        z = self.z
        if self.forced is not None:
            observed = observed & ~self.forced
        left = self.k - observed.sum(-1)
        others = Law(torch.where(observed, -torch.inf, z), left.clamp(min=0))
        together, folded = observed | others.above, -z.detach().abs()
        cost = torch.where(together == self.above, 0, folded).sum(-1)
        value = cost - others.d * others.nu + others.log_ratio - self.log_ratio
        value = torch.where(left < 0, -torch.inf, value)
        exact = torch.where(observed, z, 0).sum(-1) + others.log_normalizer - _LogNormalizer.apply(z, self)
        return _with_value(exact, value)

    def _relative_normalizer(self, z: Tensor) -> Tensor:
        """Return `log_ratio` (R,) with derivatives."""
        if not z.requires_grad:
            return self.log_ratio
        return _with_value(
            _LogNormalizer.apply(z, self) - torch.where(self.above, z, 0).sum(-1), self.log_ratio
        )


def _without_infinities(
    x: Tensor, k: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor | None, Tensor]:
    """Convert rows with logits of +inf to equivalent rows without them.

    Returns:
        The logits without +inf; a mask of the replaced entries and their new values; the entries that are
        always chosen; and the number of other entries that are chosen.
    """
    largest = x == torch.inf
    if not bool(largest.any()):
        return x, None, None, k
    crowded = (largest.sum(-1) > k).unsqueeze(-1)
    forced = largest & ~crowded
    replaced, by = largest | crowded, torch.where(largest & crowded, 0.0, -torch.inf).to(x.dtype)
    return torch.where(replaced, by, x), (replaced, by), forced, k - forced.sum(-1)


def _with_value(differentiable: Tensor, value: Tensor) -> Tensor:
    """Return `value` with the derivatives of `differentiable`, a less accurate expression for `value`."""
    if not differentiable.requires_grad:
        return value
    # The difference of infinite values would be NaN.
    change = differentiable - differentiable.detach()
    return value + torch.where(value.isfinite(), change, 0)


class _LogNormalizer(torch.autograd.Function):
    """Computes log sum_S exp(sum_{i in S} z_i), whose gradient is the vector of inclusion probabilities."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, law: Law) -> Tensor:
        ctx.law = law
        ctx.save_for_backward(z)
        return law.log_ratio + torch.where(law.above, z, 0).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (z,) = ctx.saved_tensors
        return grad.unsqueeze(-1) * _Inclusion.apply(z, ctx.law), None


class _Inclusion(torch.autograd.Function):
    """Computes the inclusion probabilities, whose derivative is the covariance matrix."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, law: Law) -> Tensor:
        ctx.law = law
        ctx.save_for_backward(z)
        return torch.where(law.above, 1 - law.tail, law.tail)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (z,) = ctx.saved_tensors
        higher = torch.is_grad_enabled()
        if not higher:
            z = z.detach().requires_grad_()
        with torch.enable_grad():
            pi = ctx.law.inclusion_of(z)
        return torch.autograd.grad(pi, z, grad, create_graph=higher)[0], None


_CHUNK = 2**20  # number of coins flipped at once


def sample(law: Law, count: int) -> Tensor:
    """Draw `count` sets from the distribution of every row.

    Returns:
        A bool tensor of shape (count, R, n), drawn with PyTorch's global random generator.
    """
    rows, n = law.b.shape
    drawn = law.above.repeat(count, 1)
    flips = law.b > 0
    variance = variance_of(law.b)
    # Rows with the same number of blocks are drawn together.
    levels = (variance / BUSY).log2().floor().clamp(min=0).long()
    levels = torch.where(flips.any(-1), levels, -1)
    for level in levels.unique().tolist():
        if level >= 0:
            row = (levels == level).nonzero().squeeze(-1)
            _sample_rows(law, row, level, drawn.view(count, rows, n))
    drawn = drawn.view(count, rows, n)
    return drawn if law.forced is None else drawn | law.forced


class _Block(NamedTuple):
    """A block of columns, and the probability that later columns supply a given net number of successes.

    The net number is the number of successes in B minus the number of failures in A.
    """

    columns: Tensor
    chance: Tensor  # (rows, M), relative to the maximum; column j mod M is for the net number j
    center: Tensor  # (rows,), the expected net number, rounded


def _sample_rows(law: Law, row: Tensor, level: int, drawn: Tensor) -> None:
    """Draw the sets of some rows, and write them into `drawn` (count, R, n)."""
    b, above, d = law.b[row], law.above[row], law.d[row]
    side = side_of(above, b)
    missing = d.expand(len(drawn), -1).flatten()
    of_pair = torch.arange(len(row), device=b.device).repeat(len(drawn))
    flipped = torch.zeros(len(of_pair), b.shape[-1], dtype=torch.bool, device=b.device)
    for block in _blocks(b, side, level):
        missing = _draw_block(block, b, side, of_pair, missing, flipped)
    drawn[:, row] = above ^ flipped.view(len(drawn), *above.shape)


def _blocks(b: Tensor, side: Tensor, level: int) -> list[_Block]:
    """Split off half of the columns, then half of the rest, and so on, while the rest has enough variance."""
    n, blocks = b.shape[-1], []
    columns = torch.randperm(n, device=b.device) if level else torch.arange(n, device=b.device)
    for _ in range(level):
        half = len(columns) // 2
        rest = columns[half:]
        b_rest, side_rest = b[:, rest], side[:, rest]
        variance = variance_of(b_rest)
        if bool((variance < BUSY).any()):
            break
        angle = angles(float(variance.max()), len(rest), b)
        size, phase = generating_function(b_rest, side_rest, variance, angle)
        chance = torch.fft.irfft(torch.polar(size, -phase), n=2 * len(angle) - 1).clamp(min=0)
        chance = chance / chance.amax(-1, keepdim=True)
        blocks.append(_Block(columns[:half], chance, (side_rest * b_rest).sum(-1).round()))
        columns = rest
    # No block follows the last block, so it must supply the exact number of missing successes.
    last = b.new_zeros(len(b), 3)
    last[:, 0] = 1
    blocks.append(_Block(columns, last, b.new_zeros(len(b))))
    return blocks


def _draw_block(
    block: _Block, b: Tensor, side: Tensor, of_pair: Tensor, missing: Tensor, flipped: Tensor
) -> Tensor:
    """Flip the coins of a block until they are accepted, and return the number of successes still missing."""
    missing = missing.clone()
    b, side = b[:, block.columns], side[:, block.columns]
    points = block.chance.shape[-1]
    pending = torch.arange(len(of_pair), device=b.device)
    size = max(1, _CHUNK // max(1, len(block.columns)))
    while len(pending):
        rejected = []
        for part in pending.split(size):
            row = of_pair[part]
            flip = torch.rand(len(part), len(block.columns), dtype=b.dtype, device=b.device) < _rows(b, row)
            left = missing[part] - torch.where(flip, _rows(side, row), 0).sum(-1)
            near = (left - block.center[row]).abs() <= points // 2
            chance = block.chance[row, left.long() % points] * near
            accept = torch.rand(len(part), dtype=b.dtype, device=b.device) < chance
            kept = part[accept]
            missing[kept] = left[accept]
            flipped[kept.unsqueeze(-1), block.columns] = flip[accept]
            rejected.append(part[~accept])
        pending = torch.cat(rejected)
    return missing


def _rows(values: Tensor, row: Tensor) -> Tensor:
    """Return `values[row]`, but broadcast a single row instead of copying it many times."""
    return values if len(values) == 1 else values[row]
