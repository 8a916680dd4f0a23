"""The settings of the recommendation commands. This module imports nothing slow, so that `--help` is fast."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from torchlml_lab.engine.settings import GridSettings, StepTimeSettings, TrainSettings
from torchlml_lab.multilabel.settings import LossName, PerRow

Model = Literal["autoencoder", "matrix-factorisation"]


@dataclass(frozen=True)
class RecommendSettings(TrainSettings):
    """Learn from a file of users and their items what each user takes next; needs --train.

    A fifth of the items of some users is set aside, and the epoch whose 20 best recommendations hold most of
    them is kept.
    """

    out: Path = Path("runs/recommend")
    train: Path | None = None
    """Who has what: lines `user item item ...`, CSV or TSV of pairs, or RecBole's .inter, plain or .gz."""
    test: Path | None = None
    """What they took later, in a file of the same kinds; by default the measures are those of validation."""
    columns: tuple[str, str] | None = None
    """The columns of users and items in CSV, TSV and .inter; by default those called user and item."""
    model: Model = "autoencoder"
    """The history of a user through a hidden layer, or a vector for every user and item (cosines)."""
    loss: LossName = "lml"
    """What is minimised, over all items for every user: lml, softmax, bce or truncated-entropy."""
    k: int | PerRow | None = None
    """For lml, how many items are predicted, or `labels`: as many as the user has, which is the default. For
    truncated-entropy a number; 1 by default."""
    dimension: int = 64
    """The size of the hidden layer, or of the vectors."""
    temperature: float = 0.1
    """What the cosines of matrix factorisation are divided by, more than 0."""
    dropout: float = 0.4
    """The share of a user's items that the autoencoder does not see in training, from 0 to less than 1."""
    epochs: int = 50
    """How often the training data are seen, at most."""
    patience: int = 5
    """After so many epochs without a better one the training ends."""
    batch_size: int = 128
    """Users per step, over all processes together; a multiple of the number of processes."""
    learning_rate: float = 0.006
    """The learning rate of Adam."""
    validation: int | None = None
    """Of how many users items are set aside for validation; by default a tenth, but 100 to 3000."""
    users: int | None = None
    """Take only so many users, the same ones for every seed, for tuning; by default all."""


@dataclass(frozen=True)
class EvaluateSettings:
    """Rank all items that users do not have, and say how many of those they took later are on top."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/recommend")
    """The folder of the run."""
    split: Literal["validation", "test"] | None = None
    """What is to be found: what the best epoch was chosen by, or by default the test, if the run has one."""
    data: Path | None = None
    """Instead of a split, a file of what users took later, of the same kinds as for `--train`."""
    out: Path | None = None
    """A folder for `report.png`, recall against k and calibration; by default that of the run."""
    train: Path | None = None
    """The training data, where they have moved."""
    test: Path | None = None
    """The test data, where they have moved."""
    cpu: bool = False
    """Stay on the CPU even where a GPU is available."""


@dataclass(frozen=True)
class PredictSettings:
    """Recommend items that users do not have, the best first.

    The probability of an item is that of being among the --top: over all items it sums to that number. Users
    of whom nothing is known get the items that most users have.
    """

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/recommend")
    """The folder of the run."""
    users: tuple[str, ...] = ()
    """The users, by their names in the training data; by default those of `--data`, or all."""
    data: Path | None = None
    """More items that users have, also of new users, in a file of the same kinds as for `--train`."""
    top: int = 5
    """How many items each user gets."""
    out: Path | None = None
    """A file for the recommendations of all users: CSV, or JSON lines with the suffix .jsonl."""
    train: Path | None = None
    """The training data, where they have moved."""


@dataclass(frozen=True)
class SweepSettings(GridSettings):
    """Run all combinations of models, losses, seeds, and what is tuned, as far as they are not done."""

    out: Path = Path("runs/recommend-sweep")
    models: tuple[Model, ...] = ("autoencoder", "matrix-factorisation")
    """The models."""
    losses: tuple[str, ...] = ("lml-labels", "lml-20", "softmax", "bce", "truncated-entropy-1")
    """The losses: softmax, bce, lml-K, lml-labels (K as many as the user has), truncated-entropy-K."""
    temperatures: tuple[float, ...] = ()
    """The temperatures to try for matrix factorisation; by default the one of `--run.temperature`."""
    dropouts: tuple[float, ...] = ()
    """The dropouts to try for the autoencoder; by default the one of `--run.dropout`."""
    run: RecommendSettings = field(default_factory=RecommendSettings)
    """All that the runs have in common, as for `torchlml train recommend`."""


@dataclass(frozen=True)
class LossTimesSettings(StepTimeSettings):
    """Time whole training steps of all losses in turns, on the same users, with the settings of a run."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/recommend")
    """The folder of the run."""
    train: Path | None = None
    """The training data, where they have moved."""
