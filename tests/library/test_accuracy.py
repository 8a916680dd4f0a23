"""Accuracy of the values, compared with the exact solution and a simple reference in the same dtype."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch

import torchlml
from tests.support import truth
from tests.support.problems import PROBLEMS, SHORT, Problem

# dtype -> the largest allowed error in each y, and in a row's sum relative to max(1, k)
ACCURACY = {torch.float32: (1e-6, 2e-6), torch.float64: (1e-11, 1e-11)}
HALF = [torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", ACCURACY, ids=str)


def each(problems: list[Problem]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("problem", problems, ids=lambda problem: problem.name)


# Bracketing makes hundreds of passes over a row, so it is tested on short rows only.
BRIEF = [problem for problem in SHORT if problem.row(torch.float32).numel() <= 2000]
DUALS = [(problem, "lml_dual") for problem in PROBLEMS] + [(problem, "lml_bracketing") for problem in BRIEF]


def check_values(y: torch.Tensor, problem: Problem, dtype: torch.dtype) -> None:
    entry, total = ACCURACY[dtype]
    expected = problem.truth(dtype).y
    got = y.double().numpy()
    assert y.dtype == dtype
    assert np.abs(got - expected).max() <= entry
    assert abs(got.sum() - problem.k) <= total * max(1.0, problem.k)
    assert got.min() >= 0
    assert got.max() <= 1


def check_dual(nu: torch.Tensor, problem: Problem, dtype: torch.dtype) -> None:
    row = problem.truth(dtype)
    assert nu.dtype == dtype
    assert nu.shape == ()
    # If nu is in a very wide gap between logits, y does not depend on it, so any nu in the gap is correct.
    if row.sum_w > 1e-30:
        rounding = torch.finfo(dtype).eps * abs(row.nu)
        assert abs(float(nu) - row.nu) <= threshold_limit(dtype, row.y.size) + rounding


def threshold_limit(dtype: torch.dtype, n: int) -> float:
    """Return the allowed error in nu. It is larger for long rows, whose partial sums may be in float32."""
    return 1e-11 if dtype == torch.float64 else 1e-6 if n <= 2000 else 1e-5


@each([problem for problem in SHORT if problem.row(torch.float64).numel() <= 60])
@each_dtype
def test_the_reference_solution_is_right(problem: Problem, dtype: torch.dtype) -> None:
    row = problem.truth(dtype)
    y, nu = truth.solve_with_mpmath(problem.row(dtype).double().tolist(), problem.k)
    assert max(abs(float(a - mpmath.mpf(b))) for a, b in zip(y, row.y.tolist(), strict=True)) < 1e-14
    if row.sum_w > 1e-90:  # in a wider gap, even 120 digits do not determine nu
        assert abs(float(nu) - row.nu) <= 1e-15 * max(1.0, abs(row.nu))


@each([PROBLEMS[i] for i in (0, 1, 3, 7, 30)])
def test_the_reference_gradients_are_right(problem: Problem) -> None:
    row = problem.truth(torch.float64)
    x = problem.row(torch.float64).tolist()
    g = np.linspace(-1, 1, len(x))
    for entry in (0, len(x) - 1):
        step, ends = 1e-4, []
        for sign in (1, -1):
            moved = list(x)
            moved[entry] += sign * step
            ends.append(truth.solve(moved, problem.k))
        slope_y = (g @ (ends[0].y - ends[1].y)) / (2 * step)
        slope_log = (g @ (ends[0].log_y - ends[1].log_y)) / (2 * step)
        slope_nu = (ends[0].nu - ends[1].nu) / (2 * step)
        assert row.lml_gradient(g)[0][entry] == pytest.approx(slope_y, abs=1e-7)
        assert row.log_lml_gradient(g)[0][entry] == pytest.approx(slope_log, abs=1e-6)
        assert row.dual_gradient(1.0)[0][entry] == pytest.approx(slope_nu, abs=1e-7)
    up, down = (truth.solve(x, problem.k + step) for step in (1e-4, -1e-4))
    assert row.lml_gradient(g)[1] == pytest.approx(g @ (up.y - down.y) / 2e-4, abs=1e-6)
    assert row.log_lml_gradient(g)[1] == pytest.approx(g @ (up.log_y - down.log_y) / 2e-4, rel=1e-5)
    assert row.dual_gradient(1.0)[1] == pytest.approx((up.nu - down.nu) / 2e-4, rel=1e-5)


@each(PROBLEMS)
@each_dtype
def test_values(problem: Problem, dtype: torch.dtype) -> None:
    check_values(torchlml.lml(problem.row(dtype), problem.k), problem, dtype)


@each(PROBLEMS)
@each_dtype
def test_order(problem: Problem, dtype: torch.dtype) -> None:
    # Proposition 1 of the paper: y preserves the order of x, even where values differ by less than the
    # guaranteed accuracy.
    x, order = problem.row(dtype), problem.row(dtype).argsort()
    for y in (torchlml.lml(x, problem.k), torchlml.log_lml(x, problem.k)):
        assert bool((y[order][1:] >= y[order][:-1]).all())


def pack(problems: list[Problem], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rows of all problems as a jagged batch: values, k and offsets."""
    rows = [problem.row(dtype) for problem in problems]
    offsets = torch.tensor([0, *np.cumsum([row.numel() for row in rows])])
    return torch.cat(rows), torch.tensor([problem.k for problem in problems], dtype=torch.float64), offsets


@each_dtype
def test_values_of_ragged_rows(dtype: torch.dtype) -> None:
    x, k, offsets = pack(SHORT, dtype)
    y = torchlml.lml(x, k, offsets=offsets)
    for problem, part in zip(SHORT, y.split(offsets.diff().tolist()), strict=True):
        check_values(part, problem, dtype)


@each_dtype
def test_bracketing_of_ragged_rows(dtype: torch.dtype) -> None:
    # The slowest row determines the number of iterations for all rows, so only short rows are used.
    problems = [problem for problem in BRIEF if problem.truth(dtype).y.size <= 100]
    x, k, offsets = pack(problems, dtype)
    nu = torchlml.lml_bracketing(x, k, offsets=offsets)
    for problem, found in zip(problems, nu, strict=True):
        check_dual(found, problem, dtype)


@each_dtype
def test_masked_rows(dtype: torch.dtype) -> None:
    # The problems are the rows of one matrix. They are padded with NaN, which the mask must hide.
    problems = [problem for problem in SHORT if problem.truth(dtype).y.size <= 200]
    x = torch.full((len(problems), 211), float("nan"), dtype=dtype)
    mask = torch.zeros(len(problems), 211, dtype=torch.bool)
    for i, problem in enumerate(problems):
        row = problem.row(dtype)
        x[i, 3 : 3 + row.numel()] = row
        mask[i, 3 : 3 + row.numel()] = True
    k = torch.tensor([problem.k for problem in problems], dtype=torch.float64)
    y = torchlml.lml(x, k, mask=mask)
    nu = torchlml.lml_bracketing(x, k, mask=mask)
    assert torch.equal(y[~mask], torch.zeros_like(y[~mask]))
    for i, problem in enumerate(problems):
        check_values(y[i][mask[i]], problem, dtype)
        check_dual(nu[i], problem, dtype)


@each([problem for problem in PROBLEMS if not problem.extreme])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_is_rounded_once(problem: Problem, dtype: torch.dtype) -> None:
    x = problem.row(dtype)
    row = problem.truth(dtype)
    y = torchlml.lml(x, problem.k)
    assert y.dtype == dtype
    # A value that is accurate in float32 may round to the wrong neighbor only near a rounding boundary.
    slack = 1e-6 * row.y * np.maximum(1.0, np.abs(row.z)) + 1e-20
    lowest, highest = (torch.from_numpy(row.y + sign * slack).to(dtype) for sign in (-1, 1))
    assert bool((lowest <= y).all())
    assert bool((y <= highest).all())


@each([problem for problem in PROBLEMS if not problem.extreme][::5])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_is_computed_in_float32(problem: Problem, dtype: torch.dtype) -> None:
    x = problem.row(dtype)
    assert torch.equal(torchlml.lml(x, problem.k), torchlml.lml(x.float(), problem.k).to(dtype))
    assert torch.equal(torchlml.log_lml(x, problem.k), torchlml.log_lml(x.float(), problem.k).to(dtype))


@each(PROBLEMS)
@each_dtype
def test_log_values(problem: Problem, dtype: torch.dtype) -> None:
    log_y = torchlml.log_lml(problem.row(dtype), problem.k)
    expected = (
        torch.from_numpy(problem.truth(dtype).log_y).to(dtype).double().numpy()
    )  # -6e38 is -inf in float32
    got = log_y.double().numpy()
    assert log_y.dtype == dtype
    # The limit is absolute near 0 and relative far below 0. Both follow from the resolution of x + nu.
    limit = threshold_limit(dtype, got.size) * np.maximum(1.0, np.abs(expected))
    with np.errstate(invalid="ignore"):  # -inf - -inf
        assert bool(((got == expected) | (np.abs(got - expected) <= limit)).all())
    assert got.max() <= 0


@pytest.mark.parametrize(
    ("problem", "name"), DUALS, ids=[f"{problem.name}-{name}" for problem, name in DUALS]
)
@each_dtype
def test_dual_values(problem: Problem, dtype: torch.dtype, name: str) -> None:
    check_dual(getattr(torchlml, name)(problem.row(dtype), problem.k), problem, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_moderate_rows_agree_with_a_simple_reference(dtype: torch.dtype) -> None:
    # For these rows, the simple reference in the same dtype is also accurate.
    x = torch.randn(20, 137, dtype=torch.float64).to(dtype) * 3
    k = torch.linspace(0.5, 136.5, 20, dtype=torch.float64)
    solved = [truth.solve(row.double().numpy(), float(target)) for row, target in zip(x, k, strict=True)]
    expected = torch.from_numpy(np.stack([row.y for row in solved]))
    reference = truth.plain(x, k)
    error = (torchlml.lml(x, k).double() - expected).abs().max()
    assert error <= ACCURACY[dtype][0]
    assert (reference.double() - expected).abs().max() <= 20 * ACCURACY[dtype][0]
    assert error <= 2 * (reference.double() - expected).abs().max()


@pytest.mark.parametrize("k", [0.7, 3, 60.5])
def test_values_follow_from_the_threshold(k: float) -> None:
    x = torch.randn(4, 64, dtype=torch.float64)
    z = x + torchlml.lml_dual(x, k).unsqueeze(-1)
    close = {"rtol": 1e-12, "atol": 1e-14}
    torch.testing.assert_close(torchlml.lml(x, k), torch.sigmoid(z), **close)
    torch.testing.assert_close(torchlml.log_lml(x, k), torch.nn.functional.logsigmoid(z), **close)


def test_arguments_are_not_modified() -> None:
    x, mask = torch.randn(3, 20), torch.rand(3, 20) > 0.2
    k = torch.tensor([1.0, 2.0, 3.0])
    copies = x.clone(), mask.clone(), k.clone()
    torchlml.lml(x, k, mask=mask)
    torchlml.log_lml(x, k, mask=mask)
    torchlml.lml_dual(x, k, mask=mask)
    assert all(torch.equal(a, b) for a, b in zip(copies, (x, mask, k), strict=True))
