"""What a run is told: the files, the model, the loss."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.interactions import is_table
from torchlml_lab.engine.settings import TrainSettings
from torchlml_lab.engine.settings import check as check_settings
from torchlml_lab.multilabel.losses import LabelLoss, LossName, PerRow

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


def check(settings: RecommendSettings) -> None:
    """Refuse settings that cannot be run."""
    check_settings(settings)
    if settings.train is None:
        raise BadInput("`--train` is missing: give a file of users and their items.")
    if settings.columns is not None and not any(map(is_table, filter(None, (settings.train, settings.test)))):
        raise BadInput(
            f"`--columns` is for CSV, TSV and .inter, but `{settings.train}` has lines `user item item ...`."
        )
    loss_of(settings)
    for name in ("dimension", "patience", "validation", "users"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise BadInput(f"`--{name}` is {value}, and must be at least 1.")
    if not 0 < settings.temperature < float("inf"):
        raise BadInput(f"`--temperature` is {settings.temperature}, and must be finite and more than 0.")
    if not 0 <= settings.dropout < 1:
        raise BadInput(f"`--dropout` is {settings.dropout}, and must be from 0 to less than 1.")


def loss_of(settings: RecommendSettings) -> LabelLoss:
    """The loss of a run, with the k that suits it where none is given."""
    usual: dict[str, int | PerRow] = {"lml": "labels", "truncated-entropy": 1}
    return LabelLoss(settings.loss, usual.get(settings.loss) if settings.k is None else settings.k)
