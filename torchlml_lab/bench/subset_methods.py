"""Other methods for a distribution over k-subsets, as commonly written, and an extended-precision truth."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import softplus

import torchlml
from torchlml.distributions import KSubset

Wide = npt.NDArray[np.longdouble]
# Log normalizer and inclusion probabilities of one row.
Quantities = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Method:
    """A way to the normalizer and the inclusion probabilities of a row."""

    name: str
    compute: Callable[[Tensor, int], Quantities]
    most_work: float
    """The largest number of steps that is tried, by `work`."""
    work: Callable[[int, int], float]


def exact(x: Tensor, k: int) -> Quantities:
    """The distribution of this package."""
    d = KSubset(k, logits=x, validate_args=False)
    return d.log_normalizer, d.mean


def recursion(x: Tensor, k: int) -> Quantities:
    """The O(nk) recursion of SIMPLE (Ahmed and others, 2023): inclusion is the gradient of the normalizer."""
    x = x.detach().requires_grad_()
    log_e = torch.full((k + 1,), -1e300, dtype=x.dtype)
    log_e[0] = 0.0
    for value in x.unbind():
        log_e = torch.cat([log_e[:1], torch.logaddexp(log_e[1:], log_e[:-1] + value)])
    (inclusion,) = torch.autograd.grad(log_e[k], x)
    return log_e[k].detach(), inclusion


def untilted_fourier(x: Tensor, k: int) -> Quantities:
    """P(k successes) of coins sigmoid(x) by a Fourier transform, in complex64 and clamped at eps."""
    x = x.detach().requires_grad_()
    n, p = len(x), x.float().sigmoid()
    angle = torch.arange(n + 1) * (2 * torch.pi / (n + 1))
    root = torch.polar(torch.ones(n + 1), angle)
    log_terms = torch.log(1 + p * (root - 1).unsqueeze(1)).sum(1)
    chance = (torch.exp(log_terms) * torch.polar(torch.ones(n + 1), -k * angle)).mean().real
    log_normalizer = chance.clamp(min=torch.finfo(torch.float32).eps).log() + softplus(x.float()).sum()
    (inclusion,) = torch.autograd.grad(log_normalizer, x)
    return log_normalizer.detach(), inclusion


METHODS = (
    Method("KSubset", exact, float("inf"), lambda n, k: n),
    Method("recursion", recursion, 2e7, lambda n, k: n * (k + 1000)),
    Method("untilted Fourier", untilted_fourier, 2e7, lambda n, k: n * n),
)


def gumbel_top_k(x: Tensor, k: int) -> Tensor:
    """Ones at the k largest logits plus Gumbel noise: k draws without replacement (Plackett and Luce)."""
    noise = -torch.empty_like(x).exponential_().log()
    return torch.zeros_like(x).scatter(-1, (x + noise).topk(k).indices, 1.0)


SAMPLERS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "KSubset": lambda x, k: KSubset(k, logits=x, validate_args=False).sample(),
    "Gumbel top-k": gumbel_top_k,
    "sample_subset": torchlml.sample_subset,
}


def truth(x: Tensor, k: int) -> tuple[float, float]:
    """Log normalizer and inclusion probability of the largest entry, by the recursion in 80-bit numbers."""
    values = np.sort(x.double().numpy().astype(np.longdouble))
    # The largest entry comes last, so that both tables share all but one step.
    before = _log_polynomials(values[:-1], k)
    total = np.logaddexp(before[k], before[k - 1] + values[-1])
    return float(total), float(np.exp(before[k - 1] + values[-1] - total))


def _log_polynomials(values: Wide, k: int) -> Wide:
    log_e = np.full(k + 1, -np.inf, dtype=np.longdouble)
    log_e[0] = 0
    for value in values:
        log_e[1:] = np.logaddexp(log_e[1:], log_e[:-1] + value)
    return log_e
