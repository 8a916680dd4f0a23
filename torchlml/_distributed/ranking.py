"""Rows whose entries are spread over processes, for what ranks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchlml._arguments import Canonical, canonical
from torchlml._distributed import labels
from torchlml._distributed.agreement import same_everywhere, split_labels
from torchlml._distributed.group import Group, LabelGroup, label_group
from torchlml._rows import DenseRows


class SpreadRows(DenseRows):
    """The rows of which this process has some columns; `sum` and `top` are over all, in a round or two."""

    def __init__(self, x: Tensor, group: LabelGroup, total: int) -> None:
        super().__init__(x, differentiable=True)
        self.longest = total
        self._group = group

    def sum(self, t: Tensor) -> Tensor:
        """The sum over each row; of a bool, how many are True."""
        return self._group.sum(t.sum(-1))

    def top(self, x: Tensor, count: int, beside: Tensor) -> tuple[Tensor, Tensor]:
        """The `count` largest entries of each row in falling order, and the entries of `beside` there."""
        values, found = super().top(x, count, beside.to(self.wide))
        values, place = self._everyones(values).topk(count)
        return values, self._everyones(found).gather(-1, place)

    def _everyones(self, own: Tensor) -> Tensor:
        """The columns of all processes, one after the other."""
        return self._group.gather(own.contiguous()).movedim(0, 1).flatten(1)


def spread_ranking(
    function: str,
    preds: Tensor,
    target: Tensor,
    ks: Sequence[int],
    ignore_index: int,
    mask: Tensor | None,
    offsets: Tensor | None,
    group: Group,
    check: Callable[[Canonical], None] | None,
) -> tuple[Canonical, SpreadRows, Tensor]:
    """The scores of this process, the rows they are in, and where the observed labels are among them.

    `check` refuses what is wrong with the function's other arguments, on every process if it does on one.
    """
    members = label_group(group)

    def read() -> tuple[Canonical, dict[str, Any]]:
        if offsets is not None:
            raise ValueError("`offsets` is not accepted with a `group`: give dense rows.")
        c = canonical(preds, 1, -1, mask, None, any_k=True, name="preds")
        if check is not None:
            check(c)
        same = same_everywhere(function, c.row_shape, preds, torch.tensor(ks), "exactly")
        same |= labels.check_target(c._replace(mask=None), target, None, ignore_index)
        return c, {"labels": c.x.shape[-1], "masked": True, "same": same}

    c, split = split_labels(members, preds, 1, "exactly", read)
    rows = labels.target_rows(c, target, ignore_index, split)
    own = labels.own_labels(rows, None, split, c.x.shape[-1])
    observed = torch.zeros_like(c.x, dtype=torch.bool)
    observed[own.row, own.place] = True
    return c, SpreadRows(c.x, members, split.total), observed
