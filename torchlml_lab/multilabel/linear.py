"""The linear part of a model: ridge regression of all labels, with a penalty chosen on held-out samples.

Least squares on 0/1 labels with an L2 penalty ranks labels as well as a linear SVM does, and it is one linear
system with a column per label.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from torch import Tensor

from torchlml.metrics import topk_ndcg
from torchlml_lab.data.labelled_rows import Matrix
from torchlml_lab.multilabel.losses import LabelLoss, unlike_logits
from torchlml_lab.multilabel.samples import label_lists

Array = npt.NDArray[np.float32]

PENALTIES = (16.0, 6.0, 2.0, 0.7, 0.25, 0.08)
"""The penalties to choose from, the strongest first, relative to the mean squared norm of the inputs."""
FOLDS = 5
FEWEST_HELD_OUT = (
    300  # fewer samples make the choice of a penalty noisy, so cross-validation uses all of them
)
TOLERANCE, MOST_STEPS = 0.05, 40
SCALE_PENALTY = 0.001  # keeps the scale finite if the validation samples are separable
SHARES, CLOSE = (0.0, 0.25, 0.5, 0.75, 1.0), 0.002
MOST_SCORES, MOST_WEIGHTS = 2**24, 2**27  # 64 MB per matrix of scores, 512 MB of weights


class LinearPart(NamedTuple):
    """Scores that are linear in the inputs: `inputs @ weight + bias`."""

    weight: Array
    """(inputs, labels)."""
    bias: Array
    """(labels,)."""

    def scores(self, inputs: Matrix) -> Array:
        """The scores (rows, labels): estimates of the probability of each label."""
        return inputs @ self.weight + self.bias


def fits(rows: int, inputs: int, labels: int) -> bool:
    """Whether the matrices of the linear part fit in memory."""
    return rows * labels <= MOST_SCORES and inputs * labels <= MOST_WEIGHTS


def ridge_path(
    inputs: Matrix, labels: Matrix, penalties: Sequence[float], start: LinearPart | None = None
) -> Iterator[LinearPart]:
    """Fit ridge regressions with decreasing penalties, each starting from the previous solution.

    Args:
        inputs: CSR float32 (rows, inputs).
        labels: CSR (rows, labels).
        penalties: The factors of the squared norm, as multiples of the mean squared norm of the inputs.
        start: The part whose distance is penalized; by default the weights themselves are.

    Returns:
        For each penalty λ, the part with weights `W = Xᵀ A`, where `(X Xᵀ + λ I) A = Y - mean(Y)` is solved
        by conjugate gradients. X has an additional column of ones for the bias. The rows of A are as many as
        the samples, which are usually fewer than the inputs.
    """
    rows = inputs.shape[0]
    x = sparse.csr_array(
        sparse.hstack([inputs, np.ones((rows, 1), np.float32)], format="csr", dtype=np.float32)
    )
    transposed = sparse.csr_array(x.T)
    y = labels.toarray().astype(np.float32)
    if start is not None:
        y -= start.scores(inputs)
    mean = y.mean(axis=0)
    y -= mean
    solution = np.zeros_like(y)
    size = float(inputs.data @ inputs.data) / rows
    for penalty in penalties:
        solution = _solve(x, transposed, y, penalty * size, solution)
        weight = transposed @ solution
        part = LinearPart(weight[:-1], weight[-1] + mean)
        yield part if start is None else LinearPart(start.weight + part.weight, start.bias + part.bias)


def _solve(x: Matrix, transposed: Matrix, y: Array, penalty: float, start: Array) -> Array:
    """Solve `(x xᵀ + penalty I) a = y` for each column of y by conjugate gradients."""

    def image(a: Array) -> Array:
        found: Array = x @ (transposed @ a)
        found += np.float32(penalty) * a
        return found

    a = start.copy()
    rest = y - image(a)
    direction = rest.copy()
    left = _squares(rest)
    enough = TOLERANCE**2 * _squares(y)
    for _ in range(MOST_STEPS):
        if (left <= enough).all():
            break
        along = image(direction)
        # Columns that are solved exactly have nothing left, and their step is 0.
        step = left / np.maximum(np.einsum("ij,ij->j", direction, along), np.float32(1e-30))
        a += step * direction
        rest -= step * along
        before, left = left, _squares(rest)
        direction *= left / np.maximum(before, np.float32(1e-30))
        direction += rest
    return a


def _squares(columns: Array) -> Array:
    return np.einsum("ij,ij->j", columns, columns)


class Choice(NamedTuple):
    """The penalty of the linear part, and the part that was fitted without the validation samples."""

    penalty: float
    part: LinearPart


def folds(rows: int) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield the training rows and the held-out rows of each fold of a cross-validation."""
    order = np.random.default_rng(0).permutation(rows)
    for fold in range(FOLDS):
        yield np.sort(np.delete(order, np.s_[fold::FOLDS])), np.sort(order[fold::FOLDS])


def choose(
    training: Matrix, labels: Matrix, validation: Matrix, its_labels: Matrix, start: LinearPart | None = None
) -> Choice:
    """Choose the penalty with the best nDCG@5 on held-out samples.

    Args:
        training: The inputs of the training samples.
        labels: Their labels.
        validation: The inputs of the validation samples.
        its_labels: Their labels, possibly followed by labels that no training sample has.
        start: The part of an earlier run to start from.

    Returns:
        The choice. If there are few validation samples, it is made by cross-validation over all samples.
    """
    its_labels = its_labels[:, : labels.shape[1]]
    if validation.shape[0] >= FEWEST_HELD_OUT:
        best, found = -1.0, None
        for penalty, part in zip(PENALTIES, ridge_path(training, labels, PENALTIES, start), strict=True):
            quality = ndcg(part.scores(validation), its_labels)
            if found is not None and quality < best - 0.005:
                break  # weaker penalties only get worse
            if quality > best:
                best, found = quality, Choice(penalty, part)
        assert found is not None
        return found
    x, y = (
        sparse.vstack([training, validation], format="csr"),
        sparse.vstack([labels, its_labels], format="csr"),
    )
    total = np.zeros(len(PENALTIES))
    for rest, held_out in folds(x.shape[0]):
        path = ridge_path(x[rest], y[rest], PENALTIES, start)
        total += [len(held_out) * ndcg(part.scores(x[held_out]), y[held_out]) for part in path]
    penalty = PENALTIES[int(total.argmax())]
    return Choice(penalty, fit(training, labels, penalty, start))


def fit(inputs: Matrix, labels: Matrix, penalty: float, start: LinearPart | None = None) -> LinearPart:
    """Fit the linear part with one penalty."""
    return next(ridge_path(inputs, labels, (penalty,), start))


class Mixture(NamedTuple):
    """The weights of the sum of two models, `linear * scores + network * logits + shift`."""

    linear: float
    network: float
    shift: float
    share: float
    """The share of the linear part, from 0 to 1, if both models have their best scale."""

    def in_words(self) -> str:
        """A sentence about the two models."""
        return (
            f"The model is the sum of a linear part ({100 * self.share:.0f}% of the weight) and a network "
            f"({100 - 100 * self.share:.0f}%), with weights chosen on the validation samples."
        )


def fit_mixture(loss: LabelLoss, scores: Array, logits: Tensor, labels: Matrix) -> Mixture:
    """Choose the weights of two models on samples that neither of them was fitted on.

    Args:
        loss: The loss of the network, which determines the scales.
        scores: The scores (rows, labels) of the linear part.
        logits: The logits of the network.
        labels: CSR (rows, labels).

    Returns:
        The mixture. Its share is the largest one whose nDCG@5 is at most `CLOSE` below the best: the linear
        part still gains from a fit on all samples.
    """
    first, second, lists = torch.from_numpy(scores).double(), logits.double(), label_lists(labels)
    scales = [fit_scale(loss, one, lists)[0] for one in (first, second)]
    sums = {share: share * scales[0] * first + (1 - share) * scales[1] * second for share in SHARES}
    quality = {share: ndcg(one.float().numpy(), labels) for share, one in sums.items()}
    share = max(one for one in SHARES if quality[one] >= max(quality.values()) - CLOSE)
    scale, shift = fit_scale(loss, sums[share], lists)
    return Mixture(scale * share * scales[0], scale * (1 - share) * scales[1], shift, share)


def fit_scale(loss: LabelLoss, logits: Tensor, lists: Tensor) -> tuple[float, float]:
    """Minimize the loss of `scale * logits + shift`; the shift is 0 for losses that it does not change."""
    # A square is not negative. Scores that estimate probabilities need a scale of about 10.
    root = torch.tensor(1 / float(logits.std().clamp(min=1e-9)), dtype=torch.float64).sqrt().requires_grad_()
    shift = torch.zeros((), dtype=torch.float64, requires_grad=loss.name == "bce")
    learned = [root, shift] if loss.name == "bce" else [root]
    optimizer = torch.optim.LBFGS(learned, max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(root.square() * logits + shift, lists) + SCALE_PENALTY * root.square()
        value.backward()
        return value

    optimizer.step(closure)
    return float(root.detach().square()), float(shift.detach())


def ndcg(scores: Array, labels: Matrix, k: int = 5) -> float:
    """The mean nDCG@k of samples that have labels, from 0 to 1."""
    k = min(k, scores.shape[1])
    lists = unlike_logits(label_lists(labels), scores.shape[1])
    found = topk_ndcg(torch.from_numpy(scores), lists, k)
    assert isinstance(found, torch.Tensor)
    return float(found)
