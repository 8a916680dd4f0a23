"""DTensors in, DTensors out: each process works on its part, with the others if the labels are split.

A DTensor may be `Shard`ed over its labels on one dimension of its mesh, and sharded over rows or replicated
on the others. Plain tensors beside it are what this process needs: for its rows, and of masks and multi-hots
its labels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchlml._arguments import check_tensor
from torchlml._distributed.group import label_group


class Layout(NamedTuple):
    """Where the parts of a DTensor are; `labels` is the dimension of its mesh that splits the labels."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    dim: int  # the dimension of the labels
    labels: int | None
    shape: torch.Size  # of x

    @property
    def group(self) -> dist.ProcessGroup | None:
        return None if self.labels is None else self.mesh.get_group(self.labels)

    @property
    def rows(self) -> tuple[Any, ...]:
        """The placements of a number per row."""
        return tuple(
            Shard(place.dim - (place.dim > self.dim))
            if isinstance(place, Shard) and place.dim != self.dim
            else Replicate()
            for place in self.placements
        )

    @property
    def row_shape(self) -> torch.Size:
        """The shape of a number per row."""
        return self.shape[: self.dim] + self.shape[self.dim + 1 :]

    @property
    def of_labels(self) -> tuple[Any, ...]:
        """The placements of a number per label."""
        return tuple(Shard(0) if i == self.labels else Replicate() for i in range(self.mesh.ndim))

    def entries(self, t: Any) -> Any:
        """This process's part of something that broadcasts to x."""
        return self._part(t, self.placements, self.shape)

    def numbers(self, t: Any) -> Any:
        """This process's part of something that broadcasts to one number per row."""
        return self._part(t, self.rows, self.row_shape)

    def target(self, t: Any) -> Any:
        """This process's part of a target: of a multi-hot its entries, of class indices those of its rows."""
        check_tensor(t, "target")
        if t.dtype == torch.bool or t.is_floating_point():
            return self.entries(t)
        return self._part(t, self.rows, t.shape)

    def _part(self, t: Any, placements: tuple[Any, ...], shape: torch.Size) -> Any:
        """This process's part of something that broadcasts to `shape`."""
        if not isinstance(t, DTensor):
            return t
        places = []
        for place in placements:
            dim = place.dim - (len(shape) - t.dim()) if isinstance(place, Shard) else -1
            # A dimension that broadcasts is not split, but size 1 does not broadcast if x has size 1 too.
            split = dim >= 0 and t.shape[dim] == shape[place.dim]
            places.append(Shard(dim) if split else Replicate())
        return _local(t, self.mesh, places, placements)


def layout(x: DTensor, dim: int, name: str = "x") -> Layout:
    """Read the placements of a DTensor whose dimension `dim` is the labels."""
    dim %= x.dim()
    split = []
    for i, place in enumerate(x.placements):
        if type(place) not in (Shard, Replicate):
            raise ValueError(
                f"`{name}` must be Shard or Replicate on every dimension of its mesh, but its placements are "
                f"{x.placements}: redistribute it first."
            )
        if isinstance(place, Shard) and place.dim == dim:
            split.append(i)
    if len(split) > 1:
        raise ValueError(
            f"`{name}` must have its labels split over one dimension of its mesh, but its placements are "
            f"{x.placements}."
        )
    return Layout(x.device_mesh, x.placements, dim, split[0] if split else None, x.shape)


def is_dtensor(x: Any) -> TypeGuard[DTensor]:
    """Is it one?"""
    return isinstance(x, DTensor)


def refuse_group(group: Any) -> None:
    """A DTensor says by itself how it is split."""
    if group is not None:
        raise ValueError(
            "`group` must not be given with a DTensor, whose mesh says how the labels are split."
        )


def label_rows(weight: DTensor) -> Layout:
    """The layout of a linear layer's weight (n, d): split over its labels, if at all."""
    where = layout(weight, 0, "linear_weight")
    if any(isinstance(place, Shard) and place.dim != 0 for place in where.placements):
        raise ValueError(
            "`linear_weight` must be split over its labels, Shard(0), but its placements are "
            f"{where.placements}."
        )
    return where


def project(
    function: Callable[..., Tensor], x: DTensor, k: Any, dim: int, mask: Any, *, per_row: bool
) -> DTensor:
    """A function of the projection for each part of a DTensor.

    The result is placed as x is; a number per row is replicated where the labels are split.
    """
    where = layout(x, dim)
    y = function(x.to_local(), where.numbers(k), where.entries(mask), where.group)
    if per_row:
        return _per_row(y, where, where.row_shape)
    return _wrap(y, where.mesh, where.placements, x.shape)


def loss(
    function: Callable[..., tuple[Tensor, Tensor]],
    logits: DTensor,
    target: Any,
    k: Any,
    mask: Any,
    weight: Any,
    reduction: str,
) -> DTensor:
    """A loss of DTensor logits; `function` gives the losses of this process's rows and their labels."""
    where = layout(logits, -1, "logits")
    if isinstance(weight, DTensor):
        weight = _local(weight, where.mesh, where.of_labels, where.rows)
    losses, number = function(
        logits.to_local(),
        where.target(target),
        where.numbers(k),
        where.entries(mask),
        weight,
        where.group,
    )
    shape = logits.shape[:-1]
    if reduction == "none":
        return _per_row(losses.to(logits.dtype), where, shape)
    total: Any = _per_row(losses, where, shape).sum()
    if reduction == "mean":
        total = total / _per_row((number > 0).to(losses.dtype), where, shape).sum().clamp(min=1)
    return total.redistribute(where.mesh, [Replicate()] * where.mesh.ndim).to(logits.dtype)


def scores(preds: DTensor, target: Any, mask: Any, group: Any) -> tuple[Tensor, Any, Any, Any]:
    """This process's part of scores, their target and mask, and the processes with the other labels."""
    refuse_group(group)
    where = layout(preds, -1, "preds")
    return preds.to_local(), where.target(target), where.entries(mask), where.group


def linear_loss(
    function: Callable[..., Tensor],
    input: Any,
    linear_weight: Any,
    target: Any,
    k: Any,
    linear_bias: Any,
    weight: Any,
    ignore_index: int,
    reduction: str,
) -> Tensor:
    """A loss of a linear layer whose weight is a DTensor; `function` gives it for this process's rows.

    An input that is no DTensor has this process's rows, and the result is theirs. A DTensor may be split over
    rows, where the mesh does not split the labels, and the result is a DTensor, of all rows.
    """
    check_tensor(input, "input")
    if not isinstance(linear_weight, DTensor):
        raise TypeError("`linear_weight` must be a DTensor if `input` is one, but it is a plain tensor.")
    labels = label_rows(linear_weight)
    mesh, shape = labels.mesh, input.shape[:-1]
    rows: tuple[Any, ...] = (Replicate(),) * mesh.ndim
    if isinstance(input, DTensor):
        if input.device_mesh != mesh:
            raise ValueError("`input` and `linear_weight` must lie on the same mesh, but theirs differ.")
        rows = tuple(
            place if type(place) is Shard and place.dim < len(shape) and i != labels.labels else Replicate()
            for i, place in enumerate(input.placements)
        )
    places = tuple(Shard(len(shape)) if i == labels.labels else place for i, place in enumerate(rows))
    where = Layout(mesh, places, len(shape), labels.labels, torch.Size([*shape, linear_weight.shape[0]]))
    own_target = where.target(target)
    multi_hot = target.dtype == torch.bool or target.is_floating_point()
    split = any(isinstance(place, Shard) for place in rows)
    result = function(
        _local(input, mesh, rows, rows),
        _local(linear_weight, mesh, where.of_labels, rows),
        own_target,
        where.numbers(k),
        linear_bias=_local(linear_bias, mesh, where.of_labels, rows),
        weight=_local(weight, mesh, where.of_labels, rows),
        reduction="sum" if split and reduction == "mean" else reduction,
        group=where.group,
    )
    if not isinstance(input, DTensor):
        return result
    if reduction == "none":
        return _per_row(result, where, shape)
    parts = [Partial() if isinstance(place, Shard) else place for place in rows]
    everywhere = [Replicate()] * mesh.ndim
    total = DTensor.from_local(result, mesh, parts, run_check=False).redistribute(mesh, everywhere)
    if not split or reduction == "sum":
        return total
    found = own_target != 0 if multi_hot else own_target != ignore_index
    found = found.any(-1) if found.dim() > len(shape) else found
    if multi_hot and where.group is not None:
        found = label_group(where.group).sum(found.long()) > 0
    number = DTensor.from_local(found.sum(), mesh, parts, run_check=False).redistribute(mesh, everywhere)
    return (total.double() / number.clamp(min=1)).to(result.dtype)


def _local(t: Any, mesh: DeviceMesh, places: Any, rows: Any) -> Any:
    """This process's part of a DTensor, whose gradient comes from all that have a part of the rows."""
    if not isinstance(t, DTensor):
        return t
    gradient = [
        Partial() if isinstance(row, Shard) and not isinstance(place, Shard) else place
        for place, row in zip(places, rows, strict=True)
    ]
    return t.redistribute(mesh, places).to_local(grad_placements=gradient)


def _per_row(t: Tensor, where: Layout, shape: Any) -> DTensor:
    return _wrap(t, where.mesh, where.rows, shape)


def _wrap(t: Tensor, mesh: DeviceMesh, placements: tuple[Any, ...], shape: Any) -> DTensor:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(1, size))
    stride = tuple(strides[: len(shape)])
    return DTensor.from_local(t, mesh, placements, run_check=False, shape=shape, stride=stride)
