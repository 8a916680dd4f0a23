"""The operators behind the LML loss, compared with float64 results for all label formats and dtypes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support import loss_rows
from tests.support.loss_rows import FORMS, LabeledRow, batch, draw
from tests.support.problems import SHORT
from tests.support.special_rows import SPECIAL
from torchlml._autograd import operators
from torchlml._torch import fast

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def call(name: str, *arguments: Tensor | None) -> tuple[Tensor, Tensor]:
    found = getattr(operators, name)(*arguments)
    if name == "loss_backward":
        grad, x, *rest = arguments
        assert x is not None
        overwritten = x.clone()
        found_k = operators.loss_backward_in_place(grad, overwritten, *rest)
        torch.testing.assert_close((overwritten, found_k), found, rtol=0, atol=0, equal_nan=True)
    return found


@each_dtype
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("form", FORMS)
def test_random_rows_are_accurate(form: str, masked: bool, packed: bool, dtype: torch.dtype) -> None:
    for lengths in ([37] * 6, [300] * 4) if not packed else ([5, 9, 0, 1, 130, 40, 64],):
        loss_rows.check(call, batch(draw(form, lengths, dtype, masked), form, packed))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_difficult_rows_are_accurate(dtype: torch.dtype) -> None:
    rows = []
    for problem in SHORT:
        x = problem.row(dtype)
        order = x.argsort(descending=True)
        chosen = {
            int(order[0]): 1.0,
            int(order[-1]): 0.5,
            int(order[min(math.ceil(problem.k), len(x) - 1)]): 2.0,
        }
        rows.append(LabeledRow(x, problem.k, None, chosen))
    loss_rows.check(call, batch(rows, "weighted list", packed=True))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_special_rows(dtype: torch.dtype) -> None:
    loss_rows.check_special(call, SPECIAL, dtype, loss_rows.available)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_label_beyond_its_row_gives_nan(dtype: torch.dtype) -> None:
    x, k = torch.randn(2, 6, dtype=dtype), torch.tensor(2.0, dtype=torch.float64)
    labels = torch.tensor([[6], [5]])
    loss, nu = operators.loss_forward(x, k, None, None, labels, None, None)
    assert loss[0].isnan().tolist() == [True, False]
    dx, _ = operators.loss_backward(torch.ones((), dtype=dtype), x, k, nu, None, None, labels, None, None)
    assert dx.isnan().all(-1).tolist() == [True, False]


@pytest.mark.parametrize(
    "labels", [torch.tensor([[-100]]), torch.zeros(1, 3, dtype=torch.bool)], ids=["list", "hot"]
)
def test_a_row_without_labels_is_ignored(labels: Tensor) -> None:
    x, k = torch.tensor([[1.0, math.nan, 2.0]]), torch.tensor(1.0, dtype=torch.float64)
    loss, nu = operators.loss_forward(x, k, None, None, labels, None, None)
    assert loss.tolist() == [[0.0], [0.0]]
    dx, dk = operators.loss_backward(torch.ones(1), x, k, nu, None, None, labels, None, None)
    assert not bool(dx.any())
    assert float(dk) == 0


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_no_rows_or_no_entries(shape: tuple[int, int]) -> None:
    x, k, labels = torch.empty(shape), torch.tensor(0.0).double(), torch.full((shape[0], 1), -1)
    for function in (operators.loss_forward, fast.loss_forward):
        loss, nu = function(x, k, None, None, labels, None, None)
        assert loss.tolist() == [[0.0] * shape[0]] * 2
        dx, dk = operators.loss_backward(torch.ones(()), x, k, nu, None, None, labels, None, None)
        assert dx.shape == shape
        assert dk.tolist() == [0.0] * shape[0]


@each_dtype
def test_the_bits_do_not_depend_on_the_threads_or_the_batch(dtype: torch.dtype) -> None:
    given = batch(draw("weighted list", [700] * 40, dtype, False), "weighted list", packed=False)
    rest = (given.labels, None, given.weight)

    def run(pick: slice) -> tuple[Tensor, ...]:
        x, k = given.x[pick].contiguous(), given.k[pick].contiguous()
        labels, weight = given.labels[pick].contiguous(), rest[2][pick].contiguous()  # type: ignore[index]
        loss, nu = operators.loss_forward(x, k, None, None, labels, None, weight)
        dx, dk = operators.loss_backward(
            torch.ones(len(k), dtype=nu.dtype), x, k, nu, None, None, labels, None, weight
        )
        return loss[0], dx, dk

    together, before = run(slice(None)), torch.get_num_threads()
    alone = run(slice(7, 8))
    try:
        torch.set_num_threads(3)
        threaded = run(slice(None))
    finally:
        torch.set_num_threads(before)
    for all_rows, one, again in zip(together, alone, threaded, strict=True):
        assert torch.equal(all_rows, again)
        assert torch.equal(all_rows[7:8], one)
