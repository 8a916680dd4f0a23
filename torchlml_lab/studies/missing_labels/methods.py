"""The methods of the study: their losses, how they turn logits into probabilities, and their search spaces.

The losses follow the definitions of the papers: Cole et al. (2021) for AN, AN-LS, WAN, EPR and ROLE, Zhou et
al. (2022) for EM (the loss without asymmetric pseudo-labels), and Ridnik et al. (2021) for ASL. They take
logits x of shape (configurations, samples, labels) and return one number per configuration.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import torchlml


class Batch(NamedTuple):
    """The inputs of a loss."""

    x: Tensor
    """(configurations, samples, labels): the logits."""
    observed: Tensor
    """(samples,), int64: the observed label."""
    k: Tensor
    """(samples,): the number of labels that the method expects."""
    weight: Tensor
    """(configurations,): the weight in the method's loss."""
    labels: Tensor
    """(samples, labels), bool: all labels, for the reference methods only."""
    estimates: Tensor | None = None
    """(configurations, samples, labels): the logits of the labels that ROLE estimates."""

    @property
    def observed_x(self) -> Tensor:
        """(configurations, samples): the logits of the observed labels."""
        return self.x.gather(-1, self._index)[..., 0]

    @property
    def target(self) -> Tensor:
        """(configurations, samples): the observed labels, for the losses of this library."""
        return self._index[..., 0]

    @property
    def _index(self) -> Tensor:
        return self.observed.expand(len(self.x), -1)[..., None]


Loss = Callable[[Batch], Tensor]


def _per_label(rows: Tensor, batch: Batch) -> Tensor:
    """Convert sums over labels (configurations, samples) to means over samples and labels."""
    return rows.mean(-1) / batch.x.shape[-1]


def all_labels(batch: Batch) -> Tensor:
    """Binary cross-entropy with all labels."""
    y = batch.labels.to(batch.x.dtype)
    return _per_label((F.softplus(batch.x) - y * batch.x).sum(-1), batch)


def assume_negative(batch: Batch) -> Tensor:
    """AN: binary cross-entropy with every unobserved label as a negative."""
    return _per_label(F.softplus(batch.x).sum(-1) - batch.observed_x, batch)


def smoothed_negative(batch: Batch) -> Tensor:
    """AN-LS: the targets are 1 - weight / 2 for the observed label and weight / 2 for all other labels."""
    smooth = batch.weight[:, None]
    target = smooth / 2 * batch.x.sum(-1) + (1 - smooth) * batch.observed_x
    return _per_label(F.softplus(batch.x).sum(-1) - target, batch)


def weak_negative(batch: Batch) -> Tensor:
    """WAN: AN with the terms of the L - 1 unobserved labels multiplied by min(1, weight / (L - 1))."""
    weight = (batch.weight[:, None] / (batch.x.shape[-1] - 1)).clamp(max=1)
    observed = batch.observed_x
    others = F.softplus(batch.x).sum(-1) - F.softplus(observed)
    return _per_label(F.softplus(-observed) + weight * others, batch)


def _expected_positive(x: Tensor, observed_x: Tensor, batch: Batch) -> Tensor:
    excess = (x.sigmoid().sum(-1).mean(-1) - batch.k.mean()) / x.shape[-1]
    return _per_label(F.softplus(-observed_x), batch) + batch.weight * excess**2


def expected_positive(batch: Batch) -> Tensor:
    """EPR: the loss of observed labels, plus weight times ((mean number of predicted labels - k) / L)^2."""
    return _expected_positive(batch.x, batch.observed_x, batch)


def online_estimation(batch: Batch) -> Tensor:
    """ROLE: the classifier and a table of estimated labels learn from each other, both with EPR."""
    x, estimates = batch.x, batch.estimates
    assert estimates is not None
    classifier = F.softplus(x) - estimates.detach().sigmoid() * x
    estimator = F.softplus(estimates) - x.detach().sigmoid() * estimates
    cross = _per_label((classifier + estimator).sum(-1), batch)
    observed = batch._replace(x=estimates).observed_x
    positives = _expected_positive(x, batch.observed_x, batch)
    return (cross + positives + _expected_positive(estimates, observed, batch)) / 2


def _entropy(x: Tensor) -> Tensor:
    return F.softplus(x) - x * x.sigmoid()


def entropy_maximization(batch: Batch) -> Tensor:
    """EM: the loss of the observed labels, minus weight times the entropy of the unobserved labels."""
    observed = batch.observed_x
    others = _entropy(batch.x).sum(-1) - _entropy(observed)
    return _per_label(F.softplus(-observed) - batch.weight[:, None] * others, batch)


MARGIN = 0.05


def asymmetric(batch: Batch) -> Tensor:
    """ASL: AN with the terms -p^weight log(1 - p) for negatives, where p is max(0, probability - 0.05)."""
    p = (batch.x.sigmoid() - MARGIN).clamp(min=0)
    # The power of 0 has an infinite derivative for weights below 1, hence the lower limit.
    negatives = -(p.clamp(min=1e-8) ** batch.weight[:, None, None]) * torch.log1p(-p)
    others = negatives.sum(-1) - negatives.gather(-1, batch.target[..., None])[..., 0]
    return _per_label(F.softplus(-batch.observed_x) + others, batch)


def softmax(batch: Batch) -> Tensor:
    """Cross-entropy of the observed label."""
    return (batch.x.logsumexp(-1) - batch.observed_x).mean(-1)


def lml(batch: Batch) -> Tensor:
    """`torchlml.lml_loss`."""
    k = batch.k.expand(batch.x.shape[:-1])
    return torchlml.lml_loss(batch.x, batch.target, k, reduction="none").mean(-1)


def subset(batch: Batch) -> Tensor:
    """The loss `torchlml.subset_loss`, with k rounded to an integer."""
    k = integer_k(batch.k).expand(batch.x.shape[:-1])
    return torchlml.subset_loss(batch.x, batch.target, k, reduction="none").mean(-1)


def truncated_entropy(batch: Batch) -> Tensor:
    """The loss `torchlml.truncated_entropy_loss`, with k rounded to an integer."""
    k = int(integer_k(batch.k[0]))
    return torchlml.truncated_entropy_loss(batch.x, batch.target, k, reduction="none").mean(-1)


def integer_k(k: Tensor) -> Tensor:
    """Round k to an integer of at least 1."""
    return k.round().clamp(min=1).long()


Link = Literal["sigmoid", "softmax", "lml", "subset"]


def scores_of(link: Link, x: Tensor, k: Tensor) -> Tensor:
    """Turn logits into scores that order samples and labels like the probabilities, without saturation.

    Args:
        link: The probabilities: "sigmoid", "softmax" times k, "lml", or "subset" for the exact inclusion
            probabilities of `KSubset`.
        x: (..., samples, labels), the logits.
        k: (samples,), the expected number of labels.

    Returns:
        The log-odds of the probabilities, or for "softmax" their logarithms.
    """
    if link == "softmax":
        return x.log_softmax(-1) + k.log()[:, None]
    if link == "lml":
        return x + torchlml.lml_dual(x, k.expand(x.shape[:-1]))[..., None]
    if link == "subset":
        p = torchlml.distributions.KSubset(integer_k(k).expand(x.shape[:-1]), x.double()).mean
        return p.clamp(1e-12, 1 - 1e-12).logit().to(x.dtype)
    return x


def probabilities_of(link: Link, scores: Tensor) -> Tensor:
    """Turn scores into probabilities. For softmax times k, they are clipped at 1."""
    return scores.exp().clamp(max=1) if link == "softmax" else scores.sigmoid()


@dataclass(frozen=True)
class Method:
    """A method of the study."""

    title: str
    loss: Loss
    link: Link = "sigmoid"
    weights: tuple[float, ...] = ()
    """The three values to try for the weight in its loss. Without a weight, more learning rates are tried."""
    k: float | None = 1.0
    """k as a multiple of the mean number of labels, or None for a prediction per sample."""
    start: float | None = None
    """The probability of every label before training. None means k divided by the number of labels."""
    labels: Literal["one", "all", "validation"] = "one"
    """The labels to learn from: one per sample, all labels, or all labels of the validation samples only."""

    @property
    def competitor(self) -> bool:
        """Whether the method is an alternative to LML that learns from the same data."""
        return self.labels != "all" and self.link not in ("lml", "subset")


METHODS = {
    "bce-all": Method("BCE, all labels", all_labels, labels="all"),
    "bce-validation": Method("BCE, fully labeled 20% only", all_labels, labels="validation"),
    "an": Method("AN", assume_negative),
    "an-ls": Method("AN-LS", smoothed_negative, weights=(0.05, 0.1, 0.2)),
    "wan": Method("WAN", weak_negative, weights=(1.0, 3.0, 10.0)),
    "epr": Method("EPR", expected_positive, weights=(1.0, 10.0, 100.0)),
    "role": Method("ROLE", online_estimation, weights=(1.0, 10.0, 100.0)),
    "em": Method("EM", entropy_maximization, weights=(0.05, 0.2, 0.5), start=0.5),
    "asl": Method("ASL", asymmetric, weights=(1.0, 2.0, 4.0)),
    "softmax": Method("softmax × k", softmax, "softmax"),
    "softmax-predicted": Method("softmax × predicted k", softmax, "softmax", k=None),
    "truncated-entropy": Method("truncated entropy", truncated_entropy, "softmax"),
    "lml": Method("LML", lml, "lml"),
    "lml-half": Method("LML, k × 0.5", lml, "lml", k=0.5),
    "lml-more": Method("LML, k × 1.5", lml, "lml", k=1.5),
    "lml-predicted": Method("LML, predicted k", lml, "lml", k=None),
    "subset": Method("exact k-subset", subset, "subset"),
}
"""The methods by name, in the order of the tables."""


class Recipe(NamedTuple):
    """A configuration of a method."""

    learning_rate: float
    weight: float
    """1 for methods without a weight in their loss."""


def recipes_of(method: Method) -> list[Recipe]:
    """Return the nine configurations of a method.

    They have nine learning rates from 1e-4 to 1e-2, or three of these rates with three weights each.
    """
    rates = [float(f"{1e-4 * 10 ** (step / 4):.2g}") for step in range(9)]
    if not method.weights:
        return [Recipe(rate, 1.0) for rate in rates]
    return [Recipe(rate, weight) for rate in rates[1::3] for weight in method.weights]
