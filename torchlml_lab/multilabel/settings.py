"""The settings of the multi-label commands. This module imports nothing slow, so that `--help` is fast."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from torchlml_lab.engine.settings import GridSettings, TrainSettings

LossName = Literal["lml", "softmax", "bce", "truncated-entropy"]
LOSSES: tuple[LossName, ...] = get_args(LossName)
WITH_K: tuple[LossName, ...] = ("lml", "truncated-entropy")
PerRow = Literal["labels"]

EXPERIMENT = "multilabel"


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


@dataclass(frozen=True)
class EvaluateSettings:
    """Print P@, nDCG@, PSP@ and R@ of a multi-label run with its best weights, beside the popular labels'."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/multilabel")
    """The folder of the run."""
    data: Path | None = None
    """Other rows with labels, in a file of any kind; by default the run's test or validation rows."""
    data_labels: Path | None = None
    """Their labels, where they are an .npz."""
    train: Path | None = None
    """The training file, where it has moved; the next two likewise."""
    valid: Path | None = None
    """The validation file."""
    test: Path | None = None
    """The test file."""
    out: Path | None = None
    """A folder for `report.md` and `report.png`; by default that of the run, and none for other rows."""


@dataclass(frozen=True)
class PredictSettings:
    """Print the best labels of each row of a file, and the probability that the label is among the k."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/multilabel")
    """The folder of the run."""
    data: Path | None = None
    """The rows, in a file like the one that the run was trained on; it needs no labels."""
    top: int | None = None
    """How many labels of each row are printed; by default 5, or all where there are fewer."""
    out: Path | None = None
    """Also write all rows to a file: `*.csv` has a line per label, `*.jsonl` a line of JSON per row."""


@dataclass(frozen=True)
class SweepSettings(GridSettings):
    """Run all combinations of losses, kept labels, seeds and learning rates that are not done.

    Needs --run.train and --run.test.
    """

    out: Path = Path("runs/multilabel-sweep")
    losses: tuple[str, ...] = ("bce", "softmax", "lml-5", "lml-20", "lml-labels", "truncated-entropy-1")
    """The losses with their k: bce, softmax, lml-5, lml-labels, truncated-entropy-1, and so on."""
    keeps: tuple[float | Literal["one"], ...] = (1.0, 0.5, 0.3, "one")
    """The shares of the training labels that are kept, at least one in each row; `one`: no more than one."""
    seeds: tuple[int, ...] = (0, 1, 2)
    run: MultilabelSettings = field(default_factory=MultilabelSettings)
    """All that the runs have in common, as for `torchlml train multilabel`."""
