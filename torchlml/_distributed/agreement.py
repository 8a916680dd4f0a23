"""What all processes of a call must have the same, told to each other before anything is computed."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchlml._arguments import autocasts
from torchlml._distributed.group import LabelGroup, agree
from torchlml._distributed.projection import Split, refuse_transforms

_Read = TypeVar("_Read")


def split_labels(
    group: LabelGroup,
    x: Any,
    k: float | Tensor,
    bound: str,
    read: Callable[[], tuple[_Read, dict[str, Any]]],
) -> tuple[_Read, Split]:
    """This process's arguments, and how the labels are split: one round, or an error on every process.

    Args:
        group: who takes part.
        x: a tensor on the device that messages go through.
        k, bound: as the caller got them.
        read: gives this process's arguments, and beside what must be the same (`same`) how many labels it has
            (`labels`) and whether some of them are masked (`masked`).
    """
    # A tensor without data cannot carry a message, and the others would wait for it.
    carries = isinstance(x, Tensor) and x.device.type != "meta"
    device = x.device if carries else torch.device("cpu")

    def read_plain() -> tuple[_Read, dict[str, Any]]:
        refuse_transforms()
        return read()

    arguments, everyone = agree(group, device, read_plain)
    labels = [int(told["labels"]) for told in everyone]
    total = sum(labels)
    largest = k.detach().amax().item() if isinstance(k, Tensor) and k.numel() else k
    limited = bound != "at_most" and not any(told["masked"] for told in everyone) and total > 0
    if limited and not isinstance(largest, Tensor) and largest > total:
        raise ValueError(
            f"`k` must be from 0 to n = {total}, the labels of all processes, but k is {largest:g}."
        )
    return arguments, Split(group, labels, bound)


def same_everywhere(
    function: str, rows: torch.Size, x: Tensor, k: float | Tensor, bound: str
) -> dict[str, Any]:
    """What must be the same on every process, in words that a message can show."""
    return {
        "function": function,
        "dtype": str(x.dtype),
        "device": x.device.type,
        "rows": list(rows),
        "k": fingerprint(k),
        "gradient of k": isinstance(k, Tensor) and k.requires_grad,
        "bound": bound,
        "autocast": str(torch.get_autocast_dtype(x.device.type)) if autocasts(x.device.type) else "off",
    }


def fingerprint(value: float | Tensor) -> str:
    """A number itself; a tensor's dtype, shape and checksum."""
    if not isinstance(value, Tensor):
        return f"{float(value):.17g}"
    value = value.detach().cpu().contiguous()
    if value.dim() == 0:
        return f"{value.item():.17g}"
    check = zlib.crc32(bytes(value.flatten().view(torch.uint8).tolist()))
    return f"a {value.dtype} tensor of shape {tuple(value.shape)} with the checksum {check:08x}"
