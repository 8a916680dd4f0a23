"""The bits of a result do not depend on the number of threads or on other rows in the batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

import torchlml

NAMES = ["lml", "log_lml", "lml_dual"]
# Rows x entries: many short rows, medium rows, one long row, and a few long rows. All lengths are odd.
SHAPES = [(257, 33), (40, 1001), (1, 150_001), (3, 100_003)]
DTYPES = [torch.float32, torch.float64]


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = (torch.randn(shape, dtype=torch.float64) * 4).to(dtype)
    return x, torch.linspace(0.5, shape[1] - 0.5, shape[0], dtype=torch.float64)


def run(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """Return the value and the gradient. The upstream gradient depends only on an entry's position."""
    x = x.clone().requires_grad_()
    y = call(x)
    weight = torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype) if y.dim() == x.dim() else torch.ones_like(y)
    (gradient,) = torch.autograd.grad(y, x, weight.expand_as(y))
    return [y.detach(), gradient]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(u, v) for u, v in zip(a, b, strict=True))


def bracketing(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Run three iterations of the paper's Algorithm 1, enough to reveal a different order of summation."""
    return torchlml.lml_bracketing(x, k, max_iterations=3)


CASES: list[tuple[Callable[..., torch.Tensor], tuple[int, int]]] = [
    *((getattr(torchlml, name), shape) for name in NAMES for shape in SHAPES),
    (bracketing, (1, 40_000)),
    (bracketing, (40, 33)),
]


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("function", "shape"), CASES, ids=lambda case: getattr(case, "__name__", str(case)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads(function: Callable[..., torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, k = make(shape, dtype)
    results = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        results.append(run(lambda x: function(x, k), x))
    assert same(results[0], results[1])
    assert same(results[0], results[2])


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_with_jagged_batches(name: str, dtype: torch.dtype) -> None:
    offsets = torch.tensor([0, 3, 3, 120_003, 120_050, 240_000])
    x = (torch.randn(240_000, dtype=torch.float64) * 4).to(dtype)
    mask = torch.rand(240_000) > 0.1
    results = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        results.append(run(lambda x: getattr(torchlml, name)(x, 2.5, mask=mask, offsets=offsets), x))
    assert same(results[0], results[1])
    assert same(results[0], results[2])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
def test_a_row_alone_or_in_a_batch(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, k = make((max(shape[0], 2), shape[1]), dtype)
    function = getattr(torchlml, name)
    batch = run(lambda x: function(x, k), x)
    for i in {0, 1, shape[0] // 2, shape[0] - 1}:
        assert same([part[i] for part in batch], run(lambda row, i=i: function(row, k[i]), x[i]))
        assert same(
            [part[i : i + 1] for part in batch],
            run(lambda row, i=i: function(row, float(k[i])), x[i : i + 1]),
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_alone_or_in_a_jagged_batch(name: str, dtype: torch.dtype) -> None:
    offsets = torch.tensor([0, 5, 5, 100_012, 100_050, 100_051])
    x = (torch.randn(100_051, dtype=torch.float64) * 4).to(dtype)
    k = torch.tensor([1.0, 0.0, 77.0, 2.5, 0.25], dtype=torch.float64)
    function = getattr(torchlml, name)
    batch = function(x, k, offsets=offsets)
    for i, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        alone = function(x[start:end], k[i : i + 1], offsets=torch.tensor([0, end - start]))
        assert torch.equal(alone[0], batch[i]) if name == "lml_dual" else torch.equal(alone, batch[start:end])


@pytest.mark.parametrize("name", NAMES)
def test_layout_does_not_matter(name: str) -> None:
    # Transposed, strided and offset views contain the same rows as their contiguous copies.
    x = torch.randn(6, 40)
    function = getattr(torchlml, name)
    expected = function(x, 3)
    assert torch.equal(function(x.t().contiguous().t(), 3), expected)
    assert torch.equal(function(x.repeat_interleave(2, dim=1)[:, ::2], 3), expected)
    assert torch.equal(function(torch.cat([torch.zeros(1, 40), x])[1:], 3), expected)
    assert torch.equal(function(x.t(), 3, dim=0), expected.t() if name != "lml_dual" else expected)
