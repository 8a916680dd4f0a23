"""Who competes: functions of the logits and k that answer the same question, and the calls that are timed."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import torchlml
from torchlml._cpu import loader
from torchlml._torch import fast
from torchlml_lab.bench.cases import Case

Mode = Literal["forward", "backward", "forward+backward"]
MODES: tuple[Mode, ...] = ("forward", "backward", "forward+backward")


@dataclass(frozen=True)
class Provider:
    """A competitor: a differentiable function of the logits and k; `absent` says why it cannot run here."""

    name: str
    function: Callable[[Tensor, int], Tensor]
    absent: Callable[[], str | None] = lambda: None


class _PlainTorch(torch.autograd.Function):
    """lml by the pure-torch kernel, also in a process where the native one has taken its place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> Tensor:
        y, nu = fast.forward(x, torch.tensor(k, dtype=torch.float64), None, None)
        ctx.save_for_backward(x, y, nu)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, y, nu = ctx.saved_tensors
        dx, _ = fast.backward(grads[0], x, y, nu, None, None)
        return dx, None


def _budget_bisect(x: Tensor, k: int) -> Tensor:
    from entmax import budget_bisect

    answer: Tensor = budget_bisect(x, budget=k, dim=-1)
    return answer


def _without_native() -> str | None:
    return None if loader.loaded() else "the native kernel is not loaded (`torchlml info`)"


def _without_entmax() -> str | None:
    return None if importlib.util.find_spec("entmax") else "the package `entmax` is not installed"


BASELINE = "softmax"
LAYER = (
    Provider(BASELINE, lambda x, k: torch.softmax(x, -1)),
    Provider("lml-native", lambda x, k: torchlml.lml(x, k), _without_native),
    Provider("lml-torch", lambda x, k: _PlainTorch.apply(x, k)),
    Provider("lml-bracketing", lambda x, k: torch.sigmoid(x + torchlml.lml_bracketing(x, k).unsqueeze(-1))),
    Provider("sigmoid", lambda x, k: torch.sigmoid(x)),
    Provider("topk", lambda x, k: torch.topk(x, k, dim=-1).values),
    Provider("sort", lambda x, k: torch.sort(x, dim=-1).values),
    Provider("entmax", _budget_bisect, _without_entmax),
)
FAMILY = (
    Provider(BASELINE, lambda x, k: torch.softmax(x, -1)),
    Provider("lml", lambda x, k: torchlml.lml(x, k)),
    Provider("lml-at-most", lambda x, k: torchlml.lml(x, k, bound="at_most")),
    Provider("lml-value", lambda x, k: torchlml.lml_value(x, k)),
    Provider("constrained-softmax", lambda x, k: torchlml.constrained_softmax(x, k)),
    Provider("constrained-sparsemax", lambda x, k: torchlml.constrained_sparsemax(x, k)),
    Provider("topk-mask", lambda x, k: torchlml.topk_mask(x, k)),
    Provider("sample-subset", lambda x, k: torchlml.sample_subset(x, k, straight_through=True)),
    Provider("sort", lambda x, k: torch.sort(x, dim=-1).values),
)


def call_of(provider: Provider, case: Case, mode: Mode) -> Callable[[], Tensor]:
    """Make the call to measure: everything it needs exists before, and nothing is kept after.

    Args:
        provider: Who answers.
        case: The problem.
        mode: "forward" without a graph; "backward" alone, through a graph made beforehand; or both together.

    Returns:
        A function without arguments; its result is the output or the gradient.
    """
    x = case.logits()
    if mode == "forward":
        return lambda: provider.function(x, case.k)
    x.requires_grad_()
    y = provider.function(x, case.k)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(case.n)).to(y.dtype)
    if mode == "backward":
        return lambda: torch.autograd.grad(y, x, grad, retain_graph=True)[0]
    return lambda: torch.autograd.grad(provider.function(x, case.k), x, grad)[0]
