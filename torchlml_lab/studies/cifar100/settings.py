"""The settings of the CIFAR-100 commands. This module has no slow imports, so that `--help` is fast."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from torchlml_lab.engine.settings import (
    GridSettings,
    StepTimeSettings,
    TrainSettings,
    parse_settings,
    read_settings,
)

Loss = Literal["cross-entropy", "smooth-svm", "truncated-entropy", "lml", "bce"]
LOSSES: tuple[Loss, ...] = get_args(Loss)
EXPERIMENT = "cifar100"


@dataclass(frozen=True)
class Cifar100Settings(TrainSettings):
    """Train on CIFAR-100 with label noise and report top-1 and top-k accuracy; needs --data or --features.

    The defaults for images follow the published recipe (Berrada et al. 2018): DenseNet 40-40 and SGD with
    Nesterov momentum 0.9, weight decay 1e-4 and batches of 64. The learning rate is 0.1, divided by ten after
    half and three quarters of 300 epochs. Images are randomly cropped and mirrored. For validation, 5000
    training images with clean labels are held out. The epoch with the best top-k accuracy on them is
    evaluated on the test images. With --features, the defaults are 10 epochs and batches of 500.
    """

    out: Path = Path("runs/cifar100")
    data: Path | None = None
    """The official images: the directory `cifar-100-python` or the file `cifar-100-python.tar.gz`."""
    features: Path | None = None
    """Frozen features instead of images: an npz file with `x`, `fine`, `coarse` and the bool array `test`."""
    network: Literal["densenet-40-40", "small-cnn"] | None = None
    """The network for images: densenet-40-40 as published (the default), or small-cnn for a CPU."""
    head: Literal["small", "wide"] | None = None
    """The head on features: `small` (the default) has one hidden layer and dropout, and `wide` has two wide
    layers, which can memorize wrong labels with `--weight-decay 0` and many epochs."""
    loss: Loss = "lml"
    """The loss function; bce treats every label except the observed one as absent."""
    k: int = 5
    """The k of the losses and of the top-k accuracy, from 1 to 99."""
    noise: float = 0.0
    """The probability that a training label is replaced by a random label of its coarse class."""
    temperature: float = 1.0
    """The temperature that divides the logits before the loss; for smooth-svm it is the tau of the loss."""
    epochs: int = 300
    """The number of epochs, at least 1."""
    weight_decay: float = 1e-4
    """The weight decay of SGD, at least 0."""
    validation: int = 5000
    """The number of training samples held out for validation; the choice does not depend on `--seed`."""
    samples: int | None = None
    """The number of training samples to use after holding out the validation samples; all by default."""


FEATURES = Cifar100Settings(epochs=10, batch_size=500)


NOISES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class SweepSettings(GridSettings):
    """Run all unfinished combinations of losses, noise levels, seeds, learning rates and temperatures."""

    out: Path = Path("runs/cifar100-sweep")
    losses: tuple[Loss, ...] = LOSSES
    """The losses: cross-entropy, smooth-svm, truncated-entropy, lml, bce."""
    noises: tuple[float, ...] = NOISES
    """The probabilities that a training label is replaced by a random label of its coarse class."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    temperatures: tuple[float, ...] = ()
    """The temperatures to try; by default `--run.temperature`."""
    run: Cifar100Settings = field(default_factory=Cifar100Settings)
    """The settings shared by all runs, as for `torchlml train cifar100`."""


@dataclass(frozen=True)
class EvaluateSettings:
    """Print the top-k accuracies of the best checkpoint of a CIFAR-100 run."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Path("runs/cifar100")
    """The run directory."""
    split: Literal["training", "validation", "test"] = "test"
    """The samples to evaluate on; training samples keep their noisy labels."""
    data: Path | None = None
    """The new path of the official images, if they have moved."""
    features: Path | None = None
    """The new path of the frozen features, if they have moved."""
    cpu: bool = False
    """Use the CPU even if a GPU is available."""


@dataclass(frozen=True)
class LossTimesSettings(StepTimeSettings):
    """Time training steps with each loss, on the same samples and with a run's settings."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Path("runs/cifar100")
    """The run directory."""
    data: Path | None = None
    """The new path of the official images, if they have moved."""
    features: Path | None = None
    """The new path of the frozen features, if they have moved."""


def read_train(arguments: Sequence[str]) -> Cifar100Settings:
    """Parse the options of `torchlml train cifar100`. With `--features`, some defaults are different."""
    given = any(word == "--features" or word.startswith("--features=") for word in arguments)
    default = FEATURES if given else Cifar100Settings()
    return read_settings(Cifar100Settings, "train cifar100", arguments, default)


def read_sweep(arguments: Sequence[str]) -> SweepSettings:
    """Parse the options of `torchlml sweep cifar100`. With `--run.features`, some defaults are different."""
    given = any(word.startswith("--run.features") for word in arguments)
    default = SweepSettings(run=FEATURES) if given else SweepSettings()
    return parse_settings(SweepSettings, "sweep cifar100", arguments, default)
