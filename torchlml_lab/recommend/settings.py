"""The settings of the recommendation commands. This module has no slow imports, so that `--help` is fast."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from torchlml_lab.engine.settings import GridSettings, StepTimeSettings, TrainSettings
from torchlml_lab.multilabel.settings import AnyLossName, PerRow

ClosedForm = Literal["ease", "graph-filter"]
Candidate = Literal[ClosedForm, "autoencoder", "matrix-factorization"]
Model = Literal["auto", Candidate]


@dataclass(frozen=True)
class RecommendSettings(TrainSettings):
    """Train a model that recommends items to users, from a file of users and their items; requires --train.

    For validation, a fifth of the items of some users is held out. The epoch with the best Recall@20 on the
    held-out items is kept. By default several models are trained, and the best combination on these items
    is used.
    """

    out: Path = Path("runs/recommend")
    train: Path | None = None
    """The users' items: lines `user item item ...`, CSV or TSV pairs, or RecBole .inter; may be gzipped."""
    test: Path | None = None
    """The users' later items, in any `--train` format; by default, validation metrics are reported."""
    columns: tuple[str, str] | None = None
    """The user and item columns of CSV, TSV and .inter; by default those named user and item."""
    min_rating: float | None = None
    """Skip pairs whose value in the column `rating` is lower than this; by default, every pair counts."""
    latest: bool = False
    """Validate on each user's latest items, according to the column `timestamp` of a table or the order in a
    line; by default, on random items."""
    model: Model = "auto"
    """ease: a closed-form linear model of the user's items. graph-filter: the user's items smoothed over the
    graph of users and items. autoencoder: a network that maps the user's items to scores.
    matrix-factorization: a vector for every user and item, compared by cosine. auto: all four, combined with
    weights that are chosen on the validation users."""
    loss: AnyLossName | None = None
    """The loss over all items: lml, softmax, bce, truncated-entropy or topk-softmax; by default lml, or bce
    for matrix factorization without graph layers."""
    k: int | PerRow | None = None
    """The number of items to predict. For lml, `labels` (the default) uses each user's number of items. The
    default is 1 for truncated-entropy and 20 for topk-softmax."""
    layers: int = 0
    """The number of graph layers for matrix factorization, as in LightGCN, which has three; 0 means none."""
    dimension: int = 64
    """The size of the autoencoder's hidden layer, or of the vectors in matrix factorization."""
    temperature: float = 0.1
    """The temperature that divides the cosines of matrix factorization, greater than 0."""
    dropout: float = 0.4
    """The share of a user's items hidden from the autoencoder during training, at least 0 and less than 1."""
    penalty: float | None = None
    """The L2 penalty of ease, greater than 0; by default the best of several on validation users."""
    epochs: int = 100
    """The maximum number of epochs."""
    patience: int = 5
    """Stop after this many epochs without improvement."""
    batch_size: int = 0
    """The number of users per step over all processes, a multiple of the number of processes. 0 means 128, or
    512 with graph layers, or fewer for matrix factorization if there are few users."""
    learning_rate: float = 0.0
    """The learning rate of Adam; 0 means 0.006 for autoencoders and 0.02 for matrix factorization."""
    validation: int | None = None
    """The number of users with held-out items for validation. By default, a tenth of the users with several
    items, at most 3000 and at least 100 (or a quarter of these users, if that is fewer)."""
    users: int | None = None
    """Use only this many random users, the same for every seed, for example for tuning; by default, all."""


@dataclass(frozen=True)
class EvaluateSettings:
    """Rank the items that each user does not have yet, and compare the ranking with later items."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Path("runs/recommend")
    """The run directory."""
    split: Literal["validation", "test"] | None = None
    """The items to find: held-out validation items, or the items of `--test` (the default if available)."""
    data: Path | None = None
    """Later items of the users, to evaluate instead of a split; a file in a format that `--train` accepts."""
    out: Path | None = None
    """The directory for `report.png` (recall against k, and calibration); by default, the run directory."""
    train: Path | None = None
    """The training data, if they have moved."""
    test: Path | None = None
    """The test data, if they have moved."""
    cpu: bool = False
    """Use the CPU even if a GPU is available."""


@dataclass(frozen=True)
class PredictSettings:
    """Recommend items that users do not have yet, best first.

    The probability of an item is P(item in top k) with k = --top, so the probabilities of all items sum to k.
    Users without known items get the most popular items.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Path("runs/recommend")
    """The run directory."""
    users: tuple[str, ...] = ()
    """The names of the users; by default, the users in `--data`, or all users without `--data`."""
    data: Path | None = None
    """A file with more items of known or new users, in any format that `--train` accepts."""
    top: int = 5
    """The number of items per user."""
    out: Path | None = None
    """The file for the recommendations for all users: CSV, or JSON lines if its name ends in .jsonl."""
    train: Path | None = None
    """The training data, if they have moved."""


@dataclass(frozen=True)
class SweepSettings(GridSettings):
    """Run all unfinished combinations of models, losses, seeds and hyperparameter values."""

    out: Path = Path("runs/recommend-sweep")
    models: tuple[Model, ...] = ("autoencoder", "matrix-factorization")
    """The models to run. `auto`, `ease` and `graph-filter` do not use the losses."""
    losses: tuple[str, ...] = ("lml-labels", "lml-20", "softmax", "bce", "truncated-entropy-1")
    """The losses: softmax, bce, lml-K, lml-labels (K is each user's number of items), truncated-entropy-K,
    topk-softmax-K."""
    layer_counts: tuple[int, ...] = (0, 3)
    """The numbers of graph layers for matrix factorization."""
    temperatures: tuple[float, ...] = ()
    """The temperatures to try for matrix factorization; by default `--run.temperature`."""
    dropouts: tuple[float, ...] = ()
    """The dropouts to try for the autoencoder; by default `--run.dropout`."""
    run: RecommendSettings = field(default_factory=RecommendSettings)
    """The settings shared by all runs, as for `torchlml train recommend`."""


@dataclass(frozen=True)
class LossTimesSettings(StepTimeSettings):
    """Time training steps with a run's settings, alternating between the losses on the same users."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Path("runs/recommend")
    """The run directory."""
    train: Path | None = None
    """The training data, if they have moved."""
