"""`KSubset` as a subclass of `torch.distributions.Distribution`: shapes, samples, derivatives and errors."""

from __future__ import annotations

import itertools
import math
import pickle

import pytest
import scipy.stats
import torch
from torch.distributions import Distribution, Independent, constraints, kl_divergence

import torchlml
from tests.support import subsets
from torchlml.distributions import KSubset

INF = math.inf


@pytest.fixture(autouse=True)
def _validation():
    """Re-enable argument validation after each test, because compiling code disables it."""
    yield
    Distribution.set_default_validate_args(True)


def logits(*shape, scale=1.0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype) * scale


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0,), (2, 0)])
@pytest.mark.parametrize("samples", [(), (4,), (2, 5), (0,)])
def test_shapes(batch, samples):
    d = KSubset(2, logits=logits(*batch, 5))
    assert d.batch_shape == batch
    assert d.event_shape == (5,)
    value = d.sample(samples)
    assert value.shape == (*samples, *batch, 5)
    assert d.rsample(samples).shape == value.shape
    assert d.log_prob(value).shape == (*samples, *batch)
    assert d.mean.shape == d.variance.shape == d.stddev.shape == d.mode.shape == (*batch, 5)
    assert d.entropy().shape == d.log_normalizer.shape == batch
    assert d.enumerate_support().shape == (10, *batch, 5)
    assert d.enumerate_support(expand=False).shape == (10, *(1,) * len(batch), 5)
    assert kl_divergence(d, d).shape == batch


def test_one_k_per_row_matches_separate_distributions():
    x, k = logits(2, 3, 7), torch.tensor([[0, 1, 2], [4, 6, 7]])
    d = KSubset(k, logits=x)
    sets = d.sample((6,))
    assert torch.equal(sets.sum(-1), k.expand(6, 2, 3).double())
    for i, j in itertools.product(range(2), range(3)):
        alone = KSubset(int(k[i, j]), logits=x[i, j])
        torch.testing.assert_close(d.mean[i, j], alone.mean)
        torch.testing.assert_close(d.log_prob(sets)[:, i, j], alone.log_prob(sets[:, i, j]))
    index = torch.full((2, 3, 7), -1)
    for i, j in itertools.product(range(2), range(3)):
        members = sets[0, i, j].nonzero().flatten()
        index[i, j, : len(members)] = members
    torch.testing.assert_close(d.log_prob(index), d.log_prob(sets[0]))


def test_k_and_logits_broadcast():
    x = logits(7)
    d = KSubset(torch.tensor([[1], [3]]), logits=x.expand(4, 7))
    assert d.batch_shape == (2, 4)
    torch.testing.assert_close(d.mean[1, 2], KSubset(3, logits=x).mean)
    one = KSubset(3, logits=x.expand(1, 7))
    value = KSubset(3, logits=x).sample((5,))
    torch.testing.assert_close(one.log_prob(value), KSubset(3, logits=x).log_prob(value))


def test_expand():
    d = KSubset(torch.tensor([1, 2]), logits=logits(2, 5))
    for expanded in (d.expand((3, 2)), d.expand(torch.Size([3, 2]))):
        assert expanded.batch_shape == (3, 2)
        assert expanded.event_shape == (5,)
        torch.testing.assert_close(expanded.mean, d.mean.expand(3, 2, 5))
        value = expanded.sample()
        torch.testing.assert_close(expanded.log_prob(value), d.log_prob(value))
        torch.testing.assert_close(expanded.entropy(), d.entropy().expand(3, 2))
    assert Independent(d, 1).log_prob(d.sample()).shape == ()


def test_representation():
    assert repr(KSubset(2, logits=torch.zeros(3, 5))) == "KSubset(k: 2, logits: torch.Size([3, 5]))"
    assert repr(KSubset(2, probs=torch.ones(5) / 2)) == "KSubset(k: 2, probs: torch.Size([5]))"
    assert repr(KSubset(2, logits=torch.zeros(5)).support) == "KHot(k=2)"
    copy = pickle.loads(pickle.dumps(KSubset(2, logits=torch.zeros(5))))
    assert torch.equal(copy.mean, torch.full((5,), 0.4))


def test_support():
    support = KSubset(torch.tensor([1, 2]), logits=torch.zeros(2, 3)).support
    assert isinstance(support, constraints.Constraint)
    assert support.is_discrete
    assert support.event_dim == 1
    value = torch.tensor([[1.0, 0, 0], [1, 1, 0]])
    assert support.check(value).tolist() == [True, True]
    assert support.check(value.flip(0)).tolist() == [False, False]
    assert support.check(value * 0.5).tolist() == [False, False]
    assert support.check(value.bool()).tolist() == [True, True]


def test_the_support_contains_every_set_once():
    d = KSubset(3, logits=logits(6))
    sets = d.enumerate_support()
    assert len(sets.unique(dim=0)) == len(sets) == math.comb(6, 3)
    assert d.support.check(sets).all()
    assert d.log_prob(sets).exp().sum().item() == pytest.approx(1, rel=1e-13)
    with pytest.raises(NotImplementedError, match="same `k`"):
        KSubset(torch.tensor([1, 2]), logits=torch.zeros(2, 3)).enumerate_support()
    with pytest.raises(ValueError, match="too many"):
        KSubset(20, logits=torch.zeros(40)).enumerate_support()


def test_the_mode_is_the_most_probable_set():
    d = KSubset(torch.tensor([1, 3, 5, 0]), logits=logits(4, 6))
    for i in range(4):
        row = KSubset(int(d.k[i]), logits=d.logits[i])
        sets = row.enumerate_support()
        assert torch.equal(d.mode[i], sets[row.log_prob(sets).argmax()])
    assert KSubset(2, logits=torch.zeros(4)).mode.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(("n", "k", "scale"), [(6, 3, 1.0), (6, 1, 2.0), (7, 5, 0.5), (5, 2, 6.0)])
def test_sample_frequencies_match_the_probabilities_of_sets(n, k, scale):
    x, count = logits(n, scale=scale), 20_000
    exact = subsets.enumerate_sets(x, k)
    drawn = KSubset(k, logits=x).sample((count,))
    code = (drawn @ (2.0 ** torch.arange(n).double())).long()
    expected = {sum(2**i for i in members): math.exp(float(p)) for members, p in exact.sets.items()}
    found = {key: int((code == key).sum()) for key in expected}
    assert sum(found.values()) == count
    # Sets with an expected count below five are merged.
    common = [key for key, p in expected.items() if p * count >= 5]
    observed = [*(found[key] for key in common), count - sum(found[key] for key in common)]
    chances = [*(expected[key] * count for key in common), count * (1 - sum(expected[key] for key in common))]
    if chances[-1] < 1e-6 * count:
        assert observed[-1] == 0
        observed, chances = observed[:-1], [c * count / sum(chances[:-1]) for c in chances[:-1]]
    assert scipy.stats.chisquare(observed, chances).pvalue > 1e-4


# The variances of the count (see `_counts.py`) are 8, 47, 83 and 250, so samples are drawn in one to four
# blocks (see `_law.py`).
@pytest.mark.parametrize(
    ("n", "k", "scale"), [(100, 10, 1.0), (1000, 50, 0.5), (400, 200, 1.0), (1000, 500, 0.0)]
)
def test_samples_of_long_rows_have_the_right_number_of_members_in_each_part(n, k, scale):
    """The number of set members in a fixed part of the row follows its exact distribution."""
    x, count = subsets.long_row(n, scale), 4000
    drawn = KSubset(k, logits=x).sample((count,))
    assert (drawn.sum(-1) == k).all()
    best = torch.zeros(n, dtype=torch.bool)
    best[x.argsort()[-n // 3 :]] = True
    for part in (torch.arange(n) % 2 == 0, torch.arange(n) < n // 4, best):
        chance = subsets.count_inside(x, k, part) * count
        found = torch.bincount(drawn[:, part].sum(-1).long(), minlength=k + 1).numpy()
        often = chance >= 5
        observed, expected = ([*v[often], v[~often].sum()] for v in (found, chance))
        assert scipy.stats.chisquare(observed, expected).pvalue > 1e-4


def test_samples_of_a_batch_do_not_mix_rows():
    x = torch.stack([subsets.long_row(300, scale) for scale in (0.0, 1.0, 10.0, 100.0)])
    x[2, :150] = -INF
    k = torch.tensor([100, 30, 20, 5])
    d = KSubset(k, logits=x)
    drawn = d.sample((3000,))
    assert (drawn.sum(-1) == k).all()
    assert (drawn[:, 2, :150] == 0).all()
    error = (drawn.mean(0) - d.mean) / (d.variance / 3000).sqrt().clamp(min=1e-3)
    assert error.abs().max() < 5


def test_a_seed_repeats_the_samples():
    d = KSubset(60, logits=subsets.long_row(400, 1.0))
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(d.sample((3,)))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_rsample_has_the_gradient_of_the_mean():
    x, seed = logits(3, 8).requires_grad_(), logits(3, 8)
    value = KSubset(3, logits=x).rsample()
    assert ((value.detach() - value.detach().round()).abs() < 1e-12).all()
    (grad,) = torch.autograd.grad(value, x, seed)
    (expected,) = torch.autograd.grad(KSubset(3, logits=x).mean, x, seed)
    torch.testing.assert_close(grad, expected)
    assert not KSubset(3, logits=x).sample().requires_grad


K = torch.tensor([1, 3, 5, 6, 0])
SETS = (torch.arange(6) < K.unsqueeze(-1)).double()
FUNCTIONS = {
    "log_prob": lambda x: KSubset(K, logits=x).log_prob(SETS),
    "log_prob of indices": lambda x: KSubset(2, logits=x).log_prob(torch.tensor([4, 1])),
    "mean": lambda x: KSubset(K, logits=x).mean,
    "variance": lambda x: KSubset(K, logits=x).variance,
    "entropy": lambda x: KSubset(K, logits=x).entropy(),
    "log_normalizer": lambda x: KSubset(K, logits=x).log_normalizer,
}


@pytest.mark.parametrize("scale", [0.0, 3.0])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_first_and_second_derivatives(name, scale):
    x = logits(5, 6, scale=scale).requires_grad_()
    assert torch.autograd.gradcheck(FUNCTIONS[name], x)
    assert torch.autograd.gradgradcheck(FUNCTIONS[name], x, fast_mode=True)


# The variances of the count are 0.0015 and 36. Unlike the problems above, these two use the methods for
# variances below 1/64 and of at least 18.
@pytest.mark.parametrize(("n", "k", "gap"), [(6, 3, 14.0), (200, 60, 0.0)])
@pytest.mark.parametrize("name", ["mean", "entropy"])
def test_derivatives_of_the_other_methods(name, n, k, gap):
    x = logits(n)
    x[:k] += gap
    x.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: getattr(KSubset(k, logits=x), name)() if name == "entropy" else KSubset(k, logits=x).mean,
        x,
        fast_mode=n > 50,
        atol=1e-9,
    )
    assert torch.autograd.gradgradcheck(
        lambda x: KSubset(k, logits=x).log_prob(SETS_OF[n]), x, fast_mode=n > 50
    )


SETS_OF = {6: (torch.arange(6) % 2 == 0), 200: torch.arange(200) < 60}


def test_the_derivative_of_the_mean_is_the_covariance():
    x = logits(7, scale=2.0).requires_grad_()
    d = KSubset(3, logits=x)
    sets = d.enumerate_support()
    chance = d.log_prob(sets).exp().detach()
    centered = sets - (chance.unsqueeze(-1) * sets).sum(0)
    covariance = torch.einsum("s,si,sj->ij", chance, centered, centered)
    jacobian = torch.autograd.functional.jacobian(lambda x: KSubset(3, logits=x).mean, x)
    torch.testing.assert_close(jacobian, covariance, rtol=1e-10, atol=1e-12)


def test_backward_can_be_called_for_every_result():
    for parameter in (
        {"logits": logits(5).requires_grad_()},
        {"probs": torch.full((5,), 0.3, requires_grad=True)},
    ):
        d = KSubset(2, **parameter)
        with torch.no_grad():
            d.sample()
        for result in (d.mean[0], d.entropy(), d.log_prob(d.mode), d.mean[1]):
            result.backward()


def test_infinite_logits_have_no_gradient():
    x = torch.tensor([1.0, -INF, 0.5, INF, 0.0], dtype=torch.float64, requires_grad=True)
    d = KSubset(3, logits=x)
    for result in (d.mean[0], d.entropy(), d.log_prob(torch.tensor([0, 2, 3]))):
        (grad,) = torch.autograd.grad(result, x)
        assert grad.isfinite().all()
        assert grad[3] == grad[1] == 0


def test_kl_divergence():
    x, y, k = logits(3, 7), logits(3, 7), torch.tensor([1, 3, 6])
    p, q = KSubset(k, logits=x), KSubset(k, logits=y)
    for i in range(3):
        a, b = (KSubset(int(k[i]), logits=t[i]) for t in (x, y))
        sets = a.enumerate_support()
        log_a, log_b = a.log_prob(sets), b.log_prob(sets)
        torch.testing.assert_close(kl_divergence(p, q)[i], (log_a.exp() * (log_a - log_b)).sum())
    assert kl_divergence(p, p).abs().max() < 1e-13
    assert (kl_divergence(p, KSubset(2, logits=y)) == INF).all()
    narrow = KSubset(2, logits=torch.tensor([1.0, 0.0, -INF, 2.0]))
    forced = KSubset(2, logits=torch.tensor([1.0, 0.0, 1.0, INF]))
    wide = KSubset(2, logits=torch.tensor([0.0, 1.0, 2.0, 3.0]))
    assert kl_divergence(wide, narrow) == kl_divergence(wide, forced) == INF
    for limited in (narrow, forced):
        sets = limited.enumerate_support()
        sets = sets[limited.log_prob(sets) > -INF]
        log_a, log_b = limited.log_prob(sets), wide.log_prob(sets)
        torch.testing.assert_close(kl_divergence(limited, wide), (log_a.exp() * (log_a - log_b)).sum())
    with pytest.raises(ValueError, match="same event shape"):
        kl_divergence(wide, p)
    x.requires_grad_()
    y.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, y: kl_divergence(KSubset(k, logits=x), KSubset(k, logits=y)), (x, y)
    )


# At a graph break, the compiler reads `.grad` of intermediate tensors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_gives_the_same_results():
    x = logits(4, 9).requires_grad_()

    def f(x):
        d = KSubset(3, logits=2 * x)
        return d.log_prob(torch.tensor([0, 1, 2])) + d.entropy() + d.mean[..., 0] + d.mode[..., 0]

    torch.compiler.reset()
    compiled = torch.compile(f, backend="aot_eager")
    torch.testing.assert_close(compiled(x), f(x))
    (grad,), (expected,) = (torch.autograd.grad(g(x).sum(), x) for g in (compiled, f))
    torch.testing.assert_close(grad, expected)


def test_transforms_are_rejected_with_a_reason():
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.vmap(lambda x: KSubset(2, logits=x, validate_args=False).mean)(logits(3, 5))


def test_ksubset_is_public():
    assert torchlml.distributions.KSubset is KSubset


X = torch.zeros(3, 5)
WRONG = {
    "k too large": (lambda: KSubset(6, logits=X), ValueError, "`k` must be from 0 to n = 5, but it is 6."),
    "k negative": (lambda: KSubset(-1, logits=X), ValueError, "`k` must be from 0 to n = 5, but it is -1."),
    "k fractional": (lambda: KSubset(2.5, logits=X), ValueError, "`k` must be an integer"),
    "k a bool": (lambda: KSubset(True, logits=X), TypeError, "`k` must be an integer"),
    "k text": (lambda: KSubset("2", logits=X), TypeError, "`k` must be an integer"),
    "k of another shape": (lambda: KSubset(torch.tensor([1, 2]), logits=X), ValueError, "`k` must broadcast"),
    "one k too large": (lambda: KSubset(torch.tensor([1, 2, 9]), logits=X), ValueError, "but it is 9."),
    "NaN": (
        lambda: KSubset(2, logits=X.index_fill(1, torch.tensor(3), math.nan)),
        ValueError,
        "nan at index (0, 3)",
    ),
    "too few": (
        lambda: KSubset(3, logits=X.index_fill(1, torch.tensor([0, 1, 2]), -INF)),
        ValueError,
        "k = 3 has only 2 entries that are not -inf",
    ),
    "nothing": (lambda: KSubset(2), ValueError, "Exactly one of `logits` and `probs`"),
    "both": (lambda: KSubset(2, logits=X, probs=X), ValueError, "Exactly one of `logits` and `probs`"),
    "a list": (lambda: KSubset(2, logits=[1.0]), TypeError, "`logits` must be a torch.Tensor"),
    "integers": (lambda: KSubset(2, logits=X.long()), TypeError, "`logits` must be a floating-point tensor"),
    "no dimension": (lambda: KSubset(0, logits=X[0, 0]), ValueError, "`logits` must have shape (..., n)"),
    "probs": (lambda: KSubset(2, probs=X + 1.5), ValueError, "`probs` must contain probabilities"),
    "too many ones": (
        lambda: KSubset(2, logits=X).log_prob(X + 1),
        ValueError,
        "within the support (KHot(k=2))",
    ),
    "halves": (lambda: KSubset(2, logits=X).log_prob(X + 0.4), ValueError, "within the support (KHot(k=2))"),
    "wrong width": (lambda: KSubset(2, logits=X).log_prob(torch.ones(4)), ValueError, "event_shape"),
    "repeated": (
        lambda: KSubset(2, logits=X).log_prob(torch.tensor([1, 1])),
        ValueError,
        "k different indices",
    ),
    "too large": (lambda: KSubset(2, logits=X).log_prob(torch.tensor([1, 5])), ValueError, "contains 5."),
    "hot integers": (
        lambda: KSubset(2, logits=X).log_prob(torch.tensor([1, 1, 0, 0, 0])),
        ValueError,
        "integers",
    ),
    "a list of members": (
        lambda: KSubset(2, logits=X).log_prob([1, 2]),
        TypeError,
        "`value` must be a torch.Tensor",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    call, error, words = WRONG[case]
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)


def test_without_validation_impossible_rows_are_nan_and_others_are_right():
    x = logits(4, 5)
    x[0, 2], x[1, :4] = math.nan, -INF
    d = KSubset(torch.tensor([2, 2, 6, 2]), logits=x, validate_args=False)
    good = KSubset(2, logits=x[3])
    for found, expected in (
        (d.mean, good.mean),
        (d.entropy(), good.entropy()),
        (d.log_normalizer, good.log_normalizer),
        (d.log_prob(good.mode), good.log_prob(good.mode)),
    ):
        assert found[:3].isnan().all()
        torch.testing.assert_close(found[3], expected)


def test_the_mode_follows_probabilities_whose_logits_round_to_ties():
    p = torch.tensor([0.001, 0.0010015, 1e-4], dtype=torch.float16)
    assert p[1] > p[0]
    assert KSubset(1, probs=p).mode.tolist() == [0, 1, 0]


def test_indices_of_every_integer_dtype():
    d = KSubset(2, logits=torch.randn(4))
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
        assert torch.equal(
            d.log_prob(torch.tensor([0, 1], dtype=dtype)), d.log_prob(torch.tensor([1.0, 1, 0, 0]))
        )
