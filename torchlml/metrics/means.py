"""Means and quotients that are kept in whole numbers, and reported for one k or several.

A metric moves with the model it stands in: `model.to(torch.bfloat16)`, which is Lightning's "bf16-true",
converts every floating state, and a sum in bfloat16 stops growing at 256. Integers are left alone. They also
add up to the same in any order, over any batches and processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from torchlml._arguments import check_whole_k
from torchlml._rows import wide_dtype

# What a part of a row or an image counts in: fine enough for seven digits, and 2^33 rows fit into an int64.
_UNIT = 2**30


class CountingMetric(Metric):
    """A metric for one k or several, whose states are whole numbers, whatever dtype is asked for."""

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    def __init__(self, k: int | Sequence[int], **settings: object) -> None:
        super().__init__(**settings)
        self.k = k
        self._ks = tuple(k) if isinstance(k, Sequence) else (k,)
        if not self._ks:
            raise ValueError("`k` must be a positive integer or several of them, but it is empty.")
        self._ks = tuple(check_whole_k(each) for each in self._ks)

    def by_k(self, values: Tensor, name: str) -> Tensor | dict[str, Tensor]:
        """A value for each k, as float32: a scalar if k is one number, else a dict with the keys `name@k`."""
        values = values.float()
        if not isinstance(self.k, Sequence):
            return values[0]
        return {f"{name}@{each}": value for each, value in zip(self.k, values, strict=True)}

    def set_dtype(self, dst_type: str | torch.dtype) -> CountingMetric:
        """Nothing: torchmetrics' own would convert the counts, and with them what they can hold."""
        return self


def of_batch(metric: CountingMetric, *batch: Any) -> Any:
    """What a metric computes from one batch."""
    metric.update(*batch)
    return metric.compute()


def in_units(parts: Tensor) -> Tensor:
    """Numbers from 0 to 1 as int64."""
    return (parts * _UNIT).round().long()


def average(total: Tensor, count: Tensor) -> Tensor:
    """The mean of numbers whose units sum to `total`, NaN where there are none, in double precision."""
    return total.to(wide_dtype(total.device)) / _UNIT / count


def add_up(numbers: Tensor) -> Tensor:
    """The sums over rows of (R, K) numbers from 0 on, in whole numbers: (K, 2), the wholes and the units."""
    wholes = numbers.floor()
    return torch.stack([wholes.long().sum(0), in_units(numbers - wholes).sum(0)], dim=-1)


def ratio(found: Tensor, possible: Tensor) -> Tensor:
    """The quotients of sums from `add_up`, NaN for 0 / 0, in double precision."""
    return _number(found) / _number(possible)


def _number(total: Tensor) -> Tensor:
    wholes, units = total.to(wide_dtype(total.device)).unbind(-1)
    return wholes + units / _UNIT
