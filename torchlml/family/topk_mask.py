"""A hard choice with a gradient: the k largest entries, exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchlml._core import paths
from torchlml._core.arguments import Canonical, canonical, readable
from torchlml._core.operators import operator
from torchlml._core.rows import DenseRows


def topk_mask(x: Tensor, k: int | Tensor, dim: int = -1, *, mask: Tensor | None = None) -> Tensor:
    """Ones at the k largest entries and zeros elsewhere, with the gradient of `lml`.

        >>> torchlml.topk_mask(torch.tensor([0.5, 2.0, 0.5, -1.0]), 2)
        tensor([1., 1., 0., 0.])

    Args:
        x: logits, of any shape.
        k: how many, a whole number or a tensor of whole numbers that broadcasts to `x` without `dim`.
        dim: the dimension to choose in.
        mask: bool, True where an entry may be chosen; broadcasts to `x`.

    Returns:
        The choice, with the shape and dtype of `x`: exactly k ones in a row, or as many as there are entries
        that may be chosen (not masked, not -inf). Among equal entries those of lower index are taken.

    The gradient is straight-through: backwards, and for every other derivative, the choice is lml(x, k). A
    NaN makes its row NaN.
    """
    c = canonical(x, k, dim, mask, None)
    check_whole(k, c)
    return c.restore(with_gradient(lambda: _choose(c.x.detach(), c.k.detach(), c.mask), c), dim)


def _reference(x: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """Ones at the k largest of each row; `k` holds whole numbers."""
    if x.numel() == 0:
        return torch.zeros_like(x)
    values = x if mask is None else torch.where(mask, x, -torch.inf)
    rows, count = DenseRows(x), k.long()
    threshold = rows.spread(rows.largest(values, count))
    count = count.expand(rows.count).unsqueeze(-1)
    above, tied = values > threshold, values == threshold
    left = count - above.sum(-1, keepdim=True)
    chosen = (above | (tied & (tied.cumsum(-1) <= left))) & (values != -torch.inf) & (count > 0)
    undefined = values.isnan().any(-1, keepdim=True)
    return torch.where(undefined, torch.nan, chosen.to(x.dtype))


_choose = operator(
    "topk_mask(Tensor x, Tensor k, Tensor? mask) -> Tensor",
    _reference,
    lambda x, k, mask: torch.empty_like(x),
)


def check_whole(k: Any, c: Canonical) -> None:
    """Refuse a k that is not a whole number, where it may be looked at."""
    if isinstance(k, Tensor):
        numbers = c.k.detach()
        whole = not readable(k) or bool((numbers == numbers.round()).all())
    else:
        whole = k % 1 == 0
    if not whole:
        raise ValueError(f"`k` must be a whole number, or a tensor of whole numbers, but it is {k}.")


def with_gradient(choose: Callable[[], Tensor], c: Canonical) -> Tensor:
    """A hard choice with the derivatives of `lml`."""
    if paths.is_plain() and paths.needs_no_graph(c.x, c.k):
        return choose()
    y = paths.lml(c.x, c.k, c.mask, None, None)
    return choose() + (y - y.detach())
