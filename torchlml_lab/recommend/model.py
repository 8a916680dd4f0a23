"""The networks that score items for users, and trained runs loaded from disk."""

import dataclasses
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, embedding_bag, linear, normalize

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine import run_directory
from torchlml_lab.multilabel.losses import PADDING
from torchlml_lab.recommend.histories import Data, read
from torchlml_lab.recommend.settings import RecommendSettings


class Factors(NamedTuple):
    """The scores of users for all items, as the factors of a linear layer."""

    hidden: Tensor
    """(R, d), one vector per user."""
    weight: Tensor
    """(n, d), one vector per item."""
    bias: Tensor
    """(n,)."""

    def scores(self) -> Tensor:
        """The score of every item, (R, n)."""
        return linear(self.hidden, self.weight, self.bias)


class MatrixFactorisation(nn.Module):
    """A vector for every user and item; the score is their cosine divided by a temperature.

    Args:
        users: The number of users.
        items: The number of items.
        dimension: The dimension of the vectors.
        temperature: Positive; published models use about 0.1.
        level: The initial value added to all scores: the log-odds of a random item. It does not affect lml
            and softmax, but bce would need at least an epoch to learn it.
    """

    def __init__(self, users: int, items: int, dimension: int, temperature: float, level: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.level = nn.Parameter(torch.tensor(level))
        self.user = nn.Parameter(torch.randn(users, dimension) * 0.1)
        self.item = nn.Parameter(torch.randn(items, dimension) * 0.1)

    def forward(self, users: Tensor, history: Tensor) -> Factors:
        """The factors of users by index (R,); `history` is not used."""
        hidden, weight = normalize(self.user[users]) / self.temperature, normalize(self.item)
        return Factors(hidden, weight, self.level.expand(len(weight)))


class Autoencoder(nn.Module):
    """An autoencoder with one hidden layer that maps a user's items to a score for every item, like Mult-DAE.

    Args:
        items: The number of items.
        dimension: The size of the hidden layer.
        dropout: The share of a user's items that is dropped from the input in training.
        level: The initial value of all scores, as for `MatrixFactorisation`.

    It encodes any history, including those of users who are not in the training data.
    """

    def __init__(self, items: int, dimension: int, dropout: float, level: float) -> None:
        super().__init__()
        self.dropout = dropout
        # The input has norm 1 for any number of items, so the encoder is initialized like an embedding and
        # the decoder like a linear layer.
        self.encoder = nn.Parameter(torch.randn(items, dimension) / dimension**0.5)
        self.encoder_bias = nn.Parameter(torch.zeros(dimension))
        self.decoder = nn.Parameter(torch.randn(items, dimension) / dimension)
        self.decoder_bias = nn.Parameter(torch.full((items,), level))

    def forward(self, users: Tensor, history: Tensor) -> Factors:
        """The factors of histories (R, L), padded with `PADDING`; `users` is not used."""
        there = history != PADDING
        counts = there.sum(-1)
        starts = counts.cumsum(0) - counts
        share = counts.clamp(min=1).to(self.encoder.dtype).rsqrt().repeat_interleave(counts)
        share = dropout(share, self.dropout, self.training)
        summed = embedding_bag(history[there], self.encoder, starts, mode="sum", per_sample_weights=share)
        return Factors(torch.tanh(summed + self.encoder_bias), self.decoder, self.decoder_bias)


EXPERIMENT = "recommend"


def network(settings: RecommendSettings, data: Data) -> nn.Module:
    """A newly initialized network with a buffer that identifies its training data."""
    training = data.training
    users, items = len(training.users), len(training.items)
    level = math.log(len(training) / (int((training.counts > 0).sum()) * items))
    model: nn.Module
    if settings.model == "autoencoder":
        model = Autoencoder(items, settings.dimension, settings.dropout, level)
    else:
        model = MatrixFactorisation(users, items, settings.dimension, settings.temperature, level)
    model.register_buffer("fingerprint", torch.tensor(data.fingerprint))
    return model


class TrainedRecommender(NamedTuple):
    """A trained run with its data."""

    run: Path
    settings: RecommendSettings
    data: Data
    model: nn.Module
    epoch: int


def load(run: Path, moved: dict[str, Path | None], with_test: bool = True) -> TrainedRecommender:
    """Load a run.

    Args:
        run: The run directory.
        moved: The current paths of `train` and `test`, or None if they have not moved.
        with_test: Whether to read the test file; otherwise it may be missing.

    Returns:
        The run. Missing data, or data that differ from those in training, raise `BadInput`.
    """
    best = run_directory.find_best_epoch(EXPERIMENT, run)
    settings = run_directory.read_moved(RecommendSettings, run, moved)
    data = read(settings if with_test or settings.test is None else dataclasses.replace(settings, test=None))
    model = network(settings, data)
    best.load(model)
    if int(model.get_buffer("fingerprint")) != data.fingerprint:
        raise BadInput(f"The run `{run}` was trained on data that differ from `{settings.train}`.")
    return TrainedRecommender(run, settings, data, model, best.epoch)
