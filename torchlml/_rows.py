"""A common interface to the rows of a dense matrix or a ragged batch, and conversion of nested tensors.

Code that works on rows is written once, in terms of sums over each row and of broadcasting one number per row
to the entries. This is the bottom layer of the library: it imports only torch.

Nested tensors with the layout `torch.jagged` are converted to values and offsets, and results are converted
back. In a nested tensor of shape (B, j), the label dimension j is ragged, and the rows form a ragged batch.
In a nested tensor of shape (B, j, n), the number of rows j is ragged, and the values are dense rows of n
labels. Results share the offsets of the input, because torch can combine nested tensors only if their offsets
are the same tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic: float64 for float64, and float32 for narrower dtypes."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of k and of row sums: float64, except on Apple GPUs, which do not support it."""
    return torch.float32 if device.type == "mps" else torch.float64


def empty_nu(x: Tensor, offsets: Tensor | None) -> Tensor:
    """Return an uninitialized nu of shape (2, R)."""
    rows = x.shape[0] if offsets is None else offsets.shape[0] - 1
    return x.new_empty((2, rows), dtype=work_dtype(x.dtype))


def empty_gradients(x: Tensor, nu: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialized tensors for dx and dk, the gradients with respect to x and to each row's k."""
    return torch.empty_like(x), nu.new_empty(nu.shape[1:], dtype=wide_dtype(x.device))


def sum_rows(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum each row of a matrix, with bitwise identical results for any number of threads."""
    # torch splits the sum of a single row across threads, which changes the order of additions. It does not
    # split the sums of two rows.
    return t.expand(2, -1).sum(-1, dtype=dtype)[:1] if t.shape[0] == 1 else t.sum(-1, dtype=dtype)


def rows_of(x: Tensor, offsets: Tensor | None, *, differentiable: bool = False) -> Rows:
    """Return the rows of `x`: those of a matrix, or those that `offsets` define in a vector.

        >>> rows = rows_of(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 3]))
        >>> rows.sum(torch.tensor([1.0, 2.0, 4.0]))
        tensor([3., 4.], dtype=torch.float64)

    Args:
        x: (R, n), or (N,) with `offsets`. Only its shape and its device matter.
        offsets: row boundaries (R + 1,) from 0 to N for ragged rows, or None for dense rows.
        differentiable: whether sums must be differentiable. If False, sums are in the wide dtype, with a
            fixed order of additions on every device, for the pure PyTorch kernels. If True, sums are in the
            dtype of the summands (int64 for a bool tensor) and support autograd, vmap, compilation and
            export.

    Returns:
        An object with `count`, the number of rows; `longest`, the length of the longest row; `wide`, the wide
        dtype; and the methods `sum`, `max` and `largest` (one number per row), `top` (several numbers per
        row) and `broadcast` (from one number per row to the entries).
    """
    return DenseRows(x, differentiable) if offsets is None else PackedRows(x, offsets, differentiable)


class DenseRows:
    """The rows of an (R, n) matrix."""

    def __init__(self, x: Tensor, differentiable: bool = False) -> None:
        self.count, self.length = x.shape
        self.longest = self.length
        self.wide = wide_dtype(x.device)
        self._sum_dtype = None if differentiable else self.wide

    def sum(self, t: Tensor) -> Tensor:
        """Sum over each row. For a bool tensor, count the True entries."""
        return sum_rows(t, self._sum_dtype)

    def max(self, t: Tensor) -> Tensor:
        """Return the largest entry of each row, or -inf for an empty row."""
        return t.amax(-1) if self.length else t.new_full((self.count,), -torch.inf)

    def broadcast(self, per_row: Tensor) -> Tensor:
        """Reshape one number per row so that it broadcasts against the entries."""
        return per_row.unsqueeze(-1)

    def largest(self, x: Tensor, rank: int | Tensor) -> Tensor:
        """Return the `rank`-th largest entry of each row, or the smallest if there are fewer entries.

        The result is -inf for an empty row. `rank` is one number for all rows, which is read on the host, or
        a tensor with one number per row.
        """
        if self.length == 0:
            return self.max(x)
        if isinstance(rank, Tensor) and rank.dim() > 0:
            place = rank.clamp(1, self.length).unsqueeze(-1) - 1
            return x.sort(-1, descending=True).values.gather(-1, place).squeeze(-1)
        # topk is faster than kthvalue, especially if it searches from the end that is nearer to the rank.
        top = min(max(int(rank), 1), self.length)
        if 2 * top <= self.length:
            return x.topk(top, sorted=False).values.amin(-1)
        return x.topk(self.length + 1 - top, largest=False, sorted=False).values.amax(-1)

    def top(self, x: Tensor, count: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's `count` largest entries in descending order, and the `values` at their positions.

        Both have shape (R, count). Past the end of a row, they are -inf and 0, respectively.
        """
        some = min(count, self.length)
        largest, place = x.topk(some)
        missing = (0, count - some)
        return pad(largest, missing, value=-torch.inf), pad(values.gather(-1, place), missing)


class PackedRows:
    """The rows x[offsets[i]:offsets[i + 1]] of a vector."""

    def __init__(self, x: Tensor, offsets: Tensor, differentiable: bool = False) -> None:
        self.offsets = offsets
        self.count = offsets.shape[0] - 1
        self.wide = wide_dtype(x.device)
        self.index = row_index(offsets, x.shape[0])
        self._differentiable = differentiable

    @property
    def longest(self) -> int:
        """The number of entries in the longest row."""
        return int(self.offsets.diff().max()) if self.count else 0

    def sum(self, t: Tensor) -> Tensor:
        """Sum over each row. For a bool tensor, count the True entries."""
        if self._differentiable:
            t = t.long() if t.dtype == torch.bool else t
            return t.new_zeros(self.count).index_add(0, self.index, t)
        # Unlike index_add, segment_reduce adds in a fixed order on every device.
        return torch.segment_reduce(t.to(self.wide), "sum", offsets=self.offsets, initial=0, unsafe=True)

    def max(self, t: Tensor) -> Tensor:
        """Return the largest entry of each row, or -inf for an empty row."""
        if self._differentiable:
            return t.new_full((self.count,), -torch.inf).scatter_reduce(0, self.index, t, "amax")
        return torch.segment_reduce(t, "max", offsets=self.offsets, initial=-torch.inf, unsafe=True)

    def broadcast(self, per_row: Tensor) -> Tensor:
        """Expand one number per row to one number per entry."""
        return per_row[self.index]

    def order(self, x: Tensor) -> Tensor:
        """Return the positions of all entries, row by row, in descending order within each row."""
        by_value = x.argsort(descending=True)
        return by_value[self.index[by_value].argsort(stable=True)]

    def largest(self, x: Tensor, rank: int | Tensor) -> Tensor:
        """Like `DenseRows.largest`."""
        if x.shape[0] == 0:
            return x.new_full((self.count,), -torch.inf)
        rank = rank.clamp(min=1) if isinstance(rank, Tensor) else max(rank, 1)
        place = torch.minimum(self.offsets[:-1] + rank, self.offsets[1:]) - 1
        found = x[self.order(x)[place.clamp(min=0)]]
        return torch.where(self.offsets.diff() > 0, found, -torch.inf)

    def top(self, x: Tensor, count: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """Like `DenseRows.top`."""
        if x.shape[0] == 0:
            return x.new_full((self.count, count), -torch.inf), values.new_zeros((self.count, count))
        place = self.offsets[:-1, None] + torch.arange(count, device=x.device)
        at = self.order(x)[place.clamp(max=x.shape[0] - 1)]
        inside = place < self.offsets[1:, None]
        return torch.where(inside, x[at], -torch.inf), values[at] * inside


Rows = DenseRows | PackedRows


def shifted(x: Tensor, nu: Tensor, rows: Rows) -> Tensor:
    """Return z = (x + hi) + lo for nu = hi + lo.

    x + hi is exact near the threshold, so z is accurate there even if all logits are near 1e7.
    """
    hi, lo = nu
    return (x + rows.broadcast(hi)) + rows.broadcast(lo)


def row_index(offsets: Tensor, size: int) -> Tensor:
    """Return the row index of each of the `size` entries of a ragged batch."""
    rows = torch.arange(offsets.shape[0] - 1, device=offsets.device)
    # Passing the size keeps the shape static for the compiler, and avoids a synchronization on a GPU.
    return rows.repeat_interleave(offsets.diff(), output_size=size)


Plain = tuple[Tensor, Any, int, Tensor | None, Tensor | None]


class Jagged(NamedTuple):
    """A nested input tensor and the position of its label dimension."""

    like: Any  # a NestedTensor, typed as Any because torch does not declare its methods
    name: str
    dim: int  # the label dimension of `like.values()`

    @property
    def ragged(self) -> int:
        """The index of the ragged dimension of `like`."""
        return self.like._ragged_idx

    @property
    def labels_are_ragged(self) -> bool:
        """Whether the label dimension is ragged. Results with one number per row are then dense."""
        return self.dim + 1 == self.ragged

    def wrap(self, values: Tensor) -> Tensor:
        """Wrap the values of all entries as a nested tensor."""
        return torch.nested.nested_tensor_from_jagged(values, self.like.offsets(), jagged_dim=self.ragged)

    def wrap_rows(self, per_row: Tensor) -> Tensor:
        """Wrap one number per row as a dense tensor (B,) or a nested tensor without the label dimension."""
        if self.labels_are_ragged:
            return per_row
        offsets, ragged = self.like.offsets(), self.ragged_of_rows
        return torch.nested.nested_tensor_from_jagged(per_row, offsets, jagged_dim=ragged)

    @property
    def ragged_of_rows(self) -> int:
        """The index of the ragged dimension after the label dimension is removed."""
        return self.ragged - (self.dim + 1 < self.ragged)

    def values(self, t: Any, name: str, ragged: int, may_read: bool) -> Tensor:
        """Return the values of the nested tensor `t`. It must have the same offsets as the input."""
        check_jagged(t, name)
        if t._ragged_idx == ragged and self.is_like(t, may_read):
            return t.values()
        raise ValueError(
            f"`{name}` must be ragged like `{self.name}`, but its ragged dimension or offsets differ; "
            f"create it with `torch.nested.nested_tensor_from_jagged(values, {self.name}.offsets())`."
        )

    def is_like(self, t: Any, may_read: bool) -> bool:
        """Whether the nested tensor `t` has the same offsets as the input."""
        offsets, own = t.offsets(), self.like.offsets()
        return offsets is own or (may_read and torch.equal(offsets, own))

    def places(self, target: Any, ignore_index: int, may_read: bool) -> Tensor:
        """Convert label indices within ragged rows to indices into all values.

        `ignore_index` becomes -1. A label outside its row becomes an index past the end of the values.
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
                "`target` must contain label indices within their rows, or `ignore_index` = "
                f"{ignore_index}, but it contains {int(label[wrong][0])}, which is outside its row."
            )
        place = torch.where(wrong, self.like.values().shape[0], offsets[row] + label)
        return torch.where(ignored, -1, place).flatten()


def check_jagged(t: Any, name: str) -> None:
    """Raise an error unless `t` is a nested tensor with the jagged layout and without holes."""
    if not isinstance(t, Tensor) or t.layout != torch.jagged:
        is_nested = isinstance(t, Tensor) and t.is_nested
        came = f"its layout is {t.layout}" if is_nested else "it is not nested"
        raise TypeError(f"`{name}` must be a nested tensor with the layout torch.jagged, but {came}.")
    if t.lengths() is not None:  # type: ignore[attr-defined]
        raise ValueError(
            f"`{name}` must be contiguous, but it has holes between its rows; pass `{name}.contiguous()`."
        )


def read_nested(
    x: Any, k: Any, dim: Any, mask: Any, offsets: Tensor | None, name: str, may_read: bool
) -> tuple[Plain, Jagged]:
    """Return the arguments for a call on the values of a nested `x`, and an object that wraps the results.

    If `may_read` is True, offsets may be compared by value. Otherwise, they must be the same tensor.
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
            f"`dim` must be the ragged dimension of a 2-d nested `{name}`, or a dimension of fixed size "
            f"other than the first, but it is {dim} for a {x.dim()}-d `{name}` whose dimension "
            f"{jagged.ragged} is ragged."
        )
    if mask is not None and (packed or getattr(mask, "is_nested", False)):
        mask = jagged.values(mask, "mask", jagged.ragged, may_read)
    if isinstance(k, Tensor) and k.dim() > 0 and (not packed or k.is_nested):
        if packed:
            raise ValueError(f"`k` must be one number for each row of `{name}`, but it is nested.")
        k = jagged.values(k, "k", jagged.ragged_of_rows, may_read)
    return (x.values(), k, jagged.dim, mask, x.offsets() if packed else None), jagged
