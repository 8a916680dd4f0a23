"""`torchlml train recommend`, and `evaluate` and `step-time` for its runs."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import send_to_device
from rich.console import Console
from torch import Tensor, nn

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.interactions import is_table
from torchlml_lab.engine import loop, run_directory
from torchlml_lab.engine.loop import Task
from torchlml_lab.engine.output import ProgressBar, new_console, plain_table
from torchlml_lab.engine.run import say, train_on_files
from torchlml_lab.engine.settings import check as check_settings
from torchlml_lab.files import check_folder
from torchlml_lab.multilabel.losses import LabelLoss, loss_with_usual_k
from torchlml_lab.multilabel.settings import LossName
from torchlml_lab.recommend.histories import Batch, Data, Users, by_popularity, read, read_later
from torchlml_lab.recommend.model import EXPERIMENT, TrainedRecommender, load, network
from torchlml_lab.recommend.ranking import KS, calibration, measures, of_network
from torchlml_lab.recommend.settings import EvaluateSettings, LossTimesSettings, RecommendSettings

CHOSEN_BY = "recall@20"
PRINTED = (CHOSEN_BY, "ndcg@20")


def main(settings: RecommendSettings) -> None:
    """Train a model, then print and plot its metrics next to a popularity baseline."""
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


ROWS = 1024
PICTURE = "report.png"


def evaluate(settings: EvaluateSettings) -> None:
    """Evaluate a run and print its tables."""
    out = settings.out or settings.run
    if settings.data is not None and settings.split is not None:
        raise BadInput("`--split` cannot be combined with `--data`.")
    check_folder("--out", out)
    own = settings.data is not None
    moved = {"train": settings.train} if own else {"train": settings.train, "test": settings.test}
    trained = load(settings.run, moved, with_test=not own)
    console = new_console()
    if settings.data is None:
        users, what = _of_split(trained, settings.split)
    else:
        have = trained.data.everything
        later, notes = read_later(settings.data, "--data", trained.settings.columns, have)
        users, what = Users(have, later), str(settings.data)
        say(notes, console)
    report(trained, users, what, out, Accelerator(cpu=settings.cpu), console)


def report_run(run: Path, console: Console) -> None:
    """Report on a finished run: on the test users if it has a test file, or else on the validation users."""
    trained = load(run, {})
    report(trained, *_of_split(trained, None), run, Accelerator(cpu=trained.settings.cpu), console)


def _of_split(trained: TrainedRecommender, split: str | None) -> tuple[Users, str]:
    """The users of a split and its name; by default the test split, if there is one."""
    splits = trained.data.splits
    name = split or list(splits)[-1]
    if name not in splits:
        raise BadInput("`--split test` requires a run that was trained with `--test`.")
    return splits[name], name


def report(
    trained: TrainedRecommender,
    users: Users,
    what: str,
    folder: Path,
    accelerator: Accelerator,
    console: Console,
) -> None:
    """Print the metrics of a run next to a popularity baseline, and plot recall and calibration.

    Args:
        trained: The run.
        users: The users with their histories and the items to find.
        what: The name of these users.
        folder: The directory of the plot.
        accelerator: Determines the device; only this process computes.
        console: The console to print to.
    """
    from torchlml_lab import plots  # imports matplotlib, which training does not need

    scores = {
        str(loss_with_usual_k(trained.settings.loss, trained.settings.k)): of_network(
            trained.model.to(accelerator.device)
        ),
        "popular items": by_popularity(trained.data.training),
    }
    with torch.no_grad(), ProgressBar(console) as progress:
        bar = progress.add_task("users", total=(len(scores) + 1) * len(users))

        def batches() -> Iterator[Batch]:
            for rows in torch.arange(len(users)).split(ROWS):
                yield send_to_device(users.__getitems__(rows.tolist()), accelerator.device)
                progress.advance(bar, len(rows))

        found = {name: measures(score, batches(), None, KS) for name, score in scores.items()}
        mean = len(users.labels) / len(users)
        bins = calibration(next(iter(scores.values())), batches(), mean)
    model, popular = (100 * values["recall@20"] for values in found.values())
    say(
        [
            f"Recall@20 is {model:.2f}% on {len(users)} users ({what}); recommending the most popular items "
            f"reaches {popular:.2f}%.",
            f"Model: {trained.settings.model}, epoch {trained.epoch}. All values are in percent.",
        ],
        console,
    )
    for measure in ("recall", "precision", "ndcg"):
        table = plain_table("", (measure, *(f"@{k}" for k in KS)))
        for name, values in found.items():
            table.add_row(name, *(f"{100 * values[f'{measure}@{k}']:.2f}" for k in KS))
        console.print(table)
    recalls = {name: {k: values[f"recall@{k}"] for k in KS} for name, values in found.items()}
    plots.draw_recall_and_calibration(
        recalls, bins, folder / PICTURE, title=f"Recall of {len(users)} users", rare=True
    )
    console.print(
        f"The run is in {trained.run}. Recall and calibration are plotted in {folder / PICTURE}.",
        soft_wrap=True,
        highlight=False,
    )
