"""What a way to choose k of n does, apart from what it costs: how exact it is, and what it can be used with.

Exactness is measured against k, and against what the same method answers in float64. An ability is tried out
and its result compared with that of plain calls, so that an answer that is merely given does not count.
"""

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

import torchlml
from torchlml_lab.bench.cases import Case

Choice = Callable[[Tensor, int], Tensor]

EXACTNESS = ("sum error", "outside [0, 1]", "bfloat16 error", "gradient error")
ABILITIES = ("-inf", "vmap", "compile", "per-row k")
# The rows on which abilities are tried, and how far apart two answers may be that ought to be the same.
TRIAL = Case(n=16, k=3, batch=4, scale=1.0, dtype="float32", threads=1)
_SAME = 1e-4


def exactness(choose: Choice, case: Case) -> dict[str, float]:
    """Measure how exact a method is on the rows of a case.

    Args:
        choose: The method.
        case: The problem; its dtype is float32.

    Returns:
        How far the sum of a row is from k at most; how many entries are below 0 or above 1; the largest error
        of an entry for logits in bfloat16; the largest error of a gradient, as a share of the largest entry
        of the right one. Errors are to the same method's answer in float64. NaN where the method fails,
        infinite where the right gradient is zero everywhere.
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
    """Try what a method can be used with.

    Args:
        choose: The method.

    Returns:
        For each of `ABILITIES` whether it works: entries of -inf get 0 and change nothing else, and every
        gradient is finite; `torch.func` maps it and its gradient; `torch.compile` takes it in one graph, with
        its gradient; k may be a tensor with a number for each row.
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
    """Try what `lml` can be used with where there is no compiled kernel: in a process that refuses it."""
    command = [sys.executable, "-m", "torchlml_lab.bench.alternative_behavior"]
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
    # Each batch stays a matrix: some methods know nothing else.
    batches = torch.stack([x, x.flip(0), 2 * x])
    mapped = torch.func.vmap(lambda one: choose(one, k))(batches)
    weights = _weights(x)
    slopes = torch.func.vmap(torch.func.grad(lambda one: (choose(one, k) * weights).sum()))(batches)
    answers = torch.stack([choose(one, k) for one in batches])
    return _same(mapped, answers) and _same(slopes, torch.stack([_gradient(choose, b, k) for b in batches]))


def _compiles(choose: Choice, x: Tensor, k: int) -> bool:
    # Without this, the methods before count towards the compiler's limit of variants of one function.
    torch.compiler.reset()
    # Whether a graph can be captured and differentiated is decided before a backend writes code for it.
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
    """What the entries of a row are weighted with before their gradient is taken; always the same."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(x.shape[-1], generator=generator, dtype=torch.float64).to(x.dtype)


def _gradient(choose: Choice, x: Tensor, k: int) -> Tensor:
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad((choose(x, k) * _weights(x)).sum(), x)[0]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, atol=_SAME, rtol=0)


def _or_nan(measure: Callable[[], float]) -> float:
    """The measure; NaN when the method fails, whatever another package may raise."""
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
