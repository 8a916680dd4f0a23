"""Closed-form recommenders, which score an item by a sum of weights over the user's items.

EASE (Steck 2019) fits the weights by ridge regression. The graph filter (GF-CF, Shen et al. 2021) smooths
a user's items over the graph of users and items.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
import torch
from torch import Tensor, nn

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.interactions import Interactions
from torchlml_lab.multilabel.losses import PADDING
from torchlml_lab.recommend.histories import popular_items
from torchlml_lab.recommend.settings import ClosedForm

PENALTIES = (10.0, 30.0, 100.0, 300.0, 1000.0)
"""The candidate penalties for EASE."""
USUAL_PENALTY = 200.0  # for large matrices, because trying each penalty requires a matrix inversion
# If there are more users than this and more items than this, EASE uses `USUAL_PENALTY` and float32.
MANY = 6_000
# If there are more items than this (for EASE, also more users than this), only this many of the most popular
# items have weights. The time to fit EASE is cubic in this number.
MOST = 50_000
KEPT = 1_024  # the maximum number of weights stored per item; all others are close to 0
LOW_PASS_WEIGHTS = (0.1, 0.3, 1.0)
"""The candidate weights for the low-pass term of the graph filter."""
RANK = 512  # the maximum number of singular vectors in the low-pass term
MOST_NUMBERS = 100_000_000  # the maximum total number of entries of these vectors
ROWS = 256  # the number of matrix rows that are processed at a time


class Scores(NamedTuple):
    """The scores of all items for each user."""

    values: Tensor
    """(R, n)."""

    def scores(self) -> Tensor:
        """Return the score of every item, (R, n)."""
        return self.values


class ItemWeights(nn.Module):
    """A model with the scores `scale * sum_i B_i`, where i runs over a user's items.

    B_i is row i of a weight matrix B of shape (items, items).

    Args:
        items: The number of items.

    Only the `KEPT` entries with the largest absolute values in each row of B are stored, so a model with
    40,000 items needs 0.3 GB instead of 6.4 GB. Scores depend only on the history, so the model can score
    users who are not in the training data.
    """

    def __init__(self, items: int) -> None:
        super().__init__()
        kept = min(items, KEPT)
        self.weight = nn.Parameter(torch.zeros(items, kept))
        self.register_buffer("places", torch.zeros(items, kept, dtype=torch.int32))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, users: Tensor, history: Tensor) -> Scores:
        """Return the scores for histories (R, L), padded with `PADDING`. `users` is not used."""
        there = history != PADDING
        items, n = history[there], len(self.weight)
        places = there.nonzero()[:, :1] * n + self.get_buffer("places")[items]
        scores = self.weight.new_zeros(len(history) * n)
        scores = scores.index_add(0, places.flatten(), self.weight[items].flatten())
        return Scores(self.scale * scores.view(-1, n))

    @torch.no_grad()
    def set_weights(self, chosen: Tensor, blocks: Iterable[Tensor]) -> None:
        """Store the entries with the largest absolute values in each row of a matrix over the chosen items.

        Args:
            chosen: The chosen items, in ascending order. The weights of all other items are not changed.
            blocks: The rows of the matrix, in blocks of `ROWS` rows.
        """
        kept = min(len(chosen), self.weight.shape[1])
        for items, rows in zip(chosen.split(ROWS), blocks, strict=True):
            places = rows.abs().topk(kept, sorted=False).indices
            self.weight[items, :kept] = rows.gather(1, places).float()
            self.get_buffer("places")[items, :kept] = chosen[places].int()


def pair_matrix(have: Interactions, chosen: Tensor) -> Any:
    """Return a sparse matrix, users × chosen items, with 1 for each pair. Users without items are omitted."""
    ones, shape = np.ones(len(have), dtype=np.float32), (len(have.users), len(have.items))
    matrix = scipy.sparse.csr_array((ones, have.item.numpy(), have.starts.numpy()), shape)
    return matrix[(have.counts > 0).numpy()][:, chosen.numpy()]


def products(rows: Any, dtype: torch.dtype) -> Tensor:
    """Return the inner products of all pairs of rows of a sparse matrix as a dense matrix."""
    count, columns = rows.shape[0], rows.T.tocsr()
    total = torch.empty(count, count, dtype=dtype)
    for start in range(0, count, ROWS):
        total[start : start + ROWS] = torch.from_numpy((rows[start : start + ROWS] @ columns).toarray())
    return total


def inverse(matrix: Tensor, penalty: float) -> Tensor:
    """Overwrite a symmetric matrix M with `(M + penalty * I)⁻¹`, using a Cholesky factorization."""
    matrix.diagonal().add_(penalty)
    columns = matrix.mT  # column-major, so LAPACK overwrites the matrix without a copy
    torch.linalg.cholesky(columns, out=columns)
    torch.cholesky_inverse(columns, out=columns)
    return matrix


def item_weights(pairs: Any, small: Tensor, penalty: float) -> Iterator[Tensor]:
    """Minimize `|X - X B|² + penalty * |B|²` over matrices B with a zero diagonal.

    Args:
        pairs: X, a sparse matrix of users × items.
        small: `X Xᵀ` if there are fewer users than items, else `Xᵀ X`. It is overwritten.
        penalty: Greater than 0.

    Yields:
        B in blocks of `ROWS` rows. Off the diagonal, `B_ij = S_ij / (1 - S_jj)`, where
        `S = Xᵀ (X Xᵀ + penalty * I)⁻¹ X = I - penalty * (Xᵀ X + penalty * I)⁻¹`. Only the smaller of the two
        matrices is inverted.
    """
    found = inverse(small, penalty)
    users, items = pairs.shape
    starts = range(0, items, ROWS)
    if users < items:
        columns, dense = pairs.T.tocsr(), found.numpy()
        own = [columns[start : start + ROWS] for start in starts]
        leverage = np.concatenate([some.multiply(some @ dense).sum(1) for some in own])
        rest = torch.from_numpy(1 - leverage)
        blocks = (torch.from_numpy((columns @ (some @ dense).T).T) for some in own)
    else:
        rest = penalty * found.diagonal()
        blocks = (-penalty * found[start : start + ROWS] for start in starts)
    for start, block in zip(starts, blocks, strict=True):
        block = block / rest
        block[torch.arange(len(block)), torch.arange(start, start + len(block))] = 0
        yield block


def fit_ease(
    have: Interactions, penalty: float | None, recall: Callable[[ItemWeights], float]
) -> tuple[ItemWeights, float]:
    """Fit EASE to the items of all users.

    Args:
        have: The training pairs.
        penalty: The penalty. None selects the best of `PENALTIES`, or `USUAL_PENALTY` for large matrices.
        recall: Computes the recall of a model on the validation users, to select the penalty.

    Returns:
        The model and its penalty. `BadInput` is raised before any computation if there is not enough memory.
    """
    users, items = int((have.counts > 0).sum()), len(have.items)
    check_memory("ease", users, items)
    chosen = torch.arange(items) if min(users, items) <= MOST else popular_items(have)[:MOST].sort().values
    pairs = pair_matrix(have, chosen)
    few = min(pairs.shape) <= MANY
    small = products(
        pairs if users < len(chosen) else pairs.T.tocsr(), torch.float64 if few else torch.float32
    )
    model = ItemWeights(items)
    if penalty is None and not few:
        penalty = USUAL_PENALTY
    if penalty is None:
        found = {}
        for one in PENALTIES:
            model.set_weights(chosen, item_weights(pairs, small.clone(), one))
            found[one] = recall(model)
        penalty = max(found, key=lambda one: found[one])
    model.set_weights(chosen, item_weights(pairs, small, penalty))
    return model, penalty


def fit_graph_filter(have: Interactions, recall: Callable[[ItemWeights], float]) -> tuple[ItemWeights, float]:
    """Fit the graph filter to the items of all users.

    Args:
        have: The training pairs.
        recall: Computes the recall of a model on the validation users, to select the weight.

    Returns:
        The model `B = Nᵀ N + w * E^(-1/2) V Vᵀ E^(1/2)`, and the best w in `LOW_PASS_WEIGHTS`. Here,
        `N = D^(-1/2) X E^(-1/2)` is the normalized matrix of pairs X, the diagonal matrices D and E contain
        the number of items of each user and the number of users of each item, and V contains the leading
        right singular vectors of N. `BadInput` is raised before any computation if there is not enough
        memory.
    """
    items = len(have.items)
    check_memory("graph-filter", int((have.counts > 0).sum()), items)
    chosen = torch.arange(items) if items <= MOST else popular_items(have)[:MOST].sort().values
    pairs = pair_matrix(have, chosen)
    root = np.sqrt(np.maximum(pairs.sum(0), 1)).astype(np.float32)
    roots_of_users = np.sqrt(np.maximum(pairs.sum(1), 1)).astype(np.float32)
    normalized = scipy.sparse.csr_array(pairs.multiply(1 / roots_of_users[:, None]).multiply(1 / root))
    columns = normalized.T.tocsr()
    vectors = leading_vectors(normalized)
    left, right = torch.from_numpy(vectors / root[:, None]), torch.from_numpy(vectors * root[:, None]).mT
    model = ItemWeights(items)

    def set_weights(weight: float) -> None:
        starts = range(0, len(chosen), ROWS)
        blocks = (
            torch.from_numpy((columns[start : start + ROWS] @ normalized).toarray()).addmm_(
                left[start : start + ROWS], right, alpha=weight
            )
            for start in starts
        )
        model.set_weights(chosen, blocks)

    found = {}
    for one in LOW_PASS_WEIGHTS:
        set_weights(one)
        found[one] = recall(model)
    best = max(found, key=lambda one: found[one])
    if best != LOW_PASS_WEIGHTS[-1]:
        set_weights(best)
    return model, best


def leading_vectors(matrix: Any) -> np.ndarray:
    """Return the leading right singular vectors of a sparse matrix, (columns, rank)."""
    rank = min(RANK, min(matrix.shape) - 1, max(MOST_NUMBERS // matrix.shape[1], 1))
    if rank < 1:
        return np.zeros((matrix.shape[1], 0), dtype=np.float32)
    start = np.random.default_rng(0).standard_normal(min(matrix.shape)).astype(np.float32)
    _, _, rows = scipy.sparse.linalg.svds(matrix, k=rank, v0=start, return_singular_vectors="vh")
    return np.ascontiguousarray(rows.T, dtype=np.float32)


def memory_needed(model: ClosedForm, users: int, items: int) -> int:
    """Return the number of bytes that are needed to fit and store a model."""
    weights = 8 * items * min(items, KEPT)
    if model == "graph-filter":
        # The singular vectors, twice as many Lanczos vectors, and the two factors of the low-pass term.
        return weights + 4 * 5 * min(items * RANK, MOST_NUMBERS)
    # EASE needs a square matrix over users or items, whichever are fewer. Up to the size `MANY`, the matrix
    # is float64, and it is copied for each penalty.
    size = min(users, items, MOST)
    return weights + size**2 * (2 * 8 if size <= MANY else 4)


def memory_available() -> int:
    """Return the available memory in bytes. If it is unknown, return the total memory, or else 8 GiB."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 8 * 2**30


def check_memory(model: ClosedForm, users: int, items: int) -> None:
    """Raise `BadInput` if fitting a model needs more memory than is available."""
    needed, available = memory_needed(model, users, items), memory_available()
    if needed > available:
        raise BadInput(
            f"`--model {model}` needs about {needed / 1e9:,.1f} GB for {users:,} users and {items:,} items, "
            f"but only {available / 1e9:,.1f} GB of memory is available. Use `--model autoencoder` or "
            "`--model matrix-factorization`."
        )
