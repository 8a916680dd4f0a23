"""EASE: a linear model of the items of a user, in closed form (Steck 2019)."""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.interactions import Interactions
from torchlml_lab.multilabel.losses import PADDING

PENALTIES = (10.0, 30.0, 100.0, 300.0, 1000.0)
"""The penalties to choose from."""
USUAL_PENALTY = 200.0  # used for many items, because trying a penalty costs a matrix inversion
MANY = 6_000  # with more items, a single penalty is used, and the inversion is in float32
ROWS = 4_096  # the number of users whose rows are dense at a time


class Scores(NamedTuple):
    """The scores of all items."""

    values: Tensor
    """(R, n)."""

    def scores(self) -> Tensor:
        """Return the score of every item, (R, n)."""
        return self.values


class Ease(nn.Module):
    """Scores that are sums over the items of a user: `scale * sum_i weight[i]`.

    Args:
        items: The number of items.

    It scores any history, including those of users who are not in the training data.
    """

    def __init__(self, items: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(items, items))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, users: Tensor, history: Tensor) -> Scores:
        """Return the scores of histories (R, L), padded with `PADDING`; `users` is not used."""
        there = history != PADDING
        counts = there.sum(-1)
        starts = counts.cumsum(0) - counts
        return Scores(self.scale * embedding_bag(history[there], self.weight, starts, mode="sum"))


def gram(have: Interactions, dtype: torch.dtype) -> Tensor:
    """Return the number of users who have items i and j, (n, n), with the counts of items on the diagonal."""
    n = len(have.items)
    total = torch.zeros(n, n, dtype=dtype)
    pairs = have.user
    for start in range(0, len(have.users), ROWS):
        rows = slice(int(have.starts[start]), int(have.starts[min(start + ROWS, len(have.users))]))
        # Only the items of these users have columns, so a block of users with few items is cheap.
        items, column = have.item[rows].unique(return_inverse=True)
        dense = torch.zeros(min(ROWS, len(have.users) - start), len(items), dtype=dtype)
        dense[pairs[rows] - start, column] = 1
        total[items[:, None], items] += dense.T @ dense
    return total


def item_weights(gram: Tensor, penalty: float) -> Tensor:
    """Solve `min |X - X B|² + penalty |B|²` over matrices B with a zero diagonal.

        >>> item_weights(torch.tensor([[2.0, 1.0], [1.0, 3.0]]), penalty=1.0)
        tensor([[0.0000, 0.2500],
                [0.3333, 0.0000]])

    Args:
        gram: `XᵀX`, (n, n). It is overwritten.
        penalty: Greater than 0.

    Returns:
        B, (n, n): `B_ij = -P_ij / P_jj` for `P = (XᵀX + penalty I)⁻¹`, from a Cholesky factorization.
    """
    gram.diagonal().add_(penalty)
    torch.linalg.cholesky(gram, out=gram)
    inverse = torch.cholesky_inverse(gram)
    inverse /= -inverse.diagonal().clone()
    inverse.fill_diagonal_(0)
    return inverse


def fit(have: Interactions, penalty: float | None, recall: Callable[[Ease], float]) -> tuple[Ease, float]:
    """Fit the model to the items of all users.

    Args:
        have: The training pairs.
        penalty: The penalty. None chooses the best one.
        recall: A metric on validation users, higher for better models.

    Returns:
        The model and its penalty. A matrix that does not fit in memory raises `BadInput` before it is built.
    """
    n = len(have.items)
    check_memory(n)
    counts = gram(have, torch.float64 if n <= MANY else torch.float32)
    model = Ease(n)
    if penalty is None and n > MANY:
        penalty = USUAL_PENALTY
    if penalty is None:
        found = {}
        for one in PENALTIES:
            model.weight.data.copy_(item_weights(counts.clone(), one))
            found[one] = recall(model)
        penalty = max(found, key=lambda one: found[one])
    # Freed before the copy: for many items, two matrices fit in memory, but not three.
    model.weight.data = torch.empty(0)
    model.weight.data = item_weights(counts, penalty).float()
    return model, penalty


def memory_needed(items: int) -> int:
    """Return the bytes that `fit` needs: matrices of items × items, in float64 up to `MANY` items."""
    # Few items: the counts, their factorization, its inverse, and the weights in float32.
    return items**2 * (3 * 8 + 4 if items <= MANY else 2 * 4)


def memory_available() -> int:
    """Return the bytes that new processes can use, or the total memory if the system does not report them."""
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


def check_memory(items: int) -> None:
    """Raise `BadInput` if the matrices do not fit in memory."""
    needed, available = memory_needed(items), memory_available()
    if needed > available:
        raise BadInput(
            f"`--model ease` needs about {needed / 1e9:,.1f} GB for {items:,} items, but only "
            f"{available / 1e9:,.1f} GB of memory is available. Use `--model autoencoder` or "
            "`--model matrix-factorisation`."
        )
