"""`torchlml train recommend`, and `torchlml evaluate` and `torchlml step-time` for its runs."""

import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import send_to_device
from rich.console import Console
from torch import Tensor, nn

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.interactions import Interactions, is_table
from torchlml_lab.engine import loop, run_directory
from torchlml_lab.engine.loop import Task
from torchlml_lab.engine.output import ProgressBar, new_console, plain_table
from torchlml_lab.engine.run import say, train, train_on_files
from torchlml_lab.engine.run_directory import RunFolder, locked
from torchlml_lab.engine.settings import check as check_settings
from torchlml_lab.engine.sweep import resuming
from torchlml_lab.files import check_folder
from torchlml_lab.multilabel.losses import LabelLoss, loss_with_usual_k
from torchlml_lab.multilabel.settings import AnyLossName
from torchlml_lab.recommend import item_weights
from torchlml_lab.recommend.histories import Batch, Data, Users, by_popularity, read, read_later
from torchlml_lab.recommend.model import (
    CHOICE,
    EXPERIMENT,
    Factors,
    Mixture,
    TrainedRecommender,
    choose,
    load,
    load_network,
    network,
)
from torchlml_lab.recommend.ranking import KS, ROWS, calibration, fit_scale, measures, of_network
from torchlml_lab.recommend.settings import (
    Candidate,
    ClosedForm,
    EvaluateSettings,
    LossTimesSettings,
    RecommendSettings,
)

CANDIDATES: tuple[Candidate, ...] = get_args(Candidate)
CLOSED_FORM: tuple[ClosedForm, ...] = get_args(ClosedForm)
WITHOUT_LOSS = ("auto", *CLOSED_FORM)


class Recipe(NamedTuple):
    """A model's defaults for settings that are not given."""

    loss: AnyLossName
    batch_size: int
    learning_rate: float


RECIPES: dict[str, Recipe] = {
    # For these two models, only the batch size is used, and only in evaluation.
    "ease": Recipe("softmax", 128, 1.0),
    "graph-filter": Recipe("softmax", 128, 1.0),
    "autoencoder": Recipe("lml", 128, 0.006),
    "matrix-factorization": Recipe("bce", 128, 0.02),
}
WITH_LAYERS = Recipe("lml", 512, 0.02)  # fewer, larger batches, because every step traverses the graph
SMALLEST_BATCH = 32
CHOSEN_BY = "recall@20"
PRINTED = (CHOSEN_BY, "ndcg@20")


def main(settings: RecommendSettings) -> None:
    """Train a model, then print and plot its metrics next to those of a popularity baseline."""
    console = new_console()
    run(settings, console)
    if PartialState().is_main_process:
        report_run(settings.resume or settings.out, console)


def run(settings: RecommendSettings, console: Console) -> dict[str, Any]:
    """Train with these settings. Invalid settings raise `BadInput` before any file is written."""
    check(settings)
    if settings.model == "auto":
        return train_all(settings, read, console)
    data = read(settings)
    own = completed(settings, len(Users(data.training, data.training)))
    return train_on_files(EXPERIMENT, own, lambda _: data, task, _introduction, console)


def completed(settings: RecommendSettings, users: int | None = None) -> RecommendSettings:
    """Return the settings with a single model's defaults for options that are not given.

    With few `users`, the default batches of matrix factorization are smaller, so that an epoch has enough
    steps.
    """
    factorization = settings.model == "matrix-factorization"
    recipe = WITH_LAYERS if factorization and settings.layers else RECIPES[settings.model]
    size = recipe.batch_size
    if factorization:
        while users is not None and size > SMALLEST_BATCH and 16 * size > users:
            size //= 2
    return replace(
        settings,
        loss=settings.loss or (recipe.loss if settings.k is None else "lml"),
        batch_size=settings.batch_size or size,
        learning_rate=settings.learning_rate or recipe.learning_rate,
    )


def loss_of(settings: RecommendSettings) -> LabelLoss:
    """Return the loss for a run with a single model."""
    name = completed(settings).loss
    assert name is not None
    return loss_with_usual_k(name, settings.k)


def train_all(
    settings: RecommendSettings, read: Callable[[RecommendSettings], Data], console: Console
) -> dict[str, Any]:
    """Train each model that fits in memory in its own subdirectory, then choose the weights of the models.

    Args:
        settings: The settings of the run.
        read: Returns the data, which all models share.
        console: The console for progress and results.

    Returns:
        The content of `result.json`, as for a single model. `seconds` is the total over all models.
    """
    folder = RunFolder(settings.resume or settings.out, EXPERIMENT)
    main = PartialState(cpu=settings.cpu).is_main_process
    with ExitStack() as held:
        if settings.resume is not None:
            folder.check()
            if (folder.path / "result.json").exists():
                return folder.result()
        elif main:
            check_folder("--out", folder.path)
            folder.check_free(settings.overwrite)
        data = read(settings)
        for name in CANDIDATES:
            loss_of(replace(settings, model=name)).check_labels(len(data.training.items))
        if main:
            folder.path.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(folder.path))
            if settings.resume is None:
                for name in CANDIDATES if settings.overwrite else ():
                    shutil.rmtree(folder.path / name, ignore_errors=True)
                (folder.path / CHOICE).unlink(missing_ok=True)
                folder.create(settings, {})
            say(_introduction(settings, data), console)
        results: dict[Candidate, dict[str, Any]] = {}
        for name in CANDIDATES:
            why = _lacks_memory(name, data.training)
            if why is None or (folder.path / name / "run.json").exists():
                results[name] = _train_one(settings, name, folder.path, data, console)
            elif main:
                say([f"`{name}` is left out, because {why}."], console)
        if main:
            _choose(settings, results, folder, data, console)
        PartialState().wait_for_everyone()
    return folder.result()


def _lacks_memory(name: Candidate, training: Interactions) -> str | None:
    """Return the reason why a model does not fit in memory, or None if it does."""
    if name not in CLOSED_FORM:
        return None
    needed = item_weights.memory_needed(name, int((training.counts > 0).sum()), len(training.items))
    available = item_weights.memory_available()
    if needed > available:
        return f"it needs {needed / 1e9:,.1f} GB of memory, but {available / 1e9:,.1f} GB is available"
    return None


def _train_one(
    settings: RecommendSettings, name: Candidate, folder: Path, data: Data, console: Console
) -> dict[str, Any]:
    own = replace(settings, model=name, out=folder / name, resume=None, overwrite=False)
    own = completed(own, len(Users(data.training, data.training)))
    if PartialState().is_main_process:
        said = "" if name in CLOSED_FORM else f" with the loss `{loss_of(own)}`"
        say([f"Training `{name}`{said}."], console)
    try:
        return train(EXPERIMENT, resuming(own), lambda: task(own, data), console)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"Interrupted while training `{name}`. Resume the run with `torchlml train {EXPERIMENT} --resume "
            f"{folder}`."
        ) from None


def _choose(
    settings: RecommendSettings,
    results: Mapping[Candidate, dict[str, Any]],
    folder: RunFolder,
    data: Data,
    console: Console,
) -> None:
    """Choose the weights of the models on the validation users, and write the choice and its metrics."""
    models: dict[str, nn.Module] = {}
    for name in results:
        own = completed(replace(settings, model=name))
        models[name] = load_network(folder.path / name, own, data)[0]
    splits = data.splits
    with torch.no_grad():
        choice = choose(models, splits["validation"], CHOSEN_BY)
        model = Mixture({name: models[name] for name in choice.factors}, choice.factors).eval()
        found = {
            name: measures(of_network(model), users.batches(ROWS), None, KS) for name, users in splits.items()
        }
    largest = max(results, key=lambda name: choice.weights.get(name, 0.0))
    folder.write(CHOICE, asdict(choice))
    result = {
        "best_epoch": results[largest]["best_epoch"],
        "validation": found["validation"],
        "test": found.get("test", {}),
        "seconds": sum(one["seconds"] for one in results.values()),
    }
    folder.write("result.json", result)
    say([choice.in_words()], console)


def _introduction(settings: RecommendSettings, data: Data) -> list[str]:
    """Return sentences about the data and the loss, to print before training."""
    training = data.training
    users = int((training.counts > 0).sum())
    said = (
        f"The {users} training users have {len(training) / users:.1f} of {len(training.items)} items on "
        f"average. {len(data.validation)} items of {len(data.splits['validation'])} users are held out for "
        "validation."
    )
    if settings.model in ("autoencoder", "matrix-factorization"):
        said += f" The loss is `{loss_of(settings)}`."
    return [*data.notes, said]


def task(settings: RecommendSettings, data: Data) -> Task:
    """Build the task for a run. This initializes the network, so set the random seed before the call."""
    settings = completed(settings)
    model = network(settings, data)
    fitted = _fit(model, settings, data) if settings.model in CLOSED_FORM else None
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
        fitted=fitted,
    )


def batch_loss(loss: LabelLoss, network: nn.Module, batch: Batch) -> Tensor:
    """Compute the mean loss over the users of a batch, all of whom have items."""
    factors: Factors = network(batch.users, batch.history)
    return loss.of_factors(factors.hidden, factors.weight, factors.bias, batch.labels)


def _fit(model: nn.Module, settings: RecommendSettings, data: Data) -> float:
    """Fit a closed-form model, and return the elapsed seconds."""
    started, users = time.monotonic(), data.splits["validation"]

    @torch.no_grad()
    def recall(one: item_weights.ItemWeights) -> float:
        return measures(of_network(one), users.batches(ROWS), None, (20,))[CHOSEN_BY]

    if settings.model == "ease":
        fitted, _ = item_weights.fit_ease(data.training, settings.penalty, recall)
    else:
        fitted, _ = item_weights.fit_graph_filter(data.training, recall)
    with torch.no_grad():
        fitted.scale.fill_(fit_scale(of_network(fitted), users))
    model.load_state_dict(fitted.state_dict(), strict=False)  # `fitted` lacks the fingerprint of the data
    return time.monotonic() - started


LOSSES: tuple[AnyLossName, ...] = ("softmax", "lml", "bce", "truncated-entropy", "topk-softmax")


def step_time(settings: LossTimesSettings) -> None:
    """Time training steps with each loss, and print a table."""
    run = replace(
        run_directory.read_moved(RecommendSettings, settings.run, {"train": settings.train}),
        k=None,
        test=None,
    )
    if run.model in WITHOUT_LOSS:
        raise BadInput(
            f"The model of `{settings.run}` is `{run.model}`, which has no training steps to time."
            + (f" Pass `{settings.run / 'autoencoder'}` instead." if run.model == "auto" else "")
        )
    size = loop.checked_size(settings, run.batch_size)
    data = read(run)
    what = f"users ({len(data.training.items)} items, {run.model})"
    loop.compare_steps(LOSSES, lambda loss: task(replace(run, loss=loss), data), settings, size, what)


def check(settings: RecommendSettings) -> None:
    """Raise `BadInput` for invalid settings."""
    models = CANDIDATES if settings.model == "auto" else (settings.model,)
    for model in models:
        check_settings(completed(replace(settings, model=model)))
    if settings.train is None:
        raise BadInput("`--train` is missing. Pass a file of users and their items.")
    if settings.columns is not None and not any(map(is_table, filter(None, (settings.train, settings.test)))):
        raise BadInput(
            "`--columns` applies to CSV, TSV and .inter files, but the lines of "
            f"`{settings.train}` are `user item item ...`."
        )
    if settings.min_rating is not None and not is_table(settings.train):
        raise BadInput(
            f"`--min-rating` requires a CSV, TSV or .inter file, but `--train` is `{settings.train}`."
        )
    if settings.min_rating is not None and math.isnan(settings.min_rating):
        raise BadInput(f"`--min-rating` must be a number, but it is {settings.min_rating}.")
    for model in models:
        loss_of(replace(settings, model=model))
    for option in ("dimension", "patience", "validation", "users"):
        value = getattr(settings, option)
        if value is not None and value < 1:
            raise BadInput(f"`--{option}` must be at least 1, but it is {value}.")
    if not 0 < settings.temperature < float("inf"):
        raise BadInput(f"`--temperature` must be finite and positive, but it is {settings.temperature}.")
    if settings.layers < 0:
        raise BadInput(f"`--layers` must be at least 0, but it is {settings.layers}.")
    if settings.penalty is not None and not 0 < settings.penalty < float("inf"):
        raise BadInput(f"`--penalty` must be finite and positive, but it is {settings.penalty}.")
    if not 0 <= settings.dropout < 1:
        raise BadInput(f"`--dropout` must be at least 0 and less than 1, but it is {settings.dropout}.")


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
        later, notes = read_later(settings.data, "--data", trained.settings, have)
        users, what = Users(have, later), str(settings.data)
        say(notes, console)
    report(trained, users, what, out, Accelerator(cpu=settings.cpu), console)


def report_run(run: Path, console: Console) -> None:
    """Report the metrics of a finished run on its test users if it has any, or else on validation users."""
    trained = load(run, {})
    report(trained, *_of_split(trained, None), run, Accelerator(cpu=trained.settings.cpu), console)


def _of_split(trained: TrainedRecommender, split: str | None) -> tuple[Users, str]:
    """Return the users and the name of a split. The default is `test` or, without one, `validation`."""
    splits = trained.data.splits
    name = split or list(splits)[-1]
    if name not in splits:
        raise BadInput("`--split test` requires a run that was created with `--test`.")
    return splits[name], name


def report(
    trained: TrainedRecommender,
    users: Users,
    what: str,
    folder: Path,
    accelerator: Accelerator,
    console: Console,
) -> None:
    """Print the metrics of a run and of a popularity baseline, and plot recall and calibration.

    Args:
        trained: The run.
        users: The users with their histories and the items to predict.
        what: A description of these users, to be printed.
        folder: The directory to write the plot to.
        accelerator: Provides the device. All computations run in the current process.
        console: The console to print to.
    """
    from torchlml_lab import plots  # imports matplotlib, which training does not need

    own = trained.settings.model
    name = own if own in WITHOUT_LOSS else str(loss_of(trained.settings))
    scores = {
        name: of_network(trained.model.to(accelerator.device)),
        "popular items": by_popularity(trained.data.training),
    }
    with torch.no_grad(), ProgressBar(console) as progress:
        bar = progress.add_task("users", total=(len(scores) + 1) * len(users))

        def batches() -> Iterator[Batch]:
            for batch in users.batches(8 * ROWS):
                yield send_to_device(batch, accelerator.device)
                progress.advance(bar, len(batch.users))

        found = {name: measures(score, batches(), None, KS) for name, score in scores.items()}
        mean = len(users.labels) / len(users)
        bins = calibration(next(iter(scores.values())), batches(), mean)
    model, popular = (100 * values["recall@20"] for values in found.values())
    say(
        [
            f"Recall@20 is {model:.2f}% on {len(users)} users ({what}). Recommending the most popular items "
            f"reaches {popular:.2f}%.",
            f"Model: {own}{'' if own in WITHOUT_LOSS else f', epoch {trained.epoch}'}. All values are in "
            "percent.",
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
        recalls, bins, folder / PICTURE, title=f"Recall for {len(users)} users", rare=True
    )
    console.print(
        f"The run is in {trained.run}. Recall and calibration are plotted in {folder / PICTURE}.",
        soft_wrap=True,
        highlight=False,
    )
