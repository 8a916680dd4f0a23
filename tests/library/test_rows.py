"""Row reductions of dense and jagged batches, differentiable or not, match loops over rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchlml._rows import rows_of

LENGTHS = [3, 1, 0, 5]
OFFSETS = torch.tensor([0, 3, 4, 4, 9])


def _packed() -> tuple[Tensor, Tensor, list[Tensor]]:
    x = torch.randn(9, generator=torch.Generator().manual_seed(0))
    return x, OFFSETS, list(x.split(LENGTHS))


def _dense() -> tuple[Tensor, None, list[Tensor]]:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    return x, None, list(x)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("make", [_packed, _dense])
def test_reductions_and_broadcast_match_a_loop_over_rows(make, differentiable: bool) -> None:
    x, offsets, each = make()
    rows = rows_of(x, offsets, differentiable=differentiable)
    assert rows.count == len(each)
    total = rows.sum(x)
    assert total.dtype == (torch.float32 if differentiable else torch.float64)
    torch.testing.assert_close(total.float(), torch.stack([row.sum() for row in each]))
    counts = [int((row > 0).sum()) for row in each]
    assert rows.sum(x > 0).tolist() == counts
    highest = [float(row.max()) if len(row) else -torch.inf for row in each]
    assert rows.max(x).tolist() == highest
    per_row = torch.arange(4.0)
    beside = torch.cat([torch.full_like(row, i) for i, row in enumerate(each)])
    assert torch.equal(rows.broadcast(per_row).expand(x.shape).reshape(-1), beside)
    for rank in (1, 2, 4, 9):
        expected = [
            float(row.sort(descending=True).values[min(rank, len(row)) - 1]) if len(row) else -torch.inf
            for row in each
        ]
        assert rows.largest(x, rank).tolist() == expected
        assert rows.largest(x, torch.tensor(rank)).tolist() == expected
        assert rows.largest(x, torch.full((4,), rank)).tolist() == expected
        values, doubled = rows.top(x, rank, 2 * x)
        for i, row in enumerate(each):
            some = row.sort(descending=True).values[:rank].tolist()
            missing = rank - len(some)
            assert values[i].tolist() == some + [-torch.inf] * missing
            assert doubled[i].tolist() == [2 * value for value in some] + [0.0] * missing
    assert rows.longest == max(map(len, each))


@pytest.mark.parametrize("make", [_packed, _dense])
def test_differentiable_sums_and_maxima_can_be_mapped_and_differentiated_twice(make) -> None:
    x, offsets, _ = make()

    def energy(x: Tensor) -> Tensor:
        rows = rows_of(x, offsets, differentiable=True)
        return (rows.sum(x**2) ** 2 + torch.where(rows.max(x.detach()).isinf(), 0, 1)).sum()

    several = torch.stack([x, 2 * x, -x]).double()
    expected = torch.stack([energy(each) for each in several])
    torch.testing.assert_close(torch.vmap(energy)(several), expected)
    assert torch.autograd.gradgradcheck(energy, (x.double().requires_grad_(),))


def test_rows_without_entries_have_sum_zero_and_maximum_minus_infinity() -> None:
    for x, offsets in ((torch.zeros(2, 0), None), (torch.zeros(0), torch.tensor([0, 0, 0]))):
        rows = rows_of(x, offsets)
        assert rows.sum(x).tolist() == [0, 0]
        assert rows.max(x).tolist() == rows.largest(x, 1).tolist() == [-torch.inf, -torch.inf]


def test_a_row_has_the_same_sum_alone_and_in_a_batch() -> None:
    x = torch.randn(1, 100_003, generator=torch.Generator().manual_seed(2))
    for differentiable in (False, True):
        alone = rows_of(x, None, differentiable=differentiable).sum(x)
        batch = x.repeat(3, 1)
        assert torch.equal(alone, rows_of(batch, None, differentiable=differentiable).sum(batch)[:1])
