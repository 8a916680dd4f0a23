"""Rules that choose a set of labels from their probabilities, and metrics for such sets."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.labeled_rows import LabeledRows
from torchlml_lab.files import read_json, record
from torchlml_lab.multilabel.settings import RULES, RuleName

FEATURES = 8  # the rule `count` predicts the number of labels from this many top probabilities
STRENGTH = 10.0  # the penalty of the ridge regression that predicts the number of labels
ODDS = (-9.0, 6.0, 301)  # the candidate thresholds: lowest log-odds, highest log-odds, number of candidates
SMOOTHNESS = 0.5  # the standard deviation of the Gaussian that smooths the metrics, in log-odds
_LARGEST = 1e9  # a file with larger regression weights is considered damaged
WORDS: Mapping[RuleName, str] = {
    "top-k": "the k most probable labels (k = {k})",
    "half": "labels with p > 0.5",
    "threshold": "labels with p > {threshold:.3f}{always}",
    "count": "the m most probable labels, where m is predicted for each sample",
}


@dataclass(frozen=True)
class Decisions:
    """How a run chooses a set of labels for each sample: the best rule, and the parameters of all rules.

    The rule and all parameters are determined on the validation samples.
    """

    rule: RuleName = "top-k"
    """The rule that maximizes micro-F1 plus the share of exact sets."""
    threshold: float = 0.5
    """The threshold that maximizes micro-F1 plus the share of exact sets, smoothed over nearby thresholds."""
    weights: list[float] = field(default_factory=list)
    """The coefficients of the regression that predicts the number of labels: the intercept, then a weight for
    each of the highest log-odds. If the list is empty, the rule `count` chooses k labels."""
    most: int = 1
    """The largest number of labels in any validation sample. The rule `count` never chooses more."""
    least: int = 1
    """The smallest number of labels that the rules `threshold` and `count` choose. It is 0 only if some
    validation samples have no labels and allowing empty sets gives better results."""

    def sizes(self, probabilities: Tensor, k: int) -> Tensor:
        """Return the number of labels that the rule `count` chooses for each sample, (R,)."""
        if not self.weights:
            return torch.full((len(probabilities),), k)
        constant, *weights = self.weights
        found = _log_odds(probabilities) @ torch.tensor(weights, dtype=torch.float64) + constant
        return found.round().clamp(self.least, min(self.most, probabilities.shape[1])).long()

    def decide(self, logits: Tensor, probabilities: Tensor, k: int, rule: RuleName) -> Tensor:
        """Choose the labels for each sample.

        Args:
            logits: (R, n). Labels are ranked by logit, because different logits can round to the same
                probability.
            probabilities: (R, n).
            k: The k of the run.
            rule: The rule to use.

        Returns:
            bool (R, n), whether each label is chosen.
        """
        if rule == "half":
            return probabilities > 0.5
        if rule == "threshold":
            above = probabilities > self.threshold
            return above.scatter(-1, logits.argmax(-1, keepdim=True), True) if self.least else above
        sizes = self.sizes(probabilities, k) if rule == "count" else torch.full((len(logits),), k)
        order = logits.topk(int(sizes.max()) if len(sizes) else 1, dim=-1).indices
        chosen = torch.arange(order.shape[1]) < sizes[:, None]
        return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, chosen)

    def in_words(self, rule: RuleName, k: int) -> str:
        """Return a description of the labels that a rule chooses."""
        always = ", and always the most probable label" if self.least else ""
        return WORDS[rule].format(k=k, threshold=self.threshold, always=always)


def fit(logits: Tensor, probabilities: Tensor, observed: Tensor, k: int, empty: bool = False) -> Decisions:
    """Fit all rules on validation samples, and choose the best rule.

    Args:
        logits: (R, n).
        probabilities: (R, n).
        observed: bool (R, n), the labels of each sample.
        k: The k of the run.
        empty: Whether some samples have no labels. If so, rules that may choose no labels are also tried.
    """
    weights, most = _count_weights(probabilities, observed.sum(-1)), max(1, int(observed.sum(-1).max()))
    possible = [
        Decisions(rule, best_threshold(logits, probabilities, observed, least), weights, most, least)
        for least in ((0, 1) if empty else (1,))
        for rule in RULES
    ]

    def score(one: Decisions) -> float:
        measures = SetMeasures(observed.shape[1])
        measures.update(one.decide(logits, probabilities, k, one.rule), observed)
        found = measures.result()
        return found.micro_f1 + found.exact

    return max(possible, key=score)


def best_threshold(logits: Tensor, probabilities: Tensor, observed: Tensor, least: int = 1) -> float:
    """Return the threshold that maximizes the smoothed sum of micro-F1 and the share of exact sets.

    If `least` is 1, the most probable label of each sample is always chosen. Averaging over nearby thresholds
    makes the result less noisy if there are few samples.
    """
    odds = torch.linspace(*ODDS, dtype=torch.float64)
    weights = (-((odds[:, None] - odds) / SMOOTHNESS).square() / 2).exp()
    thresholds = odds.sigmoid()
    f1, exact = _by_threshold(thresholds, logits, probabilities.double(), observed, least)
    return float(thresholds[int((weights @ (f1 + exact) / weights.sum(-1)).argmax())])


def _by_threshold(
    thresholds: Tensor, logits: Tensor, probabilities: Tensor, observed: Tensor, least: int
) -> tuple[Tensor, Tensor]:
    """Return micro-F1 and the share of exact sets for each threshold, both float64."""
    always = torch.zeros_like(observed)
    if least:
        always.scatter_(-1, logits.argmax(-1, keepdim=True), True)

    def above(values: Tensor) -> Tensor:
        return len(values) - torch.searchsorted(values.sort().values, thresholds, right=True)

    chosen = always.sum() + above(probabilities[~always])
    hits = (observed & always).sum() + above(probabilities[~always & observed])
    f1 = 2 * hits.double() / (chosen + observed.sum()).clamp(min=1)
    # A sample's set is exact if the threshold separates its true labels from all other labels.
    lowest = probabilities.masked_fill(always | ~observed, math.inf).amin(-1)
    highest = probabilities.masked_fill(always | observed, 0.0).amax(-1)
    possible = ~(always & ~observed).any(-1) & (highest < lowest)
    exact = above(lowest[possible]) - above(highest[possible])
    return f1, exact.double() / max(1, len(observed))


def _log_odds(probabilities: Tensor) -> Tensor:
    """Return the log-odds of the highest probabilities in descending order, float64 (R, F).

    F is `FEATURES`, or the number of labels if that is smaller.
    """
    top = probabilities.double().topk(min(FEATURES, probabilities.shape[1]), dim=-1).values
    return torch.logit(top, eps=1e-6)


def _count_weights(probabilities: Tensor, counts: Tensor) -> list[float]:
    """Fit a ridge regression that predicts the number of labels from the top log-odds; return its weights."""
    x, y = _log_odds(probabilities), counts.double()
    mean, scale = x.mean(0), x.std(0, correction=0).clamp(min=1e-6)
    x = (x - mean) / scale
    penalty = STRENGTH * torch.eye(x.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(x.T @ x + penalty, x.T @ (y - y.mean())) / scale
    constant = y.mean() - mean @ weights
    return [round(float(value), 9) for value in (constant, *weights)]


def stored(path: Path, labels: int) -> Decisions:
    """Load the decisions of a run from its calibration file. A damaged file raises `BadInput`.

    Args:
        path: The file. If it does not exist, the defaults are returned.
        labels: The number of labels known to the run.
    """
    if not path.exists():
        return Decisions()
    values = read_json(path, dict).get("decisions")
    try:
        if not isinstance(values, dict):
            raise ValueError("`decisions` must be an object")
        found = record(values, Decisions)
        if not all(map(math.isfinite, (found.threshold, *found.weights))):
            raise ValueError("`decisions` contains a number that is not finite")
        if found.weights and len(found.weights) != 1 + min(FEATURES, labels):
            raise ValueError(
                f"`weights` must have length {1 + min(FEATURES, labels)}, but it has length "
                f"{len(found.weights)}"
            )
        if found.least not in (0, 1):
            raise ValueError(f"`least` must be 0 or 1, but it is {found.least}")
        if found.most < 1 or max(map(abs, found.weights), default=0) > _LARGEST:
            raise ValueError(
                f"`most` must be at least 1, and `weights` must be from -{_LARGEST:g} to {_LARGEST:g}"
            )
    except ValueError as error:
        raise BadInput(f"`{path}` is damaged: {error}.") from error
    return found


class SetResult(NamedTuple):
    """Metrics of the label sets chosen by a rule, as fractions."""

    micro_f1: float
    macro_f1: float
    """The mean F1 over all labels that occur in a sample or are chosen for a sample."""
    exact: float
    """The share of samples for which the chosen labels are exactly the true labels."""
    size: float
    """The mean number of chosen labels per sample."""


class SetMeasures:
    """Accumulates the metrics of chosen label sets over batches.

    Args:
        labels: The number of distinct labels: those known to the run, followed by those that occur only in
            the evaluated samples, which are never chosen.
    """

    def __init__(self, labels: int) -> None:
        self.hits, self.chosen, self.support = (torch.zeros(labels, dtype=torch.int64) for _ in range(3))
        self.exact = self.rows = 0

    def update(self, chosen: Tensor, observed: Tensor) -> None:
        """Add samples: the chosen labels, bool (R, known labels), and the true labels, bool (R, labels)."""
        known = chosen.shape[1]
        self.hits[:known] += (chosen & observed[:, :known]).sum(0)
        self.chosen[:known] += chosen.sum(0)
        self.support += observed.sum(0)
        right = (chosen == observed[:, :known]).all(-1) & ~observed[:, known:].any(-1)
        self.exact += int(right.sum())
        self.rows += len(chosen)

    def result(self) -> SetResult:
        """Return the metrics of all samples that have been added."""
        either = self.chosen + self.support
        each = 2 * self.hits[either > 0] / either[either > 0]
        total = int(either.sum())
        return SetResult(
            micro_f1=2 * int(self.hits.sum()) / total if total else 0.0,
            macro_f1=float(each.double().mean()) if len(each) else 0.0,
            exact=self.exact / max(1, self.rows),
            size=int(self.chosen.sum()) / max(1, self.rows),
        )


def average_precision(scores: npt.NDArray[Any], observed: npt.NDArray[np.bool_]) -> float:
    """Compute the average precision of one label, with the samples ranked by their scores.

        >>> average_precision(np.array([0.9, 0.8, 0.1]), np.array([True, False, True]))
        0.8333333333333333

    Args:
        scores: (R,). Samples with equal scores share a rank, as in scikit-learn.
        observed: (R,), whether each sample has the label. At least one sample must have it.
    """
    order = np.argsort(-scores, kind="stable")
    ranked, hits = scores[order], np.cumsum(observed[order])
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    found = hits[last]
    return float((np.diff(found, prepend=0) * found / (last + 1)).sum() / found[-1])


class LabelResult(NamedTuple):
    """The metrics of one label, as fractions. Undefined metrics are None."""

    label: str
    support: int
    """The number of samples with the label."""
    predicted: int
    """The number of samples for which the rule of the run chooses the label."""
    precision: float | None
    recall: float | None
    average_precision: float | None


def label_results(
    rows: LabeledRows, found: SetMeasures, scores: npt.NDArray[np.float32]
) -> list[LabelResult]:
    """Return the metrics of each label that occurs or is chosen, most frequent first.

    Args:
        rows: The samples.
        found: The metrics of the label sets chosen for these samples.
        scores: (R, known labels), the probabilities of the labels. If it has no columns, all average
            precisions are None.
    """
    columns = rows.labels.tocsc()
    results = []
    counts = zip(*(one.tolist() for one in (found.hits, found.chosen, found.support)), strict=True)
    for label, (hits, chosen, support) in enumerate(counts):
        if not chosen and not support:
            continue
        average = None
        if support and label < scores.shape[1]:
            observed = np.zeros(len(rows), dtype=bool)
            observed[columns.indices[columns.indptr[label] : columns.indptr[label + 1]]] = True
            average = average_precision(scores[:, label], observed)
        precision, recall = hits / chosen if chosen else None, hits / support if support else None
        results.append(LabelResult(rows.names[label], support, chosen, precision, recall, average))
    return sorted(results, key=lambda one: -one.support)
