"""Rows whose entries are spread over processes, for what ranks them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchlml._core.arguments import Canonical, canonical
from torchlml._core.rows import DenseRows
from torchlml.parallel import labels
from torchlml.parallel.agreement import same_everywhere, split_labels
from torchlml.parallel.group import Group, LabelGroup, label_group


class SpreadRows(DenseRows):
    """The rows of which this process has some columns; `sum` and `largest` are over all, a round each."""

    def __init__(self, x: Tensor, group: LabelGroup) -> None:
        super().__init__(x, differentiable=True)
        self._group = group

    def sum(self, t: Tensor) -> Tensor:
        """The sum over each row; of a bool, how many are True."""
        return self._group.sum(t.sum(-1))

    def largest(self, x: Tensor, rank: int | Tensor) -> Tensor:
        """The `rank`-th largest entry of each row, past its end the smallest, and -inf for an empty row."""
        rank = int(rank)
        own = x.new_full((self.count, rank), -torch.inf)
        top = min(rank, self.length)
        own[:, :top] = x.topk(top, dim=-1).values
        everything = self._group.gather(own).movedim(0, 1).flatten(1)
        return everything.topk(rank, dim=-1).values[:, -1]


def spread_ranking(
    preds: Tensor, target: Tensor, ignore_index: int, mask: Tensor | None, group: Group
) -> tuple[Canonical, SpreadRows, Tensor]:
    """The scores of this process, the rows they are in, and where the observed labels are among them."""
    members = label_group(group)

    def read() -> tuple[Canonical, dict[str, Any]]:
        c = canonical(preds, 1, -1, mask, None, any_k=True, name="preds")
        same = same_everywhere("topk_recall", c.row_shape, preds, 1, "exactly")
        same |= labels.check_target(c._replace(mask=None), target, None, ignore_index)
        return c, {"labels": c.x.shape[-1], "masked": True, "same": same}

    c, split = split_labels(members, preds, 1, "exactly", read)
    rows = labels.listed(c, target, ignore_index, split) if labels.is_listed(target) else target
    own = labels.own_labels(rows.reshape(c.x.shape[0], rows.shape[-1]), None, split, c.x.shape[-1])
    observed = torch.zeros_like(c.x, dtype=torch.bool)
    observed[own.row, own.place] = True
    return c, SpreadRows(c.x, members), observed
