"""Hard choices of exactly k entries: the k largest, or a random sample with the probabilities of `lml`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchlml._arguments import Canonical, canonical, is_plain, readable
from torchlml._autograd import rule
from torchlml._autograd.operators import operator
from torchlml._rows import DenseRows, work_dtype
from torchlml._torch.onnx import OnnxRows


def topk_mask(x: Tensor, k: int | Tensor, dim: int = -1, *, mask: Tensor | None = None) -> Tensor:
    """Return ones at the k largest entries and zeros elsewhere, with the gradient of `lml`.

        >>> torchlml.topk_mask(torch.tensor([0.5, 2.0, 0.5, -1.0]), 2)
        tensor([1., 1., 0., 0.])

    Args:
        x: logits, of any shape.
        k: the number of entries to choose, an integer or a tensor of integers that broadcasts to the shape of
            `x` without `dim`.
        dim: the dimension along which entries are chosen.
        mask: a bool tensor that broadcasts to the shape of `x`, with True for entries that may be chosen.

    Returns:
        A tensor of zeros and ones with the shape and dtype of `x`. Each row has exactly k ones. If a row has
        fewer than k available entries (neither masked nor -inf), all of them are ones. Among tied entries,
        those with lower indices are chosen first.

    The gradient is straight-through: all derivatives are those of lml(x, k). A NaN makes its whole row NaN.
    """
    c = canonical(x, k, dim, mask, None)
    _check_whole(k, c)
    return c.restore(_with_gradient(lambda: _choose(c.x.detach(), c.k.detach(), c.mask), c), dim)


def sample_subset(
    x: Tensor,
    k: int | Tensor,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    straight_through: bool = False,
) -> Tensor:
    """Sample k distinct entries from every row, with the marginal probabilities lml(x, k).

        >>> torchlml.sample_subset(torch.zeros(2, 4), 2, generator=torch.Generator().manual_seed(0))
        tensor([[0., 0., 1., 1.],
                [0., 1., 0., 1.]])

    Args:
        x, k, dim, mask: as for `topk_mask`.
        generator: the source of randomness, on the device of `x`. The default is PyTorch's global generator.
        straight_through: whether the result has the derivatives of lml(x, k). By default, it has no gradient.

    Returns:
        Ones at the sampled entries and zeros elsewhere, with the shape and dtype of `x`. Each row has exactly
        k ones. If a row has fewer than k available entries, all of them are ones. A NaN makes its whole row
        NaN.

    The method is systematic sampling in random order (Goodman and Kish, 1950). Each entry of a row is
    represented by an interval whose length is its probability. The intervals are laid end to end in a random
    order (six random bits per entry), and u is drawn uniformly from [0, 1). The sample consists of the
    entries whose intervals contain one of the points u, u + 1, u + 2, ... This design gives each entry its
    exact marginal probability, but it does not control the joint probabilities of pairs and larger sets.
    Entries are not sampled independently.
    """
    c = canonical(x, k, dim, mask, None)
    _check_whole(k, c)
    _check_generator(generator, x.device)
    if straight_through:
        return c.restore(_with_gradient(lambda: _draw(c, generator), c), dim)
    return c.restore(_draw(c, generator), dim)


def _check_whole(k: Any, c: Canonical) -> None:
    """Raise an error if k has a non-integer value, unless reading its values would synchronize the device."""
    if isinstance(k, Tensor):
        numbers = c.k.detach()
        whole = not readable(k) or bool((numbers == numbers.round()).all())
    else:
        whole = k % 1 == 0
    if not whole:
        raise ValueError(f"`k` must be an integer or a tensor of integers, but it is {k}.")


def _with_gradient(choose: Callable[[], Tensor], c: Canonical) -> Tensor:
    """Give a hard choice the derivatives of `lml`."""
    if is_plain() and rule.needs_no_graph(c.x, c.k):
        return choose()
    y = rule.lml(c.x, c.k, c.mask, None)
    return choose() + (y - y.detach())


def _choose_reference(
    x: Tensor, k: Tensor, mask: Tensor | None, rows_of: Callable[[Tensor], DenseRows] = DenseRows
) -> Tensor:
    """Return ones at the k largest entries of each row and zeros elsewhere. `k` must have integer values."""
    if x.numel() == 0:
        return torch.zeros_like(x)
    values = x if mask is None else torch.where(mask, x, -torch.inf)
    rows, count = rows_of(x), k.long()
    threshold = rows.broadcast(rows.largest(values, count))
    count = count.expand(rows.count).unsqueeze(-1)
    above, tied = values > threshold, values == threshold
    left = count - above.sum(-1, keepdim=True)
    chosen = (above | (tied & (tied.cumsum(-1) <= left))) & (values != -torch.inf) & (count > 0)
    undefined = values.isnan().any(-1, keepdim=True)
    return torch.where(undefined, torch.nan, chosen.to(x.dtype))


_choose = operator(
    "topk_mask(Tensor x, Tensor k, Tensor? mask) -> Tensor",
    _choose_reference,
    lambda x, k, mask: torch.empty_like(x),
    for_onnx=lambda x, k, mask: _choose_reference(x, k, mask, OnnxRows),
)


def _check_generator(generator: Any, device: torch.device) -> None:
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"`generator` must be a torch.Generator or None, but it is {generator!r}.")
    if device.type not in (generator.device.type, "meta"):
        raise ValueError(
            f"`generator` must be on the device of `x`, {device}, but it is on {generator.device}."
        )


def _draw(c: Canonical, generator: torch.Generator | None) -> Tensor:
    x, k = c.x.detach(), c.k.detach()
    # In half precision, the rounded probabilities would not sum to k.
    y = rule.lml(x.to(work_dtype(x.dtype)), k, c.mask, None)
    # With a dynamic number of rows, torch.compile fails if `generator` is passed, even if it is None.
    source: dict[str, Any] = {} if generator is None else {"generator": generator}
    keys = _random_bytes(x, source)
    start = torch.rand(x.shape[0], dtype=k.dtype, device=x.device, **source)
    return _sample(y, k, keys, start).to(x.dtype)


def _random_bytes(x: Tensor, source: dict[str, Any]) -> Tensor:
    """Return one random byte per entry. Sorting a row by these bytes shuffles it."""
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    if traced or not is_plain():
        # torch.compile and vmap do not support the in-place random operation below.
        return torch.randint(256, x.shape, dtype=torch.uint8, device=x.device, **source)
    # Drawing eight bytes at a time is faster than drawing single bytes.
    words = torch.empty(-(-x.numel() // 8), dtype=torch.int64, device=x.device).random_(
        -(2**63), None, **source
    )
    return words.view(torch.uint8)[: x.numel()].view(x.shape)


def _sample_reference(p: Tensor, k: Tensor, keys: Tensor, start: Tensor) -> Tensor:
    """Draw systematic samples. Integer arithmetic, in units of 2^-bits, avoids rounding errors."""
    if p.numel() == 0:
        return torch.zeros_like(p)
    count, n = p.shape
    # Use 44 of a double's 53 significand bits or 23 of a float's 24, and fewer if n lengths could sum to 2^60
    # or more.
    bits = min(44 if start.dtype == torch.float64 else 23, 60 - n.bit_length())
    one = 1 << bits
    undefined = p.isnan()
    y = torch.where(undefined, 0, p).to(start.dtype)
    wanted = k.clamp(max=n).expand(count).unsqueeze(-1)
    # Distribute the rounding error in proportion to 1 - y if the sum must grow, or to y if it must shrink.
    total = y.sum(-1, keepdim=True)
    room = torch.where(y > 0, 1 - y, 0)
    missing, lacking = wanted - total, room.sum(-1, keepdim=True)
    grow = torch.where(lacking > 0, (missing / lacking).clamp(0, 1), 0)
    shrink = torch.where(missing < 0, wanted / total, 1)
    # Sort by six bits of the keys, then by index modulo 4, then by index. Kernels can compute this order
    # quickly.
    columns = torch.arange(n, device=p.device) % 4
    order = ((keys & 0xFC) + columns).argsort(stable=True)
    length = ((y + room * grow) * shrink * one).round().long().gather(-1, order)
    length = _stretch(length, wanted.long() << bits, one)
    first = (start * one).long().unsqueeze(-1)
    points = (length.cumsum(-1) + (one - 1 - first)) >> bits  # number of points before each interval's end
    hit = points.diff(dim=-1, prepend=torch.zeros_like(first)).to(p.dtype)
    return torch.where(undefined, torch.nan, torch.zeros_like(p).scatter(-1, order, hit))


def _stretch(length: Tensor, wanted: Tensor, one: int) -> Tensor:
    """Make the lengths sum to `wanted` by changing the first entries as far as their bounds allow."""
    missing = wanted - length.sum(-1, keepdim=True)
    for sign in (1, -1):
        room = torch.where(length > 0, one - length if sign > 0 else length, 0)
        left = (sign * missing).clamp(min=0) - (room.cumsum(-1) - room)
        length = length + sign * torch.minimum(left.clamp(min=0), room)
    return length


_sample = operator(
    "systematic_sample(Tensor p, Tensor k, Tensor keys, Tensor start) -> Tensor",
    _sample_reference,
    lambda p, k, keys, start: torch.empty_like(p),
)
