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
from torch.distributed.tensor import DTensor, Replicate, Shard


class Layout(NamedTuple):
    """Where the parts of a DTensor are; `labels` is the dimension of its mesh that splits the labels."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    dim: int  # the dimension of the labels
    labels: int | None
    ndim: int  # of x

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

    def entries(self, t: Any) -> Any:
        """This process's part of something that broadcasts to x."""
        return self._part(t, self.placements, self.ndim)

    def numbers(self, t: Any) -> Any:
        """This process's part of something that broadcasts to one number per row."""
        return self._part(t, self.rows, self.ndim - 1)

    def lists(self, t: Any) -> Any:
        """This process's part of something that has the rows as its first dimensions."""
        return self._part(t, self.rows, t.dim()) if isinstance(t, DTensor) else t

    def _part(self, t: Any, placements: tuple[Any, ...], ndim: int) -> Any:
        if not isinstance(t, DTensor):
            return t
        places = []
        for place in placements:
            dim = place.dim - (ndim - t.dim()) if isinstance(place, Shard) else -1
            # What broadcasts over a dimension is not split there.
            places.append(Shard(dim) if dim >= 0 and t.shape[dim] != 1 else Replicate())
        return t.redistribute(self.mesh, places).to_local()


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
    return Layout(x.device_mesh, x.placements, dim, split[0] if split else None, x.dim())


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
        return _per_row(y, where, x.shape[: where.dim] + x.shape[where.dim + 1 :])
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
    multi_hot = target.dtype == torch.bool or target.is_floating_point()
    if isinstance(weight, DTensor):
        weight = weight.redistribute(
            where.mesh, [Shard(0) if i == where.labels else Replicate() for i in range(where.mesh.ndim)]
        ).to_local()
    losses, number = function(
        logits.to_local(),
        where.entries(target) if multi_hot else where.lists(target),
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


def _per_row(t: Tensor, where: Layout, shape: Any) -> DTensor:
    return _wrap(t, where.mesh, where.rows, shape)


def _wrap(t: Tensor, mesh: DeviceMesh, placements: tuple[Any, ...], shape: Any) -> DTensor:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(1, size))
    stride = tuple(strides[: len(shape)])
    return DTensor.from_local(t, mesh, placements, run_check=False, shape=shape, stride=stride)
