"""The settings of the CIFAR-100 commands. This module imports nothing slow, so that `--help` is fast."""

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
    """Train on CIFAR-100 with noisy labels and report top-1 and top-k accuracy; needs --data or --features.

    The defaults are the published recipe (Berrada et al. 2018): DenseNet 40-40, SGD with Nesterov momentum
    0.9, learning rate 0.1 divided by ten after half and three quarters of 300 epochs, weight decay 1e-4,
    batches of 64, random crops and mirror images, 5000 training images kept for validation with clean labels,
    and the epoch with the best top-5 accuracy there is tested. With --features the defaults are ours.
    """

    out: Path = Path("runs/cifar100")
    data: Path | None = None
    """The official images: the folder `cifar-100-python` or the file `cifar-100-python.tar.gz`."""
    features: Path | None = None
    """Instead of images, an npz of frozen features `x` with `fine`, `coarse` and the bool `test`."""
    network: Literal["densenet-40-40", "small-cnn"] | None = None
    """The network for images: the published one, which is the default, or five convolutions for a CPU."""
    head: Literal["small", "wide"] | None = None
    """The head on features: one hidden layer with dropout, the default, or two wide ones that can learn wrong
    labels by heart (with `--weight-decay 0` and many epochs)."""
    loss: Loss = "lml"
    """What is minimised; bce counts every label but the observed one as absent."""
    k: int = 5
    """How many labels may be guessed, 1 to 99: the k of the losses and of the top-k accuracy."""
    noise: float = 0.0
    """The probability that a training label is drawn anew from the fine labels of its coarse class."""
    temperature: float = 1.0
    """The logits are divided by it before the loss; for smooth-svm it is the loss's own tau."""
    epochs: int = 300
    """How often the training data are seen, at least once."""
    weight_decay: float = 1e-4
    """The weight decay of SGD, at least 0."""
    validation: int = 5000
    """How many training samples are kept for validation, the same for every seed."""
    samples: int | None = None
    """How many of the others are trained on; by default all."""


FEATURES = Cifar100Settings(epochs=10, batch_size=500)


NOISES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class SweepSettings(GridSettings):
    """Run all combinations of losses, noise levels, seeds, learning rates, temperatures that are not done."""

    out: Path = Path("runs/cifar100-sweep")
    losses: tuple[Loss, ...] = LOSSES
    """The losses: cross-entropy, smooth-svm, truncated-entropy, lml, bce."""
    noises: tuple[float, ...] = NOISES
    """The probabilities that a training label is drawn anew within its coarse class."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    temperatures: tuple[float, ...] = ()
    """The temperatures to try; by default the one of `--run.temperature`."""
    run: Cifar100Settings = field(default_factory=Cifar100Settings)
    """All that the runs have in common, as for `torchlml train cifar100`."""


@dataclass(frozen=True)
class EvaluateSettings:
    """Print the top-k accuracies of a CIFAR-100 run with its best weights."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/cifar100")
    """The folder of the run."""
    split: Literal["training", "validation", "test"] = "test"
    """The samples: those it was trained on, with their noisy labels; chosen by; or never saw."""
    data: Path | None = None
    """The official images, where they have moved."""
    features: Path | None = None
    """The frozen features, where they have moved."""
    cpu: bool = False
    """Stay on the CPU even where a GPU is available."""


@dataclass(frozen=True)
class LossTimesSettings(StepTimeSettings):
    """Time whole training steps of all losses in turns, on the same samples, with the settings of a run."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/cifar100")
    """The folder of the run."""
    data: Path | None = None
    """The official images, where they have moved."""
    features: Path | None = None
    """The frozen features, where they have moved."""


def read_train(arguments: Sequence[str]) -> Cifar100Settings:
    """Read the options of `torchlml train cifar100`; frozen features have defaults of their own."""
    given = any(word == "--features" or word.startswith("--features=") for word in arguments)
    default = FEATURES if given else Cifar100Settings()
    return read_settings(Cifar100Settings, "train cifar100", arguments, default)


def read_sweep(arguments: Sequence[str]) -> SweepSettings:
    """Read the options of `torchlml sweep cifar100`, with the same defaults for frozen features."""
    given = any(word.startswith("--run.features") for word in arguments)
    default = SweepSettings(run=FEATURES) if given else SweepSettings()
    return parse_settings(SweepSettings, "sweep cifar100", arguments, default)
