"""`KSubset` has a relative error below 1e-10, even for difficult rows.

The reference values are sums over all sets for short rows and extended-precision recursions for long rows.
"""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch

import torchlml
from tests.support import subsets
from torchlml.distributions import KSubset

RELATIVE = 1e-10


def relative_error(value: float, exact) -> float:
    """Return the error relative to the exact value. Values that underflow in float64 may be 0."""
    if exact in (mpmath.inf, -mpmath.inf):
        return 0.0 if value == float(exact) else math.inf
    exact = subsets.MP.mpf(str(exact))
    if abs(exact) < 1e-300:
        return 0.0 if abs(value) < 1e-290 else math.inf
    return float(abs(subsets.MP.mpf(value) - exact) / abs(exact))


def worst(values: torch.Tensor, exact: list) -> float:
    return max(relative_error(v, e) for v, e in zip(values.tolist(), exact, strict=True))


@pytest.mark.parametrize("name", subsets.HOSTILE)
def test_every_quantity_for_difficult_rows(name):
    x, k = subsets.HOSTILE[name]
    exact = subsets.enumerate_sets(x, k)
    d = KSubset(k, logits=x)
    # The limit is absolute for a log normalizer near 0, where even a tiny error is large in relative terms.
    assert abs(float(subsets.MP.mpf(float(d.log_normalizer)) - exact.log_normalizer)) <= RELATIVE * max(
        1, abs(float(exact.log_normalizer))
    )
    assert worst(d.mean, exact.inclusion) < RELATIVE
    variance = [p * q for p, q in zip(exact.inclusion, exact.exclusion, strict=True)]
    assert worst(d.variance, variance) < RELATIVE
    assert relative_error(float(d.entropy()), exact.entropy) < RELATIVE
    hot = torch.zeros(len(exact.sets), len(x), dtype=torch.float64)
    for row, members in zip(hot, exact.sets, strict=True):
        row[list(members)] = 1
    assert worst(d.log_prob(hot), list(exact.sets.values())) < RELATIVE
    assert d.mean.sum().item() == pytest.approx(k, abs=1e-12)


@pytest.mark.parametrize("name", subsets.HOSTILE)
def test_the_same_sets_as_indices(name):
    x, k = subsets.HOSTILE[name]
    exact = subsets.enumerate_sets(x, k)
    index = torch.tensor(list(exact.sets), dtype=torch.int64).reshape(len(exact.sets), k)
    found = KSubset(k, logits=x).log_prob(index)
    for value, truth in zip(found.tolist(), exact.sets.values(), strict=True):
        assert relative_error(value, truth) < RELATIVE
        assert value <= 0


@pytest.mark.parametrize(("n", "k", "scale"), subsets.LONG)
def test_long_rows_against_dynamic_programming(n, k, scale):
    x = subsets.long_row(n, scale)
    exact = subsets.dynamic_programming(x, k)
    d = KSubset(k, logits=x)
    assert relative_error(float(d.log_normalizer), exact.log_normalizer) < RELATIVE
    assert worst(d.mean, exact.inclusion) < RELATIVE
    variance = [p * q for p, q in zip(exact.inclusion, exact.exclusion, strict=True)]
    assert worst(d.variance, variance) < RELATIVE
    assert relative_error(float(d.entropy()), exact.entropy) < RELATIVE
    assert d.mean.sum().item() == pytest.approx(k, rel=1e-13)


def two_levels(n: int, first: int, k: int, height: float) -> tuple[float, float]:
    """Return the log normalizer, and the inclusion probability of entries with logit `height`.

    The first `first` of the n entries have logit `height`, and all others have logit 0.
    """
    chosen = np.arange(max(0, k - (n - first)), min(first, k) + 1, dtype=np.longdouble)
    j = chosen[:-1]
    steps = np.log(first - j) + np.log(k - j) - np.log(j + 1) - np.log(n - first - k + j + 1) + height
    logs = np.concatenate([[0], np.cumsum(steps)])
    largest = logs.max()
    weights = np.exp(logs - largest)
    j0 = int(chosen[0])
    start = subsets.MP.log(subsets.MP.binomial(first, j0)) + subsets.MP.log(
        subsets.MP.binomial(n - first, k - j0)
    )
    log_normalizer = float(start) + float(j0 * height + largest + np.log(weights.sum()))
    return log_normalizer, float((weights * chosen).sum() / weights.sum() / first)


@pytest.mark.parametrize(
    ("n", "first", "k", "height"),
    [(60_000, 20_000, 30_000, 0.7), (100_000, 40_000, 300, -1.5), (200_000, 1_000, 150_000, 2.0)],
)
def test_very_long_rows_of_two_levels(n, first, k, height):
    x = torch.zeros(n, dtype=torch.float64)
    x[:first] = height
    log_normalizer, inclusion = two_levels(n, first, k, height)
    d = KSubset(k, logits=x)
    assert float(d.log_normalizer) == pytest.approx(log_normalizer, rel=1e-12)
    mean = d.mean
    assert mean[:first].tolist() == pytest.approx([inclusion] * first, rel=1e-10)
    assert mean.sum().item() == pytest.approx(k, rel=1e-13)


def test_a_million_entries():
    x = subsets.long_row(1_000_000, 1.0)
    for k in (10, 1000, 100_000):
        mean, y = KSubset(k, logits=x).mean, torchlml.lml(x, k)
        assert mean.sum().item() == pytest.approx(k, rel=1e-12)
        assert (mean.gather(0, x.argsort()).diff() >= 0).all()
        assert (mean - y).abs().max() < 1e-2


def test_rows_of_all_kinds_in_one_batch():
    """Rows that need different algorithms do not affect each other."""
    rows = [
        (x[torch.arange(200) % len(x)] + torch.arange(200) // len(x) * 1e-3, 7)
        for x, _ in subsets.HOSTILE.values()
    ]
    rows += [(subsets.long_row(200, scale), k) for scale, k in ((1.0, 1), (0.1, 100), (5.0, 60), (300.0, 30))]
    rows = [(x, k) for x, k in rows if (x > -math.inf).sum() > k]
    x, k = torch.stack([row for row, _ in rows]), torch.tensor([k for _, k in rows])
    together = KSubset(k, logits=x)
    for i in range(len(rows)):
        alone = KSubset(int(k[i]), logits=x[i])
        for name in ("mean", "variance", "log_normalizer"):
            torch.testing.assert_close(getattr(together, name)[i], getattr(alone, name), rtol=1e-12, atol=0)
        torch.testing.assert_close(together.entropy()[i], alone.entropy(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_computed_in_float64_and_rounded_once(dtype):
    x = (torch.randn(5, 40, dtype=torch.float64) * 3).to(dtype)
    narrow, wide = KSubset(6, logits=x), KSubset(6, logits=x.double())
    sets = wide.sample()
    for a, b in (
        (narrow.mean, wide.mean),
        (narrow.entropy(), wide.entropy()),
        (narrow.log_prob(sets), wide.log_prob(sets)),
        (narrow.log_normalizer, wide.log_normalizer),
    ):
        assert a.dtype == dtype
        assert torch.equal(a, b.to(dtype))


def test_infinite_logits_force_entries():
    inf = math.inf
    x = torch.tensor([[1.0, inf, 0.0, -2.0], [inf, 5.0, inf, inf], [inf, 3.0, inf, 1.0]], dtype=torch.float64)
    d = KSubset(2, logits=x)
    rest = torch.tensor([1.0, 0.0, -2.0], dtype=torch.float64).softmax(0)
    expected = torch.tensor([[rest[0], 1, rest[1], rest[2]], [2 / 3, 0, 2 / 3, 2 / 3], [1, 0, 1, 0]])
    torch.testing.assert_close(d.mean, expected.double(), rtol=1e-12, atol=0)
    assert (d.log_normalizer == inf).all()
    entropy = [-(rest * rest.log()).sum().item(), math.log(3), 0.0]
    assert d.entropy().tolist() == pytest.approx(entropy, rel=1e-12)
    sets = d.enumerate_support()
    assert d.log_prob(sets).exp().sum(0).tolist() == pytest.approx([1, 1, 1], rel=1e-12)
    index = sets.nonzero()[:, -1].reshape(*sets.shape[:-1], 2)
    assert torch.equal(d.log_prob(index).isinf(), d.log_prob(sets).isinf())
    torch.testing.assert_close(d.log_prob(index), d.log_prob(sets))
    assert (d.log_prob(d.sample((50,))) > -inf).all()


def test_probs_are_bernoulli_probabilities_conditioned_on_k_successes():
    p = torch.tensor([0.5, 0.2, 0.9, 0.0, 1.0, 0.35], dtype=torch.float64)
    d = KSubset(3, probs=p)
    sets = d.enumerate_support()
    chance = torch.where(sets > 0, p, 1 - p).prod(-1)
    torch.testing.assert_close(d.log_prob(sets).exp(), chance / chance.sum(), rtol=1e-12, atol=1e-300)
