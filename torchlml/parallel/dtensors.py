"""DTensors in, DTensors out: each process works on its part, with the others if the labels are split.

A DTensor may be `Shard`ed over its labels on one dimension of its mesh, and sharded over rows or replicated on the
others. Plain tensors beside it are what this process needs: for its rows, and of masks and multi-hots its labels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


class Layout(NamedTuple):
    """Where the parts of a DTensor are: `labels` is the dimension of its mesh that splits the labels, if one does."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    dim: int  # the dimension of the labels
    labels: int | None

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

    def local(self, t: Any, per_row: bool) -> Any:
        """This process's part of something that belongs to x: a number per row, or per entry."""
        if not isinstance(t, DTensor):
            return t
        places = list(self.rows if per_row else self.placements)
        if not per_row:
            # What broadcasts over a dimension is not split there.
            shift = len(self.placements) and t.dim()
            places = [
                Replicate() if isinstance(p, Shard) and t.shape[p.dim - self._rank + shift] == 1 else p
                for p in places
            ]
        if per_row and t.dim() == 0:
            places = [Replicate()] * len(places)
        return t.redistribute(self.mesh, places).to_local()

    @property
    def _rank(self) -> int:
        return self.dim + 1


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
    return Layout(x.device_mesh, x.placements, dim, split[0] if split else None)


def project(function: Callable[..., Tensor], x: DTensor, k: Any, dim: int, mask: Any, **settings: Any) -> DTensor:
    """`lml` or `log_lml` of a DTensor, placed as it is."""
    where = layout(x, dim)
    y = _call(function, where, x, k, dim, mask, settings)
    return DTensor.from_local(
        y, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=_strides(x.shape)
    )


def dual(function: Callable[..., Tensor], x: DTensor, k: Any, dim: int, mask: Any, **settings: Any) -> DTensor:
    """`lml_dual` of a DTensor: as x is placed, but replicated where the labels are split."""
    where = layout(x, dim)
    nu = _call(function, where, x, k, dim, mask, settings)
    return _per_row(nu, where, x.shape[: where.dim] + x.shape[where.dim + 1 :])


def _call(
    function: Callable[..., Tensor], where: Layout, x: DTensor, k: Any, dim: int, mask: Any, settings: dict[str, Any]
) -> Tensor:
    k, mask = where.local(k, per_row=True), where.local(mask, per_row=False)
    return function(x.to_local(), k, dim, mask=mask, group=where.group, **settings)


def _per_row(t: Tensor, where: Layout, shape: Any) -> DTensor:
    return DTensor.from_local(t, where.mesh, where.rows, run_check=False, shape=shape, stride=_strides(shape))


def _strides(shape: Any) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(1, size))
    return tuple(strides[: len(shape)])


def reduce(
    losses: Callable[[Tensor, Any, Any, Any, Any], tuple[Tensor, Tensor]],
    logits: DTensor,
    target: Any,
    k: Any,
    mask: Any,
    reduction: str,
) -> DTensor:
    """The loss of DTensor logits, from a function for this process's rows that also says which have a label."""
    where = layout(logits, -1, "logits")
    multi_hot = target.dim() == logits.dim() and target.dtype != _INT64
    place = where.local(target, per_row=not multi_hot)
    loss, labelled = losses(
        logits.to_local(), place, where.local(k, per_row=True), where.local(mask, per_row=False), where.group
    )
    shape = logits.shape[:-1]
    rows = _per_row(loss.to(logits.dtype) if reduction == "none" else loss, where, shape)
    if reduction == "none":
        return rows
    total = rows.sum()
    if reduction == "mean":
        total = total / _per_row(labelled, where, shape).sum().clamp(min=1)
    replicated = [Replicate()] * where.mesh.ndim
    return total.redistribute(where.mesh, replicated).to(logits.dtype)
