"""Benchmark cases (shape, k, dtype), and the functions that are compared on them."""

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

import torchlml
from torchlml._cpu import loader
from torchlml._torch import fast
from torchlml_lab.bench.settings import Mode
from torchlml_lab.cli_errors import BadInput

DTYPES = ("float32", "float64", "bfloat16", "float16")
MOST_ENTRIES = 4_000_000


@dataclass(frozen=True)
class Case:
    """A problem: select `k` of `n` normal logits with standard deviation `scale` in each of `batch` rows."""

    n: int
    k: int
    batch: int
    scale: float
    dtype: str
    threads: int

    def logits(self) -> Tensor:
        """Generate the logits, which are the same in every call."""
        generator = torch.Generator().manual_seed(self.n)
        logits = torch.randn(self.batch, self.n, generator=generator) * self.scale
        return logits.to(getattr(torch, self.dtype))


def case_grid(
    sizes: Sequence[int],
    ks: Sequence[str],
    batches: Sequence[int],
    scales: Sequence[float],
    dtypes: Sequence[str],
    threads: Sequence[int],
) -> list[Case]:
    """Return the cases for all distinct combinations. Each k is an integer, `n/NUMBER` or `n-NUMBER`.

        >>> [(case.n, case.k) for case in case_grid((4, 10), ("5", "n/2"), (3,), (1.0,), ("float32",), (1,))]
        [(4, 2), (10, 5)]

    Returns:
        The cases with 1 <= k <= n - 1. The batch size is reduced so that no tensor has more than 4,000,000
        entries, but not below 1. If there are no cases, `BadInput` is raised.
    """
    found = dict.fromkeys(
        Case(n, k, min(batch, max(1, MOST_ENTRIES // n)), scale, dtype, number)
        for number, dtype, scale, batch, n, text in product(threads, dtypes, scales, batches, sizes, ks)
        if 0 < (k := _k(text, n)) < n
    )
    if not found:
        raise BadInput(
            f"`--ks` must contain a value from 1 to n - 1 for an n in `--sizes`, but it is {' '.join(ks)}."
        )
    return list(found)


def _k(text: str, n: int) -> int:
    """Parse a k such as `5`, `n/2` or `n-1` for rows of length n."""
    found = re.fullmatch(r"(?:n([/-]))?(\d{1,18})", text)
    if found is None:
        raise BadInput(f"`--ks` must be integers, `n/NUMBER` or `n-NUMBER`, but it contains `{text}`.")
    sign, number = found[1], int(found[2])
    if sign == "/":
        return n // number if number else 0
    return n - number if sign == "-" else number


@dataclass(frozen=True)
class Provider:
    """A differentiable function of the logits and k.

    `absent` returns the reason why the function is not available on this machine, or None if it is available.
    """

    name: str
    function: Callable[[Tensor, int], Tensor]
    absent: Callable[[], str | None] = lambda: None


class _PurePyTorch(torch.autograd.Function):
    """An autograd function that computes lml in pure PyTorch, even if the compiled kernel is loaded."""

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
    return None if loader.loaded() else "the compiled kernel is not loaded (see `torchlml info`)"


def _without_entmax() -> str | None:
    return None if importlib.util.find_spec("entmax") else "the package `entmax` is not installed"


BASELINE = "softmax"
LAYER = (
    Provider(BASELINE, lambda x, k: torch.softmax(x, -1)),
    Provider("lml-native", lambda x, k: torchlml.lml(x, k), _without_native),
    Provider("lml-torch", lambda x, k: _PurePyTorch.apply(x, k)),
    Provider("lml-bracketing", lambda x, k: torch.sigmoid(x + torchlml.lml_bracketing(x, k).unsqueeze(-1))),
    Provider("sigmoid", lambda x, k: torch.sigmoid(x)),
    # A function with one output per logit cannot move fewer bytes than a copy, so a copy shows the limit that
    # memory bandwidth sets for such functions.
    Provider("copy", lambda x, k: x.clone()),
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
    """Build the call to measure. Its inputs are prepared in advance, and the call retains no results.

    Args:
        provider: The function to measure.
        case: The problem.
        mode: "forward" without a graph, "backward" through an existing graph, or "forward+backward".

    Returns:
        A function without arguments that returns the output or the gradient.
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
