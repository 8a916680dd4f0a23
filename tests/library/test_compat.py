"""`torchlml.compat.LML`: the class of the paper's release, by the same names, and right."""

from __future__ import annotations

import pytest
import torch

import torchlml
from tests.support import truth
from torchlml import compat

SHAPES = [(10,), (4, 10)]


def test_arguments_have_their_names_and_defaults() -> None:
    layer = compat.LML(N=3, eps=1e-4, n_iter=100, branch=None, verbose=0)
    assert isinstance(layer, torch.nn.Module)
    x = torch.randn(4, 10)
    assert torch.equal(layer(x), compat.LML(3)(x))
    assert torch.equal(compat.LML(3, 1e-2, 5, 7, 0)(x), layer(x))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    y = compat.LML(N=3)(x)
    assert y.shape == x.shape
    assert y.dtype == dtype
    assert torch.equal(y, torchlml.lml(x, 3))
    for row, got in zip(x.detach().view(-1, 10), y.detach().view(-1, 10), strict=True):
        expected = torch.from_numpy(truth.solve(row.double().numpy(), 3).y)
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-6)
    (a,) = torch.autograd.grad(y[..., 0].sum(), x)
    (b,) = torch.autograd.grad(torchlml.lml(x, 3)[..., 0].sum(), x)
    assert torch.equal(a, b)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("batch", [(), (4,)], ids=str)
def test_at_most_n_entries_are_all_chosen(n: int, batch: tuple[int, ...]) -> None:
    x = torch.randn(*batch, n, requires_grad=True)
    y = compat.LML(N=3)(x)
    assert torch.equal(y, torch.ones(*batch, n))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, torch.zeros_like(x))


def test_the_input_that_broke_the_release() -> None:
    y = compat.LML(N=1097)(torch.zeros(1098))
    torch.testing.assert_close(y, torch.full((1098,), 1097 / 1098))


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    compat.LML(N=3, verbose=2)(torch.randn(4, 10))
    assert capfd.readouterr() == ("", "")
