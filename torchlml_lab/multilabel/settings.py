"""What a run is told: the files, the model, the loss."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.tables import Columns
from torchlml_lab.engine.settings import TrainSettings
from torchlml_lab.engine.settings import check as check_settings
from torchlml_lab.multilabel.losses import WITH_K, LabelLoss, LossName, PerRow

EXPERIMENT = "multilabel"
COMMAND = f"train {EXPERIMENT}"


@dataclass(frozen=True)
class MultilabelSettings(TrainSettings):
    """Learn the labels of texts, numbers or sparse features from your own file; needs --train.

    A file is a table (CSV, TSV, Parquet: a column of labels, and columns of texts or numbers), lines of
    svmlight or of the extreme-classification repository, or a pair of scipy's .npz. Text may be gzipped.
    Without --valid a tenth of the rows is set aside, and the epoch with the best nDCG@5 there is kept.
    """

    out: Path = Path("runs/multilabel")
    train: Path | None = None
    """The rows to learn from."""
    valid: Path | None = None
    """The rows that the best epoch is chosen by; by default a tenth of `--train` is set aside."""
    test: Path | None = None
    """The rows that are measured once, at the end; by default the measures are those of validation."""
    train_labels: Path | None = None
    """The labels of `--train`, where that is an .npz; the next two are for the other files."""
    valid_labels: Path | None = None
    """The labels of `--valid`."""
    test_labels: Path | None = None
    """The labels of `--test`."""
    label_names: Path | None = None
    """A file whose line i, from 0 on, is the name of label i, where labels are numbers."""
    labels: str | None = None
    """The column of the labels in a table; by default the one called labels, tags, or the like."""
    separator: str | None = None
    """What stands between the labels of a cell; by default that of `, ; |` and tab which most cells have."""
    texts: tuple[str, ...] = ()
    """The columns of texts; where neither these nor numbers are named, all columns are used."""
    numbers: tuple[str, ...] = ()
    """The columns of numbers."""
    loss: LossName = "lml"
    """What is minimised: lml, softmax, bce or truncated-entropy."""
    k: int | PerRow | None = None
    """How many labels are predicted: a number, or for lml `labels`, in training each row's own count. By
    default it is trained with `labels`, truncated-entropy with 1, and the mean count is predicted."""
    hidden: int = 256
    """The size of the hidden layer; 0 for a linear model."""
    dropout: float = 0.5
    """The share of the hidden layer that is left out in training, from 0 to less than 1."""
    keep: float | Literal["one"] = 1.0
    """The share of the training labels that is kept, at least one in each row, or `one`: for studies."""
    epochs: int = 200
    """How often the training data are seen, at most."""
    patience: int | None = None
    """After so many epochs without a better one the training ends; by default as many as make 100 steps, and
    at least 5."""
    batch_size: int = 128
    """Rows per step, over all processes together; a multiple of the number of processes."""
    learning_rate: float = 0.005
    """The learning rate of Adam; that of a linear model is ten times as large."""

    @property
    def columns(self) -> Columns:
        """The columns of the tables, as far as they are named."""
        return Columns(self.texts, self.numbers, self.labels, self.separator)


def check(settings: MultilabelSettings) -> None:
    """Refuse settings that cannot be run, as far as that is known without the data."""
    check_settings(settings)
    if settings.train is None:
        raise BadInput("`--train` is missing: give a file of rows with labels.")
    for name in ("valid", "test"):
        if getattr(settings, f"{name}_labels") is not None and getattr(settings, name) is None:
            raise BadInput(f"`--{name}-labels` is given without `--{name}`.")
    if settings.separator == "":
        raise BadInput("`--separator` is empty: give what stands between two labels.")
    if settings.hidden < 0:
        raise BadInput(f"`--hidden` is {settings.hidden}, and must be at least 0.")
    if settings.patience is not None and settings.patience < 1:
        raise BadInput(f"`--patience` is {settings.patience}, and must be at least 1.")
    if not 0 <= settings.dropout < 1:
        raise BadInput(f"`--dropout` is {settings.dropout}, and must be from 0 to less than 1.")
    if isinstance(settings.keep, float | int) and not 0 < settings.keep <= 1:
        raise BadInput(f"`--keep` is {settings.keep}, and must be more than 0 and at most 1, or `one`.")
    if settings.k is not None:
        loss_of(settings)


def loss_of(settings: MultilabelSettings) -> LabelLoss:
    """The loss of a run, with the k that suits it where none is given."""
    if settings.loss not in WITH_K:
        # Such a loss has no k; the one that is given is for the predictions.
        if settings.k is not None and (settings.k == "labels" or settings.k < 1):
            raise BadInput(f"`--k` is {settings.k}, and with the loss `{settings.loss}` must be at least 1.")
        return LabelLoss(settings.loss)
    if settings.k is not None:
        return LabelLoss(settings.loss, settings.k)
    return LabelLoss(settings.loss, "labels" if settings.loss == "lml" else 1)
