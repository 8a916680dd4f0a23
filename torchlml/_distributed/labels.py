"""The targets of rows whose labels are spread over processes.

Class indices are numbers among the labels of all processes, and the same tensor on each of them; a multi-hot
holds the columns of this process's labels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchlml._arguments import Canonical
from torchlml._distributed.agreement import fingerprint
from torchlml._distributed.loss import OwnLabels
from torchlml._distributed.projection import Split
from torchlml.losses.targets import check_weight, read_labels


def check_target(c: Canonical, target: Tensor, weight: Tensor | None, ignore_index: int) -> dict[str, Any]:
    """Refuse what this process can refuse alone, and say what the others must have the same.

    `c` stands for the logits of this process.
    """
    if weight is not None:
        check_weight(c, weight)
    if any(isinstance(t, Tensor) and t.requires_grad for t in (weight, target)):
        raise ValueError(
            "`weight` and `target` must not require a gradient where the labels are spread over processes."
        )
    if _is_listed(target):
        return {"target": fingerprint(target), "ignore_index": ignore_index}
    # With no rows, so that a multi-hot is not copied: what is wrong with the rest of it, the chunks see.
    read_labels(c, target, None, ignore_index)
    return {"kind of target": str(target.dtype)}


def _is_listed(target: Any) -> bool:
    """Class indices, and not a multi-hot?"""
    return isinstance(target, Tensor) and target.dtype in (torch.int64, torch.uint8)


def target_rows(c: Canonical, target: Tensor, ignore_index: int, split: Split) -> Tensor:
    """(R, L) int64, every label once and negative numbers for none, or the rows of a multi-hot.

    An error is the same on every process.
    """
    if not _is_listed(target):
        return target.reshape(c.x.shape[0], target.shape[-1])
    everything = c._replace(
        x=c.x.detach().new_zeros(()).expand(c.x.shape[0], split.total),
        mask=None,
        outer=torch.Size([*c.row_shape, split.total]),
    )
    labels = read_labels(everything, target, None, ignore_index)
    assert labels.listed is not None
    return labels.listed


def own_labels(target: Tensor, weight: Tensor | None, split: Split, n: int) -> OwnLabels:
    """The labels that lie on this process, from `target_rows`."""
    if target.dtype == torch.int64:
        row, column = ((target >= split.start) & (target < split.start + n)).nonzero().unbind(-1)
        place = target[row, column] - split.start
        counts = torch.ones_like(row, dtype=torch.float64)
    else:
        row, place = target.nonzero().unbind(-1)
        counts = target[row, place].double()
    return OwnLabels(row, place, counts if weight is None else counts * weight.double()[place])
