"""A batch of rows in the order of their scores: what stands at each place, from the highest score down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchlml._arguments import Canonical, canonical
from torchlml._distributed import is_spread
from torchlml._rows import Rows, rows_of
from torchlml.losses.targets import read_labels


class Ranked:
    """Scores and the observed labels among them.

        >>> batch = Ranked("example", torch.tensor([[0.5, 0.9, 0.5]]), torch.tensor([0]), (1, 3))
        >>> batch.sums(batch.labels)
        tensor([[0., 1.]], dtype=torch.float64)
        >>> batch.at_places(batch.labels)
        tensor([[0.0000, 0.5000, 0.5000]], dtype=torch.float64)

    Args:
        function: the name of the metric, for processes that must all call the same one.
        preds, target, ignore_index, mask, offsets, group: as `torchlml.metrics.topk_recall` takes them.
        ks: how many of the highest scores will be looked at.
        check: refuses other arguments of the metric that do not fit to the scores.
    """

    rows: Rows

    def __init__(
        self,
        function: str,
        preds: Tensor,
        target: Tensor,
        ks: Sequence[int],
        ignore_index: int = -100,
        mask: Tensor | None = None,
        offsets: Tensor | None = None,
        group: Any = None,
        check: Callable[[Canonical], None] | None = None,
    ) -> None:
        if is_spread(preds, None):
            from torchlml._distributed import dtensors

            preds, target, mask, group = dtensors.scores(preds, target, mask, group)  # type: ignore[arg-type]
        if group is None:
            c = canonical(preds, 1, -1, mask, offsets, any_k=True, name="preds", nested=True)
            if check is not None:
                check(c)
            self.labels = read_labels(c._replace(mask=None), target, None, ignore_index).multi_hot(c.x)
            self.rows = rows_of(c.x, c.offsets, differentiable=True)
        else:
            from torchlml._distributed.ranking import spread_ranking

            c, self.rows, self.labels = spread_ranking(
                function, preds, target, ks, ignore_index, mask, offsets, group, check
            )
        self.ks = torch.tensor(ks, device=c.x.device)
        self.count = self.rows.sum(self.labels)
        # No row has more places than entries, however large k is.
        self.places = min(max(ks), self.rows.longest)
        self._available = torch.ones_like(c.x, dtype=torch.bool) if c.mask is None else c.mask
        self._x = c.x.detach().masked_fill(~self._available | c.x.isnan(), -torch.inf)

    def at_places(self, worth: Tensor) -> Tensor:
        """What the entry at each place is worth, the mean of all ways to break ties: (R, places).

        `worth` has the shape of the scores; the labels themselves count 1 each.
        """
        rows = self.rows
        if self.places == 0:
            return worth.new_zeros((rows.count, 0), dtype=rows.wide)
        scores, found = rows.top(self._x, self.places, worth)
        last = scores[:, -1]
        # A tie above the last score lies in these places as a whole; the one for the last places may go on
        # behind them, and where it is at -inf what is masked stands among it.
        level = self._available & (self._x == rows.spread(last))
        number, total = rows.sum(level), rows.sum(worth * level)
        above = (scores > last[:, None]).sum(-1, keepdim=True)
        place = torch.arange(self.places, device=scores.device) - above
        mean = total.to(rows.wide) / number.clamp(min=1)
        at_last = torch.where(place < number[:, None], mean[:, None], 0)
        return torch.where(place < 0, _mean_of_ties(scores, found.to(rows.wide)), at_last)

    def sums(self, worth: Tensor) -> Tensor:
        """What the k highest entries of each row are worth together, for every k: (R, len(ks))."""
        return self.first(self.at_places(worth))

    def best(self, worth: Tensor) -> Tensor:
        """The most that k entries of each row are worth together, for every k: (R, len(ks))."""
        return self.first(self.rows.top(worth, self.places, worth)[1])

    def first(self, places: Tensor) -> Tensor:
        """The sum of the first k places, for every k."""
        return pad(places.cumsum(-1), (1, 0))[..., self.ks.clamp(max=self.places)]


def _mean_of_ties(scores: Tensor, found: Tensor) -> Tensor:
    """Every number of a row, replaced by the mean of those whose scores, which fall, are the same."""
    lower = pad(scores[:, 1:] != scores[:, :-1], (1, 0))
    tie = lower.cumsum(-1)
    total = torch.zeros_like(found).scatter_add(-1, tie, found)
    number = torch.zeros_like(found).scatter_add(-1, tie, torch.ones_like(found))
    return (total / number.clamp(min=1)).gather(-1, tie)
