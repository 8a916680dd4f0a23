"""The self-test of GPU kernels, run on CPU tensors, detects wrong or failing kernels before they are used."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from torchlml._cpu import loader
from torchlml._torch import careful, fast
from torchlml._triton import self_test

CPU = torch.device("cpu")
NAMES = list(self_test.OPERATORS)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def reference(name: str) -> Callable[..., Any]:
    return getattr(fast if name.startswith("loss") else careful, name)


def right() -> SimpleNamespace:
    """Return correct kernels: the functions of `careful` and, for the losses, those of `fast`."""
    return SimpleNamespace(**{name: reference(name) for name in NAMES})


def faulty(name: str, place: int = 0) -> SimpleNamespace:
    """Return kernels, one of which returns a result with a wrong last entry."""

    def corrupt(*arguments: Any) -> Any:
        result = reference(name)(*arguments)
        results = [result.clone()] if isinstance(result, Tensor) else [part.clone() for part in result]
        results[place].view(-1)[-1] += 0.1
        return results[0] if isinstance(result, Tensor) else tuple(results)

    kernels = right()
    setattr(kernels, name, corrupt)
    return kernels


@pytest.fixture(autouse=True)
def _pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget earlier comparisons, treat CPU tensors as GPU tensors, and ignore TORCHLML_KERNEL."""
    monkeypatch.setattr(self_test, "_results", {})
    monkeypatch.setattr(self_test, "_interpreted", lambda device: False)
    monkeypatch.setattr(loader, "requested", lambda: "")
    monkeypatch.setattr(loader, "_warned", True)
    monkeypatch.setattr(self_test, "available", lambda: True)


def use(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> None:
    monkeypatch.setattr(self_test, "_kernels", lambda: kernels)


def problem() -> tuple[Tensor, Tensor, None, None]:
    return torch.randn(5, 30), torch.tensor(4.0, dtype=torch.float64), None, None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_kernels_are_used(dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert self_test.difference(CPU, dtype, right()) is None
        assert self_test.passes(CPU, dtype, right())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_wrong_kernel_is_found(name: str, dtype: torch.dtype) -> None:
    found = self_test.difference(CPU, dtype, faulty(name))
    assert found is not None
    assert f"`{name}`" in found


def test_a_wrong_gradient_of_k_is_found() -> None:
    assert self_test.difference(CPU, torch.float32, faulty("backward", place=1)) is not None


def test_a_nan_is_a_difference() -> None:
    kernels = right()
    kernels.forward = lambda *a: tuple(torch.full_like(part, torch.nan) for part in careful.forward(*a))
    assert self_test.difference(CPU, torch.float32, kernels) is not None


def test_after_a_mismatch_pure_pytorch_is_used_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, faulty("forward"))
    arguments = problem()
    with pytest.warns(UserWarning, match=r"torch.float32 on cpu .* `forward`.*`torchlml gpu-check`"):
        y, _ = self_test.OPERATORS["forward"](*arguments)
    assert torch.equal(y, self_test._plain["forward"](*arguments)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, _ = self_test.OPERATORS["forward"](*arguments)
        self_test.OPERATORS["solve"](*arguments)
    assert torch.equal(again, y)


def test_kernels_that_do_not_compile_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = right()

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("no such instruction")

    kernels.log_backward = fail
    use(monkeypatch, kernels)
    with pytest.warns(UserWarning, match="failed to run: RuntimeError: no such instruction"):
        y, _ = self_test.OPERATORS["forward"](*problem())
    torch.testing.assert_close(y.sum(-1), torch.full((5,), 4.0))


def test_the_comparison_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, right())
    calls = []
    monkeypatch.setattr(self_test, "difference", lambda *a: calls.append(a[:2]))
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        x, k, *rows = problem()
        self_test.OPERATORS["forward"](x.to(dtype), k, *rows)
    assert calls == [(CPU, torch.float32), (CPU, torch.bfloat16)]


@pytest.mark.parametrize(("choice", "used"), [("torch", False), ("native", True)])
def test_the_environment_variable_overrides_the_self_test(
    monkeypatch: pytest.MonkeyPatch, choice: str, used: bool
) -> None:
    monkeypatch.setattr(loader, "requested", lambda: choice)
    kernels = right()
    kernels.forward = lambda x, *rest: ("the kernel", None)
    use(monkeypatch, kernels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, _ = self_test.OPERATORS["forward"](*problem())
    assert (y == "the kernel") is used if used else isinstance(y, Tensor)
