"""Hard choices of exactly k entries: the largest, or drawn with the probabilities that `lml` gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchlml._arguments import Canonical, canonical, readable
from torchlml._autograd import rule
from torchlml._autograd.operators import operator
from torchlml._rows import DenseRows, work_dtype
from torchlml._torch.onnx import OnnxRows


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
    """Draw k different entries of every row, so that each is drawn with probability lml(x, k).

        >>> torchlml.sample_subset(torch.zeros(2, 4), 2, generator=torch.Generator().manual_seed(0))
        tensor([[0., 0., 1., 1.],
                [0., 1., 0., 1.]])

    Args:
        x, k, dim, mask: as for `topk_mask`.
        generator: the source of randomness, on the device of `x`; by default torch's own.
        straight_through: give the result the derivatives of lml(x, k); otherwise it is a constant.

    Returns:
        Ones at what was drawn and zeros elsewhere, with the shape and dtype of `x`: exactly k ones in every
        row, or as many as there are entries that may be drawn. A NaN makes its row NaN.

    The draw is a systematic sample in random order (Goodman and Kish, 1950): the probabilities are laid end
    to end, in an order that is drawn for every row (by six random bits for each entry), and the entries that
    cover one of the points u, u + 1, u + 2, ... are taken, with u drawn between 0 and 1. This fixes the
    probability of each single entry; those of pairs and larger sets follow from the design, they are not
    those of independent draws or of any other model.
    """
    c = canonical(x, k, dim, mask, None)
    _check_whole(k, c)
    _check_generator(generator, x.device)
    if straight_through:
        return c.restore(_with_gradient(lambda: _draw(c, generator), c), dim)
    return c.restore(_draw(c, generator), dim)


def _check_whole(k: Any, c: Canonical) -> None:
    """Refuse a k that is not a whole number, where it may be looked at."""
    if isinstance(k, Tensor):
        numbers = c.k.detach()
        whole = not readable(k) or bool((numbers == numbers.round()).all())
    else:
        whole = k % 1 == 0
    if not whole:
        raise ValueError(f"`k` must be a whole number, or a tensor of whole numbers, but it is {k}.")


def _with_gradient(choose: Callable[[], Tensor], c: Canonical) -> Tensor:
    """A hard choice with the derivatives of `lml`."""
    if rule.is_plain() and rule.needs_no_graph(c.x, c.k):
        return choose()
    y = rule.lml(c.x, c.k, c.mask, None)
    return choose() + (y - y.detach())


def _choose_reference(
    x: Tensor, k: Tensor, mask: Tensor | None, rows_of: Callable[[Tensor], DenseRows] = DenseRows
) -> Tensor:
    """Ones at the k largest of each row; `k` holds whole numbers."""
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
    # Half precision cannot hold probabilities that sum to k.
    y = rule.lml(x.to(work_dtype(x.dtype)), k, c.mask, None)
    # The compiler refuses a number of rows that it keeps open beside `generator`, even if that is None.
    source: dict[str, Any] = {} if generator is None else {"generator": generator}
    keys = _random_bytes(x, source)
    start = torch.rand(x.shape[0], dtype=k.dtype, device=x.device, **source)
    return _sample(y, k, keys, start).to(x.dtype)


def _random_bytes(x: Tensor, source: dict[str, Any]) -> Tensor:
    """One random byte for each entry: rows are put in the order of these."""
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    if traced or not rule.is_plain():
        # Neither the compiler nor vmap takes an operation in place for a random one.
        return torch.randint(256, x.shape, dtype=torch.uint8, device=x.device, **source)
    # Eight at a time are drawn faster.
    words = torch.empty(-(-x.numel() // 8), dtype=torch.int64, device=x.device).random_(
        -(2**63), None, **source
    )
    return words.view(torch.uint8)[: x.numel()].view(x.shape)


def _sample_reference(p: Tensor, k: Tensor, keys: Tensor, start: Tensor) -> Tensor:
    """The sample in whole numbers, probabilities in units of 2^-bits, so that nothing is rounded."""
    if p.numel() == 0:
        return torch.zeros_like(p)
    count, n = p.shape
    # 44 of the 53 bits of a double, 23 of the 24 of a float; fewer where n lengths could sum to 2^60 or more.
    bits = min(44 if start.dtype == torch.float64 else 23, 60 - n.bit_length())
    one = 1 << bits
    undefined = p.isnan()
    y = torch.where(undefined, 0, p).to(start.dtype)
    wanted = k.clamp(max=n).expand(count).unsqueeze(-1)
    # What rounding left of k goes to all in proportion: to what they have, or to what they lack.
    total = y.sum(-1, keepdim=True)
    room = torch.where(y > 0, 1 - y, 0)
    missing, lacking = wanted - total, room.sum(-1, keepdim=True)
    grow = torch.where(lacking > 0, (missing / lacking).clamp(0, 1), 0)
    shrink = torch.where(missing < 0, wanted / total, 1)
    # By six bits of the keys, then by four columns, then by places: as is fast for a kernel.
    columns = torch.arange(n, device=p.device) % 4
    order = ((keys & 0xFC) + columns).argsort(stable=True)
    length = ((y + room * grow) * shrink * one).round().long().gather(-1, order)
    length = _stretch(length, wanted.long() << bits, one)
    first = (start * one).long().unsqueeze(-1)
    points = (length.cumsum(-1) + (one - 1 - first)) >> bits  # how many lie before the end of each
    hit = points.diff(dim=-1, prepend=torch.zeros_like(first)).to(p.dtype)
    return torch.where(undefined, torch.nan, torch.zeros_like(p).scatter(-1, order, hit))


def _stretch(length: Tensor, wanted: Tensor, one: int) -> Tensor:
    """Make the lengths sum to `wanted`: the few units that are left go to the first with room for them."""
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
