"""`torchlml train multilabel`: train a model that predicts the top labels of samples."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from accelerate import PartialState
from rich.console import Console
from scipy import sparse
from torch import nn

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine import run_directory
from torchlml_lab.engine.loop import RowAdam, Task
from torchlml_lab.engine.output import new_console
from torchlml_lab.engine.run import say, train_on_files
from torchlml_lab.engine.settings import SETTINGS_FILE, from_json
from torchlml_lab.engine.settings import check as check_settings
from torchlml_lab.multilabel import linear
from torchlml_lab.multilabel import preparation as prepare
from torchlml_lab.multilabel.losses import LabelLoss, loss_with_usual_k
from torchlml_lab.multilabel.model import (
    KS,
    LOGITS,
    MOST_DENSE,
    LabelNetwork,
    LinearLogits,
    TrainedLabels,
    copy_weights,
    load,
    measure,
    new_network,
    origin_of_k,
    scores,
    store_linear,
)
from torchlml_lab.multilabel.preparation import LaterInputs, Preparation
from torchlml_lab.multilabel.samples import Batches, Data, digest, label_lists, read
from torchlml_lab.multilabel.settings import EXPERIMENT, WITH_K, MultilabelSettings

# `--continue-from` keeps the weights of a run that stopped early if these settings and the samples match.
_TRAINING = ("loss", "k", "dropout", "epochs", "patience", "batch_size", "learning_rate", "mixed_precision")
PATIENT_STEPS = 100  # the default patience; an epoch of a small file has too few steps to judge progress


def main(settings: MultilabelSettings) -> None:
    """Train a model and write its report."""
    from torchlml_lab.multilabel.report import report_run

    console = new_console()
    trained, data = run(settings, console)
    if PartialState().is_main_process:
        report_run(settings.resume or settings.out, trained, data, console)


def run(
    settings: MultilabelSettings, console: Console, read: Callable[[MultilabelSettings], Data] = read
) -> tuple[TrainedLabels, Data]:
    """Train with the given settings. Invalid settings raise `BadInput` before any file is written.

    Args:
        settings: The settings of the run.
        console: The console for progress and results.
        read: Returns the samples. By default, they are read from the files in the settings.

    Returns:
        The run with its best weights, and its samples. If the run was newly trained, the training samples
        no longer contain features or texts.
    """
    settings = completed(settings)
    check(settings)
    made: list[tuple[Data, Built]] = []

    def build(settings: MultilabelSettings, data: Data) -> Task:
        built = build_task(settings, data)
        # Release the features and texts of the training samples, which need a lot of memory. From now on,
        # only the inputs are used.
        nothing = replace(data.training, features=data.training.features[:, :0], texts=None)
        made.append((data._replace(training=nothing), built))
        return built.task

    result = train_on_files(EXPERIMENT, settings, read, build, _introduction, console)
    folder = settings.resume or settings.out
    if not made:
        return load(folder), read(settings)
    ((data, built),) = made
    # Copy the weights, because accelerate may have wrapped the model and moved it to a GPU.
    best = new_network(settings, built.prepared)
    best.load_state_dict(built.task.model.state_dict())
    held_out = None
    if built.linear is not None:
        best.linear = built.linear.final()
        held_out = built.linear.held_out()
        if PartialState().is_main_process:
            say([built.linear.in_words()], console)
    if built.unchanged and PartialState().is_main_process:
        kept = f"`{settings.continue_from}` had stopped improving on the same samples"
        say([f"{kept}, so its weights are kept."], console)
    return (
        TrainedLabels(
            settings=from_json(MultilabelSettings, folder / SETTINGS_FILE),
            preparation=built.prepared,
            network=best.eval(),
            epoch=result["best_epoch"],
            temperature=1.0,
            held_out=held_out,
        ),
        data,
    )


class Built(NamedTuple):
    """The objects that `build_task` creates for a run."""

    task: Task
    prepared: Preparation
    linear: "LinearFit | None"
    unchanged: bool
    """Whether the weights of the earlier run are kept, because it stopped improving with the same data and
    settings."""


def completed(settings: MultilabelSettings) -> MultilabelSettings:
    """Make the encoder path absolute, and adopt the model and loss of the run in `--continue-from`."""
    if settings.encoder is not None and Path(settings.encoder).is_dir():
        settings = replace(settings, encoder=str(Path(settings.encoder).absolute()))
    if settings.continue_from is not None:
        earlier = from_json(MultilabelSettings, settings.continue_from / SETTINGS_FILE)
        default = MultilabelSettings()
        if settings.hidden == default.hidden:
            settings = replace(settings, hidden=earlier.hidden)
        if (settings.loss, settings.k) == (default.loss, default.k):
            settings = replace(settings, loss=earlier.loss, k=earlier.k)
        settings = replace(settings, model=earlier.model, encoder=settings.encoder or earlier.encoder)
    return settings


def task(settings: MultilabelSettings, data: Data) -> Task:
    """Build the task for a run. This initializes the network, so set the random seed before the call."""
    return build_task(settings, data).task


class LinearFit:
    """Fits the linear part of a run before the network is trained, and again on all samples afterward.

    Args:
        loss: The loss of the network.
        training: The inputs and labels of the training samples.
        validation: The inputs and labels of the validation samples.
        refits: Whether to fit the linear part again on all samples after training.
        start: The linear parts of an earlier run to start from, if any.
    """

    def __init__(
        self,
        loss: LabelLoss,
        training: Batches,
        validation: Batches,
        refits: bool,
        start: linear.Start | None,
    ) -> None:
        self.loss, self.training, self.validation, self.refits = loss, training, validation, refits
        self.start = start
        self.known = validation.labels[:, : training.labels.shape[1]]
        self.penalty, self.gain, self.part = linear.choose(
            training.inputs, training.labels, validation.inputs, self.known, start
        )
        self.scores = self.part.scores(validation.inputs)
        self.final_part = self.part
        # Both models have equal weights until `combine` chooses better weights at the end of training.
        scale, shift = linear.fit_scale(loss, torch.from_numpy(self.scores).double(), label_lists(self.known))
        self.mixture = linear.Mixture(scale, 1.0, shift, 0.5)

    def held_out(self) -> LinearLogits:
        """Return the linear part fitted on the training samples only."""
        return LinearLogits(self.part, self.mixture)

    def final(self) -> LinearLogits:
        """Return the final linear part, which `refit` may have fitted on all samples."""
        return LinearLogits(self.final_part, self.mixture)

    def combine(self, model: nn.Module) -> None:
        """Choose the weights of the two models on the validation samples."""
        assert isinstance(model, LabelNetwork)
        model.linear = None
        logits = torch.cat([found for found, _ in scores(model, self.validation.inputs)])
        self.mixture = linear.fit_mixture(self.loss, self.scores, logits, self.known)
        model.linear = self.held_out().to(next(model.parameters()).device)

    def refit(self, model: nn.Module, folder: Path | None) -> None:
        """Fit the linear part on all samples if `refits` is set, and write it to the run directory."""
        assert isinstance(model, LabelNetwork)
        if self.start is not None and self.penalty == math.inf:
            self.final_part = self.start.final
        elif self.refits:
            x = sparse.vstack([self.training.inputs, self.validation.inputs], format="csr")
            y = sparse.vstack([self.training.labels, self.known], format="csr")
            self.final_part = linear.fit(x, y, self.penalty, self.gain, self.start and self.start.final)
        model.linear = self.final().to(next(model.parameters()).device)
        if folder is not None:
            store_linear(folder, self.final_part, self.part, self.mixture)

    def in_words(self) -> str:
        """Return sentences that describe the combined model."""
        again = " and was refitted on all samples" if self.refits else ""
        if self.penalty == math.inf:
            return f"{self.mixture.in_words()} The linear part is that of the earlier run."
        chosen = f"a penalty of {self.penalty:g} and a gain of {self.gain:g}"
        return f"{self.mixture.in_words()} The linear part uses {chosen}{again}."


def build_task(settings: MultilabelSettings, data: Data) -> Built:
    """Build the task for a run. This initializes the network, so set the random seed before the call."""
    settings = with_usable_loss(settings, data)
    loss, k = loss_and_k(settings, data)
    combined = settings.model == "combined"
    # Validation samples that were held out from `--train` are used in the final fit of the linear part.
    later = data.validation if combined and settings.valid is None else None
    start = earlier = None
    known = same_samples = False
    identity = digest(data)
    if settings.continue_from is None:
        prepared = prepare.fit(data.training, data.columns, k, later, rare=combined)
        model = new_network(settings, prepared)
    else:
        earlier = load(settings.continue_from)
        prepared = prepare.continued(earlier.preparation, data.training, k)
        model = new_network(settings, prepared)
        known = len(prepared.labels) == len(earlier.preparation.labels)
        same_samples = identity == earlier.preparation.digest
        if earlier.network.linear is not None:
            final = earlier.network.linear
            held_out_part = (earlier.held_out or final).part(len(prepared.labels))
            start = linear.Start(held_out_part, final.part(len(prepared.labels)), known, same_samples)
    prepared = replace(prepared, digest=identity)
    unchanged = same_samples and _stopped_improving(settings)
    rate = settings.learning_rate if settings.hidden else 10 * settings.learning_rate
    # With multiple processes, only dense gradients can be reduced.
    alone = not (dist.is_available() and dist.is_initialized())
    model.first.row_sparse = alone and model.first.weight.numel() > MOST_DENSE
    optimizer: torch.optim.Optimizer
    if model.first.row_sparse:
        optimizer = RowAdam(model.parameters(), lr=rate)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
    parts = {"validation": data.validation} | ({} if data.test is None else {"test": data.test})
    # Both splits use the larger label count, because labels that do not occur do not change any metric.
    labels = max(len(part.names) for part in parts.values())
    chosen_by = f"ndcg@{max(k for k in KS if k <= len(prepared.labels))}"
    fits = combined and linear.fits(len(data.training), prepared.inputs, len(prepared.labels))
    # The linear part needs all inputs at once.
    inputs = prepared.apply(data.training).inputs if fits else prepared.apply_to_many(data.training)
    training = Batches(inputs, data.training.labels)
    held_out = {name: Batches(prepared.apply(part).inputs, part.labels) for name, part in parts.items()}
    if model.place is not None:
        assert not isinstance(inputs, LaterInputs)  # without a linear part, the network uses all inputs
        frequency = np.bincount(inputs.indices, minlength=prepared.inputs)
        used = np.sort(np.argsort(-frequency, kind="stable")[: len(model.first.weight)])
        model.place[used] = torch.arange(len(used))
    if earlier is not None:
        copy_weights(model, earlier.network)
    found = None
    if fits:
        found = LinearFit(loss, training, held_out["validation"], later is not None, start)
        model.linear = found.held_out()
    built = Task(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        training=training,
        held_out=held_out,
        loss=lambda net, batch: net(batch.inputs, batch.labels, loss),
        measure=lambda net, batches, accelerator: measure(net, batches, accelerator, prepared, labels),
        chosen_by=chosen_by,
        evaluated=max(1, min(8, LOGITS // (labels * settings.batch_size))),
        printed=tuple(dict.fromkeys(("precision@1", chosen_by))),
        # With few labels, the matrices are too small to benefit from multiple threads.
        threads=1 if settings.batch_size * len(prepared.labels) < 2**20 else None,
        patience=0
        if unchanged
        else settings.patience
        # With a linear part, small late improvements of the network matter less.
        or max(5 if found is None else 3, math.ceil(PATIENT_STEPS * settings.batch_size / len(training))),
        stored={prepare.FILE: prepared.to_json()},
        start_margin=linear.noise(len(data.validation)) if known else None,
        settings=settings,
        combine=None if found is None else found.combine,
        refit=None if found is None else found.refit,
    )
    return Built(built, prepared, found, unchanged)


def _stopped_improving(settings: MultilabelSettings) -> bool:
    """Whether the earlier run had the same settings and stopped early, so that more epochs would not help."""
    assert settings.continue_from is not None
    earlier = from_json(MultilabelSettings, settings.continue_from / SETTINGS_FILE)
    state = run_directory.RunFolder(settings.continue_from, EXPERIMENT).state()
    alike = all(getattr(settings, name) == getattr(earlier, name) for name in _TRAINING)
    return alike and state is not None and state.epoch < earlier.epochs


def with_usable_loss(settings: MultilabelSettings, data: Data) -> MultilabelSettings:
    """Replace the loss `lml` with `bce` if some training samples have no labels.

    LML fixes the sum of the probabilities at k, which would be 0 for a sample without labels. Such a sample
    contributes no gradient, so the model could not learn that sometimes no label applies.
    """
    if settings.loss != "lml" or data.training.counts.all():
        return settings
    return replace(settings, loss="bce", k=settings.k if isinstance(settings.k, int) else None)


def loss_and_k(settings: MultilabelSettings, data: Data) -> tuple[LabelLoss, int]:
    """Return the loss and the k for predictions, which is `--k` or the rounded mean number of labels."""
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
    """Return sentences about the data, the loss and k, to print before training."""
    given, settings = settings, with_usable_loss(settings, data)
    loss, k = loss_and_k(settings, data)
    rows, mean = len(data.training), float(data.training.counts.mean())
    source = "held out for" if settings.valid is None else "provided for"
    said = [
        f"The {rows} training samples have {mean:.1f} of {len(data.training.names)} labels on average. "
        f"{len(data.validation)} more samples are {source} validation."
    ]
    if settings.continue_from is not None:
        new = len(data.training.names) - len(prepare.stored(settings.continue_from).labels)
        added = f"{new} {'label is' if new == 1 else 'labels are'} new"
        said.append(f"Training starts from the weights of `{settings.continue_from}`. {added}.")
    if data.columns is not None:
        said.append(f"Columns: {data.columns}.")
    each = "each sample's number of labels as k" if loss.k == "labels" else f"k = {loss.k}"
    said.append(f"Training with the loss `{loss.name}`" + ("." if loss.k is None else f" and {each}."))
    if given.loss != loss.name:
        said.append(
            f"It replaces `{given.loss}`, which needs at least one label per sample. To train with "
            f"`{given.loss}`, use `--unlabeled skip`."
        )
    said.append(origin_of_k(settings.k, k, mean))
    return [*data.notes, *said]


def check(settings: MultilabelSettings) -> None:
    """Check the settings without reading the data. Invalid settings raise `BadInput`."""
    check_settings(settings)
    if settings.train is None:
        raise BadInput("`--train` is missing. Pass a file of labeled samples.")
    for name in ("valid", "test"):
        if getattr(settings, f"{name}_labels") is not None and getattr(settings, name) is None:
            raise BadInput(f"`--{name}-labels` requires `--{name}`.")
    if settings.separator == "":
        raise BadInput("`--separator` must be the string between two labels, but it is empty.")
    if settings.continue_from is not None:
        earlier = from_json(MultilabelSettings, settings.continue_from / SETTINGS_FILE)
        run_directory.find_best_epoch(EXPERIMENT, settings.continue_from)  # raises if no epoch is complete
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
        raise BadInput(f"`--keep` must be `one`, or greater than 0 and at most 1, but it is {settings.keep}.")
    if settings.k is not None:
        loss_of(settings)


def loss_of(settings: MultilabelSettings) -> LabelLoss:
    """Return the loss of a run, with its default k if none is given."""
    if settings.loss not in WITH_K:
        # These losses have no k, so `--k` applies only to predictions.
        if settings.k is not None and (settings.k == "labels" or settings.k < 1):
            raise BadInput(
                f"`--k` must be a positive integer for the loss `{settings.loss}`, but it is {settings.k}."
            )
        return LabelLoss(settings.loss, empty=True)
    return loss_with_usual_k(settings.loss, settings.k)
