"""Long rows, which the compiled kernel processes in pieces.

The bits of a result do not depend on the number of threads or on other rows in the batch. Results are as
accurate as those for short rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import torchlml
from tests.support import truth
from torchlml._cpu import loader

pytestmark = [
    pytest.mark.skipif(not loader.loaded(), reason="the compiled kernel is not in use"),
    pytest.mark.usefixtures("_threads"),
]
INF, NAN = math.inf, math.nan
LONG, PIECE = 131_072, 32_768  # `long_row` and `piece_size` in csrc/kernels.h
THREADS = (1, 2, 3, 7)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Lengths around the minimum for long rows, around a multiple of the piece size, and far above both.
SIZES = [LONG - 1, LONG, LONG + 1, 5 * PIECE - 1, 5 * PIECE, 5 * PIECE + 1, 500_009]


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def logits(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def results(x: Tensor, k: Tensor, mask: Tensor | None = None, offsets: Tensor | None = None) -> list[Tensor]:
    """Return the results of all operators that can split a row across threads."""
    ops = torch.ops.torchlml
    rows = x.shape[0] if offsets is None else offsets.shape[0] - 1
    place = torch.arange(x.shape[-1]).expand(x.shape)
    g = ((place * 7919) % 1013 / 506 - 1).to(x.dtype).contiguous()
    labels = (place % 977 == 5).contiguous()
    y, nu = ops.forward(x, k, mask, offsets)
    log_y, _ = ops.log_forward(x, k, mask, offsets)
    loss, _ = ops.loss_forward(x, k, mask, offsets, labels, None, None)
    free, free_nu = ops.bounded_forward(x, k, mask, offsets, True)
    one = torch.ones((), dtype=nu.dtype)
    dx = x.clone()
    dk = ops.loss_backward_in_place(one, dx, k, nu, mask, offsets, labels, None, None)
    both = ops.loss_backward(one, x, k, nu, mask, offsets, labels, None, None)
    assert_same_bits([dx, dk], both)
    return [
        y,
        nu,
        log_y,
        loss,
        free,
        ops.solve(x, k, mask, offsets),
        *ops.backward(g, x, y, nu, mask, offsets),
        *ops.log_backward(g, x, log_y, nu, mask, offsets),
        *ops.dual_backward(one.expand(rows).contiguous(), x, nu, mask, offsets),
        *both,
        *ops.bounded_backward(g, x, free, free_nu, mask, offsets),
    ]


def assert_same_bits(got: list[Tensor], want: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a.isnan(), b.isnan()), i
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), i


def row_of(kind: str, n: int) -> tuple[Tensor, float, Tensor | None]:
    """Return one row of a kind from `KINDS`, with its k and mask."""
    x, k, mask = logits(n), n / 1000, None
    if kind == "k near n":
        k = n - 2.5
    elif kind == "ties":
        x, k = x.round(), n / 3
    elif kind == "all tied":
        x, k = torch.full_like(x, 0.3), n / 4
    elif kind == "far apart":
        x, k = x * 300, 5.0
    elif kind == "a gap":
        x, k = torch.where(torch.arange(n) % 1000 == 1, 60.0, 0.0) + x / 10, float(len(range(1, n, 1000)))
    elif kind == "shifted":
        x = x + 1e4
    elif kind == "infinite":
        x[3], x[n // 2], x[n - 1] = INF, -INF, INF
    elif kind == "infinite share":
        x[::1000], k = INF, 3.5
    elif kind == "nan":
        x[n - 2] = NAN
    elif kind == "mask":
        mask = torch.arange(n) % 5 != 2
        x[2] = NAN
    elif kind == "short behind a mask":
        mask = torch.arange(n) % 7 == 2
    elif kind == "all":
        k = float(n)
    elif kind == "none":
        k = 0.0
    return x, k, mask


KINDS = (
    "plain",
    "k near n",
    "ties",
    "all tied",
    "far apart",
    "a gap",
    "shifted",
    "infinite",
    "infinite share",
    "nan",
    "mask",
    "short behind a mask",
    "all",
    "none",
)


def canonical(kind: str, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    x, k, mask = row_of(kind, n)
    one = torch.tensor([k], dtype=torch.float64)
    return x.to(dtype)[None], one, None if mask is None else mask[None].contiguous()


@pytest.mark.parametrize(
    ("n", "dtype"), [(n, torch.float32) for n in SIZES] + [(LONG + 7, dtype) for dtype in DTYPES[1:]], ids=str
)
def test_threads_around_the_boundaries(n: int, dtype: torch.dtype) -> None:
    arguments = canonical("plain", n, dtype)
    torch.set_num_threads(THREADS[0])
    want = results(*arguments)
    for threads in THREADS[1:]:
        torch.set_num_threads(threads)
        assert_same_bits(results(*arguments), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_for_rows_of_every_kind(kind: str, dtype: torch.dtype) -> None:
    arguments = canonical(kind, LONG + 3 * PIECE + 11, dtype)
    torch.set_num_threads(1)
    want = results(*arguments)
    for threads in (2, 7):
        torch.set_num_threads(threads)
        assert_same_bits(results(*arguments), want)


@pytest.mark.parametrize("rows", [2, 3, 16])
def test_a_row_alone_and_in_a_batch(rows: int) -> None:
    # With two threads, 3 rows are split into pieces, while 2 or 16 rows are distributed over the threads.
    n = LONG + 13
    x = torch.stack([logits(n, seed) for seed in range(rows)]).float()
    k = torch.linspace(1, n - 1, rows, dtype=torch.float64)
    torch.set_num_threads(2)
    together = results(x, k)
    for r in (0, rows - 1):
        alone = results(x[r : r + 1].contiguous(), k[r : r + 1])
        parts = [a[:, r : r + 1] if a.shape == (2, rows) else a[r : r + 1] for a in together]
        assert_same_bits(alone, parts)


def test_long_rows_among_short_ones() -> None:
    lengths = [5, 0, 1000, LONG + 100, 3, 40_000, 200_003, 17]
    rows = [logits(n, seed).float() for seed, n in enumerate(lengths)]
    k = torch.tensor([min(n, 2.0 + n / 100) for n in lengths], dtype=torch.float64)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    packed = torch.cat(rows)
    for threads in THREADS:
        torch.set_num_threads(threads)
        y, nu = torch.ops.torchlml.forward(packed, k, None, ends)
        dx, dk = torch.ops.torchlml.backward(torch.cos(packed), packed, y, nu, None, ends)
        for r, row in enumerate(rows):
            span = slice(int(ends[r]), int(ends[r + 1]))
            y1, nu1 = torch.ops.torchlml.forward(row[None], k[r : r + 1], None, None)
            dx1, dk1 = torch.ops.torchlml.backward(torch.cos(row)[None], row[None], y1, nu1, None, None)
            got = [y[span], nu[:, r], dx[span], dk[r]]
            assert_same_bits(got, [y1[0], nu1[:, 0], dx1[0], dk1[0]])


# ---------------------------------------------------------------------------------------- accuracy

ACCURACY = {torch.float32: 1e-6, torch.float64: 1e-11}
SOLVED = [kind for kind in KINDS if kind not in ("infinite share", "nan", "all", "none")]


@pytest.mark.parametrize("kind", SOLVED)
@pytest.mark.parametrize("dtype", ACCURACY, ids=str)
def test_accuracy(kind: str, dtype: torch.dtype) -> None:
    x, k, mask = row_of(kind, LONG + 3 * PIECE + 11)
    x = x.to(dtype)
    row = truth.solve(x.double().numpy(), k, None if mask is None else mask.tolist())
    variable = x.clone().requires_grad_()
    y = torchlml.lml(variable, k, mask=mask)
    got = y.detach().double().numpy()
    assert np.abs(got - row.y).max() <= ACCURACY[dtype]
    assert abs(got.sum() - k) <= 2 * ACCURACY[dtype] * max(1.0, k)
    g = torch.linspace(-1, 1, x.shape[0], dtype=dtype)
    y.backward(g)
    dx = row.lml_gradient(g.double().numpy())[0]
    assert variable.grad is not None
    assert np.abs(variable.grad.double().numpy() - dx).max() <= 10 * ACCURACY[dtype]
    log_y = torchlml.log_lml(x, k, mask=mask).double().numpy()
    there = np.isfinite(row.log_y)
    assert np.array_equal(np.isfinite(log_y), there)
    error = np.abs(log_y[there] - row.log_y[there])
    assert (error <= ACCURACY[dtype] * 10 * np.maximum(1, np.abs(row.log_y[there]))).all()


def test_limits() -> None:
    n = LONG + PIECE + 5
    x, k, _ = row_of("infinite share", n)
    tied = x == INF
    assert torchlml.lml(x, k)[tied].eq(k / int(tied.sum())).all()
    assert torchlml.lml(x, k)[~tied].eq(0).all()
    assert torchlml.lml(row_of("nan", n)[0], 5.0).isnan().all()
    assert torchlml.lml(logits(n), float(n)).eq(1).all()
    assert torchlml.lml(logits(n), 0.0).eq(0).all()


def test_the_loss() -> None:
    n = LONG + 3 * PIECE + 11
    x, labels, k = logits(n).float(), torch.tensor([[4, 70_000, n - 1]]), 40.0
    row = truth.solve(x.double().numpy(), k)
    variable = x[None].clone().requires_grad_()
    loss = torchlml.lml_loss(variable, labels, k)
    assert float(loss.detach()) == pytest.approx(-row.log_y[labels[0].numpy()].sum(), rel=1e-6)
    loss.backward()
    g = np.zeros(n)
    g[labels[0].numpy()] = -1
    assert variable.grad is not None
    assert np.abs(variable.grad[0].double().numpy() - row.log_lml_gradient(g)[0]).max() <= 1e-5
