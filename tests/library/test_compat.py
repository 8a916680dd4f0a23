"""`torchlml.compat.LML` accepts the arguments of the original authors' class and returns accurate values."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch

import torchlml
from tests.support import truth
from tests.support.fresh import run
from torchlml import compat

SHAPES = [(10,), (4, 10)]


def test_arguments_have_the_original_names_and_defaults() -> None:
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
def test_all_entries_are_chosen_if_there_are_at_most_n(n: int, batch: tuple[int, ...]) -> None:
    x = torch.randn(*batch, n, requires_grad=True)
    y = compat.LML(N=3)(x)
    assert torch.equal(y, torch.ones(*batch, n))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, torch.zeros_like(x))


def test_the_input_that_the_original_release_fails_on() -> None:
    y = compat.LML(N=1097)(torch.zeros(1098))
    torch.testing.assert_close(y, torch.full((1098,), 1097 / 1098))


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    compat.LML(N=3, verbose=2)(torch.randn(4, 10))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("N", [np.int64(3), np.int32(3), torch.tensor(3)], ids=lambda n: str(type(n)))
def test_n_may_be_any_integer(N: Any) -> None:
    x = torch.randn(4, 10)
    assert torch.equal(compat.LML(N=N)(x), compat.LML(N=3)(x))


def test_the_first_trace_of_a_process_works() -> None:
    program = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import torch, torchlml.compat\n"
        "x = torch.randn(4, 10)\n"
        "for layer in (torchlml.LML(k=3), torchlml.compat.LML(3)):\n"
        "    traced = torch.jit.trace(layer, (x,))\n"
        "    torch.testing.assert_close(traced(2 * x), layer(2 * x))\n"
    )
    done = run(program)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_runs() -> None:
    x = torch.randn(4, 10)
    model = torch.nn.Sequential(torch.nn.Linear(10, 6), compat.LML(N=2))
    assert torch.equal(torch.jit.script(model)(x), model(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("layer", [torchlml.LML(k=2), compat.LML(N=2)], ids=["LML", "compat"])
def test_a_traced_model_with_parameters_is_saved_and_trains(layer: torch.nn.Module) -> None:
    x = torch.randn(4, 10)
    model = torch.nn.Sequential(torch.nn.Linear(10, 6), layer)
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, (x,)), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    other = torch.randn(7, 10)
    torch.testing.assert_close(loaded(other), model(other))
    loaded(other)[:, 0].sum().backward()
    model(other)[:, 0].sum().backward()
    for got, want in zip(loaded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)
