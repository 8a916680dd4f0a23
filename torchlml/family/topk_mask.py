"""A hard choice with a gradient: the k largest entries, exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchlml import autograd
from torchlml.arguments import Canonical, canonical, readable


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
    values = c.x.detach() if c.mask is None else torch.where(c.mask, c.x.detach(), -torch.inf)
    if c.x.numel() == 0:
        return c.restore(with_gradient(torch.zeros_like(c.x), c), dim)
    count = c.k.detach().long().expand(c.x.shape[0]).unsqueeze(-1)
    if isinstance(k, int) and k > 0:
        threshold = values.topk(min(k, c.x.shape[-1]), sorted=True).values[..., -1:]
    else:
        last = (count - 1).clamp(0, c.x.shape[-1] - 1)
        threshold = values.sort(-1, descending=True).values.gather(-1, last)
    chosen = values >= threshold
    # Where the threshold stands alone this is all. It costs less to see than to treat ties.
    several = (chosen.sum(-1, keepdim=True) != count) | (threshold == -torch.inf)
    if not readable(values) or bool(several.any()):
        above, tied = values > threshold, values == threshold
        left = count - above.sum(-1, keepdim=True)
        available = values != -torch.inf
        chosen = (above | (tied & (tied.cumsum(-1) <= left))) & available & (count > 0)
    return c.restore(with_gradient(chosen.to(c.x.dtype), c), dim)


def check_whole(k: Any, c: Canonical) -> None:
    """Refuse a k that is not a whole number, where it may be looked at."""
    if isinstance(k, Tensor) and not readable(k):
        return
    numbers = c.k.detach()
    if bool((numbers != numbers.round()).any()):
        raise ValueError(f"`k` must be a whole number, or a tensor of whole numbers, but it is {k}.")


def with_gradient(hard: Tensor, c: Canonical) -> Tensor:
    """The values of `hard` with the derivatives of `lml`; a row with a NaN is NaN, as there."""
    y = autograd.lml(c.x, c.k, c.mask, c.offsets, None)
    return hard + (y - y.detach())
