"""Convert DTensor arguments to their local parts, and wrap local results as DTensors.

A DTensor may be sharded over its labels on one dimension of its mesh, and sharded over rows or replicated on
the other dimensions. Plain tensors passed along with it are already local: they contain the rows of this
process, and masks and multi-hot targets contain only its labels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchlml._arguments import check_tensor
from torchlml._autograd.loss import Reduction, mean_divisor, reduce
from torchlml._distributed.group import LabelGroup
from torchlml._targets import is_multi_hot


class Placed(NamedTuple):
    """The placements and the global shape of tensors with one number per entry or one number per row."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size

    def local(self, t: Any) -> Any:
        """Return the local part of an argument that broadcasts to `shape`, or a plain tensor unchanged."""
        if not isinstance(t, DTensor):
            return t
        places = []
        for place in self.placements:
            dim = place.dim - (len(self.shape) - t.dim()) if isinstance(place, Shard) else -1
            # A dimension that broadcasts is not sharded. A dimension of size 1 broadcasts only if the
            # corresponding size in `shape` is not 1.
            sharded = dim >= 0 and t.shape[dim] == self.shape[place.dim]
            places.append(Shard(dim) if sharded else Replicate())
        return _to_local(t, self.mesh, places, self.placements)

    def wrap(self, t: Tensor) -> DTensor:
        """Wrap a local result as a DTensor with these placements and this shape."""
        strides = [1]
        for size in reversed(self.shape[1:]):
            strides.insert(0, strides[0] * max(1, size))
        stride = tuple(strides[: len(self.shape)])
        return DTensor.from_local(
            t, self.mesh, self.placements, run_check=False, shape=self.shape, stride=stride
        )


class Layout(NamedTuple):
    """The placements of a DTensor with one entry per label, and of tensors with one number per row."""

    entries: Placed
    rows: Placed  # replicated across the processes that the labels are sharded across
    labels: int | None  # the mesh dimension that shards the labels, if any
    group: LabelGroup | None  # the processes that the labels are sharded across; None if not sharded

    def per_label(self, t: Any) -> Any:
        """Return the local part of an argument that has one entry, or one matrix row, per label."""
        mesh = self.entries.mesh
        return self.local(t, [Shard(0) if i == self.labels else Replicate() for i in range(mesh.ndim)])

    def target(self, t: Any) -> Any:
        """Return the local part of a target.

        Class indices are sharded like rows, and multi-hot targets like entries.
        """
        check_tensor(t, "target")
        if is_multi_hot(t):
            return self.entries.local(t)
        return self.rows._replace(shape=t.shape).local(t)

    def local(self, t: Any, placements: Any) -> Any:
        """Return the local part of a DTensor; its gradient is summed over processes with different rows."""
        if not isinstance(t, DTensor):
            return t
        return _to_local(t, self.rows.mesh, placements, self.rows.placements)

    def reduce(self, losses: Tensor, has_label: Tensor, reduction: Reduction) -> DTensor:
        """Reduce the losses of all rows, given the losses of the local rows."""
        if reduction == "none":
            return self.rows.wrap(losses)
        labeled = self.rows.wrap(has_label.to(losses.dtype)).sum() if reduction == "mean" else 1
        total: Any = reduce(self.rows.wrap(losses), labeled, reduction)
        return total.redistribute(total.device_mesh, [Replicate()] * total.device_mesh.ndim)

    def reduce_sum(self, total: Tensor, has_label: Tensor | None) -> DTensor:
        """Sum a local total over the row shards; with `has_label`, divide by the number of labeled rows."""
        result = self._sum_over_rows(total)
        if has_label is None:
            return result
        labeled = self._sum_over_rows(has_label.sum())
        return (result.double() / mean_divisor(labeled)).to(total.dtype)

    @property
    def shards_rows(self) -> bool:
        """Whether the rows are sharded."""
        return any(isinstance(place, Shard) for place in self.rows.placements)

    def _sum_over_rows(self, t: Tensor) -> Any:
        mesh = self.rows.mesh
        parts = [Partial() if isinstance(place, Shard) else place for place in self.rows.placements]
        return DTensor.from_local(t, mesh, parts, run_check=False).redistribute(
            mesh, [Replicate()] * mesh.ndim
        )


def read_layout(x: DTensor, dim: int, group: Any, name: str = "x") -> Layout:
    """Check the placements of a DTensor whose labels are in dimension `dim`, and return its layout.

    A DTensor needs no `group`, so passing one raises an error.
    """
    if group is not None:
        raise ValueError(
            "`group` must be None with a DTensor, because its mesh defines how the labels are sharded."
        )
    dim %= x.dim()
    if any(type(place) not in (Shard, Replicate) for place in x.placements):
        raise ValueError(
            f"`{name}` must be placed as Shard or Replicate on every mesh dimension, but its placements are "
            f"{x.placements}. Redistribute it first."
        )
    if x.placements.count(Shard(dim)) > 1:
        raise ValueError(
            f"`{name}` must have its labels sharded on at most one mesh dimension, but its placements are "
            f"{x.placements}."
        )
    mesh, placements, shape = x.device_mesh, x.placements, x.shape
    of_rows = tuple(
        Shard(place.dim - (place.dim > dim)) if isinstance(place, Shard) and place.dim != dim else Replicate()
        for place in placements
    )
    labels, group = None, None
    if Shard(dim) in placements:
        labels = placements.index(Shard(dim))
        group = LabelGroup(mesh.get_group(labels), mesh.get_local_rank(labels), mesh.size(labels))
    rows = Placed(mesh, of_rows, shape[:dim] + shape[dim + 1 :])
    return Layout(Placed(mesh, placements, shape), rows, labels, group)


def read_linear_layout(input: Any, linear_weight: Any, group: Any) -> Layout:
    """Return the layout of the logits from a linear layer whose weight (n, d) is a DTensor.

    A plain input contains the rows of this process. A DTensor input may be sharded over rows on the mesh
    dimensions that do not shard the labels; other placements are redistributed.
    """
    check_tensor(input, "input")
    if not isinstance(linear_weight, DTensor):
        raise TypeError("`linear_weight` must be a DTensor if `input` is one, but it is a plain tensor.")
    weight = read_layout(linear_weight, 0, group, "linear_weight")
    mesh, placements, _ = weight.entries
    if any(isinstance(place, Shard) and place.dim != 0 for place in placements):
        raise ValueError(
            f"`linear_weight` must be sharded over its labels, Shard(0), but its placements are {placements}."
        )
    ndim = input.dim() - 1
    rows: tuple[Any, ...] = (Replicate(),) * mesh.ndim
    if isinstance(input, DTensor):
        if input.device_mesh != mesh:
            raise ValueError("`input` and `linear_weight` must be on the same mesh, but their meshes differ.")
        rows = tuple(
            place if type(place) is Shard and place.dim < ndim and i != weight.labels else Replicate()
            for i, place in enumerate(input.placements)
        )
    placements = tuple(Shard(ndim) if i == weight.labels else place for i, place in enumerate(rows))
    shape = torch.Size([*input.shape[:-1], linear_weight.shape[0]])
    return weight._replace(entries=Placed(mesh, placements, shape), rows=Placed(mesh, rows, shape[:-1]))


def _to_local(t: DTensor, mesh: DeviceMesh, placements: Any, rows: Any) -> Tensor:
    """Return the local part of `t`.

    Its gradient is summed over the processes that have the same part of `t` but different rows.
    """
    gradient = [
        Partial() if isinstance(row, Shard) and not isinstance(place, Shard) else place
        for place, row in zip(placements, rows, strict=True)
    ]
    return t.redistribute(mesh, placements).to_local(grad_placements=gradient)
