"""Tests of the interpreted Triton kernels, which `test_triton.py` runs in a separate process.

Each shape exercises a specific variant of the kernels. The exact solutions (in float64) and the tolerances
are those of the CPU tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import loss_rows, truth
from tests.support.gradients import resolved, slack, upstream
from tests.support.problems import SHORT, Problem
from tests.support.special_rows import SPECIAL, Special, gradient_of_k
from torchlml._triton import Plan, plan, self_test
from torchlml._triton import operators as triton_operators
from torchlml._triton import split as triton_split

Force = Callable[[Plan | None], None]
Row = TypeVar("Row", Problem, Special)
LOOP = Plan(32, 1, True)
SPLIT = Plan(16, 1, True, 2)
VARIANTS = {"chip": None, "loop": LOOP, "split": SPLIT}
LENGTHS = {
    # One entry, the smallest block completely filled, a partly filled block, and several warps.
    "chip": (1, 32, 33, 600),
    # A partly filled block on chip, a full block on chip, one streamed entry, and four streamed blocks (the
    # last one partly filled).
    "loop": (20, 32, 33, 150),
    # One program with entries and one without, one block for each program, two blocks in the first program,
    # and several blocks in all programs.
    "split": (10, 32, 33, 90),
}
each_shape = pytest.mark.parametrize(
    ("how", "n"),
    [
        pytest.param(VARIANTS[name], n, id=f"{name}, {n}")
        for name, lengths in LENGTHS.items()
        for n in lengths
    ],
)
each_variant = pytest.mark.parametrize("how", VARIANTS.values(), ids=VARIANTS)


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Force:
    """Return a function that sets the kernels' plan. None selects the plan for 100 multiprocessors."""

    def layout(how: Plan | None) -> Callable[[Tensor, int, Tensor | None], Plan]:
        return lambda x, rows, offsets: how or plan(1000, x.shape[-1], offsets is not None, 100)

    # With at most three steps, some rows do not converge and are finished by a single program.
    monkeypatch.setattr(triton_split, "_STEPS", 3)
    return lambda how: monkeypatch.setattr(triton_operators, "layout", layout(how))


def call(name: str, *arguments: Tensor | None) -> tuple[Tensor, Tensor]:
    return self_test.OPERATORS[name](*arguments)


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def check(row: truth.Row, k: float, y: Tensor, log_y: Tensor, nu: Tensor) -> None:
    """Check one row: y and its sum to the guaranteed accuracy, and log y and nu to rounding error."""
    assert np.abs(y.double().numpy() - row.y).max() <= 1e-6
    assert abs(float(y.double().sum()) - k) <= 2e-6 * max(1, k)
    expected = torch.from_numpy(row.log_y).float().double()  # -6e38 is -inf in float32
    torch.testing.assert_close(log_y.double(), expected, rtol=1e-6, atol=2e-6)
    if row.sum_w > 1e-30:
        assert abs(float(nu.double().sum()) - row.nu) <= 2e-6 + 2e-7 * abs(row.nu)


def check_gradients(row: truth.Row, g: np.ndarray, found: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Check the gradients of y, log y and nu for one row, with the tolerances of the CPU tests."""
    dx, dk = (t.double().numpy() for t in found["backward"])
    expected_dx, expected_dk = row.lml_gradient(g)
    assert np.abs(dx - expected_dx).max() <= 1e-6 * np.abs(g).max()
    if row.sum_w > 1e-30:
        assert abs(dk - expected_dk) <= slack(row, torch.float32).min() * np.abs(g).max()
    assert math.isfinite(dk)
    if not resolved(row):
        return
    dx, dk = (t.double().numpy() for t in found["log_backward"])
    expected_dx, expected_dk = row.log_lml_gradient(g)
    effect = np.abs(g) * (1 - row.y)
    room = slack(row, torch.float32)
    assert bool((np.abs(dx - expected_dx) <= room * (effect + row.p * effect.sum()) + 1e-12).all())
    if row.sum_w > 1e-30:
        assert abs(dk - expected_dk) <= 4 * room.min() * effect.sum() / row.sum_w
    dx, dk = (t.double().numpy() for t in found["dual_backward"])
    assert bool((np.abs(dx + row.p) <= 2 * room * row.p + 1e-12).all())
    if row.sum_w > 1e-30:
        assert dk == pytest.approx(1 / row.sum_w, rel=4 * room.min())


@each_shape
def test_shapes(force: Force, how: Plan | None, n: int) -> None:
    force(how)
    x = 3 * torch.randn(3, n)
    k = float64(0.3, n / 2, n - 0.25)
    g = torch.from_numpy(np.stack([upstream(n)] * 3)).float()
    (y, nu), (log_y, _) = call("forward", x, k, None, None), call("log_forward", x, k, None, None)
    assert torch.equal(nu, call("solve", x, k, None, None))
    by_y = call("backward", g, x, y, nu, None, None)
    by_log = call("log_backward", g, x, log_y, nu, None, None)
    by_nu = call("dual_backward", torch.ones(3), x, nu, None, None)
    for i in range(3):
        row = truth.solve(x[i].double().numpy(), float(k[i]))
        check(row, float(k[i]), y[i], log_y[i], nu[:, i])
        found = {"backward": by_y, "log_backward": by_log, "dual_backward": by_nu}
        check_gradients(row, g[i].double().numpy(), {key: (dx[i], dk[i]) for key, (dx, dk) in found.items()})


def some(rows: list[Row], how: Plan | None) -> list[Row]:
    """Return all rows for the on-chip variant, and subsets for the variants that are slower to interpret."""
    return rows[how == LOOP :: {None: 1, LOOP: 2, SPLIT: 4}[how]]


def packed(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([row.numel() for row in rows])
    return torch.cat(rows), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


PACKED = [problem for problem in SHORT if problem.row(torch.float32).numel() <= 101]
CHIP = [problem for problem in SHORT if 101 < problem.row(torch.float32).numel() <= 1100]


@each_variant
def test_problems_in_a_jagged_batch(force: Force, how: Plan | None) -> None:
    force(how or Plan(128, 1, True))  # for the on-chip variant, a block that is longer than the rows
    run_problems(some(PACKED, how))


@pytest.mark.parametrize("problem", CHIP, ids=lambda problem: problem.name)
def test_problems_on_chip(force: Force, problem: Problem) -> None:
    force(None)
    run_problems([problem], dense=True)


def run_problems(problems: list[Problem], dense: bool = False) -> None:
    x, offsets = packed([problem.row(torch.float32) for problem in problems])
    g, _ = packed([torch.from_numpy(upstream(problem.row(torch.float32).numel())) for problem in problems])
    k, g, cuts = float64(*(problem.k for problem in problems)), g.float(), offsets[1:-1]
    shape, rows = (x[None], None) if dense else (x, offsets)
    grad = g.view(shape.shape)
    y, nu = call("forward", shape, k, None, rows)
    log_y, _ = call("log_forward", shape, k, None, rows)
    found = {
        "backward": call("backward", grad, shape, y, nu, None, rows),
        "log_backward": call("log_backward", grad, shape, log_y, nu, None, rows),
        "dual_backward": call("dual_backward", torch.ones(len(problems)), shape, nu, None, rows),
    }
    split = {key: (dx.flatten().tensor_split(cuts), dk) for key, (dx, dk) in found.items()}
    parts = zip(y.flatten().tensor_split(cuts), log_y.flatten().tensor_split(cuts), strict=True)
    for i, (problem, (one_y, one_log)) in enumerate(zip(problems, parts, strict=True)):
        row = problem.truth(torch.float32)
        check(row, problem.k, one_y, one_log, nu[:, i])
        weights = torch.from_numpy(upstream(row.y.size)).float().double().numpy()
        check_gradients(row, weights, {key: (dx[i], dk[i]) for key, (dx, dk) in split.items()})


@each_variant
def test_special_rows(force: Force, how: Plan | None) -> None:
    force(how)
    rows = some(SPECIAL, how)
    x, offsets = packed([torch.tensor(row.x) for row in rows])
    mask, _ = packed([torch.tensor(row.mask or [True] * len(row.x), dtype=torch.bool) for row in rows])
    k, cuts = float64(*(row.k for row in rows)), offsets[1:-1]
    g = torch.from_numpy(upstream(x.numel())).float()
    y, nu = call("forward", x, k, mask, offsets)
    log_y, _ = call("log_forward", x, k, mask, offsets)
    dx, dk = call("backward", g, x, y, nu, mask, offsets)
    log_dx, log_dk = call("log_backward", g, x, log_y, nu, mask, offsets)
    dual_dx, dual_dk = call("dual_backward", torch.ones(len(rows)), x, nu, mask, offsets)
    parts = [t.tensor_split(cuts) for t in (y, log_y, g, dx, log_dx, dual_dx)]
    for i, row in enumerate(rows):
        one_y, one_log, one_g, *gradients = (part[i] for part in parts)
        expected = torch.tensor(row.y, dtype=torch.float32)
        torch.testing.assert_close(one_y, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
        exact = (expected == 0) | (expected == 1)
        assert torch.equal(one_y[exact], expected[exact]), row.name
        torch.testing.assert_close(one_log, expected.log(), rtol=1e-6, atol=1e-6, equal_nan=True)
        assert float(nu[:, i].sum()) == pytest.approx(row.nu, abs=1e-6, nan_ok=True), row.name
        if math.isnan(row.nu):
            assert all(bool(t.isnan().all()) for t in gradients), row.name
        elif math.isinf(row.nu):
            assert not any(bool(t.any()) for t in gradients), row.name
            wanted = gradient_of_k(row, one_g.tolist())
            assert float(dk[i]) == pytest.approx(wanted, abs=1e-6), row.name
            above = sum(gi for xi, gi in zip(row.x, one_g.tolist(), strict=True) if xi == math.inf)
            wanted = above / row.k if wanted else 0.0
            assert float(log_dk[i]) == pytest.approx(wanted, abs=1e-6), row.name
            assert float(dual_dk[i]) == 0, row.name
        else:
            assert all(bool(t.isfinite().all()) for t in gradients), row.name


def rounded(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Round like the interpreter, which rounds bfloat16 toward zero. Compiled code rounds to nearest."""
    if dtype == torch.bfloat16:
        wide = (wide.view(torch.int32) & -0x10000).view(torch.float32)
    return wide.to(dtype)


@pytest.mark.parametrize(
    ("how", "dtype"),
    [(None, torch.bfloat16), (None, torch.float16), (LOOP, torch.bfloat16), (SPLIT, torch.float16)],
    ids=["chip, bfloat16", "chip, float16", "loop", "split"],
)
def test_half_precision_is_computed_in_float32_and_rounded_once(
    force: Force, how: Plan | None, dtype: torch.dtype
) -> None:
    force(how)
    x, k, g = (3 * torch.randn(1, 70)).to(dtype), torch.tensor(3.0).double(), torch.randn(1, 70).to(dtype)
    for name, derivative in (("forward", "backward"), ("log_forward", "log_backward")):
        y, nu = call(name, x, k, None, None)
        wide, wide_nu = call(name, x.float(), k, None, None)
        assert y.dtype == dtype
        assert torch.equal(y, rounded(wide, dtype))
        assert torch.equal(nu, wide_nu)
        dx, _ = call(derivative, g, x, y, nu, None, None)
        wide_dx, _ = call(derivative, g.float(), x.float(), wide, nu, None, None)
        assert torch.equal(dx, rounded(wide_dx, dtype))


@each_variant
def test_masked_entries_are_ignored(force: Force, how: Plan | None) -> None:
    force(how)
    x, mask = 3 * torch.randn(2, 90), torch.rand(2, 90) < 0.5
    x[~mask] = torch.tensor([math.nan, math.inf, 1e30]).repeat(90)[: int((~mask).sum())]
    g = torch.where(mask, torch.randn(2, 90), math.nan)
    k = torch.tensor(4.0).double()
    y, nu = call("forward", x, k, mask, None)
    dx, _ = call("backward", g, x, y, nu, mask, None)
    for i in range(2):
        keep = mask[i]
        row = truth.solve(x[i][keep].double().numpy(), 4.0)
        assert np.abs(y[i][keep].double().numpy() - row.y).max() <= 1e-6
        wanted, _ = row.lml_gradient(g[i][keep].double().numpy())
        assert np.abs(dx[i][keep].double().numpy() - wanted).max() <= 4e-6
    assert not bool(y[~mask].any())
    assert not bool(dx[~mask].any())


def test_a_row_alone_and_in_a_batch_have_the_same_bits(force: Force) -> None:
    force(None)
    x, k = 3 * torch.randn(3, 100), torch.tensor(5.0).double()
    y, _ = call("forward", x, k, None, None)
    assert torch.equal(y[1:2], call("forward", x[1:2].clone(), k, None, None)[0])


def test_no_rows_or_no_entries() -> None:
    for shape in ((0, 5), (3, 0)):
        y, nu = call("forward", torch.empty(shape), torch.tensor(0.0).double(), None, None)
        assert y.shape == shape
        assert nu.shape == (2, shape[0])


def test_float64_uses_pure_pytorch() -> None:
    x = torch.randn(2, 20, dtype=torch.float64)
    y, nu = call("forward", x, torch.tensor(3.0).double(), None, None)
    assert nu.dtype == torch.float64
    row = truth.solve(x[0].numpy(), 3.0)
    assert np.abs(y[0].numpy() - row.y).max() <= 1e-11


# Each label format is tested with each variant of the kernels. One list is longer than 32, the number of
# labels that a kernel reads at once.
LOSSES = [
    ("one class", False, False),
    ("weighted list", True, True),
    ("weighted multi-hot", False, True),
]


@each_variant
@pytest.mark.parametrize(("form", "packed", "masked"), LOSSES, ids=[loss[0] for loss in LOSSES])
def test_losses(force: Force, how: Plan | None, form: str, packed: bool, masked: bool) -> None:
    force(how)
    lengths = [5, 9, 70, 0] if packed else [70] * 3
    rows = loss_rows.draw(form, lengths, torch.float32, masked)
    loss_rows.check(call, loss_rows.batch(rows, form, packed))


@each_variant
def test_losses_of_special_rows(force: Force, how: Plan | None) -> None:
    force(how)
    rows = some([row for row in SPECIAL if loss_rows.available(row)], how)
    loss_rows.check_special(call, rows, torch.float32, lambda row: loss_rows.available(row)[-1:])
