"""Derivatives of the two-sided projection, compared with finite differences and dense linear algebra."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import torchlml

F64 = torch.float64


def inputs(rows: int = 5, columns: int = 4, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = scale * torch.randn(rows, columns, dtype=F64, generator=generator)
    k = 0.3 + 1.5 * torch.rand(rows, dtype=F64, generator=generator)
    capacity = 0.5 + torch.rand(columns, dtype=F64, generator=generator)
    capacity *= k.sum() / capacity.sum()
    return x.requires_grad_(), k.requires_grad_(), capacity.requires_grad_()


MASK = torch.ones(5, 4, dtype=torch.bool)
MASK[0, 1] = MASK[3, 0] = False


@pytest.mark.parametrize("scale", [1.0, 6.0])
@pytest.mark.parametrize("mask", [None, MASK], ids=["dense", "masked"])
@pytest.mark.parametrize("function", [torchlml.balanced_lml, torchlml.balanced_lml_dual])
def test_x_k_and_capacity(function: Any, mask: Tensor | None, scale: float) -> None:
    arguments = inputs(scale=scale)
    assert gradcheck(lambda x, k, c: function(x, k, c, mask=mask), arguments)
    # Without capacities, the column sums depend on k.
    assert gradcheck(lambda x, k: function(x, k, mask=mask), arguments[:2])


@pytest.mark.parametrize("function", [torchlml.balanced_lml, torchlml.balanced_lml_dual])
def test_limits(function: Any) -> None:
    x, k, capacity = inputs()
    assert gradcheck(lambda x, k, c: function(x, k, 1.2 * c, bound="at_most"), (x, k, capacity))
    _, mu = torchlml.balanced_lml_dual(x, k, 1.2 * capacity, bound="at_most")
    assert 0 < int((mu == 0).sum()) < 4  # some columns are at their limits, others below


def test_a_batch_and_known_columns() -> None:
    _, k, _ = inputs()
    x = torch.randn(3, 5, 4, dtype=F64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    assert gradcheck(torchlml.balanced_lml, (x, k))
    capacity = torch.tensor([0.0, 5.0, 2.0, 3.0], dtype=F64)
    assert gradcheck(lambda x: torchlml.balanced_lml(x, 2, capacity), (x,))
    assert gradcheck(lambda x: torchlml.balanced_lml_dual(x, 2, capacity)[0], (x,))


def derivative(y: Tensor, grad: Tensor) -> Tensor:
    """Return w * (grad - p - q), where p and q solve the full linear system of rows and columns."""
    w = y * (1 - y)
    system = torch.cat([torch.cat([w.sum(1).diag(), w], 1), torch.cat([w.T, w.sum(0).diag()], 1)])
    right = torch.cat([(w * grad).sum(1), (w * grad).sum(0)])
    p, q = torch.linalg.lstsq(system, right[:, None], driver="gelsd").solution.squeeze(1).split(w.shape)
    return w * (grad - p[:, None] - q)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
@pytest.mark.parametrize(("rows", "columns"), [(300, 8), (900, 60)])
def test_large_matrices_and_both_linear_solvers(
    rows: int, columns: int, dtype: torch.dtype, limit: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, dtype=F64, generator=generator)
    x += 3 * torch.randn(columns, dtype=F64, generator=generator)
    grad = torch.randn(rows, columns, dtype=F64, generator=generator)
    wanted = derivative(torchlml.balanced_lml(x, 2), grad)
    x = x.to(dtype).requires_grad_()
    (found,) = torch.autograd.grad(torchlml.balanced_lml(x, 2), x, grad.to(dtype))
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=limit)


def test_a_chain_of_columns() -> None:
    """Gradients are accurate even if the conjugate gradient method reaches its iteration limit."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.arange(600) % 99
    x = torch.full((600, 100), -60.0, dtype=F64)
    x[torch.arange(600), columns] = x[torch.arange(600), columns + 1] = 0
    x += 0.1 * torch.randn(600, 100, dtype=F64, generator=generator)
    grad = torch.randn(600, 100, dtype=F64, generator=generator)
    capacity = torch.bincount(columns, minlength=100).double() / 2
    capacity[1:] += torch.bincount(columns, minlength=100)[:-1] / 2
    y = torchlml.balanced_lml(x, 1, capacity)
    wanted = derivative(y, grad)
    x.requires_grad_()
    (found,) = torch.autograd.grad(torchlml.balanced_lml(x, 1, capacity), x, grad)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


def test_saturated_rows_have_a_gradient_for_k() -> None:
    """The gradient is accurate in float32, although y rounds to 1, so that y * (1 - y) would be 0."""
    x = torch.tensor([[40.0, 0.0, -1.0], [41.0, 0.0, 1.0], [0.0, 40.0, 0.0]])
    gradients = []
    for dtype in (torch.float32, F64):
        k = torch.ones(3, dtype=dtype, requires_grad=True)
        y = torchlml.balanced_lml(x.to(dtype), k, torch.tensor([2.0, 1.0, 0.5]), bound="at_most")
        (found,) = torch.autograd.grad((y * torch.arange(9.0).view(3, 3)).sum(), k)
        gradients.append(found.double())
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


def test_half_precision_and_masked_entries() -> None:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    mask = torch.ones(32, 8, dtype=torch.bool)
    mask[::3, 1] = False
    (found,) = torch.autograd.grad(torchlml.balanced_lml(x, 2, mask=mask)[:, 0].float().square().sum(), x)
    assert found.dtype == torch.bfloat16
    assert found.isfinite().all()
    assert not found[~mask].any()
    wide = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(torchlml.balanced_lml(wide, 2, mask=mask)[:, 0].square().sum(), wide)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-3)


def test_gradients_under_autocast() -> None:
    """The backward pass must disable autocast, which would compute the Schur complement in bfloat16."""
    x = torch.randn(300, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (wanted,) = torch.autograd.grad(torchlml.balanced_lml(x, 2).square().sum(), x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = torch.autograd.grad(torchlml.balanced_lml(x, 2).square().sum(), x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_k_as_a_single_tensor_with_a_gradient() -> None:
    x, _, _ = inputs()
    k = torch.tensor(1.5, dtype=F64, requires_grad=True)
    assert gradcheck(lambda x, k: torchlml.balanced_lml(x, k), (x, k))


def test_unsupported_operations_raise() -> None:
    x, _, _ = inputs()
    y = torchlml.balanced_lml(x, 2)
    with pytest.raises(NotImplementedError, match="only first derivatives"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
    for transform in (torch.func.grad, torch.func.jacfwd):
        with pytest.raises(NotImplementedError, match=r"torch\.func transforms"):
            transform(lambda x: torchlml.balanced_lml(x, 2).square().sum())(x.detach())
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        torchlml.balanced_lml(torch.autograd.forward_ad.make_dual(x.detach(), x.detach()), 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # from the compiler, about its own tensors
def test_compiled_code_with_a_graph_break() -> None:
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    compiled = torch.compile(lambda x: 2 * torchlml.balanced_lml(x, 2), backend="eager")
    y = compiled(x)
    assert torch.equal(y, 2 * torchlml.balanced_lml(x, 2))
    assert math.isfinite(float(torch.autograd.grad(y.square().sum(), x)[0].sum()))
