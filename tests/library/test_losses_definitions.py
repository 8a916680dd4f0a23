"""The losses match their definitions, such as a sum over all subsets for the smooth SVM loss."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import torchlml
from tests.support import truth
from torchlml.losses.svm import log_ratio


def plain_smooth_svm(s, y, k, tau, alpha):
    """Return the smooth SVM loss by its definition, which sums over all sets of k classes."""
    sets = list(itertools.combinations(range(len(s)), k))
    mean = s[torch.tensor(sets)].mean(-1)
    has_label = torch.tensor([y in chosen for chosen in sets])
    every = torch.logsumexp((mean + alpha * ~has_label) / tau, 0)
    return tau * (every - torch.logsumexp(mean[has_label] / tau, 0))


def plain_hard_svm(s, y, k, alpha):
    others = sorted((v for j, v in enumerate(s) if j != y), reverse=True)
    return max(0.0, sum(v + alpha for v in others[:k]) / k - (sum(others[: k - 1]) + s[y]) / k)


def plain_truncated_entropy(f, labels, k, available=None):
    available = range(len(f)) if available is None else available
    outside = sorted(f[j] for j in available if j not in labels)
    kept = outside[: max(0, len(available) - k)]
    return sum(math.log1p(sum(math.exp(value - f[i]) for value in kept)) for i in labels)


@pytest.mark.parametrize("tau", [0.01, 0.3, 1.0, 100.0])
def test_smooth_svm_matches_its_definition_over_all_subsets(tau):
    for n in range(2, 10):
        for k in range(1, n):
            s = torch.randn(2, n, dtype=torch.float64) * 2
            y = torch.randint(n, (2,))
            expected = torch.stack([plain_smooth_svm(s[i], int(y[i]), k, tau, 1.5) for i in range(2)])
            loss = torchlml.smooth_topk_svm_loss(s, y, k, tau=tau, alpha=1.5, reduction="none")
            torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-13)


def test_smooth_svm_gradient_is_the_difference_of_two_expectations():
    n, k, tau, alpha, y = 7, 3, 0.4, 0.7, 2
    s = (torch.randn(n, dtype=torch.float64) * 2).requires_grad_()
    (grad,) = torch.autograd.grad(
        torchlml.smooth_topk_svm_loss(s, torch.tensor(y), k, tau=tau, alpha=alpha), s
    )
    sets = list(itertools.combinations(range(n), k))
    member = torch.tensor([[float(j in a) for j in range(n)] for a in sets], dtype=torch.float64)
    score = member @ s.detach() / k / tau
    every = torch.softmax(score + alpha / tau * (1 - member[:, y]), 0) @ member
    with_label = torch.softmax(score.masked_fill(member[:, y] == 0, -math.inf), 0) @ member
    torch.testing.assert_close(grad, (every - with_label) / k, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("k", [1, 2])
def test_smooth_svm_with_infinite_logits_has_no_nan_in_its_gradient(k):
    inf = math.inf
    x = torch.tensor([[1.0, inf, inf], [1.0, -inf, -inf]], requires_grad=True)
    loss = torchlml.smooth_topk_svm_loss(x, torch.tensor([0, 0]), k, reduction="none")
    assert loss.tolist() == [inf, 0]
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert grad.tolist() == [[-1 / k, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("k", [1, 5, 100, 500, 900, 999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_smooth_svm_of_a_thousand_classes_matches_a_loop_over_classes(k, dtype):
    s, y = torch.randn(4, 1000, dtype=dtype) * 3, torch.randint(1000, (4,))
    results = []
    for function in (torchlml.smooth_topk_svm_loss, summed_smooth_svm):
        x = s.clone().requires_grad_()
        loss = function(x, y, k, reduction="none").to(dtype)
        (grad,) = torch.autograd.grad(loss.sum(), x)
        results.append((loss.detach(), grad))
    tolerance = {"rtol": 1e-6, "atol": 1e-9} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-14}
    torch.testing.assert_close(results[0], results[1], **tolerance)


def summed_smooth_svm(s, y, k, reduction):
    """Return the smooth SVM loss, computed from P[S = k] / P[S = k - 1].

    S is a sum of independent Bernoulli variables, one per class.
    """
    x = s.double() / k
    own, others = x.gather(1, y[:, None])[:, 0], x.scatter(1, y[:, None], -math.inf)
    nu = torchlml.lml_dual(others.detach(), k - 0.5)[:, None]
    success, failure = torch.sigmoid(others + nu), torch.sigmoid(-others - nu)
    chances = torch.eye(1, k + 1, dtype=torch.float64).expand(len(s), k + 1)
    for won, lost in zip(success.split(1, 1), failure.split(1, 1), strict=True):
        chances = chances * lost + F.pad(chances[:, :-1], (1, 0)) * won
    ratio = chances[:, k].log() - chances[:, k - 1].log() - nu[:, 0]
    return -F.logsigmoid(own - ratio - 1)


def exact_log_ratio(x, k):
    """Return log(e_k / e_{k-1}) for the elementary symmetric polynomials of exp(x), with 200 digits."""
    with mpmath.workdps(200):
        e = [mpmath.mpf(1)] + [mpmath.mpf(0)] * k
        for value in x:
            factor = mpmath.exp(mpmath.mpf(value))
            for i in range(k, 0, -1):
                e[i] += factor * e[i - 1]
        return float(mpmath.log(e[k] / e[k - 1]))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e3, 1e5])
def test_the_ratio_of_symmetric_polynomials_matches_200_digits(scale):
    x = torch.randn(60, dtype=torch.float64) * scale
    for k in (1, 2, 30, 58, 59, 60):
        found = log_ratio(x[None], k)
        assert found.item() == pytest.approx(exact_log_ratio(x.tolist(), k), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("tau", [0.01, 0.1, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("size", [1.0, 30.0, 1e3])
@pytest.mark.parametrize("k", [1, 5, 50, 98, 99])
def test_smooth_svm_in_float32_matches_float64(tau, size, k):
    s = torch.randn(8, 100) * size
    y = torch.randint(100, (8,))
    results = []
    for x in (s, s.double()):
        x = x.clone().requires_grad_()
        loss = torchlml.smooth_topk_svm_loss(x, y, k, tau=tau, reduction="none")
        (grad,) = torch.autograd.grad(loss.sum(), x)
        assert loss.isfinite().all()
        assert grad.isfinite().all()
        results.append((loss.detach().double(), grad.double()))
    torch.testing.assert_close(results[0], results[1], rtol=2e-7, atol=1e-30)


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_hard_svm_matches_its_definition(k):
    s, y = torch.randn(50, 9, dtype=torch.float64) * 3, torch.randint(9, (50,))
    loss = torchlml.topk_svm_loss(s, y, k, alpha=0.8, reduction="none")
    expected = [plain_hard_svm(row, label, k, 0.8) for row, label in zip(s.tolist(), y.tolist(), strict=True)]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_hard_svm_is_the_limit_of_the_smooth_one(k):
    s, y = torch.randn(20, 9, dtype=torch.float64), torch.randint(9, (20,))
    hard_input, smooth_input = s.clone().requires_grad_(), s.clone().requires_grad_()
    hard = torchlml.topk_svm_loss(hard_input, y, k, reduction="none")
    for tau in (1e-2, 1e-4):
        smooth = torchlml.smooth_topk_svm_loss(smooth_input, y, k, tau=tau, reduction="none")
        # The smooth maximum of at most C(9, k) terms exceeds the largest by at most tau * log C(9, k).
        assert ((smooth - hard).abs() <= tau * math.log(math.comb(9, k)) + 1e-12).all()
    (hard_grad,) = torch.autograd.grad(hard.sum(), hard_input)
    (smooth_grad,) = torch.autograd.grad(smooth.sum(), smooth_input)
    torch.testing.assert_close(smooth_grad, hard_grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 4, 9, 10])
def test_truncated_entropy_at_every_rank_of_the_label(k):
    f = torch.linspace(-2, 2, 10, dtype=torch.float64) ** 3
    for label in range(10):
        loss = torchlml.truncated_entropy_loss(f, torch.tensor(label), k)
        expected = plain_truncated_entropy(f.tolist(), {label}, k)
        assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-14)
        # If the label is not in the top k, the loss exceeds log 2. Dropping k competitors instead of k - 1
        # could make it smaller.
        if 10 - label > k:
            assert loss.item() > math.log(2)


@pytest.mark.parametrize("k", [1, 2, 5, 11, 12])
def test_truncated_entropy_with_any_number_of_labels(k):
    f = torch.randn(40, 12, dtype=torch.float64) * 4
    observed = torch.rand(40, 12) < torch.rand(40, 1)
    loss = torchlml.truncated_entropy_loss(f, observed, k, reduction="none")
    for i in range(40):
        labels = set(observed[i].nonzero().flatten().tolist())
        expected = plain_truncated_entropy(f[i].tolist(), labels, k)
        assert loss[i].item() == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_truncated_entropy_with_k_of_1_is_cross_entropy():
    f, y = torch.randn(30, 50, dtype=torch.float64) * 30, torch.randint(50, (30,))
    torch.testing.assert_close(
        torchlml.truncated_entropy_loss(f, y, 1), F.cross_entropy(f, y), rtol=1e-13, atol=0
    )


def test_truncated_entropy_with_ties_drops_the_right_number():
    f = torch.zeros(1, 8, dtype=torch.float64, requires_grad=True)
    loss = torchlml.truncated_entropy_loss(f, torch.tensor([3]), 3)
    assert loss.item() == pytest.approx(math.log(1 + 5), rel=1e-14)
    (grad,) = torch.autograd.grad(loss, f)
    assert (grad > 0).sum() == 5
    assert grad.sum().item() == pytest.approx(0, abs=1e-15)


def test_truncated_entropy_of_many_classes_with_wide_gaps_is_finite():
    f = torch.zeros(2, 100_000)
    f[:, :50] = 100
    f[1, 60] = -100
    f.requires_grad_()
    loss = torchlml.truncated_entropy_loss(f, torch.tensor([60, 60]), 5, reduction="none")
    expected = torch.tensor([100 + math.log(46), 200 + math.log(46)])
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(loss.sum(), f)
    assert grad.isfinite().all()
    torch.testing.assert_close(grad[:, 60], torch.tensor([-1.0, -1.0]))


@pytest.mark.parametrize("k", [1, 5, 17.5, 99])
def test_lml_loss_and_gradient_match_the_exact_projection(k):
    x = torch.randn(6, 100, dtype=torch.float64) * 5
    observed = torch.rand(6, 100) < 0.05
    observed[:, 3] = True
    results = {}
    for dtype in (torch.float32, torch.float64):
        logits = x.to(torch.float32).to(dtype).requires_grad_()
        loss = torchlml.lml_loss(logits, observed, k, reduction="none")
        (grad,) = torch.autograd.grad(loss.sum(), logits)
        results[dtype] = (loss.detach().double(), grad.double())
    rows = [truth.solve(row.float().double().numpy(), k) for row in x]
    expected = [-row.log_y[labels.numpy()].sum() for row, labels in zip(rows, observed, strict=True)]
    gradient = [
        row.log_lml_gradient(-labels.double().numpy())[0] for row, labels in zip(rows, observed, strict=True)
    ]
    exact = (torch.tensor(expected, dtype=torch.float64), torch.tensor(np.array(gradient)))
    torch.testing.assert_close(results[torch.float64], exact, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(results[torch.float32], exact, rtol=3e-6, atol=2e-6)


def test_a_label_that_trails_by_40_keeps_its_gradient():
    x = torch.zeros(100)
    x[:5] = 40
    x.requires_grad_()
    loss = torchlml.lml_loss(x, torch.tensor(50), 5)
    (grad,) = torch.autograd.grad(loss, x)
    assert grad[50].item() == pytest.approx(-0.9947, abs=1e-4)
    row = truth.solve(x.detach().double().numpy(), 5)
    direction = np.zeros(100)
    direction[50] = -1
    torch.testing.assert_close(
        grad.double(), torch.tensor(row.log_lml_gradient(direction)[0]), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("shift", [0.0, 1e5, -1e7])
def test_lml_loss_is_shift_invariant(shift):
    x = (torch.randn(5, 60) * 4 + shift).requires_grad_()
    y = torch.randint(60, (5,))
    loss = torchlml.lml_loss(x, y, 4, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), x)
    for i in range(5):
        row = truth.solve(x[i].detach().double().numpy(), 4)
        assert loss[i].item() == pytest.approx(-row.log_y[y[i]], rel=2e-6, abs=2e-6)
        direction = -np.eye(60)[int(y[i])]
        expected = torch.tensor(row.log_lml_gradient(direction)[0])
        torch.testing.assert_close(grad[i].double(), expected, rtol=0, atol=2e-6)
