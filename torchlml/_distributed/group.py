"""A group of processes that hold the labels of the same rows, and the two ways in which they talk.

Every decision is taken from gathered numbers, which are added in the order of the ranks: so all processes
have the same bits and take the same way.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh
_Read = TypeVar("_Read")
# The first message has one size whatever the arguments are: a message of another size than expected may hang.
_BYTES = 2048
# The name since torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class LabelGroup(NamedTuple):
    """The processes among which the labels are split: consecutive ones each, in the order of the ranks."""

    handle: dist.ProcessGroup
    rank: int
    size: int

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all processes, (P, ...): one round."""
        part = part.contiguous()
        parts = part.new_empty((self.size, *part.shape))
        _all_gather(parts.flatten(0, 1) if part.dim() else parts, part, group=self.handle)
        return parts

    def sum(self, part: Tensor) -> Tensor:
        """The sum over all processes, the same bits on each: one round."""
        return add_up(self.gather(part))

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum in place, for what is too large to be gathered: the gradient of a common input."""
        dist.all_reduce(part, group=self.handle)
        return part


def add_up(parts: Tensor) -> Tensor:
    """The sum over the first dimension, one after the other."""
    return functools.reduce(torch.add, parts.unbind(0))


def label_group(group: Any) -> LabelGroup:
    """Read the argument `group`."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "`group` needs torch.distributed to be initialised: "
            "call torch.distributed.init_process_group first."
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                "`group` must be a DeviceMesh of one dimension, that of the labels, but it has "
                f"{group.ndim}: "
                'give one of them, as in `mesh["labels"]`.'
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"`group` must be a ProcessGroup or a DeviceMesh, but it is a {type(group).__name__}."
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("`group` must contain this process, but it does not.")
    return LabelGroup(group, rank, dist.get_world_size(group))


def agree(
    group: LabelGroup, device: torch.device, read: Callable[[], tuple[_Read, dict[str, Any]]]
) -> tuple[_Read, list[dict[str, Any]]]:
    """Check the arguments on every process before anything is computed: one round.

    Args:
        group: who takes part.
        device: where messages live.
        read: reads this process's arguments. It returns them and what it tells the others; what stands under
            `same` must be the same everywhere.

    Returns:
        What `read` returned, and what every process told.

    An argument that one process refuses is an error on all of them, and so is one in which they differ.
    """
    problem: Exception | None = None
    arguments, told = None, dict[str, Any]()
    try:
        arguments, told = read()
    except Exception as error:  # whatever it is, the others must not wait for a message that never comes
        # A character takes up to six bytes in the message.
        problem, told = error, {"error": str(error)[:300]}
    everyone = _exchange(group, device, told)
    if problem is not None:
        raise problem
    for rank, other in enumerate(everyone):
        if "error" in other:
            raise ValueError(f"Process {rank} of the group has an argument that is refused: {other['error']}")
    first = everyone[0]["same"]
    for name in first:
        for rank, other in enumerate(everyone):
            found = other["same"].get(name)
            if found != first[name]:
                raise ValueError(
                    f"The processes of the group must have the same {name}, but process 0 has "
                    f"{first[name]} and process {rank} has {found}."
                )
    assert arguments is not None
    return arguments, everyone


def _exchange(group: LabelGroup, device: torch.device, told: dict[str, Any]) -> list[dict[str, Any]]:
    # Unlike all_gather_object, one collective and not two.
    text = json.dumps(told, ensure_ascii=False).encode()
    assert len(text) <= _BYTES
    message = torch.zeros(_BYTES, dtype=torch.uint8)
    message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    parts = group.gather(message.to(device)).cpu()
    return [json.loads(bytes(part.tolist()).rstrip(b"\0")) for part in parts]
