"""`torchlml train recommend` and `step-time`: the networks, a run from files, and a run read back."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import tyro
from accelerate import Accelerator, PartialState
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import dropout, embedding_bag, linear, normalize

from torchlml_lab.cli import parse_settings
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine import run_directory, step_times
from torchlml_lab.engine.loop import Task
from torchlml_lab.engine.run import train_on_files
from torchlml_lab.engine.settings import read_settings
from torchlml_lab.multilabel.losses import PADDING, LabelLoss, LossName
from torchlml_lab.recommend.histories import Batch, Data, Users, read
from torchlml_lab.recommend.ranking import KS, measures, of_network
from torchlml_lab.recommend.settings import RecommendSettings, check, loss_of


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
COMMAND = f"train {EXPERIMENT}"
CHOSEN_BY = "recall@20"
PRINTED = (CHOSEN_BY, "ndcg@20")


def main(arguments: Sequence[str]) -> None:
    """Read the options, train, and print and draw the measures beside those of the popular items."""
    from torchlml_lab.recommend.report import report_run

    settings = read_settings(RecommendSettings, COMMAND, arguments, RecommendSettings())
    console = Console()
    run(settings, console)
    if PartialState().is_main_process:
        report_run(settings.resume or settings.out, console)


def run(settings: RecommendSettings, console: Console) -> dict[str, Any]:
    """Train with these settings; what cannot be done raises `BadInput` before anything is written."""
    check(settings)
    return train_on_files(EXPERIMENT, settings, read, task, _introduction, console)


def _introduction(settings: RecommendSettings, data: Data) -> list[str]:
    """What was read and what was chosen, in sentences."""
    training, loss = data.training, loss_of(settings)
    users = int((training.counts > 0).sum())
    said = (
        f"{users} users with {len(training) / users:.1f} of {len(training.items)} items each; for validation "
        f"{len(data.validation)} items of {len(data.splits['validation'])} users are set aside. "
        f"Trained with the loss {loss}."
    )
    return [*data.notes, said]


def task(settings: RecommendSettings, data: Data) -> Task:
    """The task of one run; the seed must be set before, since it makes the network."""
    model = network(settings, data)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, fused=True)
    loss = loss_of(settings)

    def measure(network: nn.Module, batches: Iterable[Batch], accelerator: Accelerator) -> dict[str, float]:
        return measures(of_network(network), batches, accelerator, KS)

    return Task(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0),
        training=Users(data.training, data.training),
        held_out=data.splits,
        loss=lambda network, batch: batch_loss(loss, network, batch),
        measure=measure,
        chosen_by=CHOSEN_BY,
        printed=PRINTED,
        patience=settings.patience,
    )


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


def batch_loss(loss: LabelLoss, network: nn.Module, batch: Batch) -> Tensor:
    """The mean loss over the users of a batch."""
    factors = network(batch.users, batch.history)
    return loss(factors.scores().float(), batch.labels)


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


LOSSES: tuple[LossName, ...] = ("softmax", "lml", "bce", "truncated-entropy")


@dataclass(frozen=True)
class LossTimesSettings(step_times.StepTimeSettings):
    """Time whole training steps of all losses in turns, on the same users, with the settings of a run."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/recommend")
    """The folder of the run."""
    train: Path | None = None
    """The training data, where they have moved."""


def step_time(arguments: Sequence[str]) -> None:
    """Read the options, time, and print a table."""
    settings = parse_settings(LossTimesSettings, "step-time", arguments, LossTimesSettings())
    run = replace(
        run_directory.read_moved(RecommendSettings, settings.run, {"train": settings.train}),
        k=None,
        test=None,
    )
    size = step_times.checked_size(settings, run.batch_size)
    data = read(run)
    what = f"users and {len(data.training.items)} items, {run.model}"
    step_times.compare(LOSSES, lambda loss: task(replace(run, loss=loss), data), settings, size, what)
