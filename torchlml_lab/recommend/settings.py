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
    """Users and items: lines `user item item ...`, CSV or TSV of pairs, or RecBole .inter; plain or .gz."""
    test: Path | None = None
    """Later items of the users, in any of these formats; without them, validation metrics are reported."""
    columns: tuple[str, str] | None = None
    """The user and item columns of CSV, TSV and .inter; by default those named user and item."""
    min_rating: float | None = None
    """Skip pairs with a lower rating in the column `rating`; by default every pair counts."""
    latest: bool = False
    """Validate on the latest items of each user, by the column `timestamp` of a table or in the order of a
    line; by default on random ones."""
    model: Model = "auto"
    """ease: a linear model of the user's items in closed form. graph-filter: the user's items smoothed over
    the graph of users and items. autoencoder: a network of the user's items. matrix-factorization: a vector
    for every user and item, compared by cosine. auto: all four, combined with weights that are chosen on the
    validation users."""
    loss: AnyLossName | None = None
    """The loss over all items: lml, softmax, bce, truncated-entropy or topk-softmax; by default lml, or bce
    for matrix factorization without graph layers."""
    k: int | PerRow | None = None
    """The number of items to predict. For lml, `labels` (the default) uses the number of items of each user.
    For truncated-entropy the default is 1, and for topk-softmax 20."""
    layers: int = 0
    """The number of graph layers of matrix factorization, as in LightGCN, which has three; 0 for none."""
    dimension: int = 64
    """The size of the hidden layer or of the vectors."""
    temperature: float = 0.1
    """The temperature that divides the cosines of matrix factorization, greater than 0."""
    dropout: float = 0.4
    """The share of a user's items hidden from the autoencoder in training, at least 0 and less than 1."""
    penalty: float | None = None
    """The L2 penalty of ease, greater than 0; by default the best of several on validation users."""
    epochs: int = 100
    """The maximum number of epochs."""
    patience: int = 5
    """Stop after this many epochs without improvement."""
    batch_size: int = 0
    """Users per step over all processes, a multiple of the number of processes; 0 means 128, or 512 with
    graph layers, or fewer for matrix factorization with few users."""
    learning_rate: float = 0.0
    """The learning rate of Adam; 0 means 0.006 for autoencoders and 0.02 for matrix factorization."""
    validation: int | None = None
    """The number of users with held-out items for validation; by default a tenth, at least 100 and at most
    3000."""
    users: int | None = None
    """Use only this many users, the same for every seed, for example for tuning; by default all."""


@dataclass(frozen=True)
class EvaluateSettings:
    """Rank the items that each user does not have yet, and compare the ranking with later items."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Path("runs/recommend")
    """The run directory."""
    split: Literal["validation", "test"] | None = None
    """The items to find: held-out validation items, or the items of `--test` (the default if available)."""
    data: Path | None = None
    """A file of later items to use instead of a split, in any format of `--train`."""
    out: Path | None = None
    """The directory for `report.png` (recall against k, and calibration); by default the run."""
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
    """The users, by their names in the training data; by default those of `--data`, or all."""
    data: Path | None = None
    """More items of users, who may be new, in any format of `--train`."""
    top: int = 5
    """The number of items per user."""
    out: Path | None = None
    """The file for the recommendations of all users: CSV, or JSON lines if it ends in .jsonl."""
    train: Path | None = None
    """The training data, if they have moved."""


@dataclass(frozen=True)
class SweepSettings(GridSettings):
    """Run all combinations of models, losses, seeds and tuned settings that are not finished."""

    out: Path = Path("runs/recommend-sweep")
    models: tuple[Model, ...] = ("autoencoder", "matrix-factorization")
    """The models to run. `auto`, `ease` and `graph-filter` do not use the losses."""
    losses: tuple[str, ...] = ("lml-labels", "lml-20", "softmax", "bce", "truncated-entropy-1")
    """The losses: softmax, bce, lml-K, lml-labels (K is each user's number of items), truncated-entropy-K,
    topk-softmax-K."""
    layer_counts: tuple[int, ...] = (0, 3)
    """The numbers of graph layers of matrix factorization."""
    temperatures: tuple[float, ...] = ()
    """The temperatures to try for matrix factorization; by default `--run.temperature`."""
    dropouts: tuple[float, ...] = ()
    """The dropouts to try for the autoencoder; by default `--run.dropout`."""
    run: RecommendSettings = field(default_factory=RecommendSettings)
    """Settings shared by all runs, as for `torchlml train recommend`."""


@dataclass(frozen=True)
class LossTimesSettings(StepTimeSettings):
    """Time training steps of all losses in alternation on the same users, with the settings of a run."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Path("runs/recommend")
    """The run directory."""
    train: Path | None = None
    """The training data, if they have moved."""
