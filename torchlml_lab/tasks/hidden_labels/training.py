"""The five losses, and the training of one small network with each of them.

The networks of all data sets (seeds and conditions) are trained at once, as stacked matrices: they never
exchange anything, and two cores are used well. Every loss starts from the same weights and sees the same
batches in the same order, with the same optimizer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid, one_hot

import torchlml
from torchlml_lab.tasks.hidden_labels.images import CLASSES, Images

HIDDEN = 128
BATCH = 100
LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class Method:
    """A loss of the logits (rows, 10) and the named label, and its probability of "is in the image"."""

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
        "softmax cross-entropy of the named label; p is the softmax",
        lambda logits, named, k: cross_entropy(logits, named, reduction="none"),
        _softmax,
    ),
    Method(
        "sigmoid likelihood",
        "one sigmoid per digit, likelihood of the named label alone; p is the sigmoid",
        lambda logits, named, k: -logsigmoid(logits.gather(-1, named.unsqueeze(-1))).squeeze(-1),
        _sigmoid,
    ),
    Method(
        "sigmoid BCE",
        "one sigmoid per digit, every digit that is not named counts as absent; p is the sigmoid",
        lambda logits, named, k: binary_cross_entropy_with_logits(
            logits, one_hot(named, CLASSES).to(logits.dtype), reduction="none"
        ).sum(-1),
        _sigmoid,
    ),
    Method(
        "truncated entropy",
        "cross-entropy that forgives the k - 1 strongest competitors; p is the softmax",
        lambda logits, named, k: torchlml.truncated_entropy_loss(logits, named, k, reduction="none"),
        _softmax,
    ),
    Method(
        "LML",
        "likelihood of the named label under the projection that sums to k; p is the projection",
        lambda logits, named, k: torchlml.lml_loss(logits, named, k, reduction="none"),
        lambda logits, k: torchlml.lml(logits, k),
    ),
)


def train(
    method: Method,
    sets: Sequence[Images],
    seeds: Sequence[int],
    k: int,
    epochs: int,
    step: Callable[[], None],
) -> list[Tensor]:
    """Trains one network per data set with one loss.

    Args:
        method: The loss.
        sets: The training images of each data set, all of one size.
        seeds: The seed of each: it decides the first weights and the order of the batches.
        k: How many digits an image shows.
        epochs: How often each image is seen.
        step: Called after every epoch.

    Returns:
        The stacked weights: (sets, inputs, hidden), (sets, 1, hidden), (sets, hidden, 10), (sets, 1, 10).
    """
    x = torch.stack([images.pixels.flatten(1) for images in sets])
    named = torch.stack([images.named for images in sets])
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    weights = [weight.requires_grad_() for weight in _first_weights(generators, x.shape[2])]
    optimizer = torch.optim.Adam(weights, lr=LEARNING_RATE)
    count = x.shape[1]
    row = torch.arange(len(sets)).unsqueeze(1)
    for _ in range(epochs):
        order = torch.stack([torch.randperm(count, generator=generator) for generator in generators])
        for start in range(0, count, BATCH):
            batch = order[:, start : start + BATCH]
            loss = method.loss(
                logits_of(weights, x[row, batch]).flatten(0, 1), named[row, batch].flatten(), k
            )
            optimizer.zero_grad()
            # The mean of each network's own batch: the networks do not feel one another.
            (loss.sum() / batch.shape[1]).backward()
            optimizer.step()
        step()
    return [weight.detach() for weight in weights]


def logits_of(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """The logits (sets, rows, 10) of the stacked networks for their inputs (sets, rows, inputs)."""
    first, first_bias, second, second_bias = weights
    hidden = torch.baddbmm(first_bias, x, first).relu()
    return torch.baddbmm(second_bias, hidden, second)


def _first_weights(generators: Sequence[torch.Generator], inputs: int) -> list[Tensor]:
    first = torch.stack([torch.randn(inputs, HIDDEN, generator=generator) for generator in generators])
    second = torch.stack([torch.randn(HIDDEN, CLASSES, generator=generator) for generator in generators])
    number = len(generators)
    return [
        first * (2 / inputs) ** 0.5,
        torch.zeros(number, 1, HIDDEN),
        second * (1 / HIDDEN) ** 0.5,
        torch.zeros(number, 1, CLASSES),
    ]
