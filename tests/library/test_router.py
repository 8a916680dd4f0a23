"""`TopKRouter`: balanced training, causal inference, token dropping, dtypes, state, and invalid arguments."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import torchlml


def skewed(tokens: int, experts: int, skew: float = 3.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    preferred = skew * torch.linspace(-1, 1, experts)
    return torch.randn(tokens, experts, generator=generator) + preferred


def largest_load(indices: Tensor, experts: int) -> float:
    """Return the load of the busiest expert relative to a fair share."""
    return float(torch.bincount(indices.flatten(), minlength=experts).max()) * experts / indices.numel()


def test_balance_in_training_and_afterwards() -> None:
    router = torchlml.TopKRouter(16, 2)
    unbalanced = skewed(2048, 16).topk(2).indices
    assert largest_load(unbalanced, 16) > 5
    for seed in range(10):
        weights, indices, mu = router(skewed(2048, 16, seed=seed))
        assert largest_load(indices, 16) < 1.25
        torch.testing.assert_close(weights.sum(-1), torch.ones(2048))
        assert (indices[:, 0] != indices[:, 1]).all()
        wanted = torchlml.balanced_lml_dual(skewed(2048, 16, seed=seed), 2)[1]
        torch.testing.assert_close(mu, wanted, rtol=0, atol=5e-4)
    router.eval()
    _, indices, mu = router(skewed(2048, 16, seed=99))
    assert largest_load(indices, 16) < 1.3
    assert torch.equal(mu, router.bias)


def test_the_bias_is_the_exponential_average() -> None:
    router = torchlml.TopKRouter(8, 2, decay=0.75)
    mus = [router(skewed(256, 8, seed=seed)).mu for seed in range(3)]
    wanted = 0.75 * (0.75 * mus[0] + 0.25 * mus[1]) + 0.25 * mus[2]
    torch.testing.assert_close(router.bias, wanted)
    assert int(router.updates) == 3


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_inference_is_causal_and_leaves_the_bias_alone(capacity_factor: float | None) -> None:
    router = torchlml.TopKRouter(8, 2, capacity_factor=capacity_factor)
    router(skewed(256, 8))
    router.eval()
    before, x = router.bias.clone(), skewed(64, 8, skew=0, seed=1)
    together = router(x)
    assert largest_load(together.indices, 8) > 1.5
    for i in range(64):
        alone = router(x[i : i + 1])
        assert torch.equal(alone.indices[0], together.indices[i])
        torch.testing.assert_close(alone.weights[0], together.weights[i])
    assert torch.equal(router.bias, before)


def test_weights_and_indices_come_from_y() -> None:
    x = skewed(6 * 20, 8).view(6, 20, 8)
    weights, indices, _ = torchlml.TopKRouter(8, 3, temperature=0.5, normalize=False)(x)
    y = torchlml.balanced_lml(x.view(-1, 8) / 0.5, 3)
    wanted = y.topk(3)
    assert indices.shape == (6, 20, 3)
    torch.testing.assert_close(weights.view(-1, 3), wanted.values, rtol=0, atol=1e-4)
    assert torch.equal(indices.view(-1, 3), wanted.indices)


def test_gradients_reach_all_experts_and_sum_to_zero() -> None:
    x = skewed(64, 8).double().requires_grad_()
    weights, _, _ = torchlml.TopKRouter(8, 2, normalize=False)(x)
    (grad,) = torch.autograd.grad(weights.square().sum(), x)
    assert (grad != 0).all()
    torch.testing.assert_close(grad.sum(0), torch.zeros(8, dtype=torch.float64), rtol=0, atol=1e-9)


def test_dropping_keeps_the_largest_weights() -> None:
    x = skewed(500, 8)
    kept = torchlml.TopKRouter(8, 2, normalize=False)(x)
    dropped = torchlml.TopKRouter(8, 2, normalize=False, capacity_factor=1.0)(x)
    assert torch.equal(kept.indices, dropped.indices)
    for expert in range(8):
        chosen = kept.indices == expert
        largest = kept.weights[chosen].sort(descending=True).values[:125]
        now = dropped.weights[chosen]
        assert int((now > 0).sum()) == min(125, int(chosen.sum()))
        torch.testing.assert_close(now[now > 0].sort(descending=True).values, largest)
    assert 0 < int((dropped.weights == 0).sum()) < 100


def test_padding_has_no_weight_and_no_influence() -> None:
    x = skewed(200, 8)
    mask = torch.arange(200) < 150
    x_padded = torch.where(mask[:, None], x, 100 * torch.randn(200, 8))
    found = torchlml.TopKRouter(8, 2)(x_padded.view(2, 100, 8), mask=mask.view(2, 100))
    wanted = torchlml.TopKRouter(8, 2)(x[:150])
    assert not found.weights.view(200, 2)[150:].any()
    assert torch.equal(found.indices.view(200, 2)[:150], wanted.indices)
    torch.testing.assert_close(found.mu, wanted.mu, rtol=0, atol=5e-4)


@pytest.mark.parametrize("normalize", [True, False])
def test_padding_does_not_change_gradients(normalize: bool) -> None:
    x = skewed(200, 8).double()
    mask, direction = torch.arange(200) < 150, torch.randn(200, 2, dtype=torch.float64)
    padded = torch.where(mask[:, None], x, torch.nan).requires_grad_()
    alone = x[:150].clone().requires_grad_()
    for leaf, present in ((padded, mask), (alone, None)):
        weights = torchlml.TopKRouter(8, 2, normalize=normalize)(leaf, mask=present).weights
        (weights * direction[: len(leaf)]).sum().backward()
    assert padded.grad is not None
    assert alone.grad is not None
    assert not padded.grad[150:].any()
    torch.testing.assert_close(padded.grad[:150], alone.grad, rtol=0, atol=1e-9)


def test_forbidden_experts_are_not_chosen() -> None:
    x = torch.randn(64, 4)
    x[:32, 0] = -torch.inf  # the other 32 tokens fill the first expert
    found = torchlml.TopKRouter(4, 2)(x)
    assert found.mu[0] == torch.inf
    assert not (found.indices[:32] == 0).any()
    assert (found.indices[32:] == 0).any(-1).all()
    assert found.weights.gt(0).all()


def test_a_batch_without_tokens_changes_nothing() -> None:
    router = torchlml.TopKRouter(8, 2)
    router(skewed(100, 8))
    before = {name: value.clone() for name, value in router.state_dict().items()}
    router(skewed(0, 8))
    router(skewed(10, 8), mask=torch.zeros(10, dtype=torch.bool))
    assert all(torch.equal(value, before[name]) for name, value in router.state_dict().items())


def test_multipliers_at_inference_are_a_copy() -> None:
    router = torchlml.TopKRouter(8, 2)
    router(skewed(100, 8))
    mu = router.eval()(skewed(100, 8)).mu
    before = mu.clone()
    router.train()(skewed(100, 8) + torch.arange(8))
    assert torch.equal(mu, before)


def test_half_precision() -> None:
    router = torchlml.TopKRouter(8, 2).bfloat16()
    assert router.bias.dtype == torch.float32
    weights, indices, mu = router(skewed(1024, 8).bfloat16())
    assert weights.dtype == torch.bfloat16
    assert mu.dtype == torch.float32
    assert largest_load(indices, 8) < 1.25
    kept = router.bias.clone()
    assert torch.equal(router.bfloat16().bias, kept)  # not rounded to bfloat16
    assert not torch.equal(kept.bfloat16().float(), kept)


def test_a_router_from_the_meta_device() -> None:
    """A router created on the meta device, as is common with FSDP2, can be initialized on a real device."""
    with torch.device("meta"):
        router = torchlml.TopKRouter(8, 2)
    router.to_empty(device="cpu")
    router.bias.fill_(math.nan)
    router.updates.fill_(7)
    router.reset_parameters()
    fresh = torchlml.TopKRouter(8, 2)
    assert torch.equal(router(skewed(64, 8)).mu, fresh(skewed(64, 8)).mu)
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in router.state_dict().items())


def test_copies() -> None:
    router = torchlml.TopKRouter(8, 2)
    router(skewed(64, 8))
    for copied in (copy.deepcopy(router), pickle.loads(pickle.dumps(router))):
        assert all(
            torch.equal(copied.state_dict()[name], value) for name, value in router.state_dict().items()
        )
        copied(skewed(64, 8, seed=1))
        assert int(router.updates) == 1


def test_state_and_representation() -> None:
    router = torchlml.TopKRouter(8, 2, capacity_factor=1.5)
    router(skewed(256, 8))
    other = torchlml.TopKRouter(8, 2)
    other.load_state_dict(router.state_dict())
    assert set(router.state_dict()) == {"bias", "updates"}
    x = skewed(32, 8, seed=1)
    assert torch.equal(other.eval()(x).indices, router.eval()(x).indices)
    assert repr(router) == (
        "TopKRouter(num_experts=8, k=2, temperature=1.0, normalize=True, decay=0.9, capacity_factor=1.5)"
    )


@pytest.mark.parametrize(
    ("settings", "needles"),
    [
        ({"k": 9}, ["`num_experts`", "k = 9", "8"]),
        ({"k": 0}, ["`k`", "0"]),
        ({"num_experts": 8.0}, ["`num_experts`", "8.0"]),
        ({"temperature": 0}, ["`temperature`", "0"]),
        ({"temperature": math.nan}, ["`temperature`", "nan"]),
        ({"decay": 1.0}, ["`decay`", "1.0"]),
        ({"decay": -0.1}, ["`decay`", "-0.1"]),
        ({"capacity_factor": 0.5}, ["`capacity_factor`", "0.5"]),
    ],
)
def test_wrong_settings(settings: dict[str, Any], needles: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        torchlml.TopKRouter(**{"num_experts": 8, "k": 2, **settings})
    for needle in needles:
        assert needle in str(caught.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_wrong_logits() -> None:
    router = torchlml.TopKRouter(8, 2)
    with pytest.raises(ValueError, match=r"num_experts = 8.*\(4, 7\)"):
        router(torch.zeros(4, 7))
    with pytest.raises(TypeError, match="`logits`"):
        router([1.0])
    with pytest.raises(TypeError, match="nested"):
        router(torch.nested.nested_tensor([torch.zeros(4, 8)]))
    with pytest.raises(ValueError, match=r"`mask`.*\(4,\).*\(3,\)"):
        router(torch.zeros(4, 8), mask=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="NaN"):
        router(torch.full((4, 8), math.nan))
