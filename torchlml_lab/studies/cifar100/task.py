"""`torchlml train cifar100`: train on images or frozen features, evaluate, and time training steps."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, binary_cross_entropy_with_logits, cross_entropy, one_hot

import torchlml
from torchlml.metrics import TopKRecall
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.engine import loop, run_directory
from torchlml_lab.engine.loop import Task
from torchlml_lab.engine.output import ProgressBar, new_console, plain_table
from torchlml_lab.engine.run import in_percent, say_test, train
from torchlml_lab.engine.settings import check as check_settings
from torchlml_lab.studies.cifar100.data import (
    CLASSES,
    Batches,
    Part,
    read_features,
    read_images,
    split_validation,
    with_noise,
)
from torchlml_lab.studies.cifar100.settings import (
    EXPERIMENT,
    LOSSES,
    Cifar100Settings,
    EvaluateSettings,
    Loss,
    LossTimesSettings,
)

DENSENET = "densenet-40-40"


# The number of training samples that are also evaluated after every epoch, with their noisy labels.
FOLLOWED = 5000
INSTEAD = "This network needs a GPU. On a CPU, use `--network small-cnn --epochs 6` or `--features`."


def main(settings: Cifar100Settings) -> None:
    """Train a model and print its test accuracy."""
    console = new_console()
    result = run(settings, console)
    say_test(console, settings, result, in_percent(result["test"], list(result["test"])))


def run(settings: Cifar100Settings, console: Console) -> dict[str, Any]:
    """Train with these settings. Invalid settings raise `BadInput` before any file is written."""
    check(settings)
    return train(
        EXPERIMENT, settings, lambda: task(settings, *read(settings.data, settings.features)), console
    )


def check(settings: Cifar100Settings) -> None:
    """Raise `BadInput` for invalid settings."""
    check_settings(settings)
    if (settings.data is None) == (settings.features is None):
        raise BadInput("Pass exactly one of `--data` (images) and `--features` (an npz file).")
    if settings.features is not None and settings.network is not None:
        raise BadInput("`--network` applies to images and cannot be combined with `--features`.")
    if settings.data is not None and settings.head is not None:
        raise BadInput("`--head` applies to `--features` and cannot be combined with `--data`.")
    if settings.samples is not None and settings.samples < 1:
        raise BadInput(f"`--samples` must be at least 1, but it is {settings.samples}.")
    if not 1 <= settings.k < CLASSES:
        raise BadInput(
            f"`--k` must be from 1 to {CLASSES - 1} (there are {CLASSES} classes), but it is {settings.k}."
        )
    if not 0 <= settings.noise <= 1:
        raise BadInput(f"`--noise` must be from 0 to 1, but it is {settings.noise}.")
    if not 0 < settings.temperature < float("inf"):
        raise BadInput(f"`--temperature` must be finite and positive, but it is {settings.temperature}.")
    if not 0 <= settings.weight_decay < float("inf"):
        raise BadInput(f"`--weight-decay` must be finite and at least 0, but it is {settings.weight_decay}.")


def read(data: Path | None, features: Path | None) -> tuple[Part, Part]:
    """Read the training and test samples, as images or features."""
    if features is not None:
        return read_features(features)
    assert data is not None
    return read_images(data)


def task(settings: Cifar100Settings, everything: Part, test: Part) -> Task:
    """Build the task of a run. This initializes the network, so set the random seed before the call."""
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
    # A drop at epoch 0 would lower the learning rate before the first epoch.
    drops = [max(1, settings.epochs // 2), max(1, settings.epochs * 3 // 4)]
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
    """Return the training samples with their noisy labels, the validation samples and the test samples."""
    training, validation = split_validation(everything, settings.validation)
    if settings.samples is not None:
        if settings.samples > len(training):
            raise BadInput(f"`--samples` must be at most {len(training)}, but it is {settings.samples}.")
        training = training[torch.arange(settings.samples)]  # already shuffled by the split
    training = with_noise(training, settings.noise, settings.seed)
    return {"training": training, "validation": validation, "test": test}


def model_name(settings: Cifar100Settings) -> str:
    """Return the model's name: `features` or `wide-head` for frozen features, or the network for images."""
    if settings.features is not None:
        return "wide-head" if settings.head == "wide" else "features"
    return settings.network or DENSENET


def network(settings: Cifar100Settings, training: Part) -> nn.Module:
    """Return a newly initialized network."""
    name = model_name(settings)
    if name in ("features", "wide-head"):
        head = feature_head if name == "features" else wide_head
        return head(training.x.shape[1], CLASSES)
    if name == "small-cnn":
        return small_cnn(CLASSES)
    return DenseNet(depth=40, growth=40, classes=CLASSES)


def loss_of(name: Loss, k: int, temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that computes the mean loss for logits (N, 100) and labels (N,)."""
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
    """Compute, for each k, the fraction of samples whose label has one of the k largest logits."""
    recall = TopKRecall(tuple(dict.fromkeys(ks)), sync_on_compute=False)
    for x, label in batches:
        logits, labels = accelerator.gather_for_metrics((network(x).float(), label))
        recall.to(logits.device).update(logits, labels)
    found = recall.compute()
    return {f"top{k}": found[f"recall@{k}"].item() for k in ks}


BATCH = 500
KS = (1, 2, 3, 5, 10)


def evaluate(settings: EvaluateSettings) -> None:
    """Evaluate a run and print a table."""
    best = run_directory.find_best_epoch(EXPERIMENT, settings.run)
    moved = {"data": settings.data, "features": settings.features}
    run = run_directory.read_moved(Cifar100Settings, settings.run, moved)
    part = splits(run, *read(run.data, run.features))[settings.split]
    model = network(run, part)
    best.load(model)
    accelerator, console = Accelerator(cpu=settings.cpu), new_console()
    ks = sorted({*KS, run.k})
    with torch.no_grad(), ProgressBar(console) as progress:
        task = progress.add_task("samples", total=len(part))

        def batches() -> Iterator[Any]:
            for rows in torch.arange(len(part)).split(BATCH):
                yield send_to_device(Batches(part).__getitems__(rows.tolist()), accelerator.device)
                progress.advance(task, len(rows))

        found = accuracies(model.to(accelerator.device), batches(), accelerator, ks)
    title = f"{len(part)} {settings.split} samples, epoch {best.epoch}, {model_name(run)}; accuracy in %"
    table = plain_table(title, ("loss", "noise", *(f"top-{k}" for k in ks)), left=1)
    table.add_row(run.loss, f"{run.noise:g}", *(f"{100 * found[f'top{k}']:.2f}" for k in ks))
    console.print(table)


def step_time(settings: LossTimesSettings) -> None:
    """Time the training steps of all losses and print a table."""
    moved = {"data": settings.data, "features": settings.features}
    run = run_directory.read_moved(Cifar100Settings, settings.run, moved)
    size = loop.checked_size(settings, run.batch_size)
    parts = read(run.data, run.features)
    what = f"samples, {model_name(run)}"
    loop.compare_steps(LOSSES, lambda loss: task(replace(run, loss=loss), *parts), settings, size, what)


class DenseNet(nn.Module):
    """DenseNet for 32 x 32 images (Huang et al. 2017) with bottlenecks and channel-halving transitions.

    `DenseNet(depth=40, growth=40)` is the "DenseNet 40-40" of the published code: three blocks of six layers.

    Args:
        depth: The depth 6 * m + 4, where m is the number of layers in each block.
        growth: The number of channels that each layer adds.
        classes: The number of logits.
    """

    def __init__(self, depth: int, growth: int, classes: int) -> None:
        super().__init__()
        channels = 2 * growth
        parts: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
        for block in range(3):
            for _ in range((depth - 4) // 6):
                parts.append(_Layer(channels, growth))
                channels += growth
            if block < 2:
                parts.append(_Transition(channels, channels // 2))
                channels //= 2
        parts += [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.features = nn.Sequential(*parts)
        self.head = nn.Linear(channels, classes)
        _initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, classes) for images (N, 3, 32, 32)."""
        return self.head(self.features(x))


class _Layer(nn.Module):
    """A layer that adds `growth` channels through a bottleneck with 4 * growth channels."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.new = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.new(x)), 1)


class _Transition(nn.Module):
    """A layer that reduces the number of channels and halves the resolution."""

    def __init__(self, channels: int, fewer: int) -> None:
        super().__init__()
        self.mix = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, fewer, 1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return avg_pool2d(self.mix(x), 2)


def small_cnn(classes: int) -> nn.Module:
    """Build a CNN with five convolutions and 6 million multiplications per image, for use without a GPU."""
    parts: list[nn.Module] = []
    channels = 3
    for more, stride in ((32, 2), (64, 2), (128, 2), (128, 1), (256, 2)):
        parts += [nn.Conv2d(channels, more, 3, stride, 1, bias=False), nn.BatchNorm2d(more), nn.ReLU()]
        channels = more
    network = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    _initialize(network)
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def feature_head(inputs: int, classes: int) -> nn.Module:
    """Build a multilayer perceptron with one hidden layer on frozen features."""
    hidden = 256
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, classes))


def wide_head(inputs: int, classes: int) -> nn.Module:
    """Build a wide multilayer perceptron without dropout on frozen features; it can memorize wrong labels."""
    hidden = 512
    return nn.Sequential(
        *(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, classes),
    )


def _initialize(network: nn.Module) -> None:
    """Initialize a network like the published DenseNet: He initialization with fan-out, and zero biases."""
    for part in network.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)
