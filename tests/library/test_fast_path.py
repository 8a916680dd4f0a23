"""The fast path for the most common call agrees with the general path, and no other calls take it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import torchlml
from torchlml._autograd.rule import fast_lml

X = torch.randn(7, 11, generator=torch.Generator().manual_seed(0))


def general_path(x: Tensor, k: float) -> Tensor:
    """Call `lml` with `dim=1`, so that it does not take the fast path, which requires `dim=-1`."""
    return torchlml.lml(x, k, dim=1)


@pytest.mark.parametrize("k", [0, 1, 2.5, 5, 11, 11.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_paths_give_the_same_bits(k: float, dtype: torch.dtype) -> None:
    x, grad = X.to(dtype), X.flip(0).to(dtype)
    taken = fast_lml(x, k, -1)
    assert taken is not None
    assert fast_lml(x, k, 1) is None
    assert torch.equal(torchlml.lml(x, k), general_path(x, k))
    assert torch.equal(taken, general_path(x, k))
    gradients = []
    for function in (torchlml.lml, general_path):
        leaf = x.clone().requires_grad_()
        function(leaf, k).backward(grad)
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_a_gradient_that_is_not_contiguous() -> None:
    leaf = X.clone().requires_grad_()
    torchlml.lml(leaf, 3).backward(torch.ones(()).expand_as(X))
    assert leaf.grad is not None
    assert leaf.grad.abs().max() < 1e-6  # 0 in exact arithmetic, because each row sums to k


def test_derivatives_of_the_derivative() -> None:
    leaf = X[:2, :5].double().requires_grad_()
    assert fast_lml(leaf, 2, -1) is not None
    assert torch.autograd.gradcheck(lambda x: torchlml.lml(x, 2), leaf)
    assert torch.autograd.gradgradcheck(lambda x: torchlml.lml(x, 2), leaf)


def test_a_batch_of_gradients() -> None:
    leaf = X.clone().requires_grad_()
    grads = torch.stack([X, -X, X.flip(1)])
    (batched,) = torch.autograd.grad(torchlml.lml(leaf, 3), leaf, grads, is_grads_batched=True)
    single = [torch.autograd.grad(torchlml.lml(leaf, 3), leaf, grad)[0] for grad in grads]
    torch.testing.assert_close(batched, torch.stack(single), rtol=0, atol=1e-6)


def test_no_graph_without_requires_grad() -> None:
    leaf = X.clone().requires_grad_()
    assert torchlml.lml(leaf, 3).requires_grad
    assert not torchlml.lml(X, 3).requires_grad
    with torch.no_grad():
        assert not torchlml.lml(leaf, 3).requires_grad


class Subclass(Tensor):
    pass


OTHERS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "not a tensor": lambda: ([[1.0, 2.0]], 1, -1),
    "a subclass": lambda: (X.as_subclass(Subclass), 1, -1),
    "integers": lambda: (X.long(), 1, -1),
    "half precision": lambda: (X.half(), 1, -1),
    "on another device": lambda: (X.to("meta"), 1, -1),
    "sparse": lambda: (X.to_sparse(), 1, -1),
    "nested": lambda: (torch.nested.nested_tensor([X[0], X[1]]), 1, -1),
    "jagged": lambda: (torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged), 1, -1),
    "one row": lambda: (X[0], 1, -1),
    "transposed": lambda: (X.t(), 1, -1),
    "another dim": lambda: (X, 1, 0),
    "a dim that is not an int": lambda: (X, 1, -1.0),
    "a tensor k": lambda: (X, torch.tensor(1.0), -1),
    "a bool k": lambda: (X, True, -1),
    "a k below 0": lambda: (X, -1, -1),
    "a k above n": lambda: (X, 11.5, -1),
    "a k of NaN": lambda: (X, math.nan, -1),
    "a k that is not a number": lambda: (X, "1", -1),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_calls_take_the_general_path(name: str) -> None:
    assert fast_lml(*OTHERS[name]()) is None


def _is_left(x: Tensor) -> Tensor:
    assert fast_lml(x, 1, -1) is None
    return x


def test_inference_mode_takes_the_fast_path() -> None:
    k = 2.71  # no other test puts this number into the scalar cache
    with torch.inference_mode():
        inside = fast_lml(X, k, -1)
        assert inside is not None
        assert inside.is_inference()
        assert torch.equal(torchlml.lml(X.clone(), k), inside)
    assert torch.equal(torchlml.lml(X, k), inside)
    # The cached scalar was created in inference mode. Later calls must still be able to save it for backward.
    leaf = X.clone().requires_grad_()
    torchlml.lml(leaf, k).backward(X)
    assert leaf.grad is not None
    assert leaf.grad.abs().max() > 0


def test_modes_and_transforms_take_the_general_path() -> None:
    with torch.autograd.forward_ad.dual_level():
        assert fast_lml(X, 1, -1) is None
    with FakeTensorMode() as mode:
        assert fast_lml(mode.from_tensor(X), 1, -1) is None
    torch.vmap(_is_left)(X.expand(2, 7, 11))
    assert fast_lml(X, 1, -1) is not None


def test_wrong_arguments_still_raise() -> None:
    with pytest.raises(TypeError, match=r"`dim` must be an int, but it is -1\.0\."):
        torchlml.lml(X, 1, -1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`k` must be from 0 to n = 11, but k is 12\."):
        torchlml.lml(X, 12)
