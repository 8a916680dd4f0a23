"""Several short rows share a SIMD vector. Each row's result is accurate and independent of the other rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchlml
from torchlml._autograd import operators
from torchlml._cpu import loader

INF, NAN = float("inf"), float("nan")
SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 255, 256, 257)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BLOCK = 16  # the number of rows in a vector of the widest instruction set


def truth(x: Tensor, k: Tensor) -> Tensor:
    """Return the projection in float64, computed by bisection. It is 0 for entries at -inf."""
    x = x.double()
    finite = torch.where(x.isfinite(), x, 0)
    reach = finite.abs().amax(-1) + 800
    low, high = -reach, reach
    for _ in range(200):
        middle = (low + high) / 2
        above = torch.sigmoid(x + middle.unsqueeze(-1)).sum(-1) > k
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return torch.sigmoid(x + low.unsqueeze(-1))


def rows(n: int, scale: float, count: int = 40, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * n)
    return torch.randn(count, n, generator=generator) * scale


def some_k(n: int, count: int) -> Tensor:
    """Return values of k over the full range from 0 to n, both integers and fractions."""
    share = torch.linspace(0.02, 0.98, count, dtype=torch.float64)
    return torch.where(torch.arange(count) % 3 > 0, (share * n).round().clamp(1, max(1, n - 1)), share * n)


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0, 12.0, 100.0])
@pytest.mark.parametrize("n", SIZES)
def test_accuracy(n: int, scale: float) -> None:
    x = rows(n, scale)
    k = some_k(n, len(x)) if n > 1 else torch.linspace(0.02, 0.98, len(x), dtype=torch.float64)
    for shift in (0.0, 1e4):
        moved = x + shift
        y = torchlml.lml(moved, k)
        assert (y.double() - truth(moved, k)).abs().max() <= 1e-6
        assert ((y.double().sum(-1) - k).abs() <= 2e-6 * k.clamp(min=1)).all()
        assert y.max() <= 1
        shared = torchlml.lml(moved, float(k[7]))
        assert (shared.double() - truth(moved, k[7])).abs().max() <= 1e-6


@pytest.mark.parametrize("n", SIZES[1:])
def test_masks_and_rows_of_any_length(n: int) -> None:
    x, generator = rows(n, 3.0), torch.Generator().manual_seed(n)
    mask = torch.rand(x.shape, generator=generator) < 0.6
    mask[:, : (n + 1) // 2] = True
    k = some_k((n + 1) // 2, len(x)).clamp(max=(n + 1) // 2 - 0.25)
    y = torchlml.lml(x.masked_fill(~mask, NAN), k, mask=mask)
    want = truth(x.masked_fill(~mask, -INF), k)
    assert (y.double() - want).abs().max() <= 1e-6
    assert (y[~mask] == 0).all()
    # An entry at -inf is treated like a masked entry.
    assert torch.equal(torchlml.lml(x.masked_fill(~mask, -INF), k), y)


@pytest.mark.parametrize("huge", [1e10, 1e19, 3e19, 3e38])
def test_one_huge_entry(huge: float) -> None:
    # The kernel bounds the range of a row's entries by their variance, which overflows for a huge entry.
    for place in range(3):
        x = torch.full((1, 3), 3.0)
        x[0, place] = huge
        for k, want in ((1.0, (1.0, 0.0)), (2.0, (1.0, 0.5)), (0.5, (0.5, 0.0))):
            y = torchlml.lml(x, k)[0]
            others = y[[i for i in range(3) if i != place]]
            assert y[place] == pytest.approx(want[0], abs=1e-6)
            assert others.tolist() == pytest.approx([want[1]] * 2, abs=1e-6)


# ------------------------------------------------------------------------- bitwise identical results


def results(x: Tensor, k: Tensor, mask: Tensor | None = None, offsets: Tensor | None = None) -> list[Tensor]:
    """Return values, losses and gradients, as tensors with one number per entry or per row."""
    y, nu = operators.forward(x, k, mask, offsets)
    log_y, _ = operators.log_forward(x, k, mask, offsets)
    # The upstream gradient depends only on x, so it does not change with a row's position in the batch.
    grad = (x.float() * 0.37).cos().to(x.dtype)
    grad = torch.where(grad.isfinite(), grad, 0)
    labels = ((x.float() * 8).floor() % 5 == 0, None, None)
    losses, _ = operators.loss_forward(x, k, mask, offsets, *labels)
    found = [y, log_y, *nu, *losses, operators.solve(x, k, mask, offsets)[0]]
    found += operators.backward(grad, x, y, nu, mask, offsets)
    found += operators.log_backward(grad, x, log_y, nu, mask, offsets)
    one = torch.ones((), dtype=nu.dtype)
    found += operators.loss_backward(one, x, k, nu, mask, offsets, *labels)
    return [t.nan_to_num(7.0) for t in found]


def all_kinds(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ordinary and special rows (constant, shifted, NaN, infinite) in one batch, and a k for each."""
    x = torch.cat([rows(n, scale, 3) for scale in (0.1, 1.0, 3.0, 12.0, 300.0)])
    x[2], x[5], x[8] = 1.0, torch.arange(n) * 30.0, x[8] + 1000
    x[4, 0], x[7, n // 2], x[10, -1] = NAN, INF, -INF
    return x.to(dtype), some_k(n, len(x))


@pytest.mark.parametrize("n", [2, 8, 13, 64, 100, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_at_every_position(dtype: torch.dtype, n: int) -> None:
    x, k = all_kinds(n, dtype)
    for i in range(len(x)):
        alone = results(x[i : i + 1].contiguous(), k[i : i + 1])
        for place in range(BLOCK + 1):
            others = torch.arange(place + i) % len(x)
            batch = torch.cat([x[others[i:]], x[i : i + 1], x[: (i + place) % 4]])
            targets = torch.cat([k[others[i:]], k[i : i + 1], k[: (i + place) % 4]])
            for one, many in zip(alone, results(batch, targets), strict=True):
                assert torch.equal(many[place], one[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_different_lengths_keep_their_bits(dtype: torch.dtype) -> None:
    sizes = [*SIZES, *reversed(SIZES), 5, 40, 256, 1]
    dense = [rows(n, 3.0, 1, seed=i).to(dtype) for i, n in enumerate(sizes)]
    k = torch.tensor([0.4 * n for n in sizes], dtype=torch.float64)
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    packed = results(torch.cat([row[0] for row in dense]), k, None, offsets)
    for i, row in enumerate(dense):
        for one, many in zip(results(row, k[i : i + 1]), packed, strict=True):
            part = many[offsets[i] : offsets[i + 1]] if len(many) == offsets[-1] else many[i]
            assert torch.equal(part.reshape(-1), one.reshape(-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_k_for_each_row_does_not_change_the_bits(dtype: torch.dtype) -> None:
    for n in (8, 30, 64, 200):
        x, _ = all_kinds(n, dtype)
        k = torch.tensor(0.3 * n, dtype=torch.float64)
        for one, other in zip(results(x, k), results(x, k.expand(len(x)).contiguous()), strict=True):
            assert torch.equal(one, other)


@pytest.mark.skipif(not loader.loaded(), reason="pure PyTorch pads masked rows differently")
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_a_mask_of_ones_does_not_change_the_bits(dtype: torch.dtype) -> None:
    for n in (8, 30, 64, 200):
        x, k = rows(n, 3.0).to(dtype), some_k(n, 40)
        everything = torch.ones_like(x, dtype=torch.bool)
        for one, other in zip(results(x, k), results(x, k, everything), strict=True):
            assert torch.equal(one, other)


def test_the_number_of_threads_does_not_change_the_bits() -> None:
    before = torch.get_num_threads()
    try:
        for n in (8, 64, 200):
            x = torch.cat([rows(n, scale, 701) for scale in (1.0, 12.0)])
            k = some_k(n, len(x))
            found = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(results(x, k))
            for one, two, three in zip(*found, strict=True):
                assert torch.equal(one, two)
                assert torch.equal(one, three)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("n", [2, 9, 64, 256])
@pytest.mark.parametrize("bound", ["at_most", "at_least"])
def test_bounds(bound: str, n: int) -> None:
    x, k = rows(n, 2.0), some_k(n, 40)
    y = torchlml.lml(x, k, bound=bound)
    free = torch.sigmoid(x.double())
    keeps = free.sum(-1) <= k if bound == "at_most" else free.sum(-1) >= k
    want = torch.where(keeps.unsqueeze(-1), free, truth(x, k))
    assert keeps.any()
    assert not keeps.all()
    assert (y.double() - want).abs().max() <= 1e-6
