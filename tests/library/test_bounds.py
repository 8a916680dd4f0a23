"""Bounds on the sum: special rows, rows in which a rounding error could activate the bound, and losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import torchlml

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_special_rows_with_bounds(dtype: torch.dtype) -> None:
    def lml(row: list[float], k: float, bound: str, **options: Any) -> torch.Tensor:
        return torchlml.lml(torch.tensor(row, dtype=dtype), k, bound=bound, **options)

    row = torch.tensor([1.0, -2.0, -INF], dtype=dtype)
    free = row.sigmoid()
    close: dict[str, Any] = {"rtol": 1e-6, "atol": 0, "equal_nan": True}
    for k in (2, 3, 100, 1e9):
        torch.testing.assert_close(lml([1.0, -2.0, -INF], k, "at_most"), free, **close)
        assert float(torchlml.lml_dual(row, k, bound="at_most")) == 0
        torch.testing.assert_close(torchlml.log_lml(row, k, bound="at_most"), free.log(), **close)
    assert lml([1.0, -2.0], 0, "at_most").tolist() == [0, 0]
    assert lml([1.0, INF, INF, INF], 2, "at_most").tolist()[0] == 0
    torch.testing.assert_close(lml([INF, INF, INF], 2, "at_most"), torch.full((3,), 2 / 3, dtype=dtype))
    torch.testing.assert_close(lml([INF, 0.0, 0.0], 3, "at_most"), torch.tensor([1, 0.5, 0.5], dtype=dtype))
    torch.testing.assert_close(lml([1.0, -2.0, -INF], 0, "at_least"), free, **close)
    assert lml([1.0, -2.0, -INF], 3, "at_least").tolist() == [1, 1, 0]
    torch.testing.assert_close(lml([INF, 0.0, 0.0], 1, "at_least"), torch.tensor([1, 0.5, 0.5], dtype=dtype))
    for bound in ("at_most", "at_least"):
        assert bool(lml([1.0, NAN], 1, bound).isnan().all())
        mask = torch.tensor([True, False, True])
        torch.testing.assert_close(
            lml([0.0, NAN, 0.0], 1, bound, mask=mask), torch.tensor([0.5, 0, 0.5], dtype=dtype)
        )


def test_the_sign_of_the_threshold_decides() -> None:
    # For half a million outputs of 1 - 2e-9, a float32 sum loses the digits that show whether it exceeds k.
    x = torch.full((500_001,), 20.0)
    x[0] = 0.0
    missing = 500_000 * math.exp(-20)
    for k, free in ((500_000.5 - 0.9 * missing, True), (500_000.5 - 1.1 * missing, False)):
        assert (float(torchlml.lml_dual(x, k, bound="at_most")) == 0) == free
        assert (float(torchlml.lml_dual(x, k, bound="at_least")) == 0) == (not free)
        # If a row is within its bound, y is the sigmoid of the logits, so its first entry is exactly 0.5.
        assert (float(torchlml.lml(x, k, bound="at_most")[0]) == 0.5) == free
        assert (float(torchlml.lml(x, k, bound="at_least")[0]) == 0.5) == (not free)
        assert (float(torchlml.log_lml(x, k, bound="at_most")[0].exp()) == 0.5) == free


@pytest.mark.parametrize("bound", ["at_most", "at_least"])
def test_losses(bound: str) -> None:
    logits = torch.randn(12, 9, dtype=torch.float64) * 2
    k = 4
    log_y = torchlml.log_lml(logits, k, bound=bound)
    exact = torchlml.log_lml(logits, k)
    assert 0 < int((log_y != exact).any(-1).sum()) < 12  # the bound is active in some rows, but not in all
    target = torch.randint(9, (12,))
    got = torchlml.lml_loss(logits, target, k, bound=bound, reduction="none")
    torch.testing.assert_close(got, -log_y.gather(-1, target[:, None]).squeeze(-1))
    assert torch.equal(torchlml.LMLLoss(k, bound=bound)(logits, target), got.mean())
    hot = torch.rand(12, 9) > 0.6
    got = torchlml.lml_loss(logits, hot, k, bound=bound, reduction="none")
    torch.testing.assert_close(got, -torch.where(hot, log_y, 0).sum(-1))
    mask = (torch.rand(12, 9) > 0.2) | hot
    got = torchlml.lml_loss(logits, hot, k, bound=bound, reduction="sum", mask=mask)
    masked = torchlml.log_lml(logits, k, bound=bound, mask=mask)
    torch.testing.assert_close(got, -torch.where(hot, masked, 0).sum())
    offsets = torch.tensor([0, 40, 108])
    got = torchlml.lml_loss(
        logits.flatten(), hot.flatten(), 12, bound=bound, reduction="none", offsets=offsets
    )
    packed = torchlml.log_lml(logits.flatten(), 12, bound=bound, offsets=offsets)
    parts = torch.where(hot.flatten(), packed, 0).split([40, 68])
    torch.testing.assert_close(got, torch.stack([-part.sum() for part in parts]))
    assert torchlml.lml_loss(logits, target, 100, bound="at_most") >= 0
    layer = torchlml.LML(k=4, bound=bound)
    assert torch.equal(layer(logits), torchlml.lml(logits, 4, bound=bound))
    assert bound in repr(layer)
    assert bound in repr(torchlml.LMLLoss(4, bound=bound))
