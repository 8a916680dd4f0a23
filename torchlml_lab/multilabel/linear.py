"""The linear part of a combined model: a ridge regression with a penalty chosen on held-out samples.

Ridge regression on 0/1 labels ranks labels as well as a linear SVM does. It requires solving only one linear
system, with one right-hand side per label.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from torch import Tensor

from torchlml_lab.data.labeled_rows import Matrix
from torchlml_lab.multilabel.losses import LabelLoss, unlike_logits
from torchlml_lab.multilabel.samples import label_lists

Array = npt.NDArray[np.float32]

PENALTIES = (16.0, 6.0, 2.0, 0.7, 0.25, 0.08, 0.025)
"""The candidate penalties, strongest first, relative to the mean squared norm of the inputs."""
GAINS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
"""The candidate gains. A gain multiplies the difference between a label's scores and its frequency.

The penalty that gives the weights the best directions also makes them too small, so that frequent labels are
ranked too high. A gain above 1 compensates for this.
"""
FOLDS = 5
FEWEST_HELD_OUT = 300  # with fewer validation samples, the penalty is chosen by cross-validation
WORSE = 0.005  # the smallest difference in nDCG@5 that matters, even with many samples
SPREAD = 0.2  # the per-sample standard deviation of the difference in nDCG@5 between two similar models
TOLERANCE, MOST_STEPS = 0.05, 40
RANK = 256  # the number of eigenvectors in the preconditioner
# The maximum number of entries (16 MB) and the minimum number of columns of an intermediate result.
MOST_CACHED, FEWEST_COLUMNS = 2**22, 16
SCALE_PENALTY = 0.001  # keeps the scale finite if the validation samples are separable
SHARES, CLOSE = (0.0, 0.25, 0.5, 0.75, 1.0), 0.002
MOST_SCORES, MOST_WEIGHTS = 2**24, 2**27  # 64 MB per matrix of scores, 512 MB of weights


class LinearPart(NamedTuple):
    """A linear model with the scores `inputs @ weight + bias`."""

    weight: Array
    """(inputs, labels)."""
    bias: Array
    """(labels,)."""

    def scores(self, inputs: Matrix) -> Array:
        """Return the scores (rows, labels), which estimate the probability of each label."""
        return product(inputs, self.weight) + self.bias

    def with_gain(self, gain: float, frequencies: Array) -> "LinearPart":
        """Return a linear part whose scores deviate `gain` times as much from the label frequencies."""
        factor, rest = np.float32(gain), np.float32(1 - gain)  # keep the dtype
        return LinearPart(factor * self.weight, factor * self.bias + rest * frequencies)


def product(matrix: Matrix, dense: Array) -> Array:
    """Multiply a CSR float32 matrix by a dense matrix, in less than half the time that SciPy takes."""
    found = torch.nn.functional.embedding_bag(
        torch.from_numpy(matrix.indices),
        torch.from_numpy(np.ascontiguousarray(dense)),
        torch.from_numpy(matrix.indptr),
        mode="sum",
        per_sample_weights=torch.from_numpy(matrix.data),
        include_last_offset=True,
    )
    return found.numpy()


class Start(NamedTuple):
    """The linear parts of an earlier run, from which a new fit starts."""

    held_out: LinearPart
    """The linear part that was fitted without the validation samples of the earlier run."""
    final: LinearPart
    """The linear part that was fitted on all samples of the earlier run."""
    complete: bool
    """Whether both parts have weights for all labels. The scores of labels without weights are 0."""
    same_samples: bool
    """Whether the earlier run used the same samples with the same split."""


def noise(samples: int) -> float:
    """Return the smallest difference in nDCG@5 that is not considered noise with this many samples.

    It is about one standard error, but at least `WORSE`.
    """
    return max(WORSE, SPREAD / math.sqrt(samples))


def frequencies(labels: Matrix) -> Array:
    """Return the share of samples that have each label."""
    counts = np.bincount(labels.indices, minlength=labels.shape[1])
    return (counts / labels.shape[0]).astype(np.float32)


def fits(rows: int, inputs: int, labels: int) -> bool:
    """Whether the scores and weights have at most `MOST_SCORES` and `MOST_WEIGHTS` entries, respectively."""
    return rows * labels <= MOST_SCORES and inputs * labels <= MOST_WEIGHTS


def ridge_path(
    inputs: Matrix, labels: Matrix, penalties: Sequence[float], start: LinearPart | None = None
) -> Iterator[LinearPart]:
    """Fit ridge regressions with decreasing penalties, each starting from the previous solution.

    Args:
        inputs: CSR float32 (rows, inputs).
        labels: CSR (rows, labels).
        penalties: The L2 penalties, relative to the mean squared norm of the inputs.
        start: An earlier linear part. If given, the difference from its weights is penalized instead of the
            weights themselves.

    Yields:
        The linear part for each penalty λ. Its weights are `W = Xᵀ A`, where `(X Xᵀ + λ I) A = Y - mean(Y)`
        is solved by conjugate gradients, and X has an additional column of ones for the bias. There are
        usually fewer samples than inputs, so A is smaller than W.
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
    solution, near = np.zeros_like(y), _Preconditioner(x, transposed)
    size = float(inputs.data @ inputs.data) / rows
    for penalty in penalties:
        solution = _solve(x, transposed, y, penalty * size, solution, near)
        # Do not keep a local reference to the part. It is large, and several of these generators may exist at
        # the same time.
        yield _part(product(transposed, solution), mean, start)


def _part(weight: Array, mean: Array, start: LinearPart | None) -> LinearPart:
    """Return the linear part for these weights. The last row contains the weights of the column of ones."""
    part = LinearPart(weight[:-1], weight[-1] + mean)
    return part if start is None else LinearPart(start.weight + part.weight, start.bias + part.bias)


def _image(x: Matrix, transposed: Matrix, a: Array) -> Array:
    """Return `x xᵀ a`, computed for a few columns at a time so that `xᵀ a` fits in the cache."""
    width = max(FEWEST_COLUMNS, MOST_CACHED // x.shape[1])
    found = np.empty_like(a)
    for start in range(0, a.shape[1], width):
        some = slice(start, start + width)
        found[:, some] = product(x, product(transposed, a[:, some]))
    return found


class _Preconditioner:
    """A preconditioner for `x xᵀ + penalty I`, based on the leading eigenvectors of `x xᵀ`.

    Common words lead to eigenvalues far above the penalty, so without a preconditioner, conjugate gradients
    would need many steps. The eigenvectors come from a randomized range finder and the Rayleigh–Ritz method.
    The preconditioner has the form that Frangella, Tropp and Udell (2023) use with a Nyström approximation.
    """

    def __init__(self, x: Matrix, transposed: Matrix) -> None:
        rows = x.shape[0]
        rank = min(RANK, max(1, rows // 4))
        random = np.random.default_rng(0).standard_normal((rows, rank)).astype(np.float32)
        basis = np.linalg.qr(_image(x, transposed, np.linalg.qr(random)[0]))[0]
        images = _image(x, transposed, basis).astype(np.float64)
        values, vectors = np.linalg.eigh(basis.T.astype(np.float64) @ images)
        self.values = np.maximum(values, 1e-9).astype(np.float32)
        self.vectors = (basis @ vectors).astype(np.float32)

    def apply(self, rest: Array, penalty: float) -> Array:
        """Apply the preconditioner to the residuals `rest`."""
        factors = (self.values[0] + penalty) / (self.values + penalty) - 1
        found: Array = rest + self.vectors @ (factors[:, None] * (self.vectors.T @ rest))
        return found


def _solve(
    x: Matrix, transposed: Matrix, y: Array, penalty: float, start: Array, near: _Preconditioner
) -> Array:
    """Solve `(x xᵀ + penalty I) a = y` for each column of y by preconditioned conjugate gradients."""

    def image(a: Array) -> Array:
        found = _image(x, transposed, a)
        found += np.float32(penalty) * a
        return found

    a = start.copy()
    rest = y - image(a)
    enough = TOLERANCE**2 * _squares(y)
    direction, before = np.zeros_like(y), np.ones(y.shape[1], np.float32)
    for _ in range(MOST_STEPS):
        if (_squares(rest) <= enough).all():
            break
        better = near.apply(rest, penalty)
        left = np.einsum("ij,ij->j", rest, better)
        # Columns that are solved exactly have no residual, so their step is 0.
        direction *= left / np.maximum(before, np.float32(1e-30))
        direction += better
        along = image(direction)
        step = left / np.maximum(np.einsum("ij,ij->j", direction, along), np.float32(1e-30))
        a += step * direction
        rest -= step * along
        before = left
    return a


def _squares(columns: Array) -> Array:
    return np.einsum("ij,ij->j", columns, columns)


class Choice(NamedTuple):
    """The chosen penalty and gain, and the linear part that was fitted without the validation samples."""

    penalty: float
    """Infinite if the linear part of an earlier run is kept unchanged."""
    gain: float
    part: LinearPart


def folds(rows: int) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield the indices of the training samples and of the held-out samples for each fold."""
    order = np.random.default_rng(0).permutation(rows)
    for fold in range(FOLDS):
        yield np.sort(np.delete(order, np.s_[fold::FOLDS])), np.sort(order[fold::FOLDS])


def choose(
    training: Matrix, labels: Matrix, validation: Matrix, its_labels: Matrix, start: Start | None = None
) -> Choice:
    """Choose the penalty and the gain with the best nDCG@5 on held-out samples.

    Args:
        training: The inputs of the training samples.
        labels: Their labels.
        validation: The inputs of the validation samples.
        its_labels: Their labels, possibly followed by labels that no training sample has.
        start: The linear parts of an earlier run to start from.

    Returns:
        The choice. If there are few validation samples, it is made by cross-validation over all samples. If
        the linear part of an earlier run has weights for all labels, it is kept unless a fit that starts from
        it is clearly better. If the earlier run used the same samples, its linear part is always kept,
        because it already has the best penalty, and fitting its residuals again would only weaken the
        regularization.
    """
    if start is not None and start.same_samples:
        return Choice(math.inf, 1.0, start.held_out)
    its_labels = its_labels[:, : labels.shape[1]]
    splits = [_Split(training, labels, validation, its_labels)]
    if validation.shape[0] < FEWEST_HELD_OUT:
        x = sparse.vstack([training, validation], format="csr")
        y = sparse.vstack([labels, its_labels], format="csr")
        splits = [_Split(x[rest], y[rest], x[others], y[others]) for rest, others in folds(x.shape[0])]
    weights = np.array([split.weight for split in splits])

    def mean_quality(parts: Iterable[LinearPart], gains: Sequence[float]) -> Array:
        each = [split.qualities(part, gains) for split, part in zip(splits, parts, strict=True)]
        found: Array = np.average(np.array(each), axis=0, weights=weights)
        return found

    best, penalty, gain, part = -1.0, math.inf, 1.0, None
    if start is not None and start.complete:
        best = float(mean_quality([start.final] * len(splits), (1.0,))[0])
        best += noise(sum(split.held_out.shape[0] for split in splits))
    # The weights of an earlier run already include a gain.
    gains = GAINS if start is None else (1.0,)
    first = None if start is None else start.final
    paths = [ridge_path(split.inputs, split.labels, PENALTIES, first) for split in splits]
    highest = -1.0
    for one in PENALTIES:
        # The parts of several splits are computed one at a time, because they are large.
        parts = [next(paths[0])] if len(paths) == 1 else map(next, paths)
        quality = mean_quality(parts, gains)
        if quality.max() < highest - WORSE:
            break  # assume that weaker penalties are even worse
        highest = max(highest, quality.max())
        if quality.max() > best:
            best, penalty, gain = float(quality.max()), one, gains[int(quality.argmax())]
            if isinstance(parts, list) and start is None:
                part = parts[0].with_gain(gain, splits[0].usual)
    if part is not None:
        return Choice(penalty, gain, part)
    if start is not None and penalty == math.inf:
        return Choice(penalty, gain, start.held_out)
    return Choice(penalty, gain, fit(training, labels, penalty, gain, start and start.held_out))


class _Split:
    """Samples to fit a linear part on, and held-out samples to evaluate it on."""

    def __init__(self, inputs: Matrix, labels: Matrix, held_out: Matrix, its_labels: Matrix) -> None:
        self.inputs, self.labels, self.held_out, self.its_labels = inputs, labels, held_out, its_labels
        self.usual = frequencies(labels)
        # The number of held-out samples with labels. Without labels, nDCG is undefined.
        self.weight = max(1e-9, np.count_nonzero(np.diff(its_labels.indptr)))

    def qualities(self, part: LinearPart, gains: Sequence[float]) -> list[float]:
        """Return the nDCG@5 of `part` on the held-out samples for each gain."""
        scores = part.scores(self.held_out) - self.usual
        return [ndcg(self.usual + np.float32(gain) * scores, self.its_labels) for gain in gains]


def fit(
    inputs: Matrix, labels: Matrix, penalty: float, gain: float = 1.0, start: LinearPart | None = None
) -> LinearPart:
    """Fit a linear part with the given penalty and gain."""
    part = next(ridge_path(inputs, labels, (penalty,), start))
    return part.with_gain(gain, frequencies(labels))


class Mixture(NamedTuple):
    """The coefficients of a combined model, whose logits are `linear * scores + network * logits + shift`."""

    linear: float
    network: float
    shift: float
    share: float
    """The weight of the linear part, from 0 to 1, after each model has been scaled to minimize its loss. The
    network has the weight `1 - share`."""

    def in_words(self) -> str:
        """Return a sentence about the weights of the two models."""
        return (
            f"The model is the sum of a linear part ({100 * self.share:.0f}% of the weight) and a network "
            f"({100 - 100 * self.share:.0f}%), with weights chosen on the validation samples."
        )


def fit_mixture(loss: LabelLoss, scores: Array, logits: Tensor, labels: Matrix) -> Mixture:
    """Choose the coefficients of a combined model on samples that neither of its two models was fitted on.

    Args:
        loss: The loss of the network, which determines the scales.
        scores: The scores (rows, labels) of the linear part.
        logits: The logits of the network.
        labels: CSR (rows, labels).

    Returns:
        The coefficients. Among the candidate shares with an nDCG@5 at most `CLOSE` below the best, the
        largest is chosen, because the linear part improves further when it is refitted on all samples.
    """
    first, second, lists = torch.from_numpy(scores).double(), logits.double(), label_lists(labels)
    scales = [fit_scale(loss, one, lists)[0] for one in (first, second)]
    sums = {share: share * scales[0] * first + (1 - share) * scales[1] * second for share in SHARES}
    quality = {share: ndcg(one.float().numpy(), labels) for share, one in sums.items()}
    share = max(one for one in SHARES if quality[one] >= max(quality.values()) - CLOSE)
    scale, shift = fit_scale(loss, sums[share], lists)
    return Mixture(scale * share * scales[0], scale * (1 - share) * scales[1], shift, share)


def fit_scale(loss: LabelLoss, logits: Tensor, lists: Tensor) -> tuple[float, float]:
    """Return the scale and shift that minimize the loss of `scale * logits + shift`.

    The shift is 0 for losses that do not depend on it.
    """
    # The optimizer works on the square root of the scale, so that the scale cannot be negative. The initial
    # scale is 1 / std, which is about 10 for scores that estimate probabilities.
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
    """Return the mean nDCG@k (from 0 to 1) over the samples with labels, or 0 if there are none."""
    if not labels.nnz:
        return 0.0
    from torchlml.metrics import topk_ndcg  # torchmetrics takes seconds to load

    k = min(k, scores.shape[1])
    lists = unlike_logits(label_lists(labels), scores.shape[1])
    found = topk_ndcg(torch.from_numpy(scores), lists, k)
    assert isinstance(found, torch.Tensor)
    return float(found)
