"""Backward, double backward and forward mode, compared with finite differences or exact derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import torchlml
from tests.support import truth
from tests.support.gradients import resolved, slack, upstream
from tests.support.problems import PROBLEMS, SHORT, Problem

NAMES = ["lml", "log_lml", "lml_dual"]
each_name = pytest.mark.parametrize("name", NAMES)


def _double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _per_row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


# name -> inputs, and the call to differentiate. `f` is lml, log_lml or lml_dual.
Case = tuple[Callable[[], tuple[Tensor, ...]], Callable[..., Tensor]]
KEEP = torch.tensor([[True, True, False, True, True], [True] * 5, [False, True, True, True, True]])
OFFSETS = torch.tensor([0, 4, 4, 5, 11])
CASES: dict[str, Case] = {
    "integer k": (lambda: (_double(2, 6),), lambda f, x: f(x, 2)),
    "fractional k": (lambda: (_double(5),), lambda f, x: f(x, 3.75)),
    "dim 0 of three": (lambda: (_double(4, 2, 2),), lambda f, x: f(x, 1.5, dim=0)),
    "differentiable k": (lambda: (_double(2, 5), _per_row(1.5, 3.0)), lambda f, x, k: f(x, k)),
    "one differentiable k": (lambda: (_double(2, 5), _per_row(1.5)[0]), lambda f, x, k: f(x, k)),
    "only k": (lambda: (_per_row(0.5, 2.25),), lambda f, k: f(torch.arange(8.0).double().view(2, 4), k)),
    "mask": (
        lambda: (_double(3, 5), _per_row(1.0, 2.5, 3.2)),
        lambda f, x, k: _finite(f(x, k, mask=KEEP), KEEP),
    ),
    "ragged": (lambda: (_double(11), _per_row(1.0, 0.5, 0.5, 2.5)), lambda f, x, k: f(x, k, offsets=OFFSETS)),
    "ragged and mask": (
        lambda: (_double(11), _per_row(1.0, 0.5, 0.5, 2.5)),
        lambda f, x, k: _finite(f(x, k, mask=_ragged_mask(), offsets=OFFSETS), _ragged_mask()),
    ),
}


def _ragged_mask() -> Tensor:
    return torch.arange(11) % 5 != 1


def _finite(out: Tensor, mask: Tensor) -> Tensor:
    """Remove masked entries: log y is -inf there, which finite differences cannot handle."""
    return out[mask] if out.shape == mask.shape else out


# An empty row of a jagged batch has an infinite threshold, which finite differences cannot handle.
def _select(name: str, case: str) -> Callable[..., Tensor]:
    function, call = getattr(torchlml, name), CASES[case][1]
    if name == "lml_dual" and "ragged" in case:
        return lambda *inputs: call(function, *inputs)[[0, 2, 3]]
    return lambda *inputs: call(function, *inputs)


@each_name
@pytest.mark.parametrize("case", CASES)
def test_first_derivatives(name: str, case: str) -> None:
    inputs = CASES[case][0]()
    assert gradcheck(_select(name, case), inputs, check_forward_ad=True, check_batched_grad=True)


def test_derivatives_of_bracketing() -> None:
    inputs = _double(2, 5), _per_row(1.5, 3.0)
    assert gradcheck(
        torchlml.lml_bracketing, inputs, check_forward_ad=True, check_batched_grad=True, fast_mode=True
    )
    assert gradgradcheck(torchlml.lml_bracketing, inputs, check_fwd_over_rev=True, fast_mode=True)


@each_name
@pytest.mark.parametrize("case", CASES)
def test_second_derivatives(name: str, case: str) -> None:
    inputs = CASES[case][0]()
    assert gradgradcheck(_select(name, case), inputs, check_fwd_over_rev=True, fast_mode=True)


@each_name
def test_third_derivatives(name: str) -> None:
    x, v = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    function = getattr(torchlml, name)
    weight = (
        torch.linspace(-1, 1, 6, dtype=torch.float64) if name != "lml_dual" else torch.tensor(1.0).double()
    )

    def second(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad((function(x, 2.5) * weight).sum(), x, create_graph=True)
        (out,) = torch.autograd.grad(first @ v, x, create_graph=True)
        return out

    x.requires_grad_()
    (first,) = torch.autograd.grad((function(x, 2.5) * weight).sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(first @ v, x, create_graph=True)
    (third,) = torch.autograd.grad(curvature @ v, x)
    step = 1e-4
    difference = (second(x + step * v) @ v - second(x - step * v) @ v) / (2 * step)
    torch.testing.assert_close(third @ v, difference, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(second(x), curvature)


def backward(name: str, problem: Problem, dtype: torch.dtype) -> tuple[np.ndarray, float]:
    x = problem.row(dtype).requires_grad_()
    k = torch.tensor(problem.k, dtype=torch.float64, requires_grad=True)
    out = getattr(torchlml, name)(x, k)
    g = torch.from_numpy(upstream(x.numel())).to(dtype) if name != "lml_dual" else torch.ones_like(out)
    out.backward(g)
    assert x.grad is not None
    assert k.grad is not None
    assert x.grad.dtype == dtype
    return x.grad.double().numpy(), float(k.grad)


each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


class Compared(NamedTuple):
    """The computed and the exact gradients of a problem for the upstream gradient g."""

    row: truth.Row
    g: np.ndarray
    dx: np.ndarray
    dk: float
    true_dx: np.ndarray
    true_dk: float


def compared(name: str, problem: Problem, dtype: torch.dtype) -> Compared:
    row = problem.truth(dtype)
    g = torch.from_numpy(upstream(row.y.size)).to(dtype).double().numpy()
    return Compared(row, g, *backward(name, problem, dtype), *getattr(row, f"{name}_gradient")(g))


@each_problem
@each_dtype
def test_lml_gradient_is_accurate(problem: Problem, dtype: torch.dtype) -> None:
    row, g, dx, dk, expected_dx, expected_dk = compared("lml", problem, dtype)
    limit = (1e-6 if dtype == torch.float32 else 1e-11) * np.abs(g).max()
    assert np.abs(dx - expected_dx).max() <= limit
    if row.sum_w > 1e-30:
        assert abs(dk - expected_dk) <= slack(row, dtype).min() * np.abs(g).max()
    else:
        assert math.isfinite(dk)


@each_problem
@each_dtype
def test_log_lml_gradient_is_accurate(problem: Problem, dtype: torch.dtype) -> None:
    row, g, dx, dk, expected_dx, expected_dk = compared("log_lml", problem, dtype)
    effect = np.abs(g) * (1 - row.y)
    limit = slack(row, dtype) * (effect + row.p * effect.sum()) + 1e-12
    assert bool(np.isfinite(dx).all())
    assert bool((np.abs(dx - expected_dx) <= limit).all()) or not resolved(row)
    if row.sum_w > 1e-30:
        assert abs(dk - expected_dk) <= 4 * slack(row, dtype).min() * effect.sum() / row.sum_w


@each_problem
@each_dtype
def test_dual_gradient_is_accurate(problem: Problem, dtype: torch.dtype) -> None:
    row = problem.truth(dtype)
    dx, dk = backward("lml_dual", problem, dtype)
    expected_dx, expected_dk = row.dual_gradient(1.0) if row.sum_w else (-row.p, math.inf)
    assert bool(np.isfinite(dx).all())
    assert bool((np.abs(dx - expected_dx) <= 2 * slack(row, dtype) * row.p + 1e-12).all()) or not resolved(
        row
    )
    if row.sum_w > 1e-30:
        assert dk == pytest.approx(expected_dk, rel=4 * slack(row, dtype).min())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("problem", SHORT[:6], ids=lambda problem: problem.name)
def test_half_gradients(problem: Problem, dtype: torch.dtype) -> None:
    row = problem.truth(dtype)
    g = torch.from_numpy(upstream(row.y.size)).to(dtype).double().numpy()
    step = torch.finfo(dtype).eps
    for name, expected in (("lml", row.lml_gradient(g)), ("log_lml", row.log_lml_gradient(g))):
        dx, _ = backward(name, problem, dtype)
        # y and log y are saved in the 16-bit dtype, which limits the accuracy to a few rounding errors.
        assert np.abs(dx - expected[0]).max() <= 2 * step * np.abs(g).max()


@each_dtype
def test_hardest_examples_keep_their_gradient(dtype: torch.dtype) -> None:
    # The logits of five wrong labels exceed all others by 40. With log(y + 1e-8), the gradient at the true
    # label would be only 0.045 in magnitude.
    x = torch.zeros(100, dtype=dtype)
    x[:5] = 40
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(-torchlml.log_lml(x, 5)[50], x)
    assert float(gradient[50]) == pytest.approx(-0.9947, abs=5e-5)
    expected, _ = truth.solve(x.tolist(), 5).log_lml_gradient(-np.eye(100)[50])
    torch.testing.assert_close(gradient.double(), torch.from_numpy(expected), rtol=1e-4, atol=1e-7)


@each_dtype
@pytest.mark.parametrize("gap", [200.0, 400.0, 5000.0])
def test_saturated_rows(gap: float, dtype: torch.dtype) -> None:
    # Every w = y * (1 - y) underflows in float32, and for the largest gap also in float64. The gradient of y
    # is 0, but the gradient of log y is not.
    x = (torch.tensor([3.0, 2, 1, 0, -1, -2]) * gap).to(dtype).requires_grad_()
    k = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    g = torch.arange(1.0, 7.0, dtype=dtype)
    dx, dk = torch.autograd.grad(torchlml.lml(x, k), (x, k), g)
    assert float(dx.abs().max()) <= 1e-30
    assert bool(dk.isfinite())
    (dx,) = torch.autograd.grad(torchlml.log_lml(x, k), x, g)
    # Only the two entries next to the gap affect nu: d nu/dx = (-1/2, -1/2) there.
    torch.testing.assert_close(dx, torch.tensor([0, 0, -7.5, -3.5, 5, 6], dtype=dtype), rtol=1e-4, atol=1e-4)
    (dx,) = torch.autograd.grad(torchlml.lml_dual(x, k), x)
    torch.testing.assert_close(dx, torch.tensor([0, 0, -0.5, -0.5, 0, 0], dtype=dtype), rtol=1e-4, atol=1e-6)


def test_entries_close_to_one_contribute() -> None:
    # At x = 17.3, y is within 1e-6 of 1, yet 1e5 such entries together contribute half of sum w.
    problem = next(problem for problem in PROBLEMS if problem.name == "one hundred thousand at 17.3")
    x = problem.row(torch.float32).requires_grad_()
    g = torch.zeros(x.shape)
    g[2:] = 1
    row = problem.truth(torch.float32)
    (gradient,) = torch.autograd.grad(torchlml.lml(x, problem.k), x, g)
    expected = row.lml_gradient(g.double().numpy())[0]
    assert abs(expected[0]) > 1e-4
    assert np.abs(gradient.double().numpy() - expected).max() <= 1e-6 * abs(expected[0]) + 1e-9


def test_k_keeps_its_own_dtype_and_shape() -> None:
    x = torch.randn(3, 4, 10)
    for dtype in (torch.float32, torch.float64):
        k = torch.full((4,), 2.5, dtype=dtype, requires_grad=True)
        (gradient,) = torch.autograd.grad(torchlml.lml(x, k).sum(), k)
        assert gradient.dtype == dtype
        # d(sum y)/dk = 1 for each of the three rows that share a k.
        torch.testing.assert_close(gradient, torch.full((4,), 3.0, dtype=dtype))


def test_temperature_divides_the_logits() -> None:
    x = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    layer = torchlml.LML(k=2, temperature=0.5)
    assert torch.equal(layer(x), torchlml.lml(x / 0.5, 2))
    (a,) = torch.autograd.grad(layer(x)[:, 0].sum(), x)
    (b,) = torch.autograd.grad(torchlml.lml(x / 0.5, 2)[:, 0].sum(), x)
    torch.testing.assert_close(a, b)


@each_name
def test_no_graph_is_kept_without_requires_grad(name: str) -> None:
    x = torch.randn(3, 10)
    assert not getattr(torchlml, name)(x, 2).requires_grad
    with torch.no_grad():
        assert not getattr(torchlml, name)(x.requires_grad_(), 2).requires_grad
