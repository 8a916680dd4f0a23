"""`torchlml train cifar100`: one run of the study, from images or from frozen features."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

import torchlml
from torchlml.metrics import TopKRecall
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine.loop import Task
from torchlml_lab.engine.output import new_console
from torchlml_lab.engine.run import in_percent, say_test, train
from torchlml_lab.engine.settings import check as check_settings
from torchlml_lab.studies.cifar100 import model
from torchlml_lab.studies.cifar100.data import (
    CLASSES,
    Batches,
    Part,
    read_features,
    read_images,
    split_validation,
    with_noise,
)
from torchlml_lab.studies.cifar100.settings import EXPERIMENT, Cifar100Settings, Loss

DENSENET = "densenet-40-40"


# So many training samples, with their noisy labels, are also looked at after every epoch.
FOLLOWED = 5000
INSTEAD = "That is a network for GPUs: use `--network small-cnn --epochs 6` here, or `--features`."


def main(settings: Cifar100Settings) -> None:
    """Train, and print the test."""
    console = new_console()
    result = run(settings, console)
    say_test(console, settings, result, in_percent(result["test"], list(result["test"])))


def run(settings: Cifar100Settings, console: Console) -> dict[str, Any]:
    """Train with these settings; what cannot be done raises `BadInput` before anything is written."""
    check(settings)
    return train(
        EXPERIMENT, settings, lambda: task(settings, *read(settings.data, settings.features)), console
    )


def check(settings: Cifar100Settings) -> None:
    """Refuse settings that cannot be run."""
    check_settings(settings)
    if (settings.data is None) == (settings.features is None):
        raise BadInput("Exactly one of `--data` (images) and `--features` (an npz) must be given.")
    if settings.features is not None and settings.network is not None:
        raise BadInput(
            "`--network` is for images: with `--features` a small head is trained, so leave it out."
        )
    if settings.data is not None and settings.head is not None:
        raise BadInput("`--head` is for `--features`: with images a network is trained, so leave it out.")
    if settings.samples is not None and settings.samples < 1:
        raise BadInput(f"`--samples` is {settings.samples}, and must be at least 1.")
    if not 1 <= settings.k < CLASSES:
        raise BadInput(
            f"`--k` is {settings.k}, and must be from 1 to {CLASSES - 1}, one less than the classes."
        )
    if not 0 <= settings.noise <= 1:
        raise BadInput(f"`--noise` is {settings.noise}, and must be from 0 to 1.")
    if not 0 < settings.temperature < float("inf"):
        raise BadInput(f"`--temperature` is {settings.temperature}, and must be finite and more than 0.")
    if not 0 <= settings.weight_decay < float("inf"):
        raise BadInput(f"`--weight-decay` is {settings.weight_decay}, and must be finite and at least 0.")


def read(data: Path | None, features: Path | None) -> tuple[Part, Part]:
    """The training and the test samples of either file."""
    if features is not None:
        return read_features(features)
    assert data is not None
    return read_images(data)


def task(settings: Cifar100Settings, everything: Part, test: Part) -> Task:
    """The task of one run; the seed must be set before, since it makes the network."""
    parts = splits(settings, everything, test)
    training = parts["training"]
    model = network(settings, training)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=settings.learning_rate,
        momentum=0.9,
        nesterov=True,
        weight_decay=settings.weight_decay,
    )
    drops = [max(1, settings.epochs // 2), max(1, settings.epochs * 3 // 4)]  # 0 would drop before the start
    loss = loss_of(settings.loss, settings.k, settings.temperature)
    return Task(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.MultiStepLR(optimizer, drops),
        training=Batches(training, augment=True),
        held_out={
            "train": Batches(training[torch.arange(min(FOLLOWED, len(training)))]),
            **{name: Batches(parts[name]) for name in ("validation", "test")},
        },
        loss=lambda network, batch: loss(network(batch[0]).float(), batch[1]),
        measure=lambda network, batches, accelerator: accuracies(
            network, batches, accelerator, (1, settings.k)
        ),
        chosen_by=f"top{settings.k}",
        printed=tuple(dict.fromkeys(("top1", f"top{settings.k}"))),
        threads=1 if settings.features is not None else None,
        instead="" if model_name(settings) != DENSENET else INSTEAD,
    )


def splits(settings: Cifar100Settings, everything: Part, test: Part) -> dict[str, Part]:
    """The samples that the run is trained on, with their noisy labels, chosen by, and tested on."""
    training, validation = split_validation(everything, settings.validation)
    if settings.samples is not None:
        if settings.samples > len(training):
            raise BadInput(f"`--samples` is {settings.samples}, and there are {len(training)} to train on.")
        training = training[torch.arange(settings.samples)]  # the split has shuffled them
    training = with_noise(training, settings.noise, settings.seed)
    return {"training": training, "validation": validation, "test": test}


def model_name(settings: Cifar100Settings) -> str:
    """What is trained: `features` for the head on frozen features, `wide-head`, else the network's name."""
    if settings.features is not None:
        return "wide-head" if settings.head == "wide" else "features"
    return settings.network or DENSENET


def network(settings: Cifar100Settings, training: Part) -> nn.Module:
    """The network of a run, with its first weights."""
    name = model_name(settings)
    if name in ("features", "wide-head"):
        head = model.feature_head if name == "features" else model.wide_head
        return head(training.x.shape[1], CLASSES)
    if name == "small-cnn":
        return model.small_cnn(CLASSES)
    return model.DenseNet(depth=40, growth=40, classes=CLASSES)


def loss_of(name: Loss, k: int, temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean loss of logits (N, 100) and labels (N,)."""
    if name == "smooth-svm":
        return lambda logits, label: torchlml.smooth_topk_svm_loss(logits, label, k, tau=temperature)
    plain: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "cross-entropy": cross_entropy,
        "truncated-entropy": lambda logits, label: torchlml.truncated_entropy_loss(logits, label, k),
        "lml": lambda logits, label: torchlml.lml_loss(logits, label, k),
        "bce": lambda logits, label: (
            binary_cross_entropy_with_logits(
                logits, one_hot(label, CLASSES).to(logits.dtype), reduction="none"
            )
            .sum(-1)
            .mean()
        ),
    }
    return lambda logits, label: plain[name](logits / temperature, label)


def accuracies(
    network: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    accelerator: Accelerator,
    ks: Sequence[int],
) -> dict[str, float]:
    """The shares of samples whose label has one of the k largest logits, for each k."""
    recall = TopKRecall(tuple(dict.fromkeys(ks)), sync_on_compute=False)
    for x, label in batches:
        logits, labels = accelerator.gather_for_metrics((network(x).float(), label))
        recall.to(logits.device).update(logits, labels)
    found = recall.compute()
    return {f"top{k}": found[f"recall@{k}"].item() for k in ks}
