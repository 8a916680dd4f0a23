"""The fast solver in pure PyTorch.

Rows that it certifies are accurate, all other rows are solved again by the careful solver, and a call
synchronizes the device only once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import truth
from tests.support.fresh import run
from tests.support.problems import BY_NAME, PROBLEMS, Problem
from torchlml._cpu import loader
from torchlml._solve import fast as fast_solver
from torchlml._torch import careful
from torchlml._torch import fast as fast_operators

ENTRY = {torch.float32: 1e-6, torch.float64: 1e-11}
each_dtype = pytest.mark.parametrize("dtype", ENTRY, ids=str)


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch(dtype: torch.dtype, n: int = 200) -> tuple[Tensor, Tensor]:
    """Return rows with scales from 0.01 to 12, and k from 0.5 to n - 0.5."""
    scale = float64(0.01, 1, 3, 12).repeat(10).unsqueeze(-1)
    x = torch.randn(40, n, dtype=torch.float64) * scale + torch.linspace(-1e3, 1e3, 40).unsqueeze(-1)
    return x.to(dtype), torch.linspace(0.5, n - 0.5, 40, dtype=torch.float64)


def check(y: Tensor, x: Tensor, k: Tensor) -> None:
    for row, own, target in zip(x, y, k.tolist(), strict=True):
        expected = truth.solve(row.double().numpy(), target).y
        assert np.abs(own.double().numpy() - expected).max() <= ENTRY[x.dtype]
        assert abs(float(own.double().sum()) - target) <= 2 * ENTRY[x.dtype] * max(1, target)


@each_dtype
def test_ordinary_rows_are_certified_and_accurate(dtype: torch.dtype) -> None:
    x, k = batch(dtype)
    found = fast_solver.solve_fast(x, k)
    assert bool(found.certified.all())
    check(found.y(), x, k)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
@each_dtype
def test_certified_rows_are_accurate(problem: Problem, dtype: torch.dtype) -> None:
    x = problem.row(dtype).unsqueeze(0)
    found = fast_solver.solve_fast(x, float64(problem.k))
    if bool(found.certified):
        check(found.y(), x, float64(problem.k))


def test_certified_rows_with_many_ties_are_accurate() -> None:
    # Equal entries have equal rounding errors, which add up instead of averaging out.
    levels = torch.tensor([0.0, 0.3, 1.7, 4.0, 9.0, 15.0])
    x = torch.stack([levels[torch.randint(0, 6, (3000,))] for _ in range(30)])
    k = torch.linspace(1, 2999, 30, dtype=torch.float64)
    found = fast_solver.solve_fast(x, k)
    certified = found.certified
    check(found.y()[certified], x[certified], k[certified])


def test_only_rows_that_are_not_certified_take_the_careful_path(monkeypatch: pytest.MonkeyPatch) -> None:
    x, k = batch(torch.float32)
    x[3, 5], x[7], x[9, 2] = torch.nan, torch.linspace(-1e5, 1e5, 200), torch.inf
    k[11], k[12] = 0, 200
    taken = []

    def forward(x: Tensor, *rest: Any) -> Any:
        taken.append(x)
        return original(x, *rest)

    original = careful.forward
    monkeypatch.setattr(careful, "forward", forward)
    y, _ = fast_operators.forward(x, k, None, None)
    expected = original(x, k, None, None)
    torch.testing.assert_close(y, expected[0], rtol=0, atol=1e-6, equal_nan=True)
    assert [len(rows) for rows in taken] in ([4], [5])  # 4 if the row with +inf is certified
    assert torch.equal(taken[0][0].isnan(), x[3].isnan())


@pytest.mark.parametrize("name", ["forward", "log_forward"])
def test_jagged_rows_match_dense_rows(name: str) -> None:
    lengths = [5, 0, 17, 300, 1, 16]
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    x, k = torch.randn(339) * 3, float64(2.5, 0, 3, 40, 0.5, 15)
    mask = torch.rand(339) > 0.1
    function = getattr(fast_operators, name)
    y, nu = function(x, k, mask, offsets)
    dx, dk = getattr(fast_operators, name.replace("forward", "backward"))(
        torch.ones(339), x, y, nu, mask, offsets
    )
    for i, (a, b) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        row, here = x[None, a:b], mask[None, a:b]
        own, own_nu = getattr(careful, name)(row, k[i : i + 1], here, None)
        torch.testing.assert_close(y[a:b], own[0], rtol=1e-5, atol=1e-6)
        backward = getattr(careful, name.replace("forward", "backward"))
        own_dx, own_dk = backward(torch.ones(1, b - a), row, own, own_nu, here, None)
        torch.testing.assert_close(dx[a:b], own_dx[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dk[i], own_dk[0], rtol=1e-4, atol=1e-5)


class PretendDevice(TorchDispatchMode):
    """A simulated device without float64, which records its synchronizations."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal"):
            self.waits.append(name)
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else [result]:
            if isinstance(part, Tensor) and part.dtype == torch.float64:
                raise AssertionError(f"{name} returned a float64 tensor")
        return result


@pytest.fixture
def _device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fast_solver, "on_host", lambda x: False)
    monkeypatch.setattr(fast_operators, "on_host", lambda x: False)
    monkeypatch.setattr(fast_solver, "wide_dtype", lambda device: torch.float32)
    yield
    monkeypatch.undo()


@pytest.mark.usefixtures("_device")
def test_the_solver_does_not_synchronize_a_gpu_without_float64() -> None:
    x, k = batch(torch.float32)
    with PretendDevice() as device:
        found = fast_solver.solve_fast(x, k.float())
        y = found.y()
        found.nu()
    assert device.waits == []
    assert bool(found.certified.all())
    check(y, x, k.float().double())


@pytest.mark.usefixtures("_device")
def test_a_call_synchronizes_a_gpu_once() -> None:
    x, k = batch(torch.float32)
    with PretendDevice() as device:
        y, _ = fast_operators.forward(x, k.float(), None, None)
    assert device.waits == ["nonzero"]
    check(y, x, k.float().double())


def test_the_first_slow_call_warns_and_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_warned", False)
    monkeypatch.setattr(loader, "loaded", lambda: False)
    monkeypatch.setattr(loader, "requested", lambda: "")
    x, k = batch(torch.float32)
    with pytest.warns(UserWarning, match="pure PyTorch.*`(pip install|python setup.py) "):
        fast_operators.forward(x, k, None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast_operators.forward(x, k, None, None)


def test_no_warning_if_pure_pytorch_was_requested() -> None:
    code = "import warnings; warnings.simplefilter('error', UserWarning)\n"
    code += "import torch, torchlml; torchlml.lml(torch.ones(3), 1)"
    assert run(code, TORCHLML_KERNEL="torch").returncode == 0


@pytest.mark.parametrize("offsets", [None, torch.tensor([0, 200])], ids=["dense", "packed"])
def test_the_input_is_not_modified(offsets: torch.Tensor | None) -> None:
    # A row with logits this far apart is not certified, so the careful solver overwrites its result.
    row = BY_NAME["scale 1e3"].row(torch.float32)
    x = row if offsets is not None else row.unsqueeze(0)
    for operator in (fast_operators.solve, fast_operators.forward, fast_operators.log_forward):
        operator(x, torch.tensor(20.0, dtype=torch.float64), None, offsets)
        assert x._version == 0
