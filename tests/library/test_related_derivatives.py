"""Derivatives of related operators: finite differences, exact values, `torch.func` and `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import torchlml
from tests.support import related
from tests.support.problems import SHORT, Problem
from tests.support.related import MEMBERS, Member, each_constrained


def unused(problem: Problem, dtype: torch.dtype) -> npt.NDArray[np.float64]:
    """Stand in for the exact solution, because only the operator's derivatives are tested here."""
    raise NotImplementedError


VALUE = Member("lml_value", torchlml.lml_value, unused)
DUALS = [
    Member(
        f"{name} {bound}",
        lambda x, k, f=name, b=bound, **o: getattr(torchlml, f)(x, k, bound=b, **o),
        unused,
    )
    for name in ("log_lml", "lml_dual")
    for bound in ("at_most", "at_least")
]
EVERY = [*MEMBERS, *DUALS, VALUE]
each_member = pytest.mark.parametrize("member", EVERY, ids=lambda member: member.name)
KEEP = torch.tensor([[True, True, False, True, True], [True] * 5, [False, True, True, True, True]])
OFFSETS = torch.tensor([0, 4, 5, 11])


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def finite(out: Tensor) -> Tensor:
    """Remove masked entries: log y is -inf there, which finite differences cannot handle."""
    return out[out.isfinite()]


CASES: dict[str, tuple[Callable[[], tuple[Tensor, ...]], Callable[..., Tensor]]] = {
    "number": (lambda: (leaf(3, 6),), lambda f, x: f(x, 2)),
    "dim": (lambda: (leaf(4, 2, 2),), lambda f, x: f(x, 1.5, dim=0)),
    "k of each row": (lambda: (leaf(3, 5), numbers(0.5, 1.5, 3.2)), lambda f, x, k: f(x, k)),
    "one k": (lambda: (leaf(2, 5), numbers(1.5)[0]), lambda f, x, k: f(x, k)),
    "mask": (
        lambda: (leaf(3, 5), numbers(1.2, 2.5, 3.2)),
        lambda f, x, k: finite(f(x, k, mask=KEEP)),
    ),
    "packed": (lambda: (leaf(11), numbers(1.2, 0.5, 2.5)), lambda f, x, k: f(x, k, offsets=OFFSETS)),
}


@each_member
@pytest.mark.parametrize("case", CASES)
def test_derivatives(member: Member, case: str) -> None:
    make, call = CASES[case]
    inputs = make()
    assert gradcheck(lambda *a: call(member.function, *a), inputs, check_forward_ad=True)
    assert gradgradcheck(lambda *a: call(member.function, *a), inputs)


@each_constrained
@pytest.mark.parametrize("masked", [False, True])
def test_derivatives_for_the_bounds(member: Member, masked: bool) -> None:
    mask = KEEP if masked else None
    upper = (torch.rand(3, 5, dtype=torch.float64) / 2 + 0.25).requires_grad_()
    inputs = (leaf(3, 5), numbers(0.7, 1.1, 1.6), upper)

    def call(x: Tensor, k: Tensor, upper: Tensor) -> Tensor:
        return member.function(x, k, upper=upper, mask=mask)

    y = call(*inputs)
    assert 0 < int((y == upper).sum()) < 10  # some entries are at their bounds, others are not
    assert gradcheck(call, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(call, inputs)
    one = numbers(0.6)[0]
    assert gradcheck(lambda x, u: member.function(x, 1.5, upper=u, mask=mask), (inputs[0], one))


def formula(name: str, y: np.ndarray, k: float, g: np.ndarray) -> tuple[np.ndarray, float]:
    """Compute the gradients of sum(g * y) with respect to x and k from the published formulas."""
    free = (y > 0) & (y < 1)
    weight = np.where(free, y if name == "constrained_softmax" else 1.0, 0.0)
    mean = float(weight @ g / weight.sum()) if weight.sum() else 0.0
    return weight * (g - mean), mean


@each_constrained
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("problem", SHORT, ids=lambda problem: problem.name)
def test_gradients_are_accurate(member: Member, problem: Problem, dtype: torch.dtype) -> None:
    x = problem.row(dtype).requires_grad_()
    y = related.expected(member, problem, dtype)
    if bool(((y < 1e-9) & (y > 0)).any() or ((y > 1 - 1e-9) & (y < 1)).any()) or k_is_a_vertex(y):
        # The derivative jumps at a kink, and rounding decides which side the result is on. Only finiteness
        # can be checked there.
        (dx,) = torch.autograd.grad(member.function(x, problem.k), x, torch.ones_like(x))
        assert bool(dx.isfinite().all())
        return
    k = torch.tensor(float(problem.k), dtype=torch.float64, requires_grad=True)
    g = torch.linspace(-1, 1, x.numel(), dtype=dtype)
    dx, dk = torch.autograd.grad(member.function(x, k), (x, k), g)
    expected, mean = formula(member.name, y, problem.k, g.double().numpy())
    limit = 2e-6 if dtype == torch.float32 else 1e-10
    assert np.abs(dx.double().numpy() - expected).max() <= limit
    assert abs(float(dk) - mean) <= limit


def k_is_a_vertex(y: np.ndarray) -> bool:
    return bool(((y == 0) | (y == 1)).all())


def weigh(out: Tensor) -> Tensor:
    return (out * torch.arange(1, out.numel() + 1, dtype=out.dtype).view(out.shape).cos()).sum()


TRANSFORMS: dict[str, Callable[..., Tensor]] = {
    "grad": lambda f, x, k: grad(lambda x: weigh(f(x, k)))(x),
    "grad of k": lambda f, x, k: grad(lambda k: weigh(f(x, k)))(k),
    "jvp": lambda f, x, k: jvp(f, (x, k), (x.sin(), k.cos()))[1],
    "jacrev": lambda f, x, k: jacrev(f)(x, k),
    "jacfwd": lambda f, x, k: jacfwd(f, argnums=1)(x, k),
    "hessian": lambda f, x, k: hessian(lambda x: weigh(f(x, k)))(x),
    "vmap": lambda f, x, k: vmap(f)(x, k),
    "vmap of one k": lambda f, x, k: vmap(lambda row: f(row, 1.5))(x),
    "vmap of grad": lambda f, x, k: vmap(grad(lambda x, k: weigh(f(x, k))))(x, k),
}


@each_member
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(member: Member, transform: str) -> None:
    # The references are autograd's first and second derivatives, which are tested above.
    x, k = torch.randn(3, 5, dtype=torch.float64), torch.tensor([0.5, 1.5, 3.2], dtype=torch.float64)
    got = TRANSFORMS[transform](member.function, x, k)
    expected = BY_HAND[transform](member.function, x, k)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def jacobian(f: Callable[..., Tensor], *inputs: Tensor, of: int) -> Tensor:
    return torch.autograd.functional.jacobian(f, inputs)[of]


def row_grad(f: Callable[..., Tensor], x: Tensor, k: Tensor) -> Tensor:
    leaves = [row.clone().requires_grad_() for row in x]
    return torch.stack(
        [torch.autograd.grad(weigh(f(row, t)), row)[0] for row, t in zip(leaves, k, strict=True)]
    )


BY_HAND: dict[str, Callable[..., Any]] = {
    "grad": lambda f, x, k: jacobian(lambda x, k: weigh(f(x, k)), x, k, of=0),
    "grad of k": lambda f, x, k: jacobian(lambda x, k: weigh(f(x, k)), x, k, of=1),
    "jvp": lambda f, x, k: (
        torch.tensordot(jacobian(f, x, k, of=0), x.sin(), 2)
        + torch.tensordot(jacobian(f, x, k, of=1), k.cos(), 1)
    ),
    "jacrev": lambda f, x, k: jacobian(f, x, k, of=0),
    "jacfwd": lambda f, x, k: jacobian(f, x, k, of=1),
    "hessian": lambda f, x, k: torch.autograd.functional.hessian(lambda x: weigh(f(x, k)), x),
    "vmap": lambda f, x, k: f(x, k),
    "vmap of one k": lambda f, x, k: f(x, 1.5),
    "vmap of grad": row_grad,
}


@pytest.mark.parametrize("function", [*(member.function for member in EVERY), torchlml.topk_mask])
def test_compile(function: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    x = torch.randn(3, 6, dtype=torch.float64)
    k: Any = torch.tensor([1, 2, 3])
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for call in (function, compiled):
        inputs = x.clone().requires_grad_()
        out = call(inputs, k)
        results.append((out.detach(), torch.autograd.grad(weigh(out), inputs)[0]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    # In torch 2.13, a compiled torch.func.grad ignores the backward method of an autograd.Function, so the
    # library must not use one here (see torchlml/_autograd/rule.py).
    both = torch.compile(grad(lambda x: weigh(function(x, k))), fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(both, results[0][1], rtol=1e-10, atol=1e-12)


def test_rows_with_an_inactive_bound_do_not_depend_on_k() -> None:
    x = torch.tensor([[-3.0, -4, -5], [3.0, 4, 5]], dtype=torch.float64, requires_grad=True)
    k = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True)
    y = torchlml.lml(x, k, bound="at_most")
    dx, dk = torch.autograd.grad(y.sum(), (x, k))
    torch.testing.assert_close(y[0], x[0].sigmoid())
    torch.testing.assert_close(dx[0], x[0].sigmoid() * (1 - x[0].sigmoid()))
    torch.testing.assert_close(dk, torch.tensor([0.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(dx[1], torch.zeros(3, dtype=torch.float64))


def test_the_gradient_of_the_value() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.randn(4, 30).to(dtype).requires_grad_()
        k = torch.tensor([0.5, 3, 10, 29.5], requires_grad=True)
        dx, dk = torch.autograd.grad(torchlml.lml_value(x, k).sum(), (x, k))
        assert torch.equal(dx, torchlml.lml(x, k))
        # dk is not rounded to the dtype of x, because k has its own dtype.
        wide = x.double() if dtype == torch.float64 else x.float()
        torch.testing.assert_close(dk, -torchlml.lml_dual(wide, k).to(dk.dtype))
