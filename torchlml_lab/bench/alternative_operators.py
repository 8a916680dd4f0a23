"""Other relaxations of top-k, behind one signature."""

import contextlib
import functools
import importlib
import importlib.util
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchlml_lab.bench.competitors import LAYER, Provider

# What the widely copied bisection takes: halvings, and how far from the logits it looks.
HALVINGS, REACH = 64, 10.0
# The strength of torchsort's regularisation, times n; with 10 rows of 32 no longer sum to about k.
SPREAD = 3.0


@dataclass(frozen=True)
class Alternative(Provider):
    """A provider that may be good for short rows only (`longest`), and for one dtype only."""

    longest: int = 10_000_000
    float32_only: bool = False


def straight_through(x: Tensor, k: int) -> Tensor:
    """Ones at the k largest, with the gradient of k softmax(x)."""
    soft = k * torch.softmax(x, -1)
    hard = torch.zeros_like(x).scatter(-1, x.topk(k, dim=-1).indices, 1.0)
    return hard + (soft - soft.detach())


def scaled_softmax(x: Tensor, k: int) -> Tensor:
    """k softmax(x): sums to k, and its entries may exceed 1."""
    return k * torch.softmax(x, -1)


def successive_softmax(x: Tensor, k: int) -> Tensor:
    """The sum of k softmaxes, each after its predecessor's choice was taken out (Ploetz and Roth, 2018)."""
    chosen = torch.zeros_like(x)
    for _ in range(k):
        p = torch.softmax(x, -1)
        chosen = chosen + p
        x = x + torch.log1p(-p.clamp(max=1 - torch.finfo(p.dtype).eps))
    return chosen


class _Bisection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, k: int) -> Tensor:
        low = -x.amax(-1, keepdim=True) - REACH
        high = -x.amin(-1, keepdim=True) + REACH
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            short = torch.sigmoid(x + middle).sum(-1, keepdim=True) < k
            low, high = torch.where(short, middle, low), torch.where(short, high, middle)
        y = torch.sigmoid(x + (low + high) / 2)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors  # type: ignore[attr-defined]
        w = y * (1 - y)
        felt = w * grads[0]
        return felt - w * felt.sum(-1, keepdim=True) / w.sum(-1, keepdim=True), None


def bisection(x: Tensor, k: int) -> Tensor:
    """lml as it is often written by hand: 64 halvings of an interval that reaches 10 beyond the logits."""
    answer: Tensor = _Bisection.apply(x, k)
    return answer


def sorting_network(x: Tensor, k: int) -> Tensor:
    """The mask of a relaxed sorting network, by the package difftopk, which knows float32 only."""
    # Importing it prints whether an optional package of its own is there.
    with contextlib.redirect_stdout(io.StringIO()):
        from difftopk import DiffTopkNet

    _, places = DiffTopkNet("odd_even", x.shape[-1], k)(x.float())
    answer: Tensor = places.sum(-1)
    return answer.to(x.dtype)


def soft_ranks(x: Tensor, k: int) -> Tensor:
    """A mask from the soft ranks of the package torchsort: the sigmoid of a rank less n - k + 1/2."""
    torchsort: Any = importlib.import_module("torchsort")
    n = x.shape[-1]
    # Ranks grow with x, up to n. To spread that far they need a regularisation that falls with n.
    ranks: Tensor = torchsort.soft_rank(x, regularization_strength=SPREAD / n)
    return torch.sigmoid(ranks - (n - k) - 0.5)


def soft_index(x: Tensor, k: int) -> Tensor:
    """The sum of the k soft indices that `topk` of the package softtorch gives, by its default method."""
    softtorch: Any = importlib.import_module("softtorch")
    answer: Tensor = softtorch.topk(x, k).indices.sum(-2)
    return answer


@functools.cache
def _program(n: int, k: int) -> Any:
    """lml as a convex program of cvxpylayers."""
    # By their names: their types are not those of their documentation.
    cvxpy: Any = importlib.import_module("cvxpy")
    layers: Any = importlib.import_module("cvxpylayers.torch")
    x, y = cvxpy.Parameter(n), cvxpy.Variable(n)
    entropy = cvxpy.sum(cvxpy.entr(y)) + cvxpy.sum(cvxpy.entr(1 - y))
    problem = cvxpy.Problem(cvxpy.Minimize(-x @ y - entropy), [cvxpy.sum(y) == k])
    return layers.CvxpyLayer(problem, parameters=[x], variables=[y])


def convex_program(x: Tensor, k: int) -> Tensor:
    """lml by a general solver for convex programs, to the accuracy of its defaults; for small n."""
    answer: Tensor = _program(x.shape[-1], k)(x)[0]
    return answer


def _without(package: str, hint: str = "") -> Callable[[], str | None]:
    said = f"the package `{package}` is not installed{hint}"
    return lambda: None if importlib.util.find_spec(package) else said


_OURS = {provider.name: provider for provider in LAYER}
ALTERNATIVES = (
    Alternative("topk-straight-through", straight_through),
    Alternative("softmax-times-k", scaled_softmax),
    Alternative("successive-softmax", successive_softmax),
    Alternative("bisection", bisection),
    Alternative("entmax", _OURS["entmax"].function, _OURS["entmax"].absent),
    Alternative(
        "torchsort", soft_ranks, _without("torchsort", " (`pip install --no-build-isolation torchsort`)")
    ),
    # Its default method compares every entry with every other.
    Alternative("softtorch", soft_index, _without("softtorch", " (it needs Python 3.12)"), longest=1000),
    # A network for n entries has n layers, and is built anew in every call.
    Alternative("difftopk", sorting_network, _without("difftopk"), longest=100, float32_only=True),
    Alternative("cvxpylayers", convex_program, _without("cvxpylayers"), longest=50),
    Alternative("paper-bracketing", _OURS["lml-bracketing"].function),
    Alternative("lml-torch", _OURS["lml-torch"].function),
    Alternative("lml-native", _OURS["lml-native"].function, _OURS["lml-native"].absent),
)
