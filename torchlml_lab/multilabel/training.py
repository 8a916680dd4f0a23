"""`torchlml train multilabel`: train a model that predicts the top labels from a file of labeled samples."""

import math
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import PartialState
from rich.console import Console
from torch import nn

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine import run_directory
from torchlml_lab.engine.loop import Task
from torchlml_lab.engine.output import new_console
from torchlml_lab.engine.run import train_on_files
from torchlml_lab.engine.settings import SETTINGS_FILE, from_json
from torchlml_lab.engine.settings import check as check_settings
from torchlml_lab.multilabel import preparation as prepare
from torchlml_lab.multilabel.losses import LabelLoss, loss_with_usual_k
from torchlml_lab.multilabel.model import (
    KS,
    LabelNetwork,
    TrainedLabels,
    copy_weights,
    load,
    measure,
    origin_of_k,
)
from torchlml_lab.multilabel.preparation import Preparation
from torchlml_lab.multilabel.samples import Batches, Data, read
from torchlml_lab.multilabel.settings import EXPERIMENT, WITH_K, MultilabelSettings

PATIENT_STEPS = 100  # steps: epochs of small files are too short to judge progress by


def main(settings: MultilabelSettings) -> None:
    """Train a model and write its report."""
    from torchlml_lab.multilabel.report import report_run

    console = new_console()
    trained, data = run(settings, console)
    if PartialState().is_main_process:
        report_run(settings.resume or settings.out, trained, data, console)


def run(settings: MultilabelSettings, console: Console) -> tuple[TrainedLabels, Data]:
    """Train with these settings; raise `BadInput` for invalid ones before any file is written.

    Returns:
        The run with its best weights, and its samples. Files are reread only if the run was already finished.
    """
    settings = completed(settings)
    check(settings)
    made: list[tuple[Data, Preparation, nn.Module]] = []

    def build(settings: MultilabelSettings, data: Data) -> Task:
        prepared, built = prepared_task(settings, data)
        made.append((data, prepared, built.model))
        return built

    result = train_on_files(EXPERIMENT, settings, read, build, _introduction, console)
    folder = settings.resume or settings.out
    if not made:
        return load(folder), read(settings)
    ((data, prepared, model),) = made
    # A copy, because accelerate may have wrapped the model for its precision and moved it to a GPU.
    best = network(settings, prepared)
    best.load_state_dict(model.state_dict())
    return (
        TrainedLabels(
            settings=from_json(MultilabelSettings, folder / SETTINGS_FILE),
            preparation=prepared,
            network=best.eval(),
            epoch=result["best_epoch"],
            temperature=1.0,
        ),
        data,
    )


def completed(settings: MultilabelSettings) -> MultilabelSettings:
    """The settings with an absolute path of the encoder, and with the model of a run that is continued."""
    if settings.encoder is not None and Path(settings.encoder).is_dir():
        settings = replace(settings, encoder=str(Path(settings.encoder).absolute()))
    if settings.continue_from is not None:
        earlier = from_json(MultilabelSettings, settings.continue_from / SETTINGS_FILE)
        if settings.hidden == MultilabelSettings().hidden:
            settings = replace(settings, hidden=earlier.hidden)
        settings = replace(settings, encoder=settings.encoder or earlier.encoder)
    return settings


def task(settings: MultilabelSettings, data: Data) -> Task:
    """The task of one run. Set the seed before the call, because it initializes the network."""
    return prepared_task(settings, data)[1]


def prepared_task(settings: MultilabelSettings, data: Data) -> tuple[Preparation, Task]:
    """The preparation of a run, and its task."""
    loss, k = loss_and_k(settings, data)
    if settings.continue_from is None:
        prepared = prepare.fit(data.training, data.columns, k)
        model = network(settings, prepared)
    else:
        earlier = load(settings.continue_from)
        prepared = prepare.continued(earlier.preparation, data.training, k)
        model = network(settings, prepared)
        copy_weights(model, earlier.network)
    rate = settings.learning_rate if settings.hidden else 10 * settings.learning_rate
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    parts = {"validation": data.validation} | ({} if data.test is None else {"test": data.test})
    # One label count serves all parts, because labels that do not occur change no metric.
    labels = max(len(part.names) for part in parts.values())
    chosen_by = f"ndcg@{max(k for k in KS if k <= len(prepared.labels))}"
    built = Task(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        training=Batches(prepared.apply(data.training).inputs, data.training.labels),
        held_out={name: Batches(prepared.apply(part).inputs, part.labels) for name, part in parts.items()},
        loss=lambda net, batch: net(batch.inputs, batch.labels, loss),
        measure=lambda net, batches, accelerator: measure(net, batches, accelerator, prepared, labels),
        chosen_by=chosen_by,
        printed=tuple(dict.fromkeys(("precision@1", chosen_by))),
        # With few labels the matrices are too small to benefit from several threads.
        threads=1 if settings.batch_size * len(prepared.labels) < 2**20 else None,
        patience=settings.patience
        or max(5, math.ceil(PATIENT_STEPS * settings.batch_size / len(data.training))),
        stored={prepare.FILE: prepared.to_json()},
    )
    return prepared, built


def network(settings: MultilabelSettings, prepared: Preparation) -> LabelNetwork:
    """A newly initialized network."""
    return LabelNetwork(prepared.inputs, len(prepared.labels), settings.hidden, settings.dropout)


def loss_and_k(settings: MultilabelSettings, data: Data) -> tuple[LabelLoss, int]:
    """The loss, and the k of the predictions: `--k`, or the rounded mean number of labels per sample."""
    labels = len(data.training.names)
    usual = min(max(1, round(float(data.training.counts.mean()))), labels - 1)
    loss = loss_of(settings)
    loss.check_labels(labels)
    if isinstance(settings.k, int) and settings.k >= labels:
        raise BadInput(
            f"`--k` must be at most {labels - 1}, because there are {labels} labels, but it is {settings.k}."
        )
    return loss, settings.k if isinstance(settings.k, int) else usual


def _introduction(settings: MultilabelSettings, data: Data) -> list[str]:
    """Sentences about the data and the choices that were made."""
    loss, k = loss_and_k(settings, data)
    rows, mean = len(data.training), float(data.training.counts.mean())
    source = "held out for" if settings.valid is None else "given for"
    said = [
        f"{rows} training samples with {mean:.1f} of {len(data.training.names)} labels on average; "
        f"{len(data.validation)} more samples {source} validation."
    ]
    if settings.continue_from is not None:
        new = len(data.training.names) - len(prepare.stored(settings.continue_from).labels)
        added = f"{new} {'label is' if new == 1 else 'labels are'} new"
        said.append(f"Training starts from the weights of `{settings.continue_from}`; {added}.")
    if data.columns is not None:
        said.append(f"Columns: {data.columns}.")
    each = "each sample's number of labels as k" if loss.k == "labels" else f"k = {loss.k}"
    said.append(f"Training with the loss `{loss.name}`" + ("." if loss.k is None else f" and {each}."))
    said.append(origin_of_k(settings.k, k, mean))
    return [*data.notes, *said]


def check(settings: MultilabelSettings) -> None:
    """Raise `BadInput` for invalid settings, as far as they can be checked without the data."""
    check_settings(settings)
    if settings.train is None:
        raise BadInput("`--train` is missing: pass a file of labeled samples.")
    for name in ("valid", "test"):
        if getattr(settings, f"{name}_labels") is not None and getattr(settings, name) is None:
            raise BadInput(f"`--{name}-labels` requires `--{name}`.")
    if settings.separator == "":
        raise BadInput("`--separator` must be the text between two labels, but it is empty.")
    if settings.continue_from is not None:
        earlier = from_json(MultilabelSettings, settings.continue_from / SETTINGS_FILE)
        run_directory.find_best_epoch(EXPERIMENT, settings.continue_from)  # raises if there is none
        for name in ("hidden", "encoder"):
            now, then = getattr(settings, name), getattr(earlier, name)
            if now != then:
                raise BadInput(
                    f"`--{name}` must be {then}, as in `{settings.continue_from}`, but it is {now}."
                )
    if settings.hidden < 0:
        raise BadInput(f"`--hidden` must be at least 0, but it is {settings.hidden}.")
    if settings.patience is not None and settings.patience < 1:
        raise BadInput(f"`--patience` must be at least 1, but it is {settings.patience}.")
    if not 0 <= settings.dropout < 1:
        raise BadInput(f"`--dropout` must be at least 0 and less than 1, but it is {settings.dropout}.")
    if isinstance(settings.keep, float | int) and not 0 < settings.keep <= 1:
        raise BadInput(f"`--keep` must be `one` or greater than 0 and at most 1, but it is {settings.keep}.")
    if settings.k is not None:
        loss_of(settings)


def loss_of(settings: MultilabelSettings) -> LabelLoss:
    """The loss of a run, with its default k if none is given."""
    if settings.loss not in WITH_K:
        # These losses have no k; the given one applies to the predictions only.
        if settings.k is not None and (settings.k == "labels" or settings.k < 1):
            raise BadInput(
                f"`--k` must be at least 1 for the loss `{settings.loss}`, but it is {settings.k}."
            )
        return LabelLoss(settings.loss)
    return loss_with_usual_k(settings.loss, settings.k)
