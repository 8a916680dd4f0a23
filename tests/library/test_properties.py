"""Mathematical properties of the projection, tested on random rows, shapes, masks and offsets."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

import torchlml
from tests.support import truth
from torchlml._solve.newton import order_offsets

ENTRY = st.one_of(st.floats(-50, 50, width=32), st.sampled_from([0.0, 1.0, -1.0, 300.0, -300.0, 1e4, 1e-3]))
ROW = st.lists(ENTRY, min_size=1, max_size=40)
FRACTION = st.floats(0.001, 0.999)
DTYPE = st.sampled_from([torch.float32, torch.float64])


def limit(dtype: torch.dtype) -> float:
    return 1e-6 if dtype == torch.float32 else 1e-11


def _wide(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def target(n: int, fraction: float) -> float:
    """Return k = fraction * n, rounded to an integer if fraction > 1/2.

    Integer k must also be tested, because y can be nearly binary only for an integer k.
    """
    k = fraction * n
    return float(round(k)) if fraction > 0.5 and n > 1 else k


@given(ROW, FRACTION, DTYPE)
@settings(max_examples=200)
def test_values_sum_and_bounds(row: list[float], fraction: float, dtype: torch.dtype) -> None:
    k = target(len(row), fraction)
    x = torch.tensor(row, dtype=dtype)
    y = torchlml.lml(x, k).double()
    assert float((y - torch.from_numpy(truth.projection(x.double().numpy(), k))).abs().max()) <= limit(dtype)
    assert abs(float(y.sum()) - k) <= 2 * limit(dtype) * max(1, k)
    assert bool(((y >= 0) & (y <= 1)).all())


@given(ROW, FRACTION, DTYPE)
def test_bracketing_agrees_with_the_dual(row: list[float], fraction: float, dtype: torch.dtype) -> None:
    x, k = torch.tensor(row, dtype=dtype), target(len(row), fraction)
    nu = torchlml.lml_bracketing(x, k)
    y = torch.sigmoid(x.double() + nu.double())
    expected = torch.from_numpy(truth.projection(x.double().numpy(), k))
    # nu is rounded to the dtype, which changes every y by at most a quarter of the rounding error.
    rounding = torch.finfo(dtype).eps * nu.abs().nan_to_num(posinf=0, neginf=0)
    assert float((y - expected).abs().max()) <= limit(dtype) + float(rounding)


@given(ROW, FRACTION, DTYPE)
def test_order_is_preserved(row: list[float], fraction: float, dtype: torch.dtype) -> None:
    # Proposition 1 of the paper: x_i >= x_j implies y_i >= y_j, so equal entries get equal values.
    x = torch.tensor(row, dtype=dtype)
    k = target(len(row), fraction)
    for y in (torchlml.lml(x, k), torchlml.log_lml(x, k)):
        order = x.argsort()
        steps = y[order].diff()
        assert bool((steps >= 0).all() or y.isinf().any())
        assert bool((steps[x[order].diff() == 0] == 0).all() or y.isinf().any())


@given(ROW, FRACTION, DTYPE)
def test_complement(row: list[float], fraction: float, dtype: torch.dtype) -> None:
    x = torch.tensor(row, dtype=dtype)
    k = target(len(row), fraction)
    mirrored = 1 - torchlml.lml(-x, len(row) - k)
    assert float((torchlml.lml(x, k) - mirrored).abs().max()) <= 2 * limit(dtype)


@given(ROW, FRACTION, DTYPE, st.sampled_from([-1e7, -4096.0, 0.5, 1e5, 1e7]))
def test_shift_invariance(row: list[float], fraction: float, dtype: torch.dtype, shift: float) -> None:
    shifted = torch.tensor(row, dtype=dtype) + shift
    x = (shifted.double() - shift).to(dtype)  # the row after the rounding caused by the shift
    k = target(len(row), fraction)
    assert float((torchlml.lml(x, k) - torchlml.lml(shifted, k)).abs().max()) <= 2 * limit(dtype)


@given(ROW, FRACTION, DTYPE, st.randoms(use_true_random=False))
def test_a_mask_removes_entries(row: list[float], fraction: float, dtype: torch.dtype, random) -> None:
    keep = [random.random() < 0.7 for _ in row]
    x, mask = torch.tensor(row, dtype=dtype), torch.tensor(keep)
    k = target(len(row), fraction)
    y = torchlml.lml(x, k, mask=mask)
    assert torch.equal(y[~mask], torch.zeros_like(y[~mask]))
    # The remaining row may have fewer than k entries. Without a mask, only a jagged batch allows this.
    kept = torchlml.lml(x[mask], k, offsets=torch.tensor([0, sum(keep)]))
    assert float((y[mask] - kept).abs().sum()) <= 2 * limit(dtype) * len(row)
    # Entries at -inf have the same effect as the mask.
    hidden = torchlml.lml(x.masked_fill(~mask, -math.inf), k)
    assert float((y - hidden).abs().sum()) <= 2 * limit(dtype) * len(row)


@given(st.lists(st.lists(ENTRY, max_size=12), max_size=8), st.integers(0, 2**32), DTYPE)
def test_jagged_batches_match_separate_rows(rows: list[list[float]], seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in rows])], dtype=torch.int64)
    x = torch.tensor([value for row in rows for value in row], dtype=dtype)
    mask = torch.rand(x.shape, generator=generator) > 0.2
    k = torch.rand(len(rows), generator=generator, dtype=torch.float64) * 8
    y = torchlml.lml(x, k, mask=mask, offsets=offsets)
    for i, row in enumerate(rows):
        part = slice(int(offsets[i]), int(offsets[i + 1]))
        expected = truth.projection(np.array(row), float(k[i]), mask[part].tolist())
        assert np.abs(y[part].double().numpy() - expected).sum() <= 2 * limit(dtype) * max(1, len(row))


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(-4, 3),
    st.sampled_from(["lml", "log_lml", "lml_dual"]),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_any_dim(shape: list[int], dim: int, name: str, masked: bool, seed: int) -> None:
    dim = max(-len(shape), min(dim, len(shape) - 1))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(shape, generator=generator) > 0.1 if masked else None
    rows_shape = x.movedim(dim, -1).shape[:-1]
    k = torch.rand(rows_shape, generator=generator, dtype=torch.float64) * x.shape[dim]
    function = getattr(torchlml, name)
    got = function(x, k, dim=dim, mask=mask)
    moved = function(x.movedim(dim, -1), k, mask=None if mask is None else mask.movedim(dim, -1))
    assert torch.equal(got, moved if name == "lml_dual" else moved.movedim(-1, dim))
    flat = x.movedim(dim, -1).reshape(-1, x.shape[dim])
    for i, row in enumerate(flat):
        keep = None if mask is None else mask.movedim(dim, -1).reshape(flat.shape)[i]
        alone = function(row, float(k.reshape(-1)[i]), mask=keep)
        assert torch.equal(alone, moved.reshape(len(flat), *alone.shape)[i])


def test_unsorted_optimal_transport_is_the_projection_of_rescaled_logits() -> None:
    """docs/faq.md: the operator SOFT with squared costs converges to `lml(2 * x / epsilon, k)`.

    SOFT transports n entries, each of mass 1/n, to the points 0 and 1, of masses (n - k)/n and k/n. Its
    output is n times the mass that is transported to 1.
    """
    k, epsilon = 3, 0.5
    x = np.random.default_rng(0).normal(size=12)
    kernel = np.exp(-((x[:, None] - np.array([0.0, 1.0])) ** 2) / epsilon)
    targets = np.array([len(x) - k, k]) / len(x)
    columns = np.ones(2)
    for _ in range(2000):  # Sinkhorn's iterations
        rows = 1 / len(x) / (kernel @ columns)
        columns = targets / (kernel.T @ rows)
    transported = len(x) * rows * kernel[:, 1] * columns[1]
    y = torchlml.lml(torch.from_numpy(2 * x / epsilon), k)
    np.testing.assert_allclose(y.numpy(), transported, rtol=0, atol=1e-12)


def test_k_broadcasts() -> None:
    x = torch.randn(3, 4, 10, dtype=torch.float64)
    y = torchlml.lml(x, torch.tensor([1, 2, 3, 4]))
    for j in range(4):
        assert torch.equal(y[:, j], torchlml.lml(x[:, j], j + 1))
    assert torch.equal(torchlml.lml(x, torch.tensor([[1.0], [2.5], [3.0]]))[1], torchlml.lml(x[1], 2.5))
    assert torch.equal(torchlml.lml(x, torch.tensor(2)), torchlml.lml(x, 2))
    assert torch.equal(torchlml.lml(x[0], torch.tensor([2.5])), torchlml.lml(x[0], 2.5))
    strided = torch.tensor([[1.0, 9.0], [2.5, 9.0], [3.0, 9.0], [4.0, 9.0]], dtype=torch.float64)[:, 0]
    assert torch.equal(torchlml.lml(x[0], strided), torchlml.lml(x[0], strided.clone()))


def test_masks_broadcast() -> None:
    x = torch.randn(3, 4, 10, dtype=torch.float64)
    classes = torch.arange(10) % 3 > 0
    for mask in (classes, torch.tensor([True, False, True]).view(3, 1, 1), torch.rand(4, 1) > -1):
        full = mask.expand(3, 4, 10).clone()
        assert torch.equal(torchlml.lml(x, 2, mask=mask), torchlml.lml(x, 2, mask=full))
        assert torch.equal(torchlml.lml(x, 2, dim=0, mask=mask), torchlml.lml(x, 2, dim=0, mask=full))
    assert torch.equal(
        torchlml.lml(x, 2, dim=0, mask=torch.tensor([True, False, True]).view(3, 1, 1))[1] == 0, x[1] == x[1]
    )


@given(st.lists(st.floats(-6, 6), min_size=2, max_size=6), FRACTION)
@settings(max_examples=25)
def test_agrees_with_a_convex_solver(row: list[float], fraction: float) -> None:
    # By definition, y minimizes -x.y - H_b(y) over all y in (0, 1) that sum to k.
    x, k = np.array(row), max(fraction * len(row), 0.05)

    def objective(y: np.ndarray) -> float:
        return float(-x @ y + (y * np.log(y) + (1 - y) * np.log1p(-y)).sum())

    solved = optimize.minimize(
        objective,
        np.full(len(row), k / len(row)),
        jac=lambda y: -x + np.log(y) - np.log1p(-y),
        bounds=[(1e-9, 1 - 1e-9)] * len(row),
        constraints={"type": "eq", "fun": lambda y: y.sum() - k, "jac": lambda y: np.ones(len(row))},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    y = torchlml.lml(torch.tensor(row, dtype=torch.float64), k).numpy()
    # y is at least as good as the solver's solution, and close to it (the solver's error is about 1e-5).
    assert objective(np.clip(y, 1e-300, 1 - 1e-16)) <= objective(solved.x) + 1e-9
    assert np.abs(y - solved.x).max() < 1e-3


@given(
    st.lists(st.one_of(st.floats(-1e4, 1e4), st.floats(-2, 2), st.just(0.0)), min_size=2, max_size=30),
    FRACTION,
)
@settings(max_examples=200)
def test_the_brackets_contain_the_threshold(row: list[float], fraction: float) -> None:
    k = target(len(row), fraction)
    if not 0 < k < len(row):
        k = len(row) / 2
    x = torch.tensor(row, dtype=torch.float64)
    nu = truth.solve(row, k).nu
    slack = 1e-12 * max(1.0, abs(nu))
    below, above = order_offsets(_wide(k), _wide(len(row)))
    ranked = sorted(row, reverse=True)
    assert -ranked[math.ceil(k) - 1] - float(below) <= nu + slack
    assert nu - slack <= -ranked[math.floor(k)] + float(above)
    # The other two brackets do not require sorting. The Triton kernels start from them.
    middle = math.log(k / (len(row) - k))
    assert middle - max(row) - slack <= nu <= middle - min(row) + slack
    assert math.log(k) - float(x.logsumexp(0)) <= nu + slack
    assert nu - slack <= float((-x).logsumexp(0)) - math.log(len(row) - k)


@pytest.mark.parametrize(("n", "k"), [(1098, 1097), (5000, 3), (5000, 4997)])
def test_the_papers_bracket_fails_where_ours_holds(n: int, k: int) -> None:
    x = torch.zeros(n, dtype=torch.float64)
    nu = truth.solve(x.numpy(), k).nu
    assert nu == pytest.approx(math.log(k) - math.log(n - k), abs=1e-13)
    assert not -7 <= nu <= 7  # the paper's bracket, [-pi_k - 7, -pi_{k+1} + 7]
    below, above = order_offsets(_wide(k), _wide(n))
    assert -float(below) <= nu + 1e-12
    assert nu - 1e-12 <= float(above)
    for dual in (torchlml.lml_dual, torchlml.lml_bracketing):
        assert float(dual(x, k)) == pytest.approx(nu, abs=1e-12)


def test_order_offsets_for_integers() -> None:
    k, m = torch.tensor([1.0, 3.0, 9.0]), torch.tensor(10.0)
    below, above = order_offsets(k, m)
    torch.testing.assert_close(below, (m - k).log())
    torch.testing.assert_close(above, k.log())
