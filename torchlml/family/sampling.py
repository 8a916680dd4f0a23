"""A random choice of exactly k, each entry with the probability that `lml` gives it."""

from __future__ import annotations

import torch
from torch import Tensor

from torchlml import autograd
from torchlml.arguments import Canonical, canonical
from torchlml.family.topk_mask import check_whole, with_gradient
from torchlml.rows import wide_dtype


def sample_subset(
    x: Tensor,
    k: int | Tensor,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    straight_through: bool = False,
) -> Tensor:
    """Draw k different entries of every row, so that each is drawn with probability lml(x, k).

        >>> torchlml.sample_subset(torch.zeros(2, 4), 2, generator=torch.Generator().manual_seed(0))
        tensor([[1., 0., 1., 0.],
                [0., 0., 1., 1.]])

    Args:
        x: logits, of any shape.
        k: how many, a whole number or a tensor of whole numbers that broadcasts to `x` without `dim`.
        dim: the dimension to choose in.
        mask: bool, True where an entry may be drawn; broadcasts to `x`.
        generator: the source of randomness, on the device of `x`; by default torch's own.
        straight_through: give the result the derivatives of lml(x, k); otherwise it is a constant.

    Returns:
        Ones at what was drawn and zeros elsewhere, with the shape and dtype of `x`: exactly k ones in every
        row, or as many as there are entries that may be drawn. A NaN makes its row NaN.

    The draw is a systematic sample in random order (Goodman and Kish, 1950): the probabilities are laid end
    to end, in an order that is shuffled for every row, and the entries under a comb with teeth one apart and
    a random start are taken. This fixes the probability of each single entry; those of pairs and larger sets
    follow from the design, they are not those of independent draws or of any other model.
    """
    c = canonical(x, k, dim, mask, None)
    check_whole(k, c)
    drawn = _draw(c, generator).to(c.x.dtype)
    return c.restore(with_gradient(drawn, c) if straight_through else drawn, dim)


def _draw(c: Canonical, generator: torch.Generator | None) -> Tensor:
    """The sample in whole numbers: an entry's probability in units of 2^-bits, so that nothing is rounded."""
    count, n = c.x.shape
    device = c.x.device
    wide = wide_dtype(device)
    y = autograd.lml(c.x.detach().to(wide), c.k.detach(), c.mask, None, None)
    if y.numel() == 0:
        return y
    undefined = y.isnan()
    y = torch.where(undefined, 0, y)
    available = c.x != -torch.inf if c.mask is None else c.mask & (c.x != -torch.inf)
    # So few that the sum over a row cannot overflow.
    bits = min(52 if wide == torch.float64 else 23, 61 - n.bit_length())
    order = torch.rand((count, n), generator=generator, device=device).argsort(-1)
    length = _round(y.gather(-1, order) * 2**bits)
    may = available.gather(-1, order) & ~undefined.gather(-1, order)
    wanted = torch.minimum(c.k.detach().long().expand(count), may.sum(-1)) << bits
    length = _stretch(length, wanted.unsqueeze(-1), may, 1 << bits)
    start = torch.randint(1 << bits, (count, 1), generator=generator, device=device)
    teeth = (length.cumsum(-1) + ((1 << bits) - 1 - start)) >> bits  # how many lie before the end of each
    before = torch.cat([torch.zeros_like(start), teeth[:, :-1]], -1)
    drawn = torch.zeros_like(y).scatter(-1, order, (teeth - before).to(y.dtype))
    return torch.where(undefined, torch.nan, drawn)


def _round(length: Tensor) -> Tensor:
    """Whole numbers whose running sum keeps within one of the running sum of `length`."""
    whole = length.floor()
    carried = (length - whole).cumsum(-1).floor()
    return (whole + carried.diff(dim=-1, prepend=torch.zeros_like(carried[:, :1]))).long()


def _stretch(length: Tensor, wanted: Tensor, may: Tensor, one: int) -> Tensor:
    """Make the lengths sum to `wanted` exactly: what rounding left goes to the first with room for it."""
    missing = wanted - length.sum(-1, keepdim=True)
    for sign in (1, -1):
        inside = may & (length < one) if sign > 0 else length > 0
        room = torch.where(inside, one - length if sign > 0 else length, 0)
        left = (sign * missing).clamp(min=0) - (room.cumsum(-1) - room)
        length = length + sign * torch.minimum(left.clamp(min=0), room)
    return length
