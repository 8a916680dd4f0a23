"""Metrics for scores and probabilities of shape (samples, labels), and a recalibration of scores."""

from typing import NamedTuple

import numpy as np
import torch
from scipy import optimize, special
from torch import Tensor

BINS = 15


def mean_average_precision(scores: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean over labels of the average precision, with samples ranked by score for each label.

        >>> scores, labels = torch.tensor([[3.0], [2.0], [1.0]]), torch.tensor([[True], [False], [True]])
        >>> mean_average_precision(scores, labels)
        tensor(0.8333)

    Args:
        scores: (..., samples, labels).
        labels: (samples, labels), bool. Labels that no sample has are left out.

    Returns:
        (...): the means. Samples with equal scores share the precision at the last of them.
    """
    # Only positives need a rank. Sorting all scores and searching for the positives is faster than argsort.
    present = labels.any(0)
    columns = scores[..., present].mT.contiguous().numpy()
    having = [column.nonzero()[0] for column in labels[:, present].mT.numpy()]
    found = np.empty(columns.shape[:-1])
    for place in np.ndindex(found.shape):
        column = columns[place]
        relevant = np.sort(column[having[place[-1]]])
        rank = len(column) - np.searchsorted(np.sort(column), relevant)
        hits = len(relevant) - np.searchsorted(relevant, relevant)
        found[place] = np.mean(hits / rank)
    return torch.as_tensor(found.mean(-1), dtype=scores.dtype)


def recall_at(scores: Tensor, labels: Tensor, k: int) -> float:
    """Compute the fraction of a sample's labels that are among its top k, averaged over samples."""
    found = labels.gather(-1, scores.topk(k, -1).indices).sum(-1)
    return float((found / labels.sum(-1)).mean())


def brier_score(p: Tensor, labels: Tensor) -> float:
    """Compute the mean squared difference between probabilities and labels over all entries."""
    return float(((p - labels.to(p.dtype)) ** 2).mean())


def calibration_error(p: Tensor, labels: Tensor) -> float:
    """Compute the expected calibration error over all entries, in 15 bins of equal width."""
    p = p.flatten().double()
    place = (p * BINS).long().clamp(max=BINS - 1)
    gap = torch.zeros(BINS, dtype=torch.float64).index_add(0, place, p - labels.flatten().double())
    return float(gap.abs().sum() / len(p))


def f1_score(chosen: Tensor, labels: Tensor) -> float:
    """Compute the micro-averaged F1 of the chosen entries. It is 0 if there are no choices and no labels."""
    hits, pairs = int((chosen & labels).sum()), int(chosen.sum()) + int(labels.sum())
    return 2 * hits / pairs if pairs else 0.0


class Calibration(NamedTuple):
    """A recalibration p = sigmoid(slope * score + offset) and a threshold for p."""

    slope: float
    offset: float
    threshold: float

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return the recalibrated probabilities, in float64."""
        return (self.slope * scores.double() + self.offset).sigmoid()


def recalibrated(scores: Tensor, labels: Tensor) -> Calibration:
    """Fit a temperature and an offset by maximum likelihood, then find the threshold with the best F1.

    Args:
        scores: (samples, labels), the scores of the validation samples.
        labels: (samples, labels), bool, all labels of these samples.

    Returns:
        The recalibration. Its slope is the inverse of the temperature.
    """
    flat, target = scores.double().flatten().numpy(), labels.flatten().numpy()
    center, scale = float(flat.mean()), float(flat.std()) or 1.0
    standard = (flat - center) / scale

    def objective(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        z = parameters[0] * standard + parameters[1]
        error = special.expit(z) - target
        loss = float(np.mean(np.logaddexp(0, z) - z * target))
        return loss, np.array([np.mean(error * standard), np.mean(error)])

    share = min(max(float(target.mean()), 1e-6), 1 - 1e-6)
    start = np.array([1.0, np.log(share / (1 - share))])
    slope, offset = optimize.minimize(objective, start, jac=True, method="BFGS").x
    calibration = Calibration(slope / scale, offset - slope * center / scale, 0.5)
    return calibration._replace(threshold=best_threshold(calibration.probabilities(scores), labels))


def best_threshold(p: Tensor, labels: Tensor) -> float:
    """Find the threshold with the best micro-F1, halfway between two neighboring probabilities."""
    ordered, order = p.flatten().sort(descending=True)
    hits = labels.flatten()[order].cumsum(0)
    count = torch.arange(1, len(ordered) + 1)
    f1 = 2 * hits / (count + hits[-1])
    f1[:-1][ordered[:-1] == ordered[1:]] = -1  # a threshold cannot separate equal probabilities
    best = int(f1.argmax())
    below = float(ordered[best + 1]) if best + 1 < len(ordered) else 0.0
    return (float(ordered[best]) + below) / 2
