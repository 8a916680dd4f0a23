"""Conversion between DTensors and local tensors: the local part of every argument, and wrapped results.

A DTensor may be sharded over its labels on one dimension of its mesh, and sharded over rows or replicated on
the others. Plain tensors passed along with it are local already: they have the rows of this process, and
masks and multi-hots have its labels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchlml._arguments import check_tensor
from torchlml._autograd.loss import Reduction, mean_divisor, reduce
from torchlml._targets import is_multi_hot


class Layout(NamedTuple):
    """The placements of a DTensor with rows of labels."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    dim: int  # the dimension of the labels
    labels: int | None  # the dimension of the mesh that shards the labels

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The processes that the labels are sharded across, or None if they are not sharded."""
        return None if self.labels is None else self.mesh.get_group(self.labels)

    @property
    def row_shape(self) -> torch.Size:
        """The shape of a tensor with one number per row."""
        return self.shape[: self.dim] + self.shape[self.dim + 1 :]

    @property
    def row_placements(self) -> tuple[Any, ...]:
        """The placements of a tensor with one number per row."""
        return tuple(
            Shard(place.dim - (place.dim > self.dim))
            if isinstance(place, Shard) and place.dim != self.dim
            else Replicate()
            for place in self.placements
        )

    def entries(self, t: Any) -> Any:
        """The local part of an argument that broadcasts to the shape of the DTensor."""
        return self._broadcast(t, self.placements, self.shape) if isinstance(t, DTensor) else t

    def per_row(self, t: Any) -> Any:
        """The local part of an argument that broadcasts to one number per row."""
        return self._broadcast(t, self.row_placements, self.row_shape) if isinstance(t, DTensor) else t

    def per_label(self, t: Any) -> Any:
        """The local part of an argument with one entry, or one row of a matrix, per label."""
        return self.local(t, [Shard(0) if i == self.labels else Replicate() for i in range(self.mesh.ndim)])

    def target(self, t: Any) -> Any:
        """The local part of a target: entries if it is multi-hot, rows if it has class indices."""
        check_tensor(t, "target")
        if is_multi_hot(t):
            return self.entries(t)
        return self._broadcast(t, self.row_placements, t.shape) if isinstance(t, DTensor) else t

    def local(self, t: Any, placements: Any) -> Any:
        """The local part of a DTensor; its gradient is summed over all processes that share the rows."""
        if not isinstance(t, DTensor):
            return t
        return _to_local(t, self.mesh, placements, self.row_placements)

    def wrap(self, t: Tensor) -> DTensor:
        """Wrap local entries as a DTensor."""
        return self._wrap(t, self.placements, self.shape)

    def wrap_rows(self, t: Tensor) -> DTensor:
        """Wrap one number per local row as a DTensor, replicated across the processes that share labels."""
        return self._wrap(t, self.row_placements, self.row_shape)

    def reduce(self, losses: Tensor, has_label: Tensor, reduction: Reduction) -> DTensor:
        """Reduce the losses of all rows, given those of the local rows."""
        if reduction == "none":
            return self.wrap_rows(losses)
        labeled = self.wrap_rows(has_label.to(losses.dtype)).sum() if reduction == "mean" else 1
        total: Any = reduce(self.wrap_rows(losses), labeled, reduction)
        return total.redistribute(self.mesh, [Replicate()] * self.mesh.ndim)

    def reduce_sum(self, total: Tensor, has_label: Tensor | None) -> DTensor:
        """Sum a local total over all processes; with `has_label`, divide by the number of labeled rows."""
        result = self._sum_over_rows(total)
        if has_label is None:
            return result
        labeled = self._sum_over_rows(has_label.sum())
        return (result.double() / mean_divisor(labeled)).to(total.dtype)

    @property
    def shards_rows(self) -> bool:
        """Whether the rows are sharded."""
        return any(isinstance(place, Shard) for place in self.row_placements)

    def _sum_over_rows(self, t: Tensor) -> Any:
        parts = [Partial() if isinstance(place, Shard) else place for place in self.row_placements]
        total = DTensor.from_local(t, self.mesh, parts, run_check=False)
        return total.redistribute(self.mesh, [Replicate()] * self.mesh.ndim)

    def _broadcast(self, t: DTensor, placements: tuple[Any, ...], shape: torch.Size) -> Any:
        places = []
        for place in placements:
            dim = place.dim - (len(shape) - t.dim()) if isinstance(place, Shard) else -1
            # A dimension that broadcasts is not sharded. Size 1 only broadcasts to other sizes.
            sharded = dim >= 0 and t.shape[dim] == shape[place.dim]
            places.append(Shard(dim) if sharded else Replicate())
        return _to_local(t, self.mesh, places, placements)

    def _wrap(self, t: Tensor, placements: tuple[Any, ...], shape: torch.Size) -> DTensor:
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * max(1, size))
        stride = tuple(strides[: len(shape)])
        return DTensor.from_local(t, self.mesh, placements, run_check=False, shape=shape, stride=stride)


def read_layout(x: DTensor, dim: int, group: Any, name: str = "x") -> Layout:
    """Check the placements of a DTensor whose dimension `dim` has the labels; a `group` raises an error."""
    if group is not None:
        raise ValueError(
            "`group` must be None with a DTensor, whose mesh defines how the labels are sharded."
        )
    dim %= x.dim()
    split = []
    for i, place in enumerate(x.placements):
        if type(place) not in (Shard, Replicate):
            raise ValueError(
                f"`{name}` must be Shard or Replicate on every dimension of its mesh, but its placements are "
                f"{x.placements}; redistribute it first."
            )
        if isinstance(place, Shard) and place.dim == dim:
            split.append(i)
    if len(split) > 1:
        raise ValueError(
            f"`{name}` must have its labels sharded over one dimension of its mesh, but its placements are "
            f"{x.placements}."
        )
    return Layout(x.device_mesh, x.placements, x.shape, dim, split[0] if split else None)


def read_linear_layout(input: Any, linear_weight: Any, group: Any) -> Layout:
    """Return the layout of the logits of a linear layer whose weight (n, d) is a DTensor.

    A plain input has the rows of this process. A DTensor may be sharded over rows, by dimensions of the mesh
    that do not shard the labels; other placements are redistributed.
    """
    check_tensor(input, "input")
    if not isinstance(linear_weight, DTensor):
        raise TypeError("`linear_weight` must be a DTensor if `input` is one, but it is a plain tensor.")
    weight = read_layout(linear_weight, 0, group, "linear_weight")
    if any(isinstance(place, Shard) and place.dim != 0 for place in weight.placements):
        raise ValueError(
            "`linear_weight` must be sharded over its labels, Shard(0), but its placements are "
            f"{weight.placements}."
        )
    mesh, ndim = weight.mesh, input.dim() - 1
    rows: tuple[Any, ...] = (Replicate(),) * mesh.ndim
    if isinstance(input, DTensor):
        if input.device_mesh != mesh:
            raise ValueError("`input` and `linear_weight` must be on the same mesh, but theirs differ.")
        rows = tuple(
            place if type(place) is Shard and place.dim < ndim and i != weight.labels else Replicate()
            for i, place in enumerate(input.placements)
        )
    placements = tuple(Shard(ndim) if i == weight.labels else place for i, place in enumerate(rows))
    shape = torch.Size([*input.shape[:-1], linear_weight.shape[0]])
    return Layout(mesh, placements, shape, ndim, weight.labels)


def _to_local(t: DTensor, mesh: DeviceMesh, placements: Any, rows: Any) -> Tensor:
    """Return the local part; its gradient is summed over processes with other rows but the same part."""
    gradient = [
        Partial() if isinstance(row, Shard) and not isinstance(place, Shard) else place
        for place, row in zip(placements, rows, strict=True)
    ]
    return t.redistribute(mesh, placements).to_local(grad_placements=gradient)
