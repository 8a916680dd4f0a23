"""What all metrics of the k highest scores of a row share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchlml._core.arguments import Canonical
from torchlml.metrics.means import CountingMetric, add_up, by_k, ratio, read_ks
from torchlml.metrics.ranked import Ranked


class TopKMetric(CountingMetric):
    """A sum over rows divided by another, for each k; a subclass says of what.

    Args:
        k: one number, and `compute` returns a scalar; or several, and it returns a dict.
        ignore_index: the class index that means "no label".
        group: the processes among which the scores of each row are split, as in `torchlml.lml_loss`.
        **settings: for `torchmetrics.Metric`.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    name: ClassVar[str]
    found: Tensor
    possible: Tensor

    def __init__(
        self,
        k: int | Sequence[int] = (1, 5),
        ignore_index: int = -100,
        group: Any = None,
        **settings: object,
    ) -> None:
        super().__init__(**settings)
        self.group = group
        self._ks = read_ks(k)
        self.k = k
        self.ignore_index = ignore_index
        for state in ("found", "possible"):
            self.add_state(state, torch.zeros(len(self._ks), 2, dtype=torch.int64), dist_reduce_fx="sum")

    def measure(self, batch: Ranked) -> tuple[Tensor, Tensor]:
        """What was found in each row and what was possible, for every k: two of shape (R, len(ks))."""
        raise NotImplementedError

    def update(
        self, preds: Tensor, target: Tensor, mask: Tensor | None = None, offsets: Tensor | None = None
    ) -> None:
        """Count a batch of scores (..., n); the other arguments are those of `torchlml.lml_loss`."""
        self._count(*self.measure(self._rank(preds, target, mask, offsets)))

    def _rank(
        self,
        preds: Tensor,
        target: Tensor,
        mask: Tensor | None,
        offsets: Tensor | None,
        check: Callable[[Canonical], None] | None = None,
    ) -> Ranked:
        name = type(self).__name__
        return Ranked(name, preds, target, self._ks, self.ignore_index, mask, offsets, self.group, check)

    def _count(self, found: Tensor, possible: Tensor) -> None:
        self.found = self.found + add_up(found)
        self.possible = self.possible + add_up(possible)

    def compute(self) -> Any:
        """The result for each k, NaN before the first row that counts."""
        return by_k(ratio(self.found, self.possible), self.k, self.name)
