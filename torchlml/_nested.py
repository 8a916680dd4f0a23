"""Convert nested tensors of the layout `torch.jagged` to values and offsets, and results back.

If the ragged dimension is that of the labels, (B, j), the rows form a ragged batch: values and offsets. If a
ragged number of rows has n labels each, (B, j, n), the values are dense rows. Results get the offsets of the
input, so that they can be combined with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchlml._rows import row_index

Plain = tuple[Tensor, Any, int, Tensor | None, Tensor | None]


class Jagged(NamedTuple):
    """The nested input tensor, and the dimension of its labels."""

    like: Any  # a NestedTensor, whose methods torch does not declare
    name: str
    dim: int  # the dimension of the labels in the values

    @property
    def ragged(self) -> int:
        """The dimension of `like` whose lengths differ."""
        return self.like._ragged_idx

    @property
    def labels_are_ragged(self) -> bool:
        """Whether the rows form a ragged batch, so that results per row are dense."""
        return self.dim + 1 == self.ragged

    def wrap(self, values: Tensor) -> Tensor:
        """Wrap the values of all entries as a nested tensor."""
        return torch.nested.nested_tensor_from_jagged(values, self.like.offsets(), jagged_dim=self.ragged)

    def wrap_rows(self, per_row: Tensor) -> Tensor:
        """Wrap one number per row: as a dense (B,), or nested without the dimension of the labels."""
        if self.labels_are_ragged:
            return per_row
        offsets, ragged = self.like.offsets(), self.ragged_of_rows
        return torch.nested.nested_tensor_from_jagged(per_row, offsets, jagged_dim=ragged)

    @property
    def ragged_of_rows(self) -> int:
        """The ragged dimension after that of the labels is removed."""
        return self.ragged - (self.dim + 1 < self.ragged)

    def values(self, t: Any, name: str, ragged: int, may_read: bool) -> Tensor:
        """Return the values of a nested tensor, which must have the offsets of the input."""
        check_jagged(t, name)
        if t._ragged_idx == ragged and self.is_like(t, may_read):
            return t.values()
        raise ValueError(
            f"`{name}` must be ragged like `{self.name}`, but its offsets differ; create it by "
            f"`torch.nested.nested_tensor_from_jagged(values, {self.name}.offsets())`."
        )

    def is_like(self, t: Any, may_read: bool) -> bool:
        """Whether a nested tensor has the same offsets."""
        offsets, own = t.offsets(), self.like.offsets()
        return offsets is own or (may_read and torch.equal(offsets, own))

    def places(self, target: Any, ignore_index: int, may_read: bool) -> Tensor:
        """Convert labels that are numbered within their ragged rows to positions among all values.

        `ignore_index` becomes -1. A label outside its row becomes a position past the end.
        """
        offsets = self.like.offsets()
        if target.is_nested:
            check_jagged(target, "target")
            label = target.values()
            row = row_index(target.offsets(), label.shape[0])
        else:
            row = torch.arange(target.shape[0], device=target.device)
            row, label = row.view(-1, *(1,) * (target.dim() - 1)), target
        label = label.long()
        ignored = label == ignore_index
        wrong = ~ignored & ((label < 0) | (label >= offsets.diff()[row]))
        if may_read and bool(wrong.any()):
            raise ValueError(
                "`target` must contain label numbers within their rows, or `ignore_index` = "
                f"{ignore_index}, but it contains {int(label[wrong][0])}, which is outside its row."
            )
        place = torch.where(wrong, self.like.values().shape[0], offsets[row] + label)
        return torch.where(ignored, -1, place).flatten()


def check_jagged(t: Any, name: str) -> None:
    """Raise unless `t` is a nested tensor of the jagged layout without holes."""
    if not isinstance(t, Tensor) or t.layout != torch.jagged:
        kind = f"one of {t.layout}" if isinstance(t, Tensor) and t.is_nested else "not nested"
        raise TypeError(
            f"`{name}` must be a nested tensor made with `layout=torch.jagged`, but it is {kind}."
        )
    if t.lengths() is not None:  # type: ignore[attr-defined]
        raise ValueError(f"`{name}` has holes between its rows; pass `{name}.contiguous()` instead.")


def read(
    x: Any, k: Any, dim: Any, mask: Any, offsets: Tensor | None, name: str, may_read: bool
) -> tuple[Plain, Jagged]:
    """Return the arguments of a dense call on the values, and the object that wraps its results.

    `may_read` is whether offsets may be compared by value; if not, they must be the same tensor.
    """
    check_jagged(x, name)
    if offsets is not None:
        raise ValueError(f"`offsets` must be None for a nested `{name}`, which has its own offsets.")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"`dim` must be an int, but it is {dim!r}.")
    place = dim + x.dim() if dim < 0 else dim
    jagged = Jagged(x, name, place - 1)
    packed = jagged.labels_are_ragged
    if not 0 < place < x.dim() or (packed and x.dim() > 2):
        raise ValueError(
            f"`dim` must be the ragged dimension of a 2-d nested `{name}`, or one of fixed size after the "
            f"first, but it is {dim} of {x.dim()}, and the ragged one is {jagged.ragged}."
        )
    if mask is not None and (packed or getattr(mask, "is_nested", False)):
        mask = jagged.values(mask, "mask", jagged.ragged, may_read)
    if isinstance(k, Tensor) and k.dim() > 0 and (not packed or k.is_nested):
        if packed:
            raise ValueError(f"`k` must be one number for each row of `{name}`, but it is nested.")
        k = jagged.values(k, "k", jagged.ragged_of_rows, may_read)
    return (x.values(), k, jagged.dim, mask, x.offsets() if packed else None), jagged
