"""What is measured on the test images, and the mean and spread over the seeds."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean, stdev

import torch
from torch import Tensor

from torchlml_lab.studies.digits.data import Images

BINS = 10


@dataclass(frozen=True)
class Measured:
    """One method on the test images of one seed in one condition."""

    recall: float
    hidden_recall: float
    exact: float
    count: float
    calibration_error: float
    reliability: Tensor
    """(3, bins): how many (image, digit) pairs have their p in the bin, their mean p, the share present."""


# What the table shows: the name of the measure, its heading, what it means, and the digits after the point.
COLUMNS = (
    ("recall", "recall@k", "share of all digits in an image that are among the k with the largest p", 3),
    ("hidden_recall", "of hidden", "the same for the digits that nobody named", 3),
    ("exact", "exact set", "share of images where p > 0.5 holds for exactly the digits in the image", 3),
    ("count", "p > 0.5", "how many digits of an image have p > 0.5, on average; the truth is k", 2),
    (
        "calibration_error",
        "calibration",
        "how far p is from the share of digits that are present: 0 is best",
        3,
    ),
)

Results = Mapping[tuple[str, str], list[Measured]]
"""For each (condition, method) one `Measured` per seed, in the order of the seeds."""


def measure(p: Tensor, ranking: Tensor, images: Images) -> Measured:
    """Compare predictions with what the images show.

    Args:
        p: (N, 10), the probability that the digit is in the image.
        ranking: (N, 10), what the digits are ranked by: the logits, which still differ where p rounds to 1.
        images: The test images.

    Returns:
        The measures, where recall is among as many digits as an image shows. Calibration puts all pairs of
        image and digit into ten bins by their p and averages the distance between the mean p and the share of
        digits present in a bin, weighted by the bin's size.
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
    """The mean over the seeds, and their standard deviation."""
    return mean(values), stdev(values)


def values(results: Results, condition: str, method: str, measure: str) -> list[float]:
    """One number per seed."""
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
