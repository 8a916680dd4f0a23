"""The values of every member of the family against its truth: the promises that lml itself is held to."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

import torchlml
from tests import family
from tests.family import CONSTRAINED, MEMBERS, Member
from tests.problems import PROBLEMS, SHORT, Problem

INF, NAN = math.inf, math.nan
PROMISE = {torch.float32: (1e-6, 2e-6), torch.float64: (1e-11, 1e-11)}
each_member = pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
each_constrained = pytest.mark.parametrize("member", CONSTRAINED, ids=lambda member: member.name)
each_dtype = pytest.mark.parametrize("dtype", PROMISE, ids=str)
SMALL = [problem for problem in SHORT if problem.row(torch.float64).numel() <= 200]


def each(problems: list[Problem]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("problem", problems, ids=lambda problem: problem.name)


def check(y: torch.Tensor, expected: np.ndarray, k: float | None, dtype: torch.dtype) -> None:
    entry, total = PROMISE[dtype]
    assert y.dtype == dtype
    got = y.double().numpy()
    assert np.abs(got - expected).max() <= entry
    if k is not None:
        assert abs(math.fsum(got) - k) <= total * max(1.0, k)
    assert got.min() >= 0


def bounds_for(n: int, k: float) -> np.ndarray:
    """Bounds from tiny to large, one of them 0, that leave room for k."""
    upper = 0.05 + (np.arange(n) * 0.618) % 1.7
    if n > 2:
        upper[1] = 0.0
    return upper * max(1.0, 1.3 * k / upper.sum())


@pytest.mark.parametrize("kind", [member.name for member in CONSTRAINED])
@each([problem for problem in SMALL if problem.row(torch.float64).numel() <= 12 and not problem.extreme])
def test_the_truth_is_true(kind: str, problem: Problem) -> None:
    # Padding by entries with a bound of 0 sends the same row through the other way of computing it.
    x = problem.row(torch.float64).numpy()
    upper = bounds_for(x.size, problem.k)
    long = np.concatenate([x, np.zeros(20)]), np.concatenate([upper, np.zeros(20)])
    short_way, long_way = (family.capped(kind, a, problem.k, u) for a, u in ((x, upper), long))
    assert np.abs(short_way - long_way[: x.size]).max() <= 1e-15 * max(1.0, float(np.abs(x).max()))


@each_member
@each(PROBLEMS)
@each_dtype
def test_values(member: Member, problem: Problem, dtype: torch.dtype) -> None:
    y = member.function(problem.row(dtype), problem.k)
    check(y, family.expected(member, problem, dtype), problem.k if member.fixed_sum else None, dtype)
    assert float(y.max()) <= 1


@each_constrained
@each(SMALL)
@each_dtype
def test_bounds_beside_the_entries(member: Member, problem: Problem, dtype: torch.dtype) -> None:
    x = problem.row(dtype)
    upper = torch.from_numpy(bounds_for(x.numel(), problem.k)).to(dtype)
    y = member.function(x, problem.k, upper)
    truth = family.capped(member.name, x.double().numpy(), problem.k, upper.double().numpy())
    scale = max(1.0, float(truth.max()))
    assert np.abs(y.double().numpy() - truth).max() <= scale * PROMISE[dtype][0]
    assert abs(float(y.double().sum()) - problem.k) <= PROMISE[dtype][1] * max(1.0, problem.k)
    assert bool((y <= upper).all())


@each_member
@each_dtype
def test_packed_and_masked_rows(member: Member, dtype: torch.dtype) -> None:
    rows = [problem.row(dtype) for problem in SMALL]
    sizes = [row.numel() for row in rows]
    k = torch.tensor([problem.k for problem in SMALL], dtype=torch.float64)
    offsets = torch.tensor([0, *np.cumsum(sizes)])
    packed = member.function(torch.cat(rows), k, offsets=offsets).split(sizes)
    padded = torch.full((len(rows), 211), NAN, dtype=dtype)
    mask = torch.zeros(len(rows), 211, dtype=torch.bool)
    for i, row in enumerate(rows):
        padded[i, 3 : 3 + row.numel()] = row
        mask[i, 3 : 3 + row.numel()] = True
    masked = member.function(padded, k, mask=mask)
    assert bool((masked[~mask] == 0).all())
    for i, problem in enumerate(SMALL):
        truth = family.expected(member, problem, dtype)
        for y in (packed[i], masked[i][mask[i]]):
            check(y, truth, problem.k if member.fixed_sum else None, dtype)


@each_member
@each([problem for problem in SMALL if not problem.extreme][::4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_is_rounded_once(member: Member, problem: Problem, dtype: torch.dtype) -> None:
    x = problem.row(dtype)
    y = member.function(x, problem.k)
    assert y.dtype == dtype
    truth = family.expected(member, problem, dtype)
    slack = 1e-6 * truth * max(1.0, float(x.abs().max())) + torch.finfo(torch.float32).tiny
    lowest, highest = (torch.from_numpy(truth + sign * slack).to(dtype) for sign in (-1, 1))
    assert bool(((lowest <= y) & (y <= highest)).all())


@each_dtype
@each(PROBLEMS)
def test_the_value(problem: Problem, dtype: torch.dtype) -> None:
    x = problem.row(dtype)
    expected, size = family.value(x.double().numpy(), problem.k)
    expected = float(torch.tensor(expected, dtype=torch.float64).to(dtype))  # 5e38 is inf in float32
    got = torchlml.lml_value(x, problem.k)
    assert got.dtype == dtype
    if math.isinf(expected):
        assert float(got) == expected
        return
    # exp(z) is right to |z| roundings, and z is at most 12 where it counts; tied entries all err alike.
    unit = torch.finfo(dtype).eps
    assert abs(float(got) - expected) <= 12 * unit * max(size, 1.0)
    with torch.no_grad():
        (differentiable, _) = torch.func.jvp(lambda x: torchlml.lml_value(x, problem.k), (x,), (x,))
    assert abs(float(differentiable) - expected) <= 12 * unit * max(size, 1.0)


def test_the_value_tends_to_the_sum_of_the_largest() -> None:
    x = torch.randn(5, 30, dtype=torch.float64)
    limit = 1e-4 * torchlml.lml_value(x / 1e-4, 4)
    torch.testing.assert_close(limit, x.topk(4).values.sum(-1), rtol=0, atol=1e-3)


@each_dtype
def test_softmax_and_sparsemax_are_members(dtype: torch.dtype) -> None:
    x = (torch.randn(20, 50, dtype=torch.float64) * 3).to(dtype)
    close: dict[str, Any] = {"rtol": 0, "atol": PROMISE[dtype][0] / 10}
    torch.testing.assert_close(torchlml.constrained_softmax(x, 1), x.softmax(-1), **close)
    seven = 7.5 * x.double().softmax(-1)
    torch.testing.assert_close(torchlml.constrained_softmax(x, 7.5, INF), seven.to(dtype), **close)
    # Sparsemax from its definition: the threshold of the largest support that is consistent.
    ordered = x.double().sort(-1, descending=True).values
    places = torch.arange(1, 51, dtype=torch.float64)
    support = (1 + places * ordered > ordered.cumsum(-1)).sum(-1, keepdim=True)
    tau = (ordered.cumsum(-1).gather(-1, support - 1) - 1) / support
    sparse = (x.double() - tau).clamp(min=0)
    torch.testing.assert_close(torchlml.constrained_sparsemax(x, 1).double(), sparse, **close)
    torch.testing.assert_close(torchlml.constrained_sparsemax(x, 1, INF).double(), sparse, **close)


def test_the_entmax_package_agrees() -> None:
    entmax = pytest.importorskip("entmax", reason="the package entmax is not installed")
    x = torch.randn(20, 50, dtype=torch.float64) * 3
    torch.testing.assert_close(torchlml.constrained_sparsemax(x, 1), entmax.sparsemax(x, -1))
    # Its budget is a limit of the sum, which binds for these rows.
    budget = entmax.budget_bisect(x, budget=5, dim=-1, n_iter=80)
    assert bool((x.clamp(0, 1).sum(-1) >= 5).all())
    torch.testing.assert_close(torchlml.constrained_sparsemax(x, 5), budget, rtol=0, atol=1e-9)


SPECIAL: list[tuple[str, list[float], float, list[float], dict[str, Any]]] = [
    ("k = 0", [1.0, -2.0, 0.5], 0, [0, 0, 0], {}),
    ("k = n", [1.0, -2.0, 0.5], 3, [1, 1, 1], {}),
    ("k = sum of the bounds", [1.0, -2.0, 0.5], 1.5, [0.5, 0.25, 0.75], {"upper": [0.5, 0.25, 0.75]}),
    ("-inf leaves m = k", [1.0, -INF, 0.5], 2, [1, 0, 1], {}),
    ("-inf leaves m < k", [1.0, -INF, -INF], 2, [1, 0, 0], {}),
    ("only -inf", [-INF, -INF], 1, [0, 0], {}),
    ("-inf and a tie", [2.0, 2.0, -INF, 2.0, 2.0], 1, [0.25, 0.25, 0, 0.25, 0.25], {}),
    ("mask leaves m < k", [1.0, 3.0, 0.5], 2, [0, 0, 1], {"mask": [False, False, True]}),
    ("everything masked", [1.0, 3.0], 1, [0, 0], {"mask": [False, False]}),
    ("mask hides +inf and NaN", [0.0, INF, NAN, 0.0], 1, [0.5, 0, 0, 0.5], {"mask": [True, False] * 2}),
    ("p = 1 < k", [0.0, INF, 0.0], 2, [0.5, 1, 0.5], {}),
    ("p = k", [0.0, INF, 3.0, INF], 2, [0, 1, 0, 1], {}),
    ("p > k", [0.0, INF, 3.0, INF, INF], 2, [0, 2 / 3, 0, 2 / 3, 2 / 3], {}),
    ("+inf share by their bounds", [0.0, INF, INF, INF], 1, [0, 0.2, 0.4, 0.4], {"upper": [1, 0.2, 1, 1]}),
    ("bounds of 0", [5.0, 0.0, 0.0], 1, [0, 0.5, 0.5], {"upper": [0, 1, 1]}),
    ("NaN", [0.0, NAN, 1.0], 1, [NAN] * 3, {}),
    ("NaN, k = 0", [0.0, NAN, 1.0], 0, [NAN] * 3, {}),
]
SPECIAL[9][4]["mask"] = [True, False, False, True]


@each_constrained
@pytest.mark.parametrize("special", SPECIAL, ids=lambda special: special[0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_special_rows_of_constrained(member: Member, special: Any, dtype: torch.dtype) -> None:
    _, row, k, expected, options = special
    dtypes = {"upper": torch.float64, "mask": torch.bool}
    tensors = {name: torch.tensor(option, dtype=dtypes[name]) for name, option in options.items()}
    x = torch.tensor(row, dtype=dtype, requires_grad=True)
    target = torch.tensor(float(k), dtype=torch.float64, requires_grad=True)
    y = member.function(x, target, **tensors)
    limit = {torch.float64: 1e-11, torch.float32: 1e-6, torch.bfloat16: 2.0**-9}[dtype]
    wanted = torch.tensor(expected, dtype=torch.float64)
    if "upper" in options:
        wanted = torch.minimum(wanted, tensors["upper"].double())
    torch.testing.assert_close(y.double(), wanted, rtol=limit, atol=limit, equal_nan=True)
    dx, dk = torch.autograd.grad(y, (x, target), torch.arange(1.0, len(row) + 1, dtype=dtype))
    if NAN in expected or wanted.isnan().any():
        assert bool(dx.isnan().all())
    else:
        assert bool(dx.isfinite().all())
        assert bool(dx[~torch.tensor(row).isfinite()].eq(0).all())
        assert bool(dk.isfinite())
    # A special row in the middle of ordinary ones touches none of them.
    others = torch.randn(2, len(row)).to(dtype)
    batch = torch.stack([others[0], x.detach(), others[1]])
    options = {**tensors, "mask": tensors.get("mask", torch.ones(len(row), dtype=torch.bool))}
    mixed = member.function(batch, target.detach(), **options)
    assert torch.equal(mixed[0], member.function(others[0], target.detach(), **options))
    alone = member.function(x.detach(), target.detach(), **options)
    torch.testing.assert_close(mixed[1], alone, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_special_rows_of_bounds(dtype: torch.dtype) -> None:
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
    # Half a million entries at 1 - 2e-9: whether k is kept hangs on less than a float32 sum can tell.
    x = torch.full((500_001,), 20.0)
    x[0] = 0.0
    missing = 500_000 * math.exp(-20)
    for k, free in ((500_000.5 - 0.9 * missing, True), (500_000.5 - 1.1 * missing, False)):
        assert (float(torchlml.lml_dual(x, k, bound="at_most")) == 0) == free
        assert (float(torchlml.lml_dual(x, k, bound="at_least")) == 0) == (not free)
        # A free row is its own sigmoid: the first entry is then exactly a half.
        assert (float(torchlml.lml(x, k, bound="at_most")[0]) == 0.5) == free
        assert (float(torchlml.lml(x, k, bound="at_least")[0]) == 0.5) == (not free)
        assert (float(torchlml.log_lml(x, k, bound="at_most")[0].exp()) == 0.5) == free


@each_dtype
def test_special_rows_of_the_value(dtype: torch.dtype) -> None:
    def value(row: list[float], k: float, **options: Any) -> list[float]:
        x = torch.tensor(row, dtype=dtype, requires_grad=True)
        target = torch.tensor(float(k), dtype=torch.float64, requires_grad=True)
        v = torchlml.lml_value(x, target, **options)
        dx, dk = torch.autograd.grad(v, (x, target))
        y = torchlml.lml(x, k, **options).detach()
        torch.testing.assert_close(dx, y, equal_nan=True)
        assert bool(dk.isfinite()) or math.isnan(float(v.detach()))
        return [float(v.detach()), float(dk)]

    assert value([1.0, -2.0, 0.5], 0) == [0, 0]
    assert value([1.0, -2.0, 0.5], 3) == [-0.5, 0]
    assert value([1.0, -INF, 0.5], 2) == [1.5, 0]
    assert value([1.0, NAN, 0.5], 2, mask=torch.tensor([True, False, True])) == [1.5, 0]
    assert value([1.0, INF, 0.5], 2)[0] == INF
    assert value([1.0, INF, 0.5], 0) == [0, 0]
    assert math.isnan(value([1.0, NAN, 0.5], 1)[0])
    assert torchlml.lml_value(torch.empty(3, 0), 0).tolist() == [0, 0, 0]
    assert torchlml.lml_value(torch.tensor([1.0, 2, 5]), 2, offsets=torch.tensor([0, 0, 2, 3])).tolist() == [
        0,
        3,
        5,
    ]


@each_member
def test_shapes(member: Member) -> None:
    x = torch.randn(3, 4, 5)
    y = member.function(x, 2, dim=1)
    torch.testing.assert_close(y, member.function(x.movedim(1, -1), 2).movedim(-1, 1))
    for shape, k in [((3, 0), 0), ((0, 5), 2), ((2, 0, 4), 1.5), ((0,), 0)]:
        assert member.function(torch.empty(shape), k).shape == shape
    assert member.function(torch.empty(0), 1, offsets=torch.tensor([0, 0])).shape == (0,)
    per_row = torch.tensor([1.0, 2.0, 3.5])
    rows = torch.stack([member.function(x[i], float(per_row[i])) for i in range(3)])
    torch.testing.assert_close(member.function(x, per_row.unsqueeze(-1)), rows)


@pytest.mark.parametrize("size", [20_000])
@pytest.mark.parametrize("gap", [3.0, 100.0])
@each_constrained
def test_long_staircases_end(member: Member, gap: float, size: int) -> None:
    # One entry more at its bound each time is the slowest way to saturate half of them: it must not be taken.
    x = torch.arange(size, dtype=torch.float64) * gap
    y = member.function(x, size // 2)
    assert abs(float(y.sum()) - size // 2) <= 1e-6
    assert bool((y[size // 2 + 1 :] == 1).all())


@pytest.mark.parametrize("bound", ["at_most", "at_least"])
def test_losses(bound: str) -> None:
    logits = torch.randn(12, 9, dtype=torch.float64) * 2
    k = 4
    log_y = torchlml.log_lml(logits, k, bound=bound)
    exact = torchlml.log_lml(logits, k)
    assert 0 < int((log_y != exact).any(-1).sum()) < 12  # both kinds of rows
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


WRONG: dict[str, tuple[Any, list[str]]] = {
    "bound": (lambda: torchlml.lml(torch.zeros(3), 1, bound="less"), ["`bound`", "at_most", "'less'"]),
    "bound of the dual": (lambda: torchlml.lml_dual(torch.zeros(3), 1, bound="x"), ["`bound`"]),
    "bound of a layer": (lambda: torchlml.LML(1, bound="x"), ["`bound`"]),
    "bound of a loss": (lambda: torchlml.LMLLoss(1, bound="x"), ["`bound`"]),
    "at least more than n": (
        lambda: torchlml.lml(torch.zeros(3), 4, bound="at_least"),
        ["`k`", "n = 3", "4"],
    ),
    "negative k": (lambda: torchlml.lml(torch.zeros(3), -1, bound="at_most"), ["`k`", "-1"]),
    "too little room": (
        lambda: torchlml.constrained_softmax(torch.zeros(4), 2, 0.3),
        ["`upper`", "1.2", "k is 2"],
    ),
    "too little room in one row": (
        lambda: torchlml.constrained_sparsemax(torch.zeros(2, 4), 2, torch.tensor([[1.0] * 4, [0.1] * 4])),
        ["`upper`", "0.4", "k is 2"],
    ),
    "negative bound": (
        lambda: torchlml.constrained_sparsemax(torch.zeros(4), 1, torch.tensor([1, 1, -0.5, 1])),
        ["`upper`", "-0.5"],
    ),
    "NaN bound": (lambda: torchlml.constrained_softmax(torch.zeros(4), 1, NAN), ["`upper`", "nan"]),
    "shape of the bounds": (
        lambda: torchlml.constrained_softmax(torch.zeros(4), 1, torch.ones(3)),
        ["`upper`", "(4,)", "(3,)"],
    ),
    "text as bounds": (lambda: torchlml.constrained_softmax(torch.zeros(4), 1, "1"), ["`upper`", "'1'"]),
    "bool as bounds": (
        lambda: torchlml.constrained_softmax(torch.zeros(4), 1, torch.ones(4) > 0),
        ["`upper`", "torch.bool"],
    ),
    "fractional k of a mask": (lambda: torchlml.topk_mask(torch.zeros(4), 1.5), ["`k`", "whole", "1.5"]),
    "fractional k of a sample": (
        lambda: torchlml.sample_subset(torch.zeros(2, 4), torch.tensor([1, 1.5])),
        ["`k`", "whole"],
    ),
    "k of a mask above n": (lambda: torchlml.topk_mask(torch.zeros(4), 5), ["`k`", "n = 4"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    call, words = WRONG[case]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def test_bounds_that_should_sum_to_k_are_forgiven_their_rounding() -> None:
    upper = torch.rand(50).softmax(0) * 3
    for function in (torchlml.constrained_softmax, torchlml.constrained_sparsemax):
        torch.testing.assert_close(function(torch.randn(50), 3, upper), upper)


@pytest.mark.parametrize("shape", [(57, 33), (1, 30_001), (3, 20_003)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@each_member
def test_the_same_bits(member: Member, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape, dtype=torch.float64) * 4).to(dtype)
    k = torch.linspace(0.5, shape[1] - 0.5, shape[0], dtype=torch.float64)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            leaf = x.clone().requires_grad_()
            y = member.function(leaf, k)
            (gradient,) = torch.autograd.grad(
                y, leaf, torch.linspace(-1, 1, shape[1], dtype=dtype).expand(shape)
            )
            results.append((y.detach(), gradient))
    finally:
        torch.set_num_threads(before)
    for a, b in itertools.pairwise(results):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    for i in {0, shape[0] // 2, shape[0] - 1}:
        assert torch.equal(member.function(x[i], k[i]), results[0][0][i])
