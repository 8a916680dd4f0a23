"""The methods of the study: their losses, their maps from logits to probabilities, and their search spaces.

The losses follow their original papers: Cole et al. (2021) for AN, AN-LS, WAN, EPR and ROLE, Zhou et
al. (2022) for EM (the loss without asymmetric pseudo-labels), and Ridnik et al. (2021) for ASL. A loss takes
a `Batch` with logits x of shape (configurations, samples, labels) and returns one value per configuration.
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
    """(samples,), int64: the observed label of each sample."""
    k: Tensor
    """(samples,): the number of labels that the method expects for each sample."""
    weight: Tensor
    """(configurations,): the weight in the method's loss (see `Method.weights`)."""
    labels: Tensor
    """(samples, labels), bool: all labels, for the reference methods only."""
    estimates: Tensor | None = None
    """(configurations, samples, labels): the logits of ROLE's label estimates."""

    @property
    def observed_x(self) -> Tensor:
        """(configurations, samples): the logits of the observed labels."""
        return self.x.gather(-1, self._index)[..., 0]

    @property
    def target(self) -> Tensor:
        """(configurations, samples): the observed labels, in the shape that `torchlml` losses expect."""
        return self._index[..., 0]

    @property
    def _index(self) -> Tensor:
        return self.observed.expand(len(self.x), -1)[..., None]


Loss = Callable[[Batch], Tensor]


def _per_label(rows: Tensor, batch: Batch) -> Tensor:
    """Convert sums over labels, of shape (configurations, samples), to means over samples and labels."""
    return rows.mean(-1) / batch.x.shape[-1]


def all_labels(batch: Batch) -> Tensor:
    """Binary cross-entropy with all labels."""
    y = batch.labels.to(batch.x.dtype)
    return _per_label((F.softplus(batch.x) - y * batch.x).sum(-1), batch)


def assume_negative(batch: Batch) -> Tensor:
    """AN: binary cross-entropy that treats every unobserved label as negative."""
    return _per_label(F.softplus(batch.x).sum(-1) - batch.observed_x, batch)


def smoothed_negative(batch: Batch) -> Tensor:
    """AN-LS: AN with targets 1 - weight / 2 for the observed label and weight / 2 for all other labels."""
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
    """EPR: the loss of the observed labels, plus weight * ((s - k) / L)^2.

    s is the sum of a sample's probabilities, k is its expected number of labels (both are averaged over the
    batch), and L is the total number of labels.
    """
    return _expected_positive(batch.x, batch.observed_x, batch)


def online_estimation(batch: Batch) -> Tensor:
    """ROLE: the loss of a classifier and a table of label estimates.

    The classifier and the estimates are each trained with EPR and with the other's probabilities as targets.
    """
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
    """ASL: AN with the terms -p^weight * log(1 - p) for negatives, where p is max(0, probability - 0.05)."""
    p = (batch.x.sigmoid() - MARGIN).clamp(min=0)
    # The lower limit avoids p = 0, where the derivative of the power is infinite for weights below 1.
    negatives = -(p.clamp(min=1e-8) ** batch.weight[:, None, None]) * torch.log1p(-p)
    others = negatives.sum(-1) - negatives.gather(-1, batch.target[..., None])[..., 0]
    return _per_label(F.softplus(-batch.observed_x) + others, batch)


def softmax(batch: Batch) -> Tensor:
    """Cross-entropy of the observed label."""
    return (batch.x.logsumexp(-1) - batch.observed_x).mean(-1)


def lml(batch: Batch) -> Tensor:
    """The loss `torchlml.lml_loss`."""
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
    """Round k to an integer that is at least 1."""
    return k.round().clamp(min=1).long()


class Adam:
    """Adam with one learning rate per configuration, for tensors whose first axis is the configuration."""

    def __init__(self, rates: Tensor) -> None:
        self.rates = rates

    def step(self, value: Tensor, gradient: Tensor, moments: list[Tensor], number: int) -> None:
        """Update the value and its two moments in place; `number` counts the steps from 1."""
        first, second = moments
        first.lerp_(gradient, 0.1)
        second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        scale = (second / (1 - 0.999**number)).sqrt_().add_(1e-8)
        value -= (self.rates / (1 - 0.9**number)).view(-1, 1, 1) * first / scale


class Estimates:
    """The estimated labels of ROLE: one logit per training sample and label.

    Their learning rate is ten times that of the classifier. The initial probabilities are uniform between 0.4
    and 0.6, and those of the observed labels are 0.995. As in the paper's code, Adam updates the whole
    table in every step. Updates for a sample outside the batch are deferred until the sample's next use.
    """

    def __init__(self, observed: Tensor, labels: int, rates: Tensor, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = (0.4 + 0.2 * torch.rand(len(observed), labels, generator=generator)).logit()
        logits[torch.arange(len(observed)), observed] = torch.tensor(0.995).logit()
        self.logits = logits.repeat(len(rates), 1, 1)
        self.moments = [torch.zeros_like(self.logits), torch.zeros_like(self.logits)]
        self.optimizer = Adam(10 * rates)
        self.updated = torch.zeros(len(logits), dtype=torch.int64)
        """The last optimizer step that was applied to each sample."""

    def of(self, rows: Tensor, number: int) -> Tensor:
        """Return the logits of these samples before optimizer step `number`, as a leaf tensor."""
        first, second = (moment[:, rows] for moment in self.moments)
        since = self.updated[rows, None]
        missed = number - 1 - since
        after = torch.arange(1, 101, dtype=torch.float64)  # later updates are negligible: 0.9^100 is 3e-5
        step = since + after
        factor = 0.9**after / (1 - 0.9**step) * ((1 - 0.999**step) / 0.999**after).sqrt()
        factor = torch.where(after <= missed, factor, 0).sum(-1, keepdim=True).float()
        epsilon = 1e-8 * (1 - 0.999 ** (since + 1)).sqrt()
        move = self.optimizer.rates.view(-1, 1, 1) * factor * first / (second.sqrt() + epsilon)
        self.moments[0][:, rows] = first * 0.9**missed
        self.moments[1][:, rows] = second * 0.999**missed
        self.updated[rows] = number
        return (self.logits[:, rows] - move).requires_grad_()

    def update(self, rows: Tensor, logits: Tensor, gradient: Tensor, number: int) -> None:
        """Apply optimizer step `number` to these samples, starting from the logits that `of` returned."""
        pair = [moment[:, rows] for moment in self.moments]
        value = logits.detach()
        self.optimizer.step(value, gradient, pair, number)
        for whole, part in zip((self.logits, *self.moments), (value, *pair), strict=True):
            whole[:, rows] = part


Link = Literal["sigmoid", "softmax", "lml", "subset"]


def scores_of(link: Link, x: Tensor, k: Tensor) -> Tensor:
    """Turn logits into scores that rank samples and labels like the probabilities, but do not saturate.

    Args:
        link: The kind of probabilities: "sigmoid", "softmax" (times k), "lml", or "subset" for the exact
            inclusion probabilities of `KSubset`.
        x: (..., samples, labels), the logits.
        k: (samples,), the expected number of labels.

    Returns:
        The log-odds of the probabilities, or their logarithms for "softmax".
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
    """Turn scores into probabilities. For softmax, which is multiplied by k, they are clipped at 1."""
    return scores.exp().clamp(max=1) if link == "softmax" else scores.sigmoid()


@dataclass(frozen=True)
class Method:
    """A method of the study."""

    title: str
    loss: Loss
    link: Link = "sigmoid"
    weights: tuple[float, ...] = ()
    """Seven values for the weight in the loss, if it has one. The search starts with the middle three."""
    k: float | None = 1.0
    """The ratio of k to the mean number of labels, or None to predict k for each sample."""
    start: float | None = None
    """The sigmoid of every logit before training. None means the mean number of labels per sample, divided by
    the total number of labels."""
    labels: Literal["one", "all", "validation"] = "one"
    """The labels to learn from: one per sample, all labels, or all labels of the validation samples only."""

    @property
    def competitor(self) -> bool:
        """Whether the method is an alternative to LML. BCE with all labels and k-subset do not count."""
        return self.labels != "all" and self.link not in ("lml", "subset")


_PENALTIES = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0, 10000.0)

METHODS = {
    "bce-all": Method("BCE, all labels", all_labels, labels="all"),
    "bce-validation": Method("BCE, fully labeled 20% only", all_labels, labels="validation"),
    "an": Method("AN", assume_negative),
    "an-ls": Method("AN-LS", smoothed_negative, weights=(0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)),
    "wan": Method("WAN", weak_negative, weights=(0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)),
    "epr": Method("EPR", expected_positive, weights=_PENALTIES),
    "role": Method("ROLE", online_estimation, weights=_PENALTIES),
    "em": Method("EM", entropy_maximization, weights=(0.005, 0.02, 0.05, 0.2, 0.5, 1.0, 2.0), start=0.5),
    "asl": Method("ASL", asymmetric, weights=(0.0, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0)),
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
    """The weight in the loss, or 1 for methods without one."""


RATES = tuple(float(f"{1e-5 * 10 ** (step / 4):.2g}") for step in range(17))
"""The learning rates, from 1e-5 to 0.1; the search starts with rates from 1e-4 to 0.01."""


def first_recipes(method: Method) -> list[Recipe]:
    """Return the nine configurations with which the search for a method starts.

    For methods without a weight, these are nine learning rates from 1e-4 to 1e-2. For other methods, they are
    three of these rates with three weights each.
    """
    rates = RATES[4:13]
    if not method.weights:
        return [Recipe(rate, 1.0) for rate in rates]
    return [Recipe(rate, weight) for rate in rates[1::3] for weight in method.weights[2:5]]


def neighbors(method: Method, recipe: Recipe) -> list[Recipe]:
    """Return the configurations with the next smaller or larger learning rate or weight."""
    rate, weight = recipe
    return [
        *(Recipe(other, weight) for other in _adjacent(RATES, rate)),
        *(Recipe(rate, other) for other in _adjacent(method.weights or (1.0,), weight)),
    ]


def _adjacent(values: tuple[float, ...], value: float) -> tuple[float, ...]:
    place = values.index(value)
    return (*values[max(place - 1, 0) : place], *values[place + 1 : place + 2])
