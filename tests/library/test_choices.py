"""`topk_mask` and `sample_subset`: exactly k entries, documented tie-breaking, frequencies and gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torchlml

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 7, 100, 1001])
def test_topk_mask_selects_the_largest_entries(n: int, dtype: torch.dtype) -> None:
    # Few distinct values, so that there are many ties. A stable sort implements the tie-breaking rule.
    x = torch.randint(-3, 4, (40, n)).to(dtype)
    for k in {0, 1, n // 2, n - 1, n}:
        mask = torchlml.topk_mask(x, k)
        assert mask.dtype == dtype
        for row, chosen in zip(x.tolist(), mask.tolist(), strict=True):
            order = sorted(range(n), key=lambda i: (-row[i], i))
            assert [i for i in range(n) if chosen[i] == 1] == sorted(order[:k])
            assert sum(chosen) == k


def test_topk_mask_with_a_different_k_in_each_row() -> None:
    x = torch.randn(4, 3, 9).round()
    k = torch.tensor([0, 2, 9])
    for mask in (None, torch.rand(4, 3, 9) > 0.3):
        got = torchlml.topk_mask(x, k, mask=mask)
        rows = [
            [
                torchlml.topk_mask(x[i, j], int(k[j]), mask=None if mask is None else mask[i, j])
                for j in range(3)
            ]
            for i in range(4)
        ]
        assert torch.equal(got, torch.stack([torch.stack(row) for row in rows]))
    assert torch.equal(
        torchlml.topk_mask(x.movedim(-1, 0), k, dim=0), torchlml.topk_mask(x, k).movedim(-1, 0)
    )


def test_special_rows() -> None:
    x = torch.tensor([[1.0, INF, INF, INF], [-INF, -INF, -INF, 2], [1, NAN, 2, 3], [0, 0, 0, 0]])
    hard = torchlml.topk_mask(x, 2)
    assert hard[[0, 1, 3]].tolist() == [[0, 1, 1, 0], [0, 0, 0, 1], [1, 1, 0, 0]]
    assert bool(hard[2].isnan().all())
    drawn = torchlml.sample_subset(x, 2)
    assert drawn[0, 0] == 0
    assert drawn[0].sum() == 2
    assert drawn[1].tolist() == [0, 0, 0, 1]
    assert bool(drawn[2].isnan().all())
    assert drawn[3].sum() == 2
    keep = torch.tensor([True, False, False, True])
    assert torchlml.topk_mask(torch.tensor([1.0, NAN, 9, 0]), 3, mask=keep).tolist() == [1, 0, 0, 1]
    assert torchlml.sample_subset(torch.tensor([1.0, NAN, 9, 0]), 3, mask=keep).tolist() == [1, 0, 0, 1]
    for function in (torchlml.topk_mask, torchlml.sample_subset):
        assert function(torch.empty(0, 5), 2).shape == (0, 5)
        assert function(torch.empty(3, 0), 0).shape == (3, 0)


@pytest.mark.parametrize("name", ["topk_mask", "sample_subset"])
def test_straight_through(name: str) -> None:
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    g = torch.randn(5, 8, dtype=torch.float64)
    options = {} if name == "topk_mask" else {"straight_through": True}
    out = getattr(torchlml, name)(x, 3, **options)
    assert bool(((out == 0) | (out == 1)).all())
    (got,) = torch.autograd.grad(out, x, g, create_graph=True)
    (expected,) = torch.autograd.grad(torchlml.lml(x, 3), x, g, create_graph=True)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad(got.square().sum(), x)[0], torch.autograd.grad(expected.square().sum(), x)[0]
    )
    assert not torchlml.sample_subset(x, 3).requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sample_has_exactly_k_entries(dtype: torch.dtype) -> None:
    for n, scale in itertools.product([1, 2, 13, 1000], [0.0, 0.1, 3.0, 100.0]):
        x = (torch.randn(60, n) * scale).to(dtype)
        for k in {0, 1, n // 2, n - 1, n}:
            drawn = torchlml.sample_subset(x, k)
            assert drawn.dtype == dtype
            assert bool(((drawn == 0) | (drawn == 1)).all())
            assert drawn.double().sum(-1).tolist() == [k] * 60
    counts = torch.randint(0, 14, (60,))
    mask = torch.rand(60, 13) > 0.4
    drawn = torchlml.sample_subset(torch.randn(60, 13).to(dtype), counts, mask=mask)
    assert torch.equal(drawn.double().sum(-1), torch.minimum(counts, mask.sum(-1)).double())
    assert bool((drawn[~mask] == 0).all())


def test_a_sample_from_a_long_row_has_exactly_k_entries() -> None:
    # The floating-point sum of a million probabilities is not exactly k in any order of summation.
    x = torch.randn(1, 1_000_000) * 4
    for k in (1, 1000, 999_999):
        assert float(torchlml.sample_subset(x, k).double().sum()) == k


@pytest.mark.parametrize(("k", "scale"), [(1, 1.0), (3, 1.0), (5, 3.0), (8, 0.0)])
def test_inclusion_frequencies(k: int, scale: float) -> None:
    n, draws = 10, 40_000
    x = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) * scale
    y = torchlml.lml(x, k)
    generator = torch.Generator().manual_seed(7)
    counts = torchlml.sample_subset(x.expand(draws, n), k, generator=generator).sum(0)
    # The count of each entry is binomial. The counts sum to k * draws, which leaves n - 1 degrees of freedom.
    # A negative correlation between entries only lowers the statistic.
    z = ((counts - draws * y) / (draws * y * (1 - y)).sqrt()).numpy()
    assert (abs(z) < 4.5).all()
    assert stats.chi2.sf((z**2).sum() * (n - 1) / n, n - 1) > 1e-4
    # The entries are sampled in random order, so every pair of entries can be drawn together.
    if scale < 2 and k > 1:
        drawn = torchlml.sample_subset(x.expand(4000, n), k, generator=generator)
        assert bool(((drawn.T @ drawn) > 0).all())


def test_reproducible() -> None:
    x = torch.randn(5, 50)
    draws = [torchlml.sample_subset(x, 7, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*draws)
    torch.manual_seed(4)
    first = torchlml.sample_subset(x, 7)
    assert not torch.equal(first, torchlml.sample_subset(x, 7))
    torch.manual_seed(4)
    assert torch.equal(first, torchlml.sample_subset(x, 7))


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("options", [{}, {"fullgraph": True}, {"fullgraph": True, "dynamic": True}], ids=str)
def test_sampling_compiles_for_any_batch_size(options: dict[str, bool]) -> None:
    draw = torch.compile(lambda x: torchlml.sample_subset(x, 2), backend="aot_eager", **options)
    for count in (3, 4, 7):
        drawn = draw(torch.randn(count, 10))
        assert bool(((drawn == 0) | (drawn == 1)).all())
        assert drawn.sum(-1).tolist() == [2] * count


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_samples_have_the_right_frequencies() -> None:
    x, draws = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5]).double(), 20_000
    torch.manual_seed(0)
    draw = torch.compile(lambda x: torchlml.sample_subset(x, 2), fullgraph=True)
    _assert_frequencies(draw(x.expand(draws, 5).contiguous()), x, 2)


def test_every_element_of_a_vmap_gets_its_own_sample() -> None:
    x, draws = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5]).double(), 2000
    torch.manual_seed(0)
    draw = torch.vmap(lambda x: torchlml.sample_subset(x, 2), randomness="different")
    _assert_frequencies(draw(x.expand(draws, 5)), x, 2)
    several = torch.vmap(lambda x: torchlml.sample_subset(x, 2), randomness="different")(
        torch.zeros(50, 3, 8)
    )
    assert several.sum(-1).tolist() == [[2] * 3] * 50
    assert len(several.flatten(1).unique(dim=0)) > 40
    same = torch.vmap(lambda x: torchlml.sample_subset(x, 2), randomness="same")(torch.zeros(50, 8))
    assert len(same.unique(dim=0)) == 1


def _assert_frequencies(drawn: Tensor, x: Tensor, k: int) -> None:
    y, draws = torchlml.lml(x, k), len(drawn)
    assert drawn.sum(-1).tolist() == [k] * draws
    z = (drawn.sum(0) - draws * y) / (draws * y * (1 - y)).sqrt()
    assert float(z.abs().max()) < 4.5


def _in_fake_mode(x: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        choice = torchlml.topk_mask(mode.from_tensor(x), 5)
    assert choice.shape == x.shape
    return torchlml.topk_mask(x, 5)


class _Choose(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torchlml.topk_mask(x, 5)


TRACED: dict[str, Callable[[Tensor], Tensor]] = {
    "compile": lambda x: torch.compile(_Choose(), fullgraph=True, backend="aot_eager")(x),
    "export": lambda x: torch.export.export(_Choose(), (x,)).module()(x),
    "make_fx": lambda x: make_fx(_Choose())(x)(x),
    "symbolic make_fx": lambda x: make_fx(_Choose(), tracing_mode="symbolic")(x)(x),
    "fake": _in_fake_mode,
}


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("way", TRACED)
def test_topk_mask_can_be_traced_if_k_is_a_number(way: str) -> None:
    x = torch.randn(4, 12)
    expected = torch.zeros_like(x).scatter(-1, x.topk(5).indices, 1)
    assert torch.equal(TRACED[way](x), expected)
