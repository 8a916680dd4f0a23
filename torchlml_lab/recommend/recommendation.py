"""`torchlml train recommend`: learn from who has what which items each user takes next."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from rich.console import Console
from torch import Tensor, nn

from torchlml_lab.engine.loop import Task
from torchlml_lab.engine.settings import read_settings
from torchlml_lab.recommend.full_ranking import KS, measures, of_network
from torchlml_lab.recommend.histories import Batch, Users
from torchlml_lab.recommend.recommend_settings import RecommendSettings, check, loss_of
from torchlml_lab.recommend.recommenders import Autoencoder, MatrixFactorisation
from torchlml_lab.recommend.user_items import Data, read
from torchlml_lab.screen import new_console
from torchlml_lab.tasks.label_losses import LabelLoss
from torchlml_lab.tasks.own_files import train_on_files

EXPERIMENT = "recommend"
COMMAND = f"train {EXPERIMENT}"
CHOSEN_BY = "recall@20"
PRINTED = (CHOSEN_BY, "ndcg@20")


def main(arguments: Sequence[str]) -> None:
    """Read the options, train, and print and draw the measures beside those of the popular items."""
    from torchlml_lab.recommend.ranking_report import report_run

    settings = read_settings(RecommendSettings, COMMAND, arguments, RecommendSettings())
    console = new_console()
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
