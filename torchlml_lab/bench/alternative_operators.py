"""Other relaxations of top-k with a common signature, and measurements of their accuracy and features."""

import contextlib
import functools
import importlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torchlml
from torchlml_lab.bench.cases import LAYER, Case, Provider

# The distance by which a typical handwritten bisection extends its interval beyond the logits.
REACH = 10.0
# The product of torchsort's regularization strength and n. With a value of 10, the outputs for n = 32 would
# not even approximately sum to k.
SPREAD = 3.0


@dataclass(frozen=True)
class Alternative(Provider):
    """A function to compare, which may be limited to rows of at most `longest` entries or to float32."""

    longest: int = 10_000_000
    float32_only: bool = False


def straight_through(x: Tensor, k: int) -> Tensor:
    """Return ones at the k largest entries, with the gradient of k * softmax(x)."""
    soft = k * torch.softmax(x, -1)
    hard = torch.zeros_like(x).scatter(-1, x.topk(k, dim=-1).indices, 1.0)
    return hard + (soft - soft.detach())


def scaled_softmax(x: Tensor, k: int) -> Tensor:
    """Return k * softmax(x), which sums to k, but whose entries may exceed 1."""
    return k * torch.softmax(x, -1)


def successive_softmax(x: Tensor, k: int) -> Tensor:
    """Return the sum of k softmaxes, each of which suppresses earlier choices (Plötz and Roth, 2018)."""
    chosen = torch.zeros_like(x)
    for _ in range(k):
        p = torch.softmax(x, -1)
        chosen = chosen + p
        x = x + torch.log1p(-p.clamp(max=1 - torch.finfo(p.dtype).eps))
    return chosen


def _through_threshold(w: Tensor, grad: Tensor) -> Tensor:
    """Backpropagate `grad` through y = F(x - b), where b makes y sum to k and w is the density F'(x - b)."""
    weighted = w * grad
    return weighted - w * weighted.sum(-1, keepdim=True) / w.sum(-1, keepdim=True)


class _Bisection(torch.autograd.Function):
    # Handwritten versions usually pass `ctx` to `forward`, a style that `torch.func` does not support.
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int, halvings: int) -> Tensor:
        low = -x.amax(-1, keepdim=True) - REACH
        high = -x.amin(-1, keepdim=True) + REACH
        for _ in range(halvings):
            middle = (low + high) / 2
            short = torch.sigmoid(x + middle).sum(-1, keepdim=True) < k
            low, high = torch.where(short, middle, low), torch.where(short, high, middle)
        y = torch.sigmoid(x + (low + high) / 2)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        return _through_threshold(y * (1 - y), grads[0]), None, None


def bisection(x: Tensor, k: int, halvings: int = 64) -> Tensor:
    """Compute lml by a typical handwritten bisection on an interval that extends 10 beyond the logits."""
    answer: Tensor = _Bisection.apply(x, k, halvings)
    return answer


class _LaplaceSum(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        z = x.sort(dim=-1, descending=True).values
        n = z.shape[-1]
        # For b = z_j, entries 1 to j contribute j - A_j / 2 to the sum, and later entries B_j / 2, where
        # A_j = sum of exp(z_j - z_i) over i <= j, and B_j = sum of exp(z_i - z_j) over i > j.
        suffix = z.flip(-1).logcumsumexp(-1).flip(-1)
        a = (-z).logcumsumexp(-1) + z
        b = torch.nn.functional.pad(suffix[..., 1:], (0, 1), value=-torch.inf) - z
        place = torch.arange(1, n + 1, dtype=x.dtype, device=x.device)
        above = (place + (b.exp() - a.exp()) / 2 <= k).sum(-1, keepdim=True)
        # For b between two entries, t = exp(b - z_j) is the positive root of A * t^2 + 2 * (k - j) * t - B.
        # For b above all entries, A is 0 and B is relative to the largest entry. Logarithms avoid overflow
        # and cancellation.
        index, none = (above - 1).clamp(min=0), above == 0
        a = a.gather(-1, index).masked_fill(none, -torch.inf)
        b = torch.where(none, suffix[..., :1] - z[..., :1], b.gather(-1, index))
        difference = (k - above).to(x.dtype)
        size = difference.abs().log()
        total = torch.logaddexp(size, torch.logaddexp(2 * size, a + b) / 2)
        distance = x - z.gather(-1, index) - torch.where(difference >= 0, b - total, total - a)
        density = torch.exp(-distance.abs()) / 2
        return torch.where(distance > 0, 1 - density, density), density

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _through_threshold(ctx.saved_tensors[0], grads[0]), None


def laplace_sum(x: Tensor, k: int) -> Tensor:
    """Return F(x - b), which sums to k, where F is the Laplace CDF (LapSum, Struski et al., 2025)."""
    answer: Tensor = _LaplaceSum.apply(x, k)[0]
    return answer


def midpoint_sigmoid(x: Tensor, k: int) -> Tensor:
    """Return sigmoid(x - b), with b midway between the k-th and the (k + 1)-th largest entries.

    This is DFTopK (Zhu et al., 2025).
    """
    around = x.topk(k + 1, dim=-1).values[..., k - 1 :]
    return torch.sigmoid(x - around.mean(-1, keepdim=True))


def sorting_network(x: Tensor, k: int) -> Tensor:
    """Return the soft top-k mask from difftopk's relaxed sorting network, which supports only float32."""
    # On import, difftopk prints a message about an optional dependency.
    with contextlib.redirect_stdout(io.StringIO()):
        from difftopk import DiffTopkNet

    _, places = DiffTopkNet("odd_even", x.shape[-1], k)(x.float())
    answer: Tensor = places.sum(-1)
    return answer.to(x.dtype)


def soft_ranks(x: Tensor, k: int) -> Tensor:
    """Return sigmoid(rank - (n - k + 1/2)), with soft ranks from the package torchsort."""
    torchsort: Any = importlib.import_module("torchsort")
    n = x.shape[-1]
    # Ranks increase with x from 1 to n. They cover this range only if the regularization decreases with n.
    ranks: Tensor = torchsort.soft_rank(x, regularization_strength=SPREAD / n)
    return torch.sigmoid(ranks - (n - k) - 0.5)


def soft_index(x: Tensor, k: int) -> Tensor:
    """Return the sum of the k soft one-hot indices from softtorch's `topk`, with its default method."""
    softtorch: Any = importlib.import_module("softtorch")
    answer: Tensor = softtorch.topk(x, k).indices.sum(-2)
    return answer


@functools.cache
def _program(n: int, k: int) -> Any:
    """Build a cvxpylayers layer that computes lml as a convex program."""
    # Imported as `Any`, because the type annotations of these packages contradict their documentation.
    cvxpy: Any = importlib.import_module("cvxpy")
    layers: Any = importlib.import_module("cvxpylayers.torch")
    x, y = cvxpy.Parameter(n), cvxpy.Variable(n)
    entropy = cvxpy.sum(cvxpy.entr(y)) + cvxpy.sum(cvxpy.entr(1 - y))
    problem = cvxpy.Problem(cvxpy.Minimize(-x @ y - entropy), [cvxpy.sum(y) == k])
    return layers.CvxpyLayer(problem, parameters=[x], variables=[y])


def convex_program(x: Tensor, k: int) -> Tensor:
    """Compute lml with a general convex solver at its default accuracy. This is feasible only for small n."""
    answer: Tensor = _program(x.shape[-1], k)(x)[0]
    return answer


def _without(package: str, hint: str = "", needs: str | None = None) -> Callable[[], str | None]:
    def absent() -> str | None:
        missing = next(
            (name for name in (package, needs) if name and not importlib.util.find_spec(name)), None
        )
        return None if missing is None else f"the package `{missing}` is not installed{hint}"

    return absent


_OURS = {provider.name: provider for provider in LAYER}
ALTERNATIVES = (
    Alternative("topk-straight-through", straight_through),
    Alternative("softmax-times-k", scaled_softmax),
    Alternative("successive-softmax", successive_softmax),
    Alternative("bisection", bisection),
    Alternative("bisection-50", functools.partial(bisection, halvings=50)),
    Alternative("lapsum", laplace_sum),
    Alternative("dftopk", midpoint_sigmoid),
    Alternative("entmax", _OURS["entmax"].function, _OURS["entmax"].absent),
    Alternative(
        "torchsort", soft_ranks, _without("torchsort", " (`pip install --no-build-isolation torchsort`)")
    ),
    # The default method of softtorch compares all pairs of entries, which is too slow for long rows.
    Alternative(
        "softtorch", soft_index, _without("softtorch", " (it needs Python 3.12 or later)"), longest=1000
    ),
    # A network for n entries has n layers and is rebuilt in every call.
    Alternative(
        "difftopk", sorting_network, _without("difftopk", needs="diffsort"), longest=100, float32_only=True
    ),
    Alternative("cvxpylayers", convex_program, _without("cvxpylayers"), longest=50),
    # Measuring the accuracy of this method on a row of a million entries takes minutes.
    Alternative("paper-bracketing", _OURS["lml-bracketing"].function, longest=100_000),
    Alternative("lml-torch", _OURS["lml-torch"].function),
    Alternative("lml-native", _OURS["lml-native"].function, _OURS["lml-native"].absent),
)


Choice = Callable[[Tensor, int], Tensor]

EXACTNESS = ("sum error", "outside [0, 1]", "bfloat16 error", "gradient error")
ABILITIES = ("-inf", "vmap", "compile", "per-row k")
# The problem on which features are tested, and the tolerance for results that should agree.
TRIAL = Case(n=16, k=3, batch=4, scale=1.0, dtype="float32", threads=1)
_SAME = 1e-4


def exactness(choose: Choice, case: Case) -> dict[str, float]:
    """Measure the accuracy of a method on the rows of a case.

    Args:
        choose: The method.
        case: The problem, in float32.

    Returns:
        A value for each of `EXACTNESS`. "sum error" is the largest deviation of a row sum from k, and
        "outside [0, 1]" is the number of entries outside this interval. "bfloat16 error" is the largest error
        of an entry for bfloat16 logits, and "gradient error" is the largest error of the gradient, relative
        to its largest entry. The reference for these two errors is the same method in float64. A value is NaN
        if the method fails. The gradient error is infinite if the reference gradient is zero everywhere.
    """
    x, k = case.logits(), case.k
    coarse = x.bfloat16()
    answer = functools.cache(lambda: choose(x, k).double())

    def sum_error() -> float:
        return float((answer().sum(-1) - k).abs().max())

    def outside() -> float:
        return float(((answer() < 0) | (answer() > 1)).sum()) if answer().isfinite().all() else torch.nan

    def coarse_error() -> float:
        return float((choose(coarse, k).double() - choose(coarse.double(), k)).abs().max())

    def gradient_error() -> float:
        right = _gradient(choose, x.double(), k)
        error = (_gradient(choose, x, k).double() - right).abs().max()
        return float(error / right.abs().max()) if right.any() else torch.inf

    measures = (sum_error, outside, coarse_error, gradient_error)
    return {name: _or_nan(measure) for name, measure in zip(EXACTNESS, measures, strict=True)}


def abilities(choose: Choice) -> dict[str, bool]:
    """Test which PyTorch features a method supports.

    Args:
        choose: The method.

    Returns:
        Whether each of `ABILITIES` works. For "-inf", logits of -inf must map to 0 without affecting other
        entries, and all gradients must be finite. For "vmap", `torch.func.vmap` must support the method and
        its gradient. For "compile", `torch.compile` must capture both in one graph. For "per-row k", the
        method must accept a tensor k with one value per row.
    """
    x, k = TRIAL.logits(), TRIAL.k
    trials: tuple[Callable[[], bool], ...] = (
        lambda: _ignores_minus_infinity(choose, x, k),
        lambda: _maps(choose, x, k),
        lambda: _compiles(choose, x, k),
        lambda: any(_takes_a_k_for_each_row(choose, x, shape) for shape in ((-1, 1), (-1,))),
    )
    return {name: _works(trial) for name, trial in zip(ABILITIES, trials, strict=True)}


def abilities_in_plain_torch() -> dict[str, bool]:
    """Test the features of `lml` without the compiled kernel, in a separate process."""
    command = [sys.executable, "-m", "torchlml_lab.bench.alternative_operators"]
    environment = {**os.environ, "TORCHLML_KERNEL": "torch"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, bool] = json.loads(done.stdout)
    return found


def _ignores_minus_infinity(choose: Choice, x: Tensor, k: int) -> bool:
    out, inside = x.clone(), slice(2, None)
    out[:, :2] = -torch.inf
    y = choose(out, k)
    fewer = choose(out[:, inside].clone(), k)
    finite = bool(_gradient(choose, out, k).isfinite().all())
    return finite and _same(y[:, :2], torch.zeros_like(y[:, :2])) and _same(y[:, inside], fewer)


def _maps(choose: Choice, x: Tensor, k: int) -> bool:
    # Each element of the batch is a matrix, because some methods accept only matrices.
    batches = torch.stack([x, x.flip(0), 2 * x])
    mapped = torch.func.vmap(lambda one: choose(one, k))(batches)
    weights = _weights(x)
    slopes = torch.func.vmap(torch.func.grad(lambda one: (choose(one, k) * weights).sum()))(batches)
    answers = torch.stack([choose(one, k) for one in batches])
    return _same(mapped, answers) and _same(slopes, torch.stack([_gradient(choose, b, k) for b in batches]))


def _compiles(choose: Choice, x: Tensor, k: int) -> bool:
    # Without a reset, earlier methods count toward the compiler's recompilation limit.
    torch.compiler.reset()
    # Capture and differentiation precede code generation, so a backend without code generation suffices.
    compiled = torch.compile(lambda x: choose(x, k), fullgraph=True, backend="aot_eager")
    same = _same(compiled(x), choose(x, k))
    return same and _same(_gradient(lambda x, k: compiled(x), x, k), _gradient(choose, x, k))


def _takes_a_k_for_each_row(choose: Choice, x: Tensor, shape: tuple[int, ...]) -> bool:
    ks = range(1, len(x) + 1)
    try:
        together = choose(x, torch.tensor(ks).reshape(shape))  # type: ignore[arg-type]
    except Exception:
        return False
    return _same(together, torch.cat([choose(row[None], k) for row, k in zip(x, ks, strict=True)]))


def _weights(x: Tensor) -> Tensor:
    """Return fixed random weights for the sum of the outputs whose gradient is tested."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(x.shape[-1], generator=generator, dtype=torch.float64).to(x.dtype)


def _gradient(choose: Choice, x: Tensor, k: int) -> Tensor:
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad((choose(x, k) * _weights(x)).sum(), x)[0]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, atol=_SAME, rtol=0)


def _or_nan(measure: Callable[[], float]) -> float:
    """Return the measured value, or NaN if the method raises any exception."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return measure()
    except Exception:
        return torch.nan


def _works(trial: Callable[[], bool]) -> bool:
    return _or_nan(lambda: float(trial())) == 1


if __name__ == "__main__":
    sys.stdout.write(json.dumps(abilities(lambda x, k: torchlml.lml(x, k))))
