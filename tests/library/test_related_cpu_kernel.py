"""The CPU kernels of related operators agree with pure PyTorch, and rows do not depend on each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchlml
from tests.support.cpu_kernel import FORMS, TOLERANCE, assert_close, needs_kernel, problem
from tests.support.fresh import run
from torchlml import choices, constrained, projection
from torchlml._autograd import rule
from torchlml._balanced import linear

Case = tuple[Tensor, Tensor, "Tensor | None", "Tensor | None"]
PROJECTIONS = {
    "constrained_softmax": constrained._softmax_project,
    "constrained_sparsemax": constrained._sparsemax_project,
}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
each_form = pytest.mark.parametrize("form", FORMS)
OPERATORS = torch.ops.torchlml


def upper_for(x: Tensor, kind: str) -> Tensor:
    """Return one upper bound for all entries, or one per entry, each from 0 to 2 or infinite."""
    if kind == "one":
        return torch.tensor(1.25, dtype=torch.float64)
    upper = torch.rand(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 2
    upper[..., ::7], upper[..., 3::11] = 0.0, torch.inf
    return upper


def gradient_for(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(x.dtype)


def same(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.double().nan_to_num(7e30), want.double().nan_to_num(7e30))


@needs_kernel
@each_form
@each_dtype
@pytest.mark.parametrize("kind", ["one", "each"])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_constrained(name: str, kind: str, dtype: torch.dtype, form: str) -> None:
    x, k, mask, offsets = problem(dtype, form)
    upper = upper_for(x, kind)
    projection = PROJECTIONS[name]
    y, nu = projection.forward(x, k, upper, mask, offsets)
    want, nu_want = projection.reference_forward(x, k, upper, mask, offsets)
    assert y.dtype == dtype
    # Entries can be greater than 1, so errors are measured relative to the largest entry.
    scale = want.double().nan_to_num(0).amax().clamp(min=1)
    assert_close(y.double() / scale, want.double() / scale, dtype)
    assert torch.equal(nu[0].isfinite(), nu_want[0].isfinite())
    # Both backward passes start from the same nu, so that an error in nu does not affect the comparison.
    arguments = (gradient_for(x), x, k, upper, nu_want, mask, offsets, True)
    got, wanted = projection.backward(*arguments), projection.reference_backward(*arguments)
    near = near_a_kink(name, x, nu_want, upper, mask, offsets)
    assert_close(got[0].masked_fill(near, 0) / scale, wanted[0].masked_fill(near, 0) / scale, dtype, 20)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if not bool(near.any()):
        assert_close(got[1], wanted[1], wide, 20)
        assert_close(got[2], wanted[2], wide, 50)


def near_a_kink(
    name: str, x: Tensor, nu: Tensor, upper: Tensor, mask: Tensor | None, offsets: Tensor | None
) -> Tensor:
    """Return a mask of rows with an entry within rounding error of its bound or 0, where derivatives jump."""
    row = torch.arange(nu.shape[1]).repeat_interleave(
        torch.full((nu.shape[1],), x.shape[-1]) if offsets is None else offsets.diff()
    )
    z = ((x.double().flatten() + nu[0][row]) + nu[1][row]).nan_to_num(0, 1e9, -1e9)
    bound = upper.expand(x.shape).flatten()
    if name == "constrained_softmax":
        near = (z - bound.log()).abs() < 1e-5
    else:
        near = ((z - bound).abs() < 1e-5) | (z.abs() < 1e-5)
    if mask is not None:
        near = near & mask.flatten()
    rows = torch.zeros(nu.shape[1], dtype=torch.bool).index_put((row,), near, accumulate=True)
    return rows[row].view(x.shape)


@needs_kernel
@each_form
@each_dtype
def test_bounds_and_value(dtype: torch.dtype, form: str) -> None:
    x, k, mask, offsets = problem(dtype, form)
    for at_most in (True, False):
        y, nu = OPERATORS.bounded_forward(x, k, mask, offsets, at_most)
        want, nu_want = rule._reference_forward(x, k, mask, offsets, at_most)
        assert_close(y, want, dtype)
        assert torch.equal((nu == 0).all(0), (nu_want == 0).all(0))
        arguments = (gradient_for(x), x, want, nu_want, mask, offsets)
        for got, wanted in zip(
            OPERATORS.bounded_backward(*arguments), rule._reference_backward(*arguments), strict=True
        ):
            close = wanted.isnan() | (wanted.abs() < 1e6)
            assert_close(got[close], wanted[close], dtype if got.dtype == dtype else torch.float32, 100)
    got, _ = OPERATORS.value(x, k, mask, offsets)
    wanted, _ = projection._value_reference(x, k, mask, offsets)
    size = wanted.abs().nan_to_num(0, 0, 0).clamp(min=100)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert_close(got / size, wanted / size, wide)


@needs_kernel
@each_dtype
@pytest.mark.parametrize("form", FORMS[:3])
def test_choices(dtype: torch.dtype, form: str) -> None:
    x, k, mask, _ = problem(dtype, form)
    x = torch.cat([x, (x * 2).round() / 2, x.new_zeros(8, x.shape[1])])  # ties
    k = k if k.dim() == 0 else torch.cat([k, k, k[:8]]).floor()
    mask = None if mask is None else torch.cat([mask, mask, mask[:8]])
    assert same(OPERATORS.topk_mask(x, k, mask), choices._choose_reference(x, k, mask))
    if dtype not in (torch.float32, torch.float64):
        return
    p = torchlml.lml(x, k, mask=mask)
    keys = torch.randint(256, x.shape, dtype=torch.uint8)
    start = torch.rand(x.shape[0], dtype=torch.float64)
    assert same(OPERATORS.systematic_sample(p, k, keys, start), choices._sample_reference(p, k, keys, start))


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [1, 5, 64, 300])
def test_balanced_rows(dtype: torch.dtype, columns: int) -> None:
    """For any number of rows, y agrees with pure PyTorch, and the sums agree with float64 sums of y."""
    for rows in (0, 1, 3, 70, 5000 if columns < 100 else 300):
        x, mu = torch.randn(rows, columns, dtype=dtype), torch.randn(columns, dtype=torch.float64)
        x[torch.rand_like(x) < 0.1] = -torch.inf
        for k in (torch.tensor(0.4 * columns, dtype=torch.float64), columns * torch.rand(rows).double()):
            y, inverse, sums = OPERATORS.balanced_forward(x, mu, k)
            assert_close(y, linear._forward(x, mu, k)[0], dtype)
            wide = y.double()
            w = wide - wide * wide
            assert_close(sums, torch.stack([wide.sum(0), w.sum(0), (w * wide).sum(0)]), dtype, 10)
            a = w.sum(1)
            assert_close(inverse[a > 0] * a[a > 0], torch.ones_like(a[a > 0]), dtype, 10)
            assert not inverse[a == 0].any()
            p = torch.randn(columns, dtype=torch.float64)
            wanted = w.T @ (inverse.double() * (w @ p))
            assert_close(OPERATORS.balanced_product(y, inverse, p), wanted, dtype, 10)
            # Pure PyTorch adds the rows one by one in the dtype of y, so its error grows with their number.
            size = w.T @ (inverse.double() * (w @ p.abs()))
            error = (linear._product(y, inverse, p) - wanted).abs()
            assert (error <= (rows + columns + 8) * torch.finfo(dtype).eps * size).all()


def every(x: Tensor, k: Tensor) -> list[Tensor]:
    """Return results and gradients of related operators for dense rows, without sampling and balancing."""
    g = torch.linspace(-1, 1, x.shape[1], dtype=x.dtype).expand(x.shape).contiguous()
    found: list[Tensor] = []
    for name in PROJECTIONS:
        one = torch.tensor(1.0, dtype=torch.float64)
        y, nu = getattr(OPERATORS, f"{name}_forward")(x, k, one, None, None)
        found += [y, *getattr(OPERATORS, f"{name}_backward")(g, x, k, one, nu, None, None, True)]
    y, nu = OPERATORS.bounded_forward(x, k, None, None, True)
    found += [y, *OPERATORS.bounded_backward(g, x, y, nu, None, None)]
    found += [OPERATORS.value(x, k, None, None)[0], OPERATORS.topk_mask(x, k.floor(), None)]
    return found


@each_dtype
def test_rows_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    x, k, _, _ = problem(dtype, "dense")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = every(x.repeat(40, 1), k.repeat(40))  # enough work for two threads
    finally:
        torch.set_num_threads(before)
    for i in range(0, x.shape[0], 5):
        for a, b in zip(every(x[i : i + 1].contiguous(), k[i : i + 1]), together, strict=True):
            assert same(a[0], b[i])
            assert same(a[0], b[i + x.shape[0]])


CALLS: dict[str, Callable[..., Any]] = {
    "constrained_softmax": torchlml.constrained_softmax,
    "constrained_sparsemax": torchlml.constrained_sparsemax,
    "at_most": lambda x, k: torchlml.lml(x, k, bound="at_most"),
    "lml_value": torchlml.lml_value,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("n", [7, 300])
def test_fast_and_transformable_paths_agree(name: str, n: int) -> None:
    x = torch.randn(6, n) * 4
    k = torch.tensor([1.0, 2.5, n / 10, n / 2, n - 2.5, n - 1.0], dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    y = CALLS[name](leaf, k)
    g = torch.linspace(-1, 2, y.numel()).view(y.shape)
    (dx,) = torch.autograd.grad(y, leaf, g)
    transformed, pullback = torch.func.vjp(lambda x: CALLS[name](x, k), x)
    torch.testing.assert_close(y.detach(), transformed, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(dx, pullback(g)[0], rtol=1e-5, atol=5e-6)


@needs_kernel
@pytest.mark.parametrize("level", ["baseline", "v3", "v4"])
def test_instruction_sets(level: str) -> None:
    code = """
import torch
from tests.library.test_related_cpu_kernel import FORMS, PROJECTIONS, TOLERANCE
from tests.library.test_related_cpu_kernel import test_bounds_and_value, test_choices, test_constrained
for dtype in (torch.float32, torch.float64, torch.float16):
    test_bounds_and_value(dtype, "dense mask")
    test_choices(dtype, "dense")
    for name in PROJECTIONS:
        test_constrained(name, "one", dtype, "dense")
        test_constrained(name, "each", dtype, "packed mask")
"""
    result = run(code, TORCHLML_ISA=level)
    assert result.returncode == 0, result.stderr
