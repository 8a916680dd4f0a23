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

    For validation, a fifth of the items of some users is held out. The final weights are those of the epoch
    with the best Recall@20 on the held-out items. By default, four models are trained, and the combination of
    them with the best Recall@20 is used.
    """

    out: Path = Path("runs/recommend")
    train: Path | None = None
    """File with the items of each user. It can be a text file with lines `user item item ...`, a CSV or TSV
    file with one user-item pair per line, or a RecBole .inter file. It may be gzipped."""
    test: Path | None = None
    """File with held-out items of the same users, in any format that `--train` accepts. If given, the final
    model is evaluated on it. Otherwise, it is evaluated on the validation users."""
    columns: tuple[str, str] | None = None
    """The names of the user and item columns in CSV, TSV and .inter files. By default, they are detected."""
    min_rating: float | None = None
    """Skip pairs with a lower value than this in the column `rating`. By default, all pairs are used."""
    latest: bool = False
    """Hold out each user's latest items for validation instead of random ones. In a table, the order is given
    by the column `timestamp`. In lines `user item item ...`, the last items are the latest."""
    model: Model = "auto"
    """ease is a linear model with a closed-form solution. graph-filter smooths a user's items over the graph
    of users and items. autoencoder is a network that maps a user's items to a score for every item.
    matrix-factorization learns a vector for every user and item, and scores items by cosine similarity. auto
    trains all four (ease and graph-filter only if they fit in memory) and adds their scores, with weights
    chosen on the validation users."""
    loss: AnyLossName | None = None
    """The loss over all items: lml, softmax, bce, truncated-entropy or topk-softmax. The default is lml,
    except for matrix factorization without graph layers, where it is bce unless `--k` is given."""
    k: int | PerRow | None = None
    """The number of items to predict. With lml, `labels` means each user's own number of items. The default
    is `labels` for lml, 1 for truncated-entropy and 20 for topk-softmax."""
    layers: int = 0
    """The number of graph layers for matrix factorization. LightGCN, for example, uses 3."""
    dimension: int = 64
    """The size of the autoencoder's hidden layer and of the vectors in matrix factorization."""
    temperature: float = 0.1
    """The temperature by which matrix factorization divides the cosine similarities, greater than 0."""
    dropout: float = 0.4
    """The probability that an item is dropped from the autoencoder's input during training, at least 0 and
    less than 1."""
    penalty: float | None = None
    """The L2 penalty of ease, greater than 0. By default, it is chosen on the validation users, or it is 200
    if there are more than 6000 users and more than 6000 items."""
    epochs: int = 100
    """The maximum number of epochs."""
    patience: int = 5
    """Stop after this many epochs without improvement."""
    batch_size: int = 0
    """The number of users per step over all processes. It must be a multiple of the number of processes. 0
    means 128, or 512 with graph layers. With few users, 0 means a smaller batch for matrix factorization."""
    learning_rate: float = 0.0
    """The learning rate of Adam. 0 means 0.006 for the autoencoder and 0.02 for matrix factorization."""
    validation: int | None = None
    """The number of users with held-out items for validation. The default is a tenth of the users with at
    least two items, but at most 3000 and at least 100 (or a quarter of these users, if that is fewer)."""
    users: int | None = None
    """Use only this many users, for example for tuning. They are chosen at random, independently of the seed.
    By default, all users are used."""


@dataclass(frozen=True)
class EvaluateSettings:
    """Evaluate a recommendation run: rank the items that each user does not have yet, and compute metrics."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Path("runs/recommend")
    """The run directory."""
    split: Literal["validation", "test"] | None = None
    """The held-out items to evaluate on: those held out for validation, or those in the run's test file. The
    default is `test` if the run has a test file, and `validation` otherwise."""
    data: Path | None = None
    """File with held-out items of the same users, in any format that `--train` accepts. If given, the model
    is evaluated on it instead of on a split."""
    out: Path | None = None
    """The directory for `report.png`, a plot of recall and calibration. The default is the run directory."""
    train: Path | None = None
    """The new path of the training file, if it has moved since training."""
    test: Path | None = None
    """The new path of the test file, if it has moved since training."""
    cpu: bool = False
    """Use the CPU even if a GPU is available."""


@dataclass(frozen=True)
class PredictSettings:
    """Recommend items that users do not have yet, best first.

    The probability of an item is P(item in top k) with k = --top, so the probabilities of all items sum to k.
    Users whom the model cannot score, such as users without items, get the most popular items.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Path("runs/recommend")
    """The run directory."""
    users: tuple[str, ...] = ()
    """The names of the users to recommend items to. The default is all users in `--data` or, without
    `--data`, in the training data."""
    data: Path | None = None
    """File with additional items of known or new users, in any format that `--train` accepts."""
    top: int = 5
    """The number of items per user."""
    out: Path | None = None
    """Write the recommendations for all users to this file (.csv or .jsonl)."""
    train: Path | None = None
    """The new path of the training file, if it has moved since training."""


@dataclass(frozen=True)
class SweepSettings(GridSettings):
    """Train with all combinations of models, losses, seeds and hyperparameters.

    Finished runs are not repeated. Requires --run.train.
    """

    out: Path = Path("runs/recommend-sweep")
    models: tuple[Model, ...] = ("autoencoder", "matrix-factorization")
    """The models to train. `--losses` does not apply to `auto`, `ease` and `graph-filter`."""
    losses: tuple[str, ...] = ("lml-labels", "lml-20", "softmax", "bce", "truncated-entropy-1")
    """The losses with their k: softmax, bce, lml-K, lml-labels (k is each user's number of items),
    truncated-entropy-K or topk-softmax-K, where K is an integer."""
    layer_counts: tuple[int, ...] = (0, 3)
    """The numbers of graph layers to try for matrix factorization."""
    temperatures: tuple[float, ...] = ()
    """The temperatures to try for matrix factorization. The default is `--run.temperature`."""
    dropouts: tuple[float, ...] = ()
    """The dropout probabilities to try for the autoencoder. The default is `--run.dropout`."""
    run: RecommendSettings = field(default_factory=RecommendSettings)
    """The options of all runs, as for `torchlml train recommend`."""


@dataclass(frozen=True)
class LossTimesSettings(StepTimeSettings):
    """Time the training steps of a run with each loss, alternating between the losses on the same users."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = Path("runs/recommend")
    """The run directory."""
    train: Path | None = None
    """The new path of the training file, if it has moved since training."""
