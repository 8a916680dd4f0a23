"""Rows whose solution is a limit, such as rows with k = 0 or infinite logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Special:
    """A row, its solution y (a limit, derived by hand) and its dual variable nu."""

    name: str
    x: list[float]
    k: float
    y: list[float]
    nu: float
    mask: list[bool] | None = None
    short: bool = False  # empty or shorter than k, which is possible only in a ragged batch


# In the names, m is the number of available entries, and p is the number of entries at +inf.
SPECIAL = [
    Special("k = 0", [1.0, -2.0, 0.5], 0, [0, 0, 0], -INF),
    Special("k = 0 with +inf", [1.0, INF, 0.5], 0, [0, 0, 0], -INF),
    Special("k = n", [1.0, -2.0, 0.5], 3, [1, 1, 1], INF),
    Special("k = n with +inf", [1.0, INF, 0.5], 3, [1, 1, 1], INF),
    Special("one entry, k = 1", [-7.0], 1, [1], INF),
    Special("one entry, k = 0", [-7.0], 0, [0], -INF),
    Special("-inf leaves m = k", [1.0, -INF, 0.5], 2, [1, 0, 1], INF),
    Special("-inf leaves m < k", [1.0, -INF, -INF], 2, [1, 0, 0], INF),
    Special("-inf leaves m < fractional k", [1.0, -INF, -INF], 1.5, [1, 0, 0], INF),
    Special("only -inf", [-INF, -INF], 1, [0, 0], INF),
    Special("only -inf, k = 0", [-INF, -INF], 0, [0, 0], -INF),
    Special("-inf and a tie", [2.0, 2.0, -INF, 2.0, 2.0], 1, [0.25, 0.25, 0, 0.25, 0.25], -2 - math.log(3)),
    Special("mask leaves m = k", [1.0, 3.0, 0.5], 2, [1, 0, 1], INF, [True, False, True]),
    Special("mask leaves m < k", [1.0, 3.0, 0.5], 2, [0, 0, 1], INF, [False, False, True]),
    Special("everything masked", [1.0, 3.0, 0.5], 2, [0, 0, 0], INF, [False] * 3),
    Special("everything masked, k = 0", [1.0, 3.0, 0.5], 0, [0, 0, 0], -INF, [False] * 3),
    Special("mask and -inf together", [1.0, -INF, 0.5, 4.0], 2, [1, 0, 1, 0], INF, [True, True, True, False]),
    Special("mask hides +inf", [0.0, INF, 0.0], 1, [0.5, 0, 0.5], 0, [True, False, True]),
    Special("mask hides NaN", [0.0, NAN, 0.0], 1, [0.5, 0, 0.5], 0, [True, False, True]),
    Special("mask hides NaN, k = m", [0.0, NAN, 0.0], 2, [1, 0, 1], INF, [True, False, True]),
    Special("p = 1 < k", [0.0, INF, 0.0], 2, [0.5, 1, 0.5], 0),
    Special(
        "p = 1 < fractional k", [INF, 1.0, 1.0, 1.0, 1.0], 1.8, [1, 0.2, 0.2, 0.2, 0.2], -1 - math.log(4)
    ),
    Special("p = k", [0.0, INF, 3.0, INF], 2, [0, 1, 0, 1], -INF),
    Special("p > k", [0.0, INF, 3.0, INF, INF], 2, [0, 2 / 3, 0, 2 / 3, 2 / 3], -INF),
    Special("p > fractional k", [0.0, INF, INF], 0.5, [0, 0.25, 0.25], -INF),
    Special("only +inf", [INF, INF, INF, INF], 1, [0.25] * 4, -INF),
    Special("+inf and -inf, p < k", [INF, -INF, 2.0, 2.0], 2, [1, 0, 0.5, 0.5], -2),
    Special("+inf and -inf, p > k", [INF, -INF, 2.0, INF], 1, [0.5, 0, 0, 0.5], -INF),
    Special("+inf and -inf, m = k", [INF, -INF, 2.0], 2, [1, 0, 1], INF),
    Special("NaN", [0.0, NAN, 1.0], 1, [NAN] * 3, NAN),
    Special("NaN, k = 0", [0.0, NAN, 1.0], 0, [NAN] * 3, NAN),
    Special("NaN, k = n", [0.0, NAN, 1.0], 3, [NAN] * 3, NAN),
    Special("NaN next to +inf", [INF, NAN, 1.0], 1, [NAN] * 3, NAN),
    Special("NaN next to a masked entry", [0.0, NAN, 1.0], 1, [NAN] * 3, NAN, [True, True, False]),
    Special("ragged row as long as k", [1.0, 5.0], 2, [1, 1], INF),
    Special("ragged row shorter than k", [1.0, 5.0], 3, [1, 1], INF, short=True),
    Special("ragged row shorter than k, with NaN", [1.0, NAN], 3, [NAN, NAN], NAN, short=True),
    Special("empty ragged row", [], 3, [], INF, short=True),
    Special("empty ragged row, k = 0", [], 0, [], -INF, short=True),
    Special("an ordinary neighbor", [0.3, -1.0, 2.0, 0.0], 1.5, [], NAN),
]
ORDINARY = SPECIAL.pop()
DENSE = [row for row in SPECIAL if not row.short]


def gradient_of_k(row: Special, g: list[float]) -> float:
    """Return d sum(g * y) / dk, which is nonzero only if p > k entries are at +inf, each with dy/dk = 1/p."""
    above = [gi for xi, gi in zip(row.x, g, strict=True) if xi == INF]
    return sum(above) / len(above) if row.nu == -INF and len(above) > row.k > 0 else 0.0
