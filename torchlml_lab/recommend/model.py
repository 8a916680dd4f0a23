"""The networks that score items for users, and a trained run read back."""

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
    """The scores of users and all items, as the linear layer that gives them."""

    hidden: Tensor
    """(R, d), the users."""
    weight: Tensor
    """(n, d), the items."""
    bias: Tensor
    """(n,)."""

    def scores(self) -> Tensor:
        """(R, n)."""
        return linear(self.hidden, self.weight, self.bias)


class MatrixFactorisation(nn.Module):
    """A vector for every user and every item; a score is their cosine divided by a temperature.

    Args:
        users: How many there are.
        items: How many there are.
        dimension: Of the vectors.
        temperature: More than 0; the published models use about 0.1.
        level: What is added to all scores at first: the logit of the mean share of the items that a user has.
            lml and softmax do not see it; bce would need an epoch or more to find it.
    """

    def __init__(self, users: int, items: int, dimension: int, temperature: float, level: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.level = nn.Parameter(torch.tensor(level))
        self.user = nn.Parameter(torch.randn(users, dimension) * 0.1)
        self.item = nn.Parameter(torch.randn(items, dimension) * 0.1)

    def forward(self, users: Tensor, history: Tensor) -> Factors:
        """The factors of users by their numbers (R,); their history is not looked at."""
        hidden, weight = normalize(self.user[users]) / self.temperature, normalize(self.item)
        return Factors(hidden, weight, self.level.expand(len(weight)))


class Autoencoder(nn.Module):
    """The items of a user through one hidden layer to a score for every item, as in Mult-DAE.

    Args:
        items: How many there are.
        dimension: Of the hidden layer.
        dropout: The share of a user's items that is left out of the input in training.
        level: Of all scores at first, as for `MatrixFactorisation`.

    Any history can be encoded, also that of a user who was not there in training.
    """

    def __init__(self, items: int, dimension: int, dropout: float, level: float) -> None:
        super().__init__()
        self.dropout = dropout
        # The input has length 1 whatever the number of its items, so its rows are drawn as those of an
        # embedding, and the output's as those of a linear layer.
        self.encoder = nn.Parameter(torch.randn(items, dimension) / dimension**0.5)
        self.encoder_bias = nn.Parameter(torch.zeros(dimension))
        self.decoder = nn.Parameter(torch.randn(items, dimension) / dimension)
        self.decoder_bias = nn.Parameter(torch.full((items,), level))

    def forward(self, users: Tensor, history: Tensor) -> Factors:
        """The factors of histories (R, L), filled up with `PADDING`; who the users are does not matter."""
        there = history != PADDING
        counts = there.sum(-1)
        starts = counts.cumsum(0) - counts
        share = counts.clamp(min=1).to(self.encoder.dtype).rsqrt().repeat_interleave(counts)
        share = dropout(share, self.dropout, self.training)
        summed = embedding_bag(history[there], self.encoder, starts, mode="sum", per_sample_weights=share)
        return Factors(torch.tanh(summed + self.encoder_bias), self.decoder, self.decoder_bias)


EXPERIMENT = "recommend"


def network(settings: RecommendSettings, data: Data) -> nn.Module:
    """The network of a run, with its first weights, and with a number that tells its data from others."""
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
    """A run, ready to recommend."""

    run: Path
    settings: RecommendSettings
    data: Data
    model: nn.Module
    epoch: int


def load(run: Path, moved: dict[str, Path | None], with_test: bool = True) -> TrainedRecommender:
    """Read a run back.

    Args:
        run: Its folder.
        moved: Where `train` and `test` are now; None where nothing has moved.
        with_test: Whether the test's file is needed; without it, it may be gone.

    Returns:
        The run. Data that are nowhere, or not those it was trained on, raise `BadInput`.
    """
    best = run_directory.find_best_epoch(EXPERIMENT, run)
    settings = run_directory.read_moved(RecommendSettings, run, moved)
    data = read(settings if with_test or settings.test is None else dataclasses.replace(settings, test=None))
    model = network(settings, data)
    best.load(model)
    if int(model.get_buffer("fingerprint")) != data.fingerprint:
        raise BadInput(f"The run `{run}` was trained on other data than `{settings.train}` holds now.")
    return TrainedRecommender(run, settings, data, model, best.epoch)
