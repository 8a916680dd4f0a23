"""Derivatives of the losses: finite differences, special rows, `torch.func` and `torch.compile`."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import torchlml
from tests.support.losses import EVERY, multi_label

every = pytest.mark.parametrize("loss", [*EVERY], ids=[e.__name__ for e in EVERY])


def logits(*shape, scale=1.0):
    return (torch.randn(*shape, dtype=torch.float64) * scale).requires_grad_()


LABELS = torch.tensor([0, 3, -100, 8])
SEVERAL = torch.tensor([[0, 3, 5], [1, -100, -100], [-100, -100, -100], [8, 2, -100]])
WEIGHT = torch.rand(9, dtype=torch.float64) + 0.5


@every
@pytest.mark.parametrize("k", [1, 4, 8])
def test_first_and_second_derivatives_with_one_label(loss, k):
    mask = torch.ones(4, 9, dtype=torch.bool)
    mask[:, 6] = False
    for settings in ({}, {"weight": WEIGHT, "reduction": "none"}, {"mask": mask, "reduction": "sum"}):
        x = logits(4, 9)
        function = functools.partial(loss, target=LABELS, k=k, **settings)
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x, fast_mode=True)


@multi_label
@pytest.mark.parametrize("k", [2, 6])
def test_first_and_second_derivatives_with_several_labels(loss, k):
    offsets = torch.tensor([0, 9, 9, 20, 36])
    positions = torch.tensor([1, 2, 9, 15, 30, 31, 35])
    for x, target, settings in (
        (logits(4, 9), SEVERAL, {"weight": WEIGHT}),
        (logits(4, 9), torch.rand(4, 9) < 0.4, {"reduction": "none"}),
        (logits(4, 9), torch.rand(4, 9, dtype=torch.float64), {"weight": WEIGHT}),
        (logits(36), positions, {"offsets": offsets, "reduction": "none"}),
        (logits(36), torch.rand(36, dtype=torch.float64), {"offsets": offsets}),
    ):
        function = functools.partial(loss, target=target, k=k, **settings)
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x, fast_mode=True)


@multi_label
def test_label_weights_are_differentiable(loss):
    x, weights = logits(3, 7), torch.rand(3, 7, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, c: loss(x, c, 3), (x, weights))


@multi_label
def test_label_weights_of_masked_entries_have_gradient_zero(loss):
    x = logits(2, 5)
    weights = torch.tensor([[1, 0.5, 0, 0, 0], [0, 0, 2, 0, 0]], dtype=torch.float64).requires_grad_()
    mask = torch.tensor([True, True, True, True, False])
    (found,) = torch.autograd.grad(loss(x, weights, 2, mask=mask), weights)
    (without,) = torch.autograd.grad(loss(x[:, :4], weights[:, :4], 2), weights)
    torch.testing.assert_close(found, without)
    assert (without[:, 4] == 0).all()


def test_k_is_differentiable():
    x = logits(4, 9)
    for k in (torch.tensor(2.5, dtype=torch.float64), torch.tensor([1.0, 2.5, 3, 6], dtype=torch.float64)):
        k.requires_grad_()
        assert torch.autograd.gradcheck(lambda x, k: torchlml.lml_loss(x, SEVERAL, k), (x, k))
        assert torch.autograd.gradgradcheck(lambda x, k: torchlml.lml_loss(x, SEVERAL, k), (x, k))


def test_derivatives_of_the_lml_loss_in_special_rows():
    inf = math.inf
    x = torch.tensor(
        [
            [inf, inf, inf, 0.0, 1.0],  # three entries at +inf share k = 2
            [inf, 0.0, 1.0, 2.0, -inf],  # y is 1 for the first entry and 0 for the last
            [1.0, -inf, -inf, 2.0, -inf],  # only k entries are not -inf
        ],
        dtype=torch.float64,
        requires_grad=True,
    )
    k = torch.full((3,), 2.0, dtype=torch.float64, requires_grad=True)
    loss = torchlml.lml_loss(x, torch.tensor([1, 2, 3]), k, reduction="none")
    finite = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    rest = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    middle = torchlml.lml_loss(finite, torch.tensor(1), rest)
    torch.testing.assert_close(loss.detach(), torch.tensor([math.log(1.5), middle.item(), 0.0]).double())
    dx, dk = torch.autograd.grad(loss.sum(), (x, k))
    middle_dx, middle_dk = torch.autograd.grad(middle, (finite, rest))
    torch.testing.assert_close(dx[1, 1:4], middle_dx)
    dx[1, 1:4] = 0
    assert (dx == 0).all()
    torch.testing.assert_close(dk, torch.tensor([-0.5, middle_dk.item(), 0.0], dtype=torch.float64))


@every
def test_the_transforms_of_torch_func_agree_with_autograd(loss):
    x = logits(4, 9)
    labels = torch.tensor([0, 3, 7, 8])

    def one(row, label):
        return loss(row, label, 3)

    rows = torch.func.vmap(one)(x.detach(), labels)
    torch.testing.assert_close(rows, loss(x.detach(), labels, 3, reduction="none"))
    per_row = torch.func.vmap(torch.func.grad(one))(x.detach(), labels)
    (expected,) = torch.autograd.grad(loss(x, labels, 3, reduction="sum"), x)
    torch.testing.assert_close(per_row, expected)
    direction = torch.randn_like(x)
    _, tangent = torch.func.jvp(lambda x: loss(x, labels, 3, reduction="sum"), (x.detach(),), (direction,))
    torch.testing.assert_close(tangent, (expected * direction).sum())
    hessian = torch.func.hessian(lambda row: one(row, labels[0]))(x[0].detach())
    reverse = torch.autograd.functional.hessian(lambda row: one(row, labels[0]), x[0].detach())
    torch.testing.assert_close(hessian, reverse)


@multi_label
def test_ragged_rows_under_torch_func(loss):
    x, offsets, target = logits(20), torch.tensor([0, 8, 20]), torch.tensor([1, 2, 11])
    function = functools.partial(loss, target=target, k=3, offsets=offsets)
    (expected,) = torch.autograd.grad(function(x), x)
    torch.testing.assert_close(torch.func.grad(function)(x.detach()), expected)
    _, tangent = torch.func.jvp(function, (x.detach(),), (expected,))
    torch.testing.assert_close(tangent, (expected * expected).sum())


@every
def test_a_compiled_loss_matches_the_eager_loss(loss):
    # This backend captures the forward and backward graphs but skips code generation, which is slow.
    compiled = compile_loss(loss, "aot_eager")
    for shape in ((4, 9), (5, 9)):
        target = torch.randint(9, shape[:1])
        target[0] = -100
        assert_same_compiled(compiled, loss, torch.randn(*shape), target=target)


@multi_label
def test_a_compiled_ragged_loss_matches_the_eager_loss(loss):
    offsets, target = torch.tensor([0, 8, 20]), torch.tensor([1, 2, 11])
    compiled = compile_loss(loss, "aot_eager")
    assert_same_compiled(compiled, loss, torch.randn(20), target=target, offsets=offsets)


def test_the_lml_loss_compiles_with_inductor():
    compiled = compile_loss(torchlml.lml_loss, "inductor")
    assert_same_compiled(compiled, torchlml.lml_loss, torch.randn(4, 9), target=LABELS)


def compile_loss(loss, backend):
    torch.compiler.reset()
    return torch.compile(functools.partial(loss, k=3), fullgraph=True, backend=backend)


def assert_same_compiled(compiled, loss, x, **arguments):
    x.requires_grad_()
    value, expected = compiled(x, **arguments), loss(x, k=3, **arguments)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    (grad,) = torch.autograd.grad(value, x)
    (expected_grad,) = torch.autograd.grad(expected, x)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-6)


def test_compiling_a_functional_gradient_keeps_the_gradient():
    torch.compiler.reset()
    x, label = torch.randn(9), torch.tensor(4)
    gradient = torch.func.grad(lambda x: torchlml.lml_loss(x, label, 3))
    compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), gradient(x), rtol=1e-6, atol=1e-6)
