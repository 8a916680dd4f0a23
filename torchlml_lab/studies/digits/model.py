"""The images, networks and metrics of the demo, which `torchlml which-k` also uses.

In the demo, each image shows k different handwritten digits side by side, and one of them is the observed
label. The digits come with scikit-learn, so nothing is downloaded. They are split into training and test sets
before the images are composed, so that no handwritten digit occurs in both.

There is one data set for each combination of seed and condition, and each data set has its own network. For
speed, the networks of a method are trained together as stacked matrices. All losses use the same
initial weights, the same batches in the same order, and the same optimizer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid, one_hot

import torchlml
from torchlml_lab.engine.loop import train_epoch

CLASSES = 10
SIDE = 8
CONDITIONS = ("uniform", "skewed")
# In the skewed condition, a 0 is 16 times as likely to be observed as a 9. The odds of the digits in between
# fall geometrically.
SKEW = 16.0


@dataclass(frozen=True)
class Images:
    """N images, each of which shows up to k digits."""

    pixels: Tensor
    """(N, 8, 8 * k), float32, from 0 to 1."""
    present: Tensor
    """(N, 10), bool: the digits in each image."""
    named: Tensor
    """(N,), int64: the observed digit of each image."""


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
        condition: "uniform" (each digit in an image is equally likely to be observed) or "skewed".
        seed: The random seed. The same seed gives the same images in both conditions.
        varying: Whether the images show a random number of digits from 1 to k. Unused positions are blank.

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
    """Choose up to k different digits for each image, and compose the image from one example of each."""
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


BINS = 10


@dataclass(frozen=True)
class Measured:
    """The metrics of one method on the test images for one seed and condition."""

    recall: float
    hidden_recall: float
    top_set: float
    exact: float
    count: float
    calibration_error: float
    reliability: Tensor
    """(3, bins): the number of (image, digit) pairs with p in the bin, their mean p, and the
    fraction of pairs whose digit is present."""


SCALED = "k times softmax"
"""A baseline that knows k: the network trained with cross-entropy, with p = min(k * softmax, 1)."""

# The columns of the table: the field of `Measured`, the heading, the meaning, and the number of decimals.
COLUMNS = (
    ("recall", "recall@k", "fraction of the digits in an image that are among the k with the largest p", 3),
    ("hidden_recall", "unobserved", "recall@k of the unobserved digits only", 3),
    (
        "top_set",
        "top-k set",
        "fraction of images where the k digits with the largest p are exactly the digits in the image",
        3,
    ),
    ("exact", "p > 0.5", "fraction of images where exactly the digits in the image have p > 0.5", 3),
    (
        "calibration_error",
        "calibration",
        "mean absolute difference between p and the fraction of digits that are present; 0 is best",
        3,
    ),
)

Results = Mapping[tuple[str, str], list[Measured]]
"""One `Measured` per seed for each (condition, method), in the order of the seeds."""


def measure(p: Tensor, ranking: Tensor, images: Images) -> Measured:
    """Compare predictions with the digits in the images.

    Args:
        p: (N, 10), the probability that each digit is in the image.
        ranking: (N, 10), the scores that rank the digits. Pass logits, which differ even where p rounds to 1.
        images: The test images.

    Returns:
        The metrics. Recall considers the top m digits of an image that shows m digits. For the calibration
        error, all (image, digit) pairs are grouped into ten bins by p. The error is the absolute difference
        between a bin's mean p and its fraction of digits that are present, averaged over the bins in
        proportion to their sizes.
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
        top_set=(top == images.present).all(-1).float().mean().item(),
        exact=((p > 0.5) == images.present).all(-1).float().mean().item(),
        count=(p > 0.5).sum(-1).float().mean().item(),
        calibration_error=(gaps.sum() / number.sum()).item(),
        reliability=reliability,
    )


def spread(values: list[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation over the seeds."""
    return mean(values), stdev(values)


def values(results: Results, condition: str, method: str, measure: str) -> list[float]:
    """Return one metric's value for each seed."""
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


HIDDEN = 128
BATCH = 100
LEARNING_RATE = 2e-3


Index = tuple[Tensor, Tensor]
"""The index of the data set and the index of the image for each row of a batch."""


@dataclass(frozen=True)
class Method:
    """A loss for logits (rows, 10) and observed labels, and the matching map from logits to probabilities."""

    name: str
    meaning: str
    loss: Callable[[Tensor, Tensor, int], Tensor]
    probability: Callable[[Tensor, int], Tensor]


def _softmax(logits: Tensor, k: int) -> Tensor:
    return torch.softmax(logits, -1)


def _sigmoid(logits: Tensor, k: int) -> Tensor:
    return torch.sigmoid(logits)


METHODS = (
    Method(
        "cross-entropy",
        "softmax cross-entropy of the observed label; p is the softmax",
        lambda logits, named, k: cross_entropy(logits, named, reduction="none"),
        _softmax,
    ),
    Method(
        "sigmoid likelihood",
        "one sigmoid per digit, with the likelihood of the observed label only; p is the sigmoid",
        lambda logits, named, k: -logsigmoid(logits.gather(-1, named.unsqueeze(-1))).squeeze(-1),
        _sigmoid,
    ),
    Method(
        "sigmoid BCE",
        "one sigmoid per digit, where every unobserved digit counts as absent; p is the sigmoid",
        lambda logits, named, k: binary_cross_entropy_with_logits(
            logits, one_hot(named, CLASSES).to(logits.dtype), reduction="none"
        ).sum(-1),
        _sigmoid,
    ),
    Method(
        "truncated entropy",
        "cross-entropy that ignores the k - 1 strongest competitors; p is the softmax",
        lambda logits, named, k: torchlml.truncated_entropy_loss(logits, named, k, reduction="none"),
        _softmax,
    ),
    Method(
        "LML",
        "likelihood of the observed label under the projection that sums to k; p is the projection",
        lambda logits, named, k: torchlml.lml_loss(logits, named, k, reduction="none"),
        lambda logits, k: torchlml.lml(logits, k),
    ),
)


class StackedNetworks(nn.Module):
    """One small network for each data set, stored as stacked matrices.

    Args:
        generators: One generator per network, for its initial weights.
        inputs: The number of inputs of a network.
        outputs: The number of outputs of a network.
    """

    def __init__(self, generators: Sequence[torch.Generator], inputs: int, outputs: int = CLASSES) -> None:
        super().__init__()
        first = torch.stack([torch.randn(inputs, HIDDEN, generator=one) for one in generators])
        second = torch.stack([torch.randn(HIDDEN, outputs, generator=one) for one in generators])
        self.first = nn.Parameter(first * (2 / inputs) ** 0.5)
        self.first_bias = nn.Parameter(torch.zeros(len(generators), 1, HIDDEN))
        self.second = nn.Parameter(second * (1 / HIDDEN) ** 0.5)
        self.second_bias = nn.Parameter(torch.zeros(len(generators), 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (sets, rows, outputs) for inputs (sets, rows, inputs)."""
        hidden = torch.baddbmm(self.first_bias, x, self.first).relu()
        return torch.baddbmm(self.second_bias, hidden, self.second)


def train(
    method: Method,
    sets: Sequence[Images],
    seeds: Sequence[int],
    k: int,
    epochs: int,
    step: Callable[[], None],
) -> StackedNetworks:
    """Train one network per data set with one loss.

    Args:
        method: The loss.
        sets: The training images of each data set, all of the same size.
        seeds: The seed of each data set, for the initial weights and the order of the batches.
        k: The number of digits in an image.
        epochs: The number of epochs.
        step: Called after every epoch.

    Returns:
        The trained networks, one for each data set.
    """
    named = torch.stack([images.named for images in sets])

    def loss(outputs: Tensor, where: Index) -> Tensor:
        return method.loss(outputs.flatten(0, 1), named[where].flatten(), k)

    return fit(loss, sets, seeds, epochs, step)


def fit(
    loss: Callable[[Tensor, Index], Tensor],
    sets: Sequence[Images],
    seeds: Sequence[int],
    epochs: int,
    step: Callable[[], None] = lambda: None,
    outputs: int = CLASSES,
) -> StackedNetworks:
    """Train one network per data set.

    Args:
        loss: Computes the loss of each row from the outputs (sets, rows, outputs) and an `Index`, which
            selects the targets of the rows from a tensor (sets, images, ...).
        sets: The training images of each data set, all of the same size.
        seeds: The seed of each data set, for the initial weights and the order of the batches.
        epochs: The number of epochs.
        step: Called after every epoch.
        outputs: The number of outputs of a network.

    Returns:
        The trained networks, one for each data set.
    """
    x = torch.stack([images.pixels.flatten(1) for images in sets])
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    networks = StackedNetworks(generators, x.shape[2], outputs)
    optimizer = torch.optim.Adam(networks.parameters(), lr=LEARNING_RATE)
    row = torch.arange(len(sets)).unsqueeze(1)

    def batches() -> Iterator[Index]:
        order = torch.stack([torch.randperm(x.shape[1], generator=one) for one in generators])
        for batch in order.split(BATCH, 1):
            yield row, batch

    def mean_loss(model: nn.Module, where: Index) -> Tensor:
        # The mean losses of the networks are summed, so the gradient of one does not depend on the others.
        return loss(model(x[where]), where).sum() / where[1].shape[1]

    for _ in range(epochs):
        train_epoch(networks, optimizer, mean_loss, batches())
        step()
    return networks.eval()
