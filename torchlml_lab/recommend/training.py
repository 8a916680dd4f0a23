"""`torchlml train recommend`, and `torchlml step-time` for recommendation runs."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from rich.console import Console
from torch import Tensor, nn

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.interactions import is_table
from torchlml_lab.engine import loop, run_directory
from torchlml_lab.engine.loop import Task
from torchlml_lab.engine.output import new_console
from torchlml_lab.engine.run import train_on_files
from torchlml_lab.engine.settings import check as check_settings
from torchlml_lab.multilabel.losses import LabelLoss, loss_with_usual_k
from torchlml_lab.multilabel.settings import LossName
from torchlml_lab.recommend.histories import Batch, Data, Users, read
from torchlml_lab.recommend.model import EXPERIMENT, network
from torchlml_lab.recommend.ranking import KS, measures, of_network
from torchlml_lab.recommend.settings import LossTimesSettings, RecommendSettings

CHOSEN_BY = "recall@20"
PRINTED = (CHOSEN_BY, "ndcg@20")


def main(settings: RecommendSettings) -> None:
    """Train a model, then print and plot its metrics next to a popularity baseline."""
    from torchlml_lab.recommend.report import report_run

    console = new_console()
    run(settings, console)
    if PartialState().is_main_process:
        report_run(settings.resume or settings.out, console)


def run(settings: RecommendSettings, console: Console) -> dict[str, Any]:
    """Train with these settings; raise `BadInput` for invalid ones before any file is written."""
    check(settings)
    return train_on_files(EXPERIMENT, settings, read, task, _introduction, console)


def _introduction(settings: RecommendSettings, data: Data) -> list[str]:
    """Sentences about the data and the loss."""
    training, loss = data.training, loss_with_usual_k(settings.loss, settings.k)
    users = int((training.counts > 0).sum())
    said = (
        f"{users} training users with {len(training) / users:.1f} of {len(training.items)} items on average; "
        f"{len(data.validation)} items of {len(data.splits['validation'])} users held out for validation. "
        f"Training with the loss `{loss}`."
    )
    return [*data.notes, said]


def task(settings: RecommendSettings, data: Data) -> Task:
    """The task of one run. Set the seed before the call, because it initializes the network."""
    model = network(settings, data)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, fused=True)
    loss = loss_with_usual_k(settings.loss, settings.k)

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


def batch_loss(loss: LabelLoss, network: nn.Module, batch: Batch) -> Tensor:
    """The mean loss over the users of a batch."""
    factors = network(batch.users, batch.history)
    return loss(factors.scores().float(), batch.labels)


LOSSES: tuple[LossName, ...] = ("softmax", "lml", "bce", "truncated-entropy")


def step_time(settings: LossTimesSettings) -> None:
    """Time the training steps of all losses and print a table."""
    run = replace(
        run_directory.read_moved(RecommendSettings, settings.run, {"train": settings.train}),
        k=None,
        test=None,
    )
    size = loop.checked_size(settings, run.batch_size)
    data = read(run)
    what = f"users and {len(data.training.items)} items, {run.model}"
    loop.compare_steps(LOSSES, lambda loss: task(replace(run, loss=loss), data), settings, size, what)


def check(settings: RecommendSettings) -> None:
    """Raise `BadInput` for invalid settings."""
    check_settings(settings)
    if settings.train is None:
        raise BadInput("`--train` is missing: pass a file of users and their items.")
    if settings.columns is not None and not any(map(is_table, filter(None, (settings.train, settings.test)))):
        raise BadInput(
            "`--columns` applies to CSV, TSV and .inter, but the lines of "
            f"`{settings.train}` are `user item item ...`."
        )
    loss_with_usual_k(settings.loss, settings.k)
    for name in ("dimension", "patience", "validation", "users"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise BadInput(f"`--{name}` must be at least 1, but it is {value}.")
    if not 0 < settings.temperature < float("inf"):
        raise BadInput(f"`--temperature` must be finite and positive, but it is {settings.temperature}.")
    if not 0 <= settings.dropout < 1:
        raise BadInput(f"`--dropout` must be at least 0 and less than 1, but it is {settings.dropout}.")
