"""The demo's data: each image shows k different handwritten digits side by side, and names one of them.

The digits are those that scikit-learn carries with it, so nothing is downloaded. The handwriting of the test
images is not in the training images: the digits are divided first, and the images are put together after.
"""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor

CLASSES = 10
SIDE = 8
CONDITIONS = ("uniform", "skewed")
# In the skewed condition a 0 is written down 16 times as readily as a 9, the others in even steps between.
SKEW = 16.0


@dataclass(frozen=True)
class Images:
    """N images of up to k digits: pixels (N, 8, 8 k), present (N, 10) bool, the digit named, (N,) int64."""

    pixels: Tensor
    present: Tensor
    named: Tensor


def make(
    k: int, train: int, test: int, condition: str, seed: int, varying: bool = False
) -> tuple[Images, Images]:
    """Put the training and the test images together.

    Example:
        >>> train, test = make(k=3, train=5000, test=2000, condition="uniform", seed=0)

    Args:
        k: How many different digits an image shows, 1 to 9.
        train: How many training images.
        test: How many test images.
        condition: "uniform", each digit of an image is equally likely to be the one named; or "skewed".
        seed: The images depend on it, but not on the condition: both name labels of the same images.
        varying: Show from 1 to k digits, each number as often; the places of the others are empty.

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
    """Draw up to k different digits for each image, an example of each, and set them side by side."""
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
