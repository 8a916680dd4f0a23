"""The alternative operators: each one matches its definition, computed independently in float64."""

from __future__ import annotations

import pytest
import torch

import torchlml
from torchlml_lab.bench.alternative_operators import (
    ALTERNATIVES,
    bisection,
    scaled_softmax,
    straight_through,
    successive_softmax,
)

# cvxpylayers emits a warning about numpy's copy semantics.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.mark.parametrize("peer", ALTERNATIVES, ids=lambda peer: peer.name)
def test_an_alternative_gives_a_value_and_a_gradient_for_each_entry(peer) -> None:
    if peer.absent() is not None:
        pytest.skip(peer.absent())
    x = torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    y = peer.function(x, 3)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert y.shape == gradient.shape == x.shape
    assert gradient.isfinite().all()
    assert gradient.ne(0).any()
    # A larger logit never has a smaller output, except with two methods that mix the entries they compare.
    order = x.argsort(-1)
    assert peer.name in ("difftopk", "softtorch") or (y.gather(-1, order).diff(dim=-1) >= -1e-4).all()
    if peer.name == "dftopk":  # its outputs do not sum to k
        return
    # torchsort's mask, which is computed from soft ranks, sums to k only approximately.
    loose = {"difftopk": 1e-5, "cvxpylayers": 1e-3, "torchsort": 1.0}.get(peer.name, 1e-9)
    torch.testing.assert_close(y.sum(-1), torch.full((4,), 3.0, dtype=torch.float64), atol=loose, rtol=0)


def test_bisection_equals_lml_only_if_its_interval_contains_the_root() -> None:
    x = torch.randn(4, 50, dtype=torch.float64, requires_grad=True)
    for function in (bisection, torchlml.lml):
        y = function(x, 7)
        assert torch.allclose(
            torch.sigmoid(x.detach() + torch.logit(y).detach()[:, :1] - x.detach()[:, :1]), y
        )
        (gradient,) = torch.autograd.grad(y[:, 3].sum(), x)
        torch.testing.assert_close(gradient.sum(-1), torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(bisection(x, 7), torchlml.lml(x, 7))
    assert bisection(torch.zeros(1, 100_000), 1).sum() > 4


def test_the_convex_program_equals_lml() -> None:
    peer = next(peer for peer in ALTERNATIVES if peer.name == "cvxpylayers")
    if (why := peer.absent()) is not None:
        pytest.skip(why)
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(peer.function(x, 2), torchlml.lml(x, 2), atol=1e-3, rtol=0)


def test_successive_softmaxes_remove_chosen_entries() -> None:
    x = torch.tensor([[0.3, 1.2, -0.5]], dtype=torch.float64)
    first = x.softmax(-1)
    weights = x.exp() * (1 - first)
    torch.testing.assert_close(successive_softmax(x, 2), first + weights / weights.sum())


def test_straight_through_is_hard_with_the_gradient_of_softmax() -> None:
    x = torch.tensor([[0.3, 1.2, -0.5]], dtype=torch.float64, requires_grad=True)
    y = straight_through(x, 2)
    torch.testing.assert_close(y, torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64))
    gradients = [torch.autograd.grad(f(x, 2)[0, 0], x)[0] for f in (straight_through, scaled_softmax)]
    torch.testing.assert_close(*gradients)


def test_the_mask_from_soft_ranks_approximates_the_top_k() -> None:
    peer = next(peer for peer in ALTERNATIVES if peer.name == "torchsort")
    if (why := peer.absent()) is not None:
        pytest.skip(why)
    x = torch.tensor([[9.0, -4.0, 7.0, -6.0, -9.0]], dtype=torch.float64)
    torch.testing.assert_close(peer.function(x, 2).round(), torch.tensor([[1.0, 0, 1, 0, 0]]).double())
