"""Process groups that the labels are sharded across: collectives, and checks that arguments match.

All decisions depend only on gathered numbers, which are added in rank order. All processes therefore compute
bitwise identical results and take the same branches.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchlml._arguments import is_plain

Group = dist.ProcessGroup | DeviceMesh
# The first message has a fixed size, because a collective with mismatched sizes may hang.
_BYTES = 2048
# torch 2.13 renamed all_gather_into_tensor to all_gather_single.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class LabelGroup(NamedTuple):
    """The processes that the labels are sharded across: each has consecutive labels, in rank order."""

    handle: dist.ProcessGroup
    rank: int
    size: int

    def gather(self, part: Tensor) -> Tensor:
        """Gather the parts of all P processes into a tensor (P, ...), in one round of communication."""
        part = part.contiguous()
        parts = part.new_empty((self.size, *part.shape))
        _all_gather(parts.flatten(0, 1) if part.dim() else parts, part, group=self.handle)
        return parts

    def sum(self, part: Tensor) -> Tensor:
        """Sum over all processes in one round; the result is bitwise identical on every process."""
        return add_up(self.gather(part))

    def all_reduce(self, part: Tensor) -> Tensor:
        """Sum in place, for tensors that are too large to gather, such as the gradient of a shared input."""
        dist.all_reduce(part, group=self.handle)
        return part


class LabelSplit(NamedTuple):
    """How the labels are divided among the processes of a group, and how k constrains the sum of y."""

    group: LabelGroup
    labels: list[int]  # the number of labels on each process
    total: int  # the number of labels on all processes together
    bound: str

    @property
    def start(self) -> int:
        """The index of the first label of this process."""
        return sum(self.labels[: self.group.rank])


def add_up(parts: Tensor) -> Tensor:
    """Sum over the first dimension, adding in order."""
    return functools.reduce(torch.add, parts.unbind(0))


def label_group(group: Any) -> LabelGroup:
    """Check the argument `group`, and return it with the rank of this process and the number of processes."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "`group` requires torch.distributed to be initialized. "
            "Call torch.distributed.init_process_group first."
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                "`group` must be a ProcessGroup or a one-dimensional DeviceMesh, but it is a mesh with "
                f'{group.ndim} dimensions. Select one of them, as in `mesh["labels"]`.'
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


@dataclass
class Agreement:
    """The messages that processes exchange to check that their arguments match.

    `own` is the message of this process, and `everyone` contains all messages in rank order.
    """

    group: LabelGroup
    own: dict[str, Any] = field(default_factory=dict)
    everyone: list[dict[str, Any]] = field(default_factory=list)

    def tell(
        self,
        function: str,
        x: Tensor,
        k: float | Tensor,
        bound: str,
        *,
        rows: Sequence[int],
        labels: int,
        masked: bool = False,
        same: dict[str, Any] | None = None,
    ) -> None:
        """Set the message of this process: its number of labels, and the arguments that must match.

        Args:
            function: the name of the called function.
            x, k, bound: the arguments of that function. x may already be converted by `canonical`.
            rows: the shape of a tensor with one number per row.
            labels: the number of labels of this process.
            masked: whether k may exceed the number of labels, as it may with a mask.
            same: other values that must match, keyed by their names in error messages.
        """
        if not is_plain():  # such a call would silently return wrong results
            raise NotImplementedError(
                "With `group`, only plain calls and their first derivatives are supported, but a torch.func "
                "transform or forward-mode differentiation is active."
            )
        common = {
            "function": function,
            "dtype": str(x.dtype),
            "device": x.device.type,
            "row shape": list(rows),
            "k": fingerprint(k) if isinstance(k, Tensor) else f"{float(k):.17g}",
            "gradient requirement for k": isinstance(k, Tensor) and k.requires_grad,
            "bound": bound,
        }
        self.own = {"same": common | (same or {}), "labels": labels, "masked": masked}

    def split(self, k: float | Tensor, bound: str) -> LabelSplit:
        """Return how the labels are split, after checking that k does not exceed their number."""
        labels = [other["labels"] for other in self.everyone]
        total, masked = sum(labels), any(other["masked"] for other in self.everyone)
        if bound != "at_most" and total > 0 and not masked:
            largest = k.detach().amax().item() if isinstance(k, Tensor) and k.numel() else k
            if not isinstance(largest, Tensor) and largest > total:
                raise ValueError(
                    f"`k` must be from 0 to n = {total}, the number of labels on all processes, "
                    f"but k is {largest:g}."
                )
        return LabelSplit(self.group, labels, total, bound)


@contextmanager
def agreement(group: LabelGroup, x: Any) -> Iterator[Agreement]:
    """Check in one round that all ranks pass matching arguments, before any computation.

        with agreement(group, x) as agreed:
            c = canonical(x, k, -1, ...)
            agreed.tell("lml", c.x, k, bound, rows=x.shape[:-1], labels=x.shape[-1])
        nu = solve(..., agreed.split(k, bound))

    Args:
        group: the processes.
        x: a tensor on the device from which messages are sent.

    If the `with` block raises an error on one process or the arguments differ, every process raises an error.
    """
    agreed = Agreement(group)
    # Tensors on the meta device have no values, so a message sent from it would never arrive. Use the CPU.
    carries = isinstance(x, Tensor) and x.device.type != "meta"
    device = x.device if carries else torch.device("cpu")
    failure: Exception | None = None
    try:
        yield agreed
    except Exception as error:
        # Send the error, because the other processes wait for a message. A character takes up to six bytes,
        # so 300 characters fit.
        failure, agreed.own = error, {"error": str(error)[:300]}
    # This takes one collective, whereas all_gather_object takes two.
    text = json.dumps(agreed.own, ensure_ascii=False).encode()
    assert len(text) <= _BYTES
    message = torch.zeros(_BYTES, dtype=torch.uint8)
    message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    messages = group.gather(message.to(device)).cpu()
    if failure is not None:
        raise failure
    agreed.everyone = [json.loads(bytes(part.tolist()).rstrip(b"\0")) for part in messages]
    for rank, other in enumerate(agreed.everyone):
        if "error" in other:
            raise ValueError(f"Process {rank} of the group has an invalid argument: {other['error']}")
    first = agreed.everyone[0]["same"]
    for name in first:
        for rank, other in enumerate(agreed.everyone):
            found = other["same"].get(name)
            if found != first[name]:
                raise ValueError(
                    f"The processes of the group must have the same {name}, but process 0 has "
                    f"{first[name]} and process {rank} has {found}."
                )


def fingerprint(value: Tensor) -> str:
    """Describe a tensor for comparison: by its value if it is 0-d, else by its dtype, shape and checksum."""
    value = value.detach().cpu().contiguous()
    if value.dim() == 0:
        return f"{value.item():.17g}"
    check = zlib.crc32(bytes(value.flatten().view(torch.uint8).tolist()))
    return f"a {value.dtype} tensor of shape {tuple(value.shape)} with the checksum {check:08x}"
