"""The distribution over all sets of exactly k of n entries, as a `torch.distributions.Distribution`."""

from __future__ import annotations

import itertools
import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, register_kl
from torch.distributions.utils import lazy_property

from torchlml.distributions._law import Law, sample, uncompiled

_LARGEST_SUPPORT = 2**26  # the maximum number of entries in a result of `enumerate_support`


class KHot(constraints.Constraint):
    """Vectors of zeros and exactly k ones.

    Args:
        k: the number of ones, as a tensor that broadcasts to the batch shape.
    """

    is_discrete = True
    event_dim = 1

    def __init__(self, k: Tensor) -> None:
        self.k = k
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        """Whether each vector consists of zeros and exactly k ones."""
        ones = value == 1
        return (ones | (value == 0)).all(-1) & (ones.sum(-1) == self.k)

    def __repr__(self) -> str:
        return f"KHot(k={self.k.tolist() if self.k.numel() < 10 else tuple(self.k.shape)})"


class KSubset(Distribution):
    """The distribution over sets of exactly k of n entries with P(S) ∝ exp(sum of the logits in S).

        >>> d = torchlml.distributions.KSubset(2, logits=torch.tensor([2.0, 1.0, 0.0, -1.0]))
        >>> d.mean  # the probability that each entry is in the set
        tensor([0.8808, 0.6944, 0.3056, 0.1192])
        >>> d.log_prob(torch.tensor([1.0, 1.0, 0.0, 0.0])).exp()  # the probability of the set {0, 1}
        tensor(0.5859)
        >>> d.log_prob(torch.tensor([0, 1])).exp()  # the same set as indices
        tensor(0.5859)
        >>> d.sample((1000,)).sum(-1).unique()  # every sample has two ones
        tensor([2.])

    Args:
        k: the size of the sets, an integer from 0 to n or an integer tensor that broadcasts to the batch
            shape.
        logits: a tensor of shape (..., n). An entry with logit -inf is never chosen, and an entry with logit
            +inf is always chosen. If more than k logits are +inf, k of these entries are chosen uniformly at
            random.
        probs: an alternative to `logits`: a tensor of shape (..., n) with the success probabilities of
            independent coin flips, which are conditioned on k successes. They correspond to
            `logits = log(probs / (1 - probs))`.
        validate_args: whether to check arguments and values, as in `torch.distributions`.

    A sample is a vector of n zeros and ones with exactly k ones, in the dtype of `logits` or `probs`.
    `log_prob` accepts such vectors as float or bool tensors, and sets as int64 indices of shape (..., k). If
    k differs between rows, shorter lists of indices are padded with -1. `rsample` returns samples with the
    gradient of `mean` (straight-through).

    This is the conditional Bernoulli distribution, also called the conditional Poisson distribution.
    `torchlml.lml(logits, k)` approximates its mean. The dual variable nu of `lml` makes the exact computation
    cheap: coin flips with probabilities sigmoid(logits + nu) have k successes on average. The probability of
    exactly k successes is therefore never tiny, and a short Fourier transform computes it accurately. Time
    and memory grow with n but hardly depend on k.

    All computations are in float64, regardless of the dtype of the arguments. For float64 logits, `log_prob`,
    `entropy`, `mean` and `variance` have relative errors of about 1e-14, even if their values are tiny. These
    results, `log_normalizer` and the KL divergence are differentiable any number of times with respect to the
    logits.
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {
        "k": constraints.nonnegative_integer,
        "logits": constraints.real_vector,
        "probs": constraints.independent(constraints.unit_interval, 1),
    }
    has_rsample = True
    has_enumerate_support = True

    def __init__(
        self,
        k: int | Tensor,
        logits: Tensor | None = None,
        probs: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if (logits is None) == (probs is None):
            given = "neither was" if logits is None else "both were"
            raise ValueError(f"Exactly one of `logits` and `probs` must be given, but {given}.")
        name, parameter = ("logits", logits) if probs is None else ("probs", probs)
        _check_parameter(parameter, name)
        assert parameter is not None
        self.k = _read_k(k, parameter)
        try:
            batch = torch.broadcast_shapes(self.k.shape, parameter.shape[:-1])
        except RuntimeError:
            raise ValueError(
                f"`k` must broadcast to the batch shape {tuple(parameter.shape[:-1])} of `{name}`, "
                f"but its shape is {tuple(self.k.shape)}."
            ) from None
        if self.k.dim():
            self.k = self.k.expand(batch)
        self._name = name
        setattr(self, name, parameter.expand(*batch, -1))
        # Skip the validation in the base class: its messages are less informative, and it fails for an empty
        # batch.
        super().__init__(batch, parameter.shape[-1:], validate_args=False)
        self._validate_args = Distribution._validate_args if validate_args is None else validate_args
        if self._validate_args:
            self._check_values()

    def _check_values(self) -> None:
        """Raise an error for invalid parameters."""
        parameter, n = getattr(self, self._name).detach(), getattr(self, self._name).shape[-1]
        accepted = "real numbers, -inf or +inf" if self._name == "logits" else "probabilities from 0 to 1"
        wrong = parameter.isnan() if self._name == "logits" else ~((parameter >= 0) & (parameter <= 1))
        if bool(wrong.any()):
            place = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"`{self._name}` must contain {accepted}, but it contains "
                f"{parameter[tuple(place)].item():g} at index {tuple(place)}."
            )
        never = parameter == (-torch.inf if self._name == "logits" else 0)
        available = n - never.sum(-1)
        if bool((self.k < 0).any()) or bool((self.k > n).any()):
            wrong_k = self.k[(self.k < 0) | (self.k > n)].flatten()[0]
            raise ValueError(f"`k` must be from 0 to n = {n}, but it is {int(wrong_k)}.")
        short = available < self.k
        if bool(short.any()):
            k = self.k.expand(short.shape)[short].flatten()[0]
            raise ValueError(
                f"`{self._name}` must leave at least k entries to choose from in every row, "
                f"but a row with k = {int(k)} has only {int(available[short].flatten()[0])} entries that are "
                f"not {'-inf' if self._name == 'logits' else '0'}."
            )

    @lazy_property
    def logits(self) -> Tensor:
        """The log odds of the independent coin flips, before conditioning."""
        return self.probs.log() - (-self.probs).log1p()

    @lazy_property
    def probs(self) -> Tensor:
        """The success probabilities of the independent coin flips, before conditioning."""
        return self.logits.sigmoid()

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self) -> constraints.Constraint:
        """Vectors of zeros and exactly k ones."""
        return KHot(self.k)

    @property
    def _parameter(self) -> Tensor:
        parameter: Tensor = getattr(self, self._name)
        return parameter

    @property
    def _rows(self) -> Tensor:
        """The logits as rows in float64."""
        parameter = self._parameter.double()
        if self._name == "probs":
            parameter = parameter.log() - (-parameter).log1p()
        return parameter.reshape(-1, parameter.shape[-1])

    @lazy_property
    def _solved(self) -> Law:
        return Law(self._rows.detach(), self.k.expand(self.batch_shape).reshape(-1))

    @property
    def _law(self) -> Law:
        # Every result has its own graph, so that `backward` can be called on each result separately.
        return self._solved.of(self._rows)

    def _per_row(self, values: Tensor) -> Tensor:
        return values.reshape(self.batch_shape).to(self._parameter.dtype)

    def _per_entry(self, values: Tensor) -> Tensor:
        return values.reshape(self.batch_shape + self.event_shape).to(self._parameter.dtype)

    @property
    @uncompiled
    def mean(self) -> Tensor:
        """The inclusion probabilities: the probability that each entry is in the set. They sum to k."""
        return self._per_entry(self._law.inclusion)

    @property
    @uncompiled
    def variance(self) -> Tensor:
        """The variance of each entry."""
        return self._per_entry(self._law.variance)

    @property
    @uncompiled
    def mode(self) -> Tensor:
        """The most probable set: the k largest logits. Ties are broken in favor of the lower index."""
        # If `probs` were given, use their order: different probabilities may round to equal logits.
        given = self._parameter.detach()
        order = given.argsort(stable=True, dim=-1, descending=True)
        first = torch.arange(given.shape[-1], device=given.device) < self.k.unsqueeze(-1)
        return torch.zeros_like(given).scatter(-1, order, first.expand(given.shape).to(given.dtype))

    @property
    @uncompiled
    def log_normalizer(self) -> Tensor:
        """The logarithm of the sum over all sets of exp(sum of the logits in the set)."""
        return self._per_row(self._law.log_normalizer)

    @uncompiled
    def entropy(self) -> Tensor:
        """Compute the entropy of the distribution, in nats."""
        return self._per_row(self._law.entropy)

    @uncompiled
    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of each set.

        Args:
            value: float or bool vectors of zeros and k ones, of shape (..., n), or int64 indices of shape
                (..., k).
        """
        if not isinstance(value, Tensor):
            raise TypeError(f"`value` must be a torch.Tensor, but its type is {type(value).__name__}.")
        as_indices = not value.is_floating_point() and value.dtype != torch.bool
        if self._validate_args:
            self._check_indices(value.long()) if as_indices else self._validate_sample(value)
        shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        if shape[len(shape) - len(self.batch_shape) :] != self.batch_shape:
            return self.expand(shape).log_prob(value)
        rows = math.prod(self.batch_shape)
        outer = shape[: len(shape) - len(self.batch_shape)]
        sets = value.expand(*shape, -1).reshape(*outer, rows, value.shape[-1])
        law = self._law
        result = law.log_prob_of_indices(sets.long()) if as_indices else law.log_prob(sets != 0)
        return result.reshape(shape).to(self._parameter.dtype)

    def _check_indices(self, index: Tensor) -> None:
        n, width = self.event_shape[0], int(self.k.max()) if self.k.numel() else 0
        if index.dim() == 0 or index.shape[-1] != width:
            raise ValueError(
                f"`value` contains integers, so its last dimension must list the {width} set members, but "
                f"its shape is {tuple(index.shape)}. Pass vectors of zeros and ones as float or bool."
            )
        if bool(((index < -1) | (index >= n)).any()):
            wrong = index[(index < -1) | (index >= n)].flatten()[0]
            raise ValueError(
                f"`value` must contain indices from 0 to {n - 1} or -1 (padding), but it contains "
                f"{int(wrong)}."
            )
        ordered = index.sort(-1).values
        repeated = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        if bool(repeated.any()) or bool(((index >= 0).sum(-1) != self.k).any()):
            raise ValueError(
                "`value` must contain k different indices for each set, but a set repeats an index or has a "
                "different number of indices."
            )

    @uncompiled
    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008
        """Draw sets with PyTorch's global random generator, as vectors of zeros and k ones."""
        shape = self._extended_shape(torch.Size(sample_shape))
        with torch.no_grad():
            drawn = sample(self._law, math.prod(torch.Size(sample_shape)))
            return drawn.reshape(shape).to(self._parameter.dtype)

    @uncompiled
    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008
        """Draw sets with the gradient of `mean` (straight-through)."""
        mean = self.mean
        return self.sample(sample_shape) + (mean - mean.detach())

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return all sets as vectors, stacked along the first dimension. All rows must have the same k."""
        sizes = self.k.unique()
        if len(sizes) != 1:
            raise NotImplementedError(
                "`enumerate_support` requires the same `k` in all rows of the batch, but `k` differs."
            )
        n, k = self.event_shape[0], int(sizes[0])
        count = math.comb(n, k)
        if count * n > _LARGEST_SUPPORT:
            raise ValueError(
                f"`enumerate_support` would return {count} sets of {k} of {n} entries, which is too many."
            )
        members = torch.tensor(list(itertools.combinations(range(n), k)), device=self._parameter.device)
        values = self._parameter.new_zeros(count, n, requires_grad=False)
        values = values.scatter(1, members.long().reshape(count, k), 1.0)
        values = values.reshape(count, *(1,) * len(self.batch_shape), n)
        return values.expand(count, *self.batch_shape, n) if expand else values

    def expand(self, batch_shape: Any, _instance: Any = None) -> KSubset:
        """Return the same distribution with a larger batch shape."""
        new: KSubset = self._get_checked_instance(KSubset, _instance)
        batch = torch.Size(batch_shape)
        new.k = self.k.expand(batch) if self.k.dim() else self.k
        new._name = self._name
        setattr(new, self._name, self._parameter.expand(*batch, -1))
        super(KSubset, new).__init__(batch, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new


def _check_parameter(parameter: Any, name: str) -> None:
    if not isinstance(parameter, Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor, but its type is {type(parameter).__name__}.")
    if not parameter.is_floating_point():
        raise TypeError(f"`{name}` must be a floating-point tensor, but its dtype is {parameter.dtype}.")
    if parameter.dim() == 0 or parameter.shape[-1] == 0:
        raise ValueError(
            f"`{name}` must have shape (..., n) with n at least 1, but its shape is {tuple(parameter.shape)}."
        )


def _read_k(k: Any, parameter: Tensor) -> Tensor:
    """Return the set sizes as an int64 tensor. Raise an error for non-integer values."""
    given = k if isinstance(k, Tensor) else torch.tensor(k) if isinstance(k, (int, float)) else None
    if given is None or given.dtype == torch.bool or given.is_complex():
        raise TypeError(f"`k` must be an integer or a tensor of integers, but it is {k!r}.")
    given = given.detach().to(parameter.device)
    if given.is_floating_point() and bool((given != given.round()).any()):
        raise ValueError(f"`k` must be an integer or a tensor of integers, but it is {k}.")
    return given.long()


@register_kl(KSubset, KSubset)  # type: ignore[untyped-decorator]
@uncompiled
def _kl_ksubset_ksubset(p: KSubset, q: KSubset) -> Tensor:
    """Return the KL divergence, which is infinite if the sizes differ or q excludes a set that p allows."""
    if p.event_shape != q.event_shape:
        raise ValueError(
            f"Both distributions must have the same event shape, but they have {tuple(p.event_shape)} and "
            f"{tuple(q.event_shape)}."
        )
    shape = torch.broadcast_shapes(p.batch_shape, q.batch_shape)
    p, q = (d if d.batch_shape == shape else d.expand(shape) for d in (p, q))
    divergence = p._law.cross_entropy(q._law) - p._law.entropy
    same = (p.k == q.k).expand(shape).reshape(-1)
    result = torch.where(same, divergence, torch.inf).reshape(shape)
    return result.to(torch.promote_types(p._parameter.dtype, q._parameter.dtype))
