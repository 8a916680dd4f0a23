"""The metrics on the test images, and their mean and standard deviation over the seeds."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean, stdev

import torch
from torch import Tensor

from torchlml_lab.studies.digits.data import Images

BINS = 10


@dataclass(frozen=True)
class Measured:
    """The metrics of one method on the test images of one seed and condition."""

    recall: float
    hidden_recall: float
    exact: float
    count: float
    calibration_error: float
    reliability: Tensor
    """(3, bins): the number of (image, digit) pairs in each bin of p, their mean p, and the share present."""


# The columns of the table: name of the metric, heading, description, and number of decimals.
COLUMNS = (
    ("recall", "recall@k", "share of the digits in an image that are among the k with the largest p", 3),
    ("hidden_recall", "unobserved", "the same for the digits that were not observed", 3),
    ("exact", "exact set", "share of images where p > 0.5 for exactly the digits in the image", 3),
    ("count", "p > 0.5", "mean number of digits per image with p > 0.5; the correct value is k", 2),
    (
        "calibration_error",
        "calibration",
        "mean distance between p and the share of digits that are present; 0 is best",
        3,
    ),
)

Results = Mapping[tuple[str, str], list[Measured]]
"""For each (condition, method), one `Measured` per seed, in the order of the seeds."""


def measure(p: Tensor, ranking: Tensor, images: Images) -> Measured:
    """Compare predictions with the digits in the images.

    Args:
        p: (N, 10), the probability that the digit is in the image.
        ranking: (N, 10), the scores for ranking: the logits, which still differ if p rounds to 1.
        images: The test images.

    Returns:
        The metrics. Recall counts the top m digits of an image with m digits. For the calibration error, all
        (image, digit) pairs are binned by p into ten bins; it is the distance between the mean p and the
        share of digits present in a bin, averaged over the bins with weights by size.
    """
    rank = ranking.argsort(-1, descending=True).argsort(-1)
    top = rank < images.present.sum(-1, keepdim=True)
    hidden = images.present.scatter(-1, images.named.unsqueeze(-1), False)
    reliability = _reliability(p, images.present)
    number, said, present = reliability
    gaps = torch.where(number > 0, number * (said - present).abs(), 0)
    return Measured(
        recall=_share(top & images.present, images.present),
        hidden_recall=_share(top & hidden, hidden),
        exact=((p > 0.5) == images.present).all(-1).float().mean().item(),
        count=(p > 0.5).sum(-1).float().mean().item(),
        calibration_error=(gaps.sum() / number.sum()).item(),
        reliability=reliability,
    )


def spread(values: list[float]) -> tuple[float, float]:
    """The mean and standard deviation over the seeds."""
    return mean(values), stdev(values)


def values(results: Results, condition: str, method: str, measure: str) -> list[float]:
    """One value per seed."""
    return [getattr(measured, measure) for measured in results[condition, method]]


def _share(part: Tensor, whole: Tensor) -> float:
    return (part.sum() / whole.sum()).item()


def _reliability(p: Tensor, present: Tensor) -> Tensor:
    p, truth = p.flatten().double(), present.flatten().double()
    place = (p * BINS).long().clamp(max=BINS - 1)
    empty = torch.zeros(BINS, dtype=torch.float64)
    number = empty.index_add(0, place, torch.ones_like(p))
    return torch.stack(
        (number, empty.index_add(0, place, p) / number, empty.index_add(0, place, truth) / number)
    )
