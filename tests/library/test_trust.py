"""Kernels of a GPU that lie, fail or are right, on CPU tensors: they are found out before they are used."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from torchlml._cpu import loader as native
from torchlml._torch import careful as reference
from torchlml._torch import loss as reference_loss
from torchlml._triton import self_test as trust

CPU = torch.device("cpu")
NAMES = list(trust.OPERATORS)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def careful(name: str) -> Callable[..., Any]:
    return getattr(reference_loss if name.startswith("loss") else reference, name)


def right() -> SimpleNamespace:
    """Kernels that are another implementation than the plain path, and right."""
    return SimpleNamespace(**{name: careful(name) for name in NAMES})


def lying(name: str, place: int = 0) -> SimpleNamespace:
    """Kernels of which one is wrong in the last entry of one of its results."""

    def lie(*arguments: Any) -> Any:
        result = careful(name)(*arguments)
        results = [result.clone()] if isinstance(result, Tensor) else [part.clone() for part in result]
        results[place].view(-1)[-1] += 0.1
        return results[0] if isinstance(result, Tensor) else tuple(results)

    kernels = right()
    setattr(kernels, name, lie)
    return kernels


@pytest.fixture(autouse=True)
def _pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was compared yet, CPU tensors are taken for those of a GPU, and nobody asked for a kernel."""
    monkeypatch.setattr(trust, "_verdicts", {})
    monkeypatch.setattr(trust, "_interpreted", lambda device: False)
    monkeypatch.setattr(native, "requested", lambda: "")
    monkeypatch.setattr(native, "_warned", True)
    monkeypatch.setattr(trust, "available", lambda: True)


def use(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> None:
    monkeypatch.setattr(trust, "_kernels", lambda: kernels)


def problem() -> tuple[Tensor, Tensor, None, None]:
    return torch.randn(5, 30), torch.tensor(4.0, dtype=torch.float64), None, None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_kernels_are_used(dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trust.difference(CPU, dtype, right()) is None
        assert trust.trusted(CPU, dtype, right())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_lie_is_found(name: str, dtype: torch.dtype) -> None:
    found = trust.difference(CPU, dtype, lying(name))
    assert found is not None
    assert f"`{name}`" in found


def test_a_wrong_gradient_of_k_is_found() -> None:
    assert trust.difference(CPU, torch.float32, lying("backward", place=1)) is not None


def test_a_nan_is_a_difference() -> None:
    kernels = right()
    kernels.forward = lambda *a: tuple(torch.full_like(part, torch.nan) for part in reference.forward(*a))
    assert trust.difference(CPU, torch.float32, kernels) is not None


def test_after_a_lie_the_plain_path_answers_and_one_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, lying("forward"))
    arguments = problem()
    with pytest.warns(UserWarning, match=r"torch.float32 on cpu .* `forward`.*`torchlml gpu-check`"):
        y, _ = trust.OPERATORS["forward"](*arguments)
    assert torch.equal(y, trust._plain["forward"](*arguments)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, _ = trust.OPERATORS["forward"](*arguments)
        trust.OPERATORS["solve"](*arguments)
    assert torch.equal(again, y)


def test_kernels_that_do_not_compile_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = right()

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("no such instruction")

    kernels.log_backward = fail
    use(monkeypatch, kernels)
    with pytest.warns(UserWarning, match="do not run: RuntimeError: no such instruction"):
        y, _ = trust.OPERATORS["forward"](*problem())
    torch.testing.assert_close(y.sum(-1), torch.full((5,), 4.0))


def test_the_comparison_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, right())
    calls = []
    monkeypatch.setattr(trust, "difference", lambda *a: calls.append(a[:2]))
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        x, k, *rows = problem()
        trust.OPERATORS["forward"](x.to(dtype), k, *rows)
    assert calls == [(CPU, torch.float32), (CPU, torch.bfloat16)]


@pytest.mark.parametrize(("choice", "used"), [("torch", False), ("native", True)])
def test_the_environment_overrules(monkeypatch: pytest.MonkeyPatch, choice: str, used: bool) -> None:
    monkeypatch.setattr(native, "requested", lambda: choice)
    kernels = right()
    kernels.forward = lambda x, *rest: ("the kernel", None)
    use(monkeypatch, kernels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, _ = trust.OPERATORS["forward"](*problem())
    assert (y == "the kernel") is used if used else isinstance(y, Tensor)
