"""`TopKClassifier`: a scikit-learn estimator trained with the losses of torchlml."""

import copy
import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from scipy import sparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data
from torch import Tensor, nn

from torchlml.metrics import topk_ndcg
from torchlml_lab.classifier.label_forms import NO_LABELS, Matrix, learn_form
from torchlml_lab.engine.loop import EpochBatches, train_epoch
from torchlml_lab.engine.output import new_console
from torchlml_lab.multilabel.losses import LabelLoss, unlike_logits
from torchlml_lab.multilabel.model import LabelNetwork, probabilities, scores
from torchlml_lab.multilabel.samples import Batch, Batches
from torchlml_lab.multilabel.settings import LOSSES, WITH_K, LossName

# The k of the nDCG@k that selects the best epoch, and the default patience in steps. Both are the same as in
# `torchlml train multilabel`.
_AT = 5
_PATIENT_STEPS = 100


class Schedule(NamedTuple):
    """The training schedule."""

    epochs: int
    patience: int | None
    """Training stops after this many epochs without improvement. None corresponds to 100 steps, but at least
    5 epochs."""
    batch_size: int
    learning_rate: float
    seed: int


class Judged(NamedTuple):
    """The quality of a network on validation samples. A higher nDCG is better, and the loss breaks ties."""

    ndcg: float
    minus_loss: float


def fit_network(
    network: LabelNetwork,
    loss: LabelLoss,
    training: Batches,
    validation: Batches | None,
    schedule: Schedule,
    say: Callable[[str], None],
) -> int:
    """Train a network in place. If validation samples are given, restore the weights of the best epoch.

    Args:
        network: The network to train.
        loss: The loss to minimize.
        training: The training samples.
        validation: The samples used to select the best epoch. If None, train for all epochs.
        schedule: The training schedule.
        say: Called after every epoch with a line of text to print.

    Returns:
        The number of epochs that the network was trained for.
    """
    optimizer = torch.optim.Adam(network.parameters(), lr=schedule.learning_rate, fused=True)
    batches = EpochBatches(len(training), schedule.batch_size, schedule.seed, shuffle=True)
    patience = schedule.patience or max(5, math.ceil(_PATIENT_STEPS / len(batches)))
    best, weights, best_epoch = Judged(-1.0, 0.0), network.state_dict(), 0

    def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
        value: Tensor = model(batch.inputs, batch.labels, loss)
        return value

    for epoch in range(1, schedule.epochs + 1):
        batches.epoch = epoch
        total = train_epoch(network, optimizer, mean_loss, map(training.__getitems__, batches))
        line = f"epoch {epoch}: loss {total / len(batches):.4f}"
        if validation is None:
            say(line)
            continue
        judged = judge(network, loss, validation)
        say(f"{line}, validation loss {-judged.minus_loss:.4f}, nDCG@{_AT} {judged.ndcg:.4f}")
        if judged.ndcg > best.ndcg:
            best_epoch = epoch
        if judged > best:  # a lower loss at equal nDCG updates the weights, but does not extend the patience
            best, weights = judged, copy.deepcopy(network.state_dict())
        if epoch - best_epoch >= patience:
            break
    if validation is not None:
        network.load_state_dict(weights)
    network.eval()
    return epoch


def judge(network: LabelNetwork, loss: LabelLoss, rows: Batches) -> Judged:
    """Compute the nDCG and the loss of a network on validation samples."""
    network.eval()
    logits = torch.cat([found for found, _ in scores(network, rows.inputs)])
    labels = unlike_logits(rows.__getitems__(range(len(rows))).labels, logits.shape[1])
    ndcg = topk_ndcg(logits, labels, _AT)
    assert isinstance(ndcg, Tensor)  # not a dict, because there is only one k
    return Judged(ndcg.item(), -loss(logits, labels).item())


_FEWEST = 100  # with fewer samples, none are held out for validation


class TopKClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier that predicts k labels per sample, with a linear model or one hidden layer.

    By default, it is trained with the LML loss.

        >>> from torchlml_lab import TopKClassifier
        >>> X = [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.9], [0.9, 0.0]]
        >>> tags = [["tea"], ["milk", "cup"], ["tea", "milk", "cup"], ["tea"], ["cup", "milk"]]
        >>> model = TopKClassifier(k=2, random_state=0).fit(X, tags)
        >>> sorted(model.predict([[1.0, 0.1]])[0])
        ['cup', 'milk']

    Args:
        k: the number of labels per sample: an integer, or "labels". With "labels", the LML loss uses each
            sample's own number of labels. Predictions and the loss "truncated-entropy" use the mean number,
            rounded to an integer (`k_`).
        hidden: the size of the hidden layer; 0 for a linear model.
        dropout: the dropout probability of the hidden layer.
        loss: "lml", "softmax", "bce" or "truncated-entropy".
        learning_rate: the learning rate of Adam; None means 0.005 with a hidden layer and 0.1 without one.
        batch_size: the number of samples per step.
        epochs: the maximum number of epochs.
        validation_fraction: the fraction of samples held out for validation, to select the epoch with the
            best nDCG@5. With 0, or with fewer than 100 samples, the model is trained on all samples for the
            maximum number of epochs.
        patience: stop after this many epochs without improvement; None corresponds to 100 steps, but at
            least 5 epochs.
        random_state: the seed for the initial weights, the order of the samples and the validation split.
        verbose: whether to print a line after every epoch.

    X is an array or a sparse matrix. Dense columns are standardized; the rows of a sparse matrix are
    divided by their mean norm. For texts, use `TfidfVectorizer` in a `Pipeline`.

    y can have three forms:

    - A dense or sparse binary matrix with a column for each label. `predict` returns a matrix of this kind.
    - A list of label names for each sample. `predict` returns lists of names, best first. Stratified
      splits in scikit-learn do not support lists, so pass a `KFold` instead of a number to `GridSearchCV`.
    - One class for each sample. `predict` returns the best class, and k is 1 unless you set it.

    Samples without labels are ignored in training and in `score`. Training runs on the CPU.

    Attributes:
        classes_: (n,), the names of the labels; for a matrix, its column indices.
        k_: the number of labels that `predict` returns.
        n_iter_: the number of epochs for which the network was trained.
        network_: the trained `torch.nn.Module`.
    """

    def __init__(
        self,
        k: int | Literal["labels"] = "labels",
        *,
        hidden: int = 256,
        dropout: float = 0.5,
        loss: LossName = "lml",
        learning_rate: float | None = None,
        batch_size: int = 128,
        epochs: int = 200,
        validation_fraction: float = 0.1,
        patience: int | None = None,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.k = k
        self.hidden = hidden
        self.dropout = dropout
        self.loss = loss
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.epochs = epochs
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> "TopKClassifier":
        """Fit the model to samples and their labels."""
        self._check_settings()
        if y is None:
            raise ValueError(
                "`TopKClassifier` requires y to be passed, but the target y is None. Pass the labels."
            )
        X = validate_data(self, X, accept_sparse="csr", dtype=(np.float64, np.float32))
        self._form = learn_form(y)
        labels = self._form.read(y)
        check_consistent_length(X, labels)
        self.classes_ = self._form.classes
        self._choose_k(labels)
        self._learn_scale(X)
        random = check_random_state(self.random_state)
        seed = int(random.randint(2**31))
        training, validation = self._parts(Batches(self._inputs(X), labels), random)
        # The initial weights and dropout use PyTorch's global generator. Its state is restored afterward.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inputs, n = X.shape[1], len(self.classes_)
            self.network_ = LabelNetwork(inputs, n, int(self.hidden), float(self.dropout))
            rate = self.learning_rate or (0.005 if self.hidden else 0.1)
            schedule = Schedule(
                int(self.epochs), self.patience, int(self.batch_size), float(rate), seed % 2**20
            )
            console = new_console(quiet=not self.verbose)
            self.n_iter_ = fit_network(
                self.network_, self._label_loss(), training, validation, schedule, console.print
            )
        return self

    def predict_proba(self, X: Any) -> Any:
        """Return the probability that each label is among the top `k_`, with shape (samples, labels).

        Every row sums to `k_`, except with the loss "bce", which treats the labels as independent.
        """
        logits = self._logits(X)
        return probabilities(logits.double(), self.loss, self.k_).numpy()

    def predict(self, X: Any, k: int | None = None) -> Any:
        """Predict the top k labels of each sample, in the same form as the labels passed to `fit`.

        Args:
            X: the samples.
            k: the number of labels; `k_` by default. A `Pipeline` passes it on: `pipeline.predict(X, k=5)`.
        """
        check_is_fitted(self)
        k = self.k_ if k is None else k
        if not (_whole(k, 1) and k <= len(self.classes_)):
            raise ValueError(f"`k` must be an integer from 1 to {len(self.classes_)}, but it is {k!r}.")
        # The sort is stable, so that ties are broken by column and each result depends only on its sample.
        order = self._logits(X).sort(dim=-1, descending=True, stable=True).indices
        return self._form.write(order[:, : int(k)].numpy())

    def score(self, X: Any, y: Any) -> float:
        """Return the mean R-precision: for a sample with m labels, the share of them that are in the top m.

        If each sample has one label, this is the accuracy. It does not depend on how many labels `predict`
        returns, so `GridSearchCV` can compare values of `k`. For other metrics, use `torchlml.metrics` (P@k,
        nDCG@k and more), or pass the outputs of `predict` and `predict_proba` to scikit-learn's metrics.
        """
        logits = self._logits(X)
        labels = self._form.read(y)
        check_consistent_length(logits, labels)
        order = logits.sort(dim=-1, descending=True, stable=True).indices.numpy()
        # A label that is not in the training data cannot be predicted, so it counts as a miss.
        counts = self._form.counts(y)
        hits = np.take_along_axis(labels.toarray(), order, axis=1) * (
            np.arange(order.shape[1]) < counts[:, None]
        )
        there = counts > 0
        return float((hits.sum(axis=1)[there] / counts[there]).mean()) if there.any() else math.nan

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        tags.input_tags.sparse = True
        return tags

    def _check_settings(self) -> None:
        """Validate the settings before the data is read."""
        if self.k != "labels" and not _whole(self.k, 1):
            raise ValueError(f'`k` must be a positive integer or "labels", but it is {self.k!r}.')
        if self.loss not in LOSSES:
            raise ValueError(f"`loss` must be one of {', '.join(LOSSES)}, but it is {self.loss!r}.")
        for name, least in (("hidden", 0), ("batch_size", 1), ("epochs", 1), ("patience", 1)):
            value = getattr(self, name)
            if name == "patience" and value is None:
                continue
            if not _whole(value, least):
                raise ValueError(f"`{name}` must be an integer of at least {least}, but it is {value!r}.")
        for name in ("dropout", "validation_fraction"):
            value = getattr(self, name)
            if not _real(value) or not 0 <= value < 1:
                raise ValueError(f"`{name}` must be at least 0 and less than 1, but it is {value!r}.")
        rate = self.learning_rate
        if rate is not None and (not _real(rate) or not 0 < rate < math.inf):
            raise ValueError(f"`learning_rate` must be a positive number or None, but it is {rate!r}.")

    def _choose_k(self, labels: Matrix) -> None:
        n, counts = labels.shape[1], np.diff(labels.indptr)
        if n < 2:
            raise ValueError(f"`y` must have at least two labels (classes), but it has {n} class.")
        if not counts.any():
            raise ValueError(NO_LABELS)
        if self.k != "labels" and self.k >= n:
            raise ValueError(f"`k` must be less than the number of labels ({n}), but it is {self.k}.")
        usual = min(max(1, round(float(counts[counts > 0].mean()))), n - 1)
        self.k_ = usual if self.k == "labels" else int(self.k)

    def _label_loss(self) -> LabelLoss:
        if self.loss not in WITH_K:
            return LabelLoss(self.loss)
        return LabelLoss(self.loss, "labels" if self.loss == "lml" and self.k == "labels" else self.k_)

    def _learn_scale(self, X: Any) -> None:
        """Compute the shift and scale of the inputs: per column for dense X, one number for sparse X."""
        if sparse.issparse(X):
            length = float(np.sqrt(X.multiply(X).sum(axis=1)).mean())
            self._mean, self._scale = None, np.array(length or 1.0)
            return
        deviation = X.std(axis=0)
        # In a constant column, the computed deviation is only rounding error.
        constant = deviation <= 1e-12 * np.abs(X).max(axis=0)
        self._mean, self._scale = X.mean(axis=0), np.where(constant, 1.0, deviation)

    def _inputs(self, X: Any) -> Matrix:
        if self._mean is not None:
            X = ((X.toarray() if sparse.issparse(X) else X) - self._mean) / self._scale
        return sparse.csr_array(X if self._mean is not None else X / float(self._scale), dtype=np.float32)

    def _parts(self, rows: Batches, random: Any) -> tuple[Batches, Batches | None]:
        """Split the samples into a training set and a validation set."""
        count = round(self.validation_fraction * len(rows)) if len(rows) >= _FEWEST else 0
        if count == 0:
            return rows, None
        if count == len(rows):
            raise ValueError(
                "`validation_fraction` must leave at least one training sample, "
                f"but it is {self.validation_fraction}, which holds out all {count} samples."
            )
        aside, rest = np.split(random.permutation(len(rows)), [count])
        training, validation = (Batches(rows.inputs[part], rows.labels[part]) for part in (rest, aside))
        return training, validation

    def _logits(self, X: Any) -> torch.Tensor:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, accept_sparse="csr", dtype=(np.float64, np.float32))
        return torch.cat([found for found, _ in scores(self.network_, self._inputs(X))])


def _whole(value: Any, least: int) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def _real(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real)
