"""The data of the demo: images of k different handwritten digits side by side, one of which is observed.

The digits come with scikit-learn, so nothing is downloaded. They are split into training and test digits
before the images are composed, so that no handwriting occurs in both.
"""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor

CLASSES = 10
SIDE = 8
CONDITIONS = ("uniform", "skewed")
# In the skewed condition, a 0 is 16 times as likely to be observed as a 9, in geometric steps.
SKEW = 16.0


@dataclass(frozen=True)
class Images:
    """N images of up to k digits: pixels (N, 8, 8 k), present (N, 10) bool, observed digit (N,) int64."""

    pixels: Tensor
    present: Tensor
    named: Tensor


def make(
    k: int, train: int, test: int, condition: str, seed: int, varying: bool = False
) -> tuple[Images, Images]:
    """Compose training and test images.

    Example:
        >>> train, test = make(k=3, train=5000, test=2000, condition="uniform", seed=0)

    Args:
        k: The number of different digits in an image, from 1 to 9.
        train: The number of training images.
        test: The number of test images.
        condition: "uniform" (each digit of an image is equally likely to be observed) or "skewed".
        seed: Determines the images, which are the same for both conditions.
        varying: Show 1 to k digits, with equal probability of each number; the other places stay empty.

    Returns:
        The training and the test images.
    """
    source = load_digits()
    pixels = torch.from_numpy(source.images).float() / 16
    digits = torch.from_numpy(source.target).long()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(digits), generator=generator)
    cut = 2 * len(digits) // 3
    pools = (order[:cut], order[cut:])
    shown = [
        _show(pixels[pool], digits[pool], k, count, generator, varying)
        for pool, count in zip(pools, (train, test), strict=True)
    ]
    odds = torch.ones(CLASSES)
    if condition == "skewed":
        odds = SKEW ** -(torch.arange(CLASSES) / (CLASSES - 1))
    result = []
    for picture, present in shown:
        named = torch.multinomial(present * odds, 1, generator=generator).squeeze(1)
        result.append(Images(picture, present, named))
    return result[0], result[1]


def _show(
    pixels: Tensor, digits: Tensor, k: int, count: int, generator: torch.Generator, varying: bool
) -> tuple[Tensor, Tensor]:
    """Choose up to k different digits for each image, an example of each, and place them side by side."""
    chosen = torch.rand(count, CLASSES, generator=generator).argsort(1)[:, :k]
    examples = torch.empty_like(chosen)
    for digit in range(CLASSES):
        where = chosen == digit
        candidates = (digits == digit).nonzero().squeeze(1)
        examples[where] = candidates[torch.randint(len(candidates), (int(where.sum()),), generator=generator)]
    shown = torch.ones(count, k, dtype=torch.bool)
    if varying:
        number = torch.randint(1, k + 1, (count, 1), generator=generator)
        shown = torch.rand(count, k, generator=generator).argsort(1) < number
    one_by_one = pixels[examples] * shown[..., None, None]
    side_by_side = one_by_one.permute(0, 2, 1, 3).reshape(count, SIDE, k * SIDE)
    present = torch.zeros(count, CLASSES, dtype=torch.bool).scatter(1, chosen, shown)
    return side_by_side, present
