"""Labels sharded across processes: values, gradients, special rows, communication and invalid arguments."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

import torchlml
import torchlml._distributed.group as group_module
import torchlml._distributed.solve as solve_module
from tests.support.distributed import in_processes, part, same_on_all, whole
from tests.support.problems import SHORT
from tests.support.special_rows import DENSE, Special
from torchlml.metrics import (
    PropensityScoredPrecision,
    TopKNDCG,
    TopKPrecision,
    TopKRecall,
    propensity_scored_precision,
    topk_ndcg,
    topk_precision,
    topk_recall,
)

Group = dist.ProcessGroup
FUNCTIONS = (torchlml.lml, torchlml.log_lml, torchlml.lml_dual)
BOUNDS = ("exactly", "at_most", "at_least")
REDUCTIONS = (("mean", "mean"), ("sum", "sum"), ("none", "sum"), ("mean", "sum"))
FORMS = ("index", "list", "bool", "float")
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-6}
DTYPES = tuple(TOLERANCE)


def rounds(call: Callable[[], object]) -> int:
    """Count the communication rounds of a call. `test_counting` compares the result with PyTorch's count."""
    number = 0

    def count(*arguments: Any, **more: Any) -> None:
        nonlocal number
        number += 1
        gather(*arguments, **more)

    gather = group_module._all_gather
    group_module._all_gather = count
    try:
        call()
    finally:
        group_module._all_gather = gather
    return number


@in_processes(2, 3, 4)
def test_counting(group: Group) -> None:
    x = part(torch.randn(4, 100), group)
    with CommDebugMode() as counted:
        torchlml.lml(x, 5, group=group)
    assert counted.get_total_counts() == rounds(lambda: torchlml.lml(x, 5, group=group)) > 0


@in_processes(2)
def test_the_layer(group: Group) -> None:
    x = part(torch.randn(4, 10), group)
    layer = torchlml.LML(3, temperature=0.5, bound="at_most", group=group)
    assert torch.equal(layer(x), torchlml.lml(x / 0.5, 3, bound="at_most", group=group))


def close(found: Tensor, wanted: Tensor, slack: float = 1.0) -> None:
    limit = TOLERANCE[wanted.dtype] * slack
    size = max([1.0, *wanted.detach().abs().flatten().tolist()])
    torch.testing.assert_close(found, wanted, rtol=limit, atol=limit * size)


@in_processes(2, 3)
def test_problems_against_the_truth(group: Group) -> None:
    """Results match the exact solutions. With three processes, rows are sorted and have the other dtype."""
    size = dist.get_world_size(group)
    for i, problem in enumerate(SHORT):
        dtype, limit = ((torch.float32, 1e-6), (torch.float64, 1e-11))[(i + size) % 2]
        right = problem.truth(dtype)
        order = np.argsort(right.z) if size == 3 else np.arange(len(right.y))
        x = problem.row(dtype)[torch.from_numpy(order)]
        nu = torchlml.lml_dual(part(x, group), problem.k, group=group)
        assert same_on_all(nu, group), problem.name
        y = whole(torchlml.lml(part(x, group), problem.k, group=group), group).double()
        error = np.abs(y.numpy() - right.y[order]).max()
        assert error <= limit, (problem.name, dtype, error)
        assert abs(float(y.sum()) - problem.k) <= 2 * limit * max(1, problem.k), problem.name
        log_y = whole(torchlml.log_lml(part(x, group), problem.k, group=group), group)
        wanted = torch.from_numpy(right.log_y[order]).to(dtype)
        torch.testing.assert_close(log_y, wanted, rtol=4 * limit, atol=4 * limit, msg=problem.name)


@in_processes(2, 3, 4)
def test_like_unsharded(group: Group) -> None:
    """y, log y, nu and their gradients match the unsharded call, with masks, bounds and one k per row.

    The dtype depends on the number of processes, so that each combination is tested in both dtypes.
    """
    for i, (bound, masked, function) in enumerate(itertools.product(BOUNDS, (False, True), FUNCTIONS)):
        dtype = DTYPES[(i + dist.get_world_size(group)) % 2]
        x, k = torch.randn(5, 3, 23, dtype=dtype) * 3, torch.rand(5, 3) * 6 + 0.5
        mask = torch.rand(3, 23) < 0.8 if masked else None
        _like_unsharded(function, x, k, mask, bound, group)


def _like_unsharded(
    function: Any, x: Tensor, k: Tensor, mask: Tensor | None, bound: str, group: Group
) -> None:
    x_whole, k_whole = x.clone().requires_grad_(), k.clone().requires_grad_()
    wanted = function(x_whole, k_whole, mask=mask, bound=bound)
    grad = torch.where(wanted.isinf(), 0, torch.randn(wanted.shape, dtype=x.dtype))
    dx, dk = torch.autograd.grad(wanted, (x_whole, k_whole), grad)
    own_x, own_k = part(x, group).requires_grad_(), k.clone().requires_grad_()
    own_mask = None if mask is None else part(mask, group)
    found = function(own_x, own_k, mask=own_mask, bound=bound, group=group)
    per_row = function is torchlml.lml_dual
    own_dx, own_dk = torch.autograd.grad(found, (own_x, own_k), grad if per_row else part(grad, group))
    close(found, wanted if per_row else part(wanted, group))
    close(own_dx, part(dx, group), 4)
    close(own_dk, dk, 16)
    assert same_on_all(own_dk, group)
    if per_row:
        assert same_on_all(found, group)


@in_processes(2, 3, 4)
def test_another_dim(group: Group) -> None:
    x = torch.randn(2, 19, 3, dtype=torch.float64)
    y = torchlml.lml(part(x, group, 1), 4, dim=1, group=group)
    close(y, part(torchlml.lml(x, 4, dim=1), group, 1))


@in_processes(4)
def test_special_rows(group: Group) -> None:
    """Rows with infinities, NaN, masks or extreme k have the results listed in support/special_rows.py."""
    for row in DENSE:
        for dtype in TOLERANCE:
            _special(row, dtype, group)


def _special(row: Special, dtype: torch.dtype, group: Group) -> None:
    mask = torch.tensor(row.mask or [True] * len(row.x))
    x = torch.tensor(row.x, dtype=dtype)
    wanted = torch.tensor(row.y, dtype=torch.float64)
    for function in FUNCTIONS:
        own = part(x, group).requires_grad_()
        k = torch.tensor(float(row.k), requires_grad=True)
        found = function(own, k, mask=part(mask, group), group=group)
        right = {"lml": wanted, "log_lml": wanted.log(), "lml_dual": torch.tensor(row.nu)}[function.__name__]
        right = right if function is torchlml.lml_dual else part(right, group)
        torch.testing.assert_close(
            found.detach().double(), right.double(), rtol=2e-6, atol=2e-6, equal_nan=True, msg=row.name
        )
        # The gradients match those of the unsharded call, which test_special_rows.py tests.
        x_whole, k_whole = x.clone().requires_grad_(), k.detach().clone().requires_grad_()
        y = function(x_whole, k_whole, mask=mask)
        dx, dk = torch.autograd.grad(y, (x_whole, k_whole), torch.ones_like(y))
        own_dx, own_dk = torch.autograd.grad(found, (own, k), torch.ones_like(found))
        options = {"rtol": 1e-5, "atol": 1e-6, "equal_nan": True}
        torch.testing.assert_close(own_dx, part(dx, group), **options, msg=f"{row.name} {function.__name__}")
        torch.testing.assert_close(own_dk, dk, **options, msg=f"{row.name} {function.__name__}")


def _target(form: str, rows: int, n: int) -> Tensor:
    if form in ("index", "list"):
        target = torch.randint(n, (rows,) if form == "index" else (rows, 4))
        target[1] = -100
        return target
    hot = torch.rand(rows, n) < 0.2
    hot[1] = False
    return hot if form == "bool" else hot.float() * 2


def _own(target: Tensor, group: Group) -> Tensor:
    return target if target.dtype == torch.int64 else part(target, group)


@in_processes(2, 4)
def test_losses(group: Group) -> None:
    """The loss matches the unsharded loss for combinations of target format, reduction, bound and dtype."""
    size = dist.get_world_size(group)
    for i, form in enumerate(FORMS):
        for j, (reduction, of_labels) in enumerate(REDUCTIONS):
            dtype, bound = DTYPES[(i // 2 + j) % 2], BOUNDS[(i + j + size) % 3]
            settings = {"reduction": reduction, "label_reduction": of_labels, "bound": bound}
            _loss_like_unsharded(dtype, form, settings, group)
            _linear_like_unsharded(dtype, form, settings, group)


def _loss_like_unsharded(dtype: torch.dtype, form: str, settings: Any, group: Group) -> None:
    x, k, weight = torch.randn(6, 23, dtype=dtype) * 3, torch.rand(6) * 6 + 0.5, torch.rand(23)
    x[1] = math.nan  # has no effect, because the row has no label
    target = _target(form, 6, 23)
    x_whole, k_whole = x.clone().requires_grad_(), k.clone().requires_grad_()
    wanted = torchlml.lml_loss(x_whole, target, k_whole, weight=weight, **settings)
    grad = torch.rand(wanted.shape, dtype=dtype)
    dx, dk = torch.autograd.grad(wanted, (x_whole, k_whole), grad)
    own_x, own_k = part(x, group).requires_grad_(), k.clone().requires_grad_()
    loss = torchlml.lml_loss(
        own_x, _own(target, group), own_k, weight=part(weight, group), **settings, group=group
    )
    own_dx, own_dk = torch.autograd.grad(loss, (own_x, own_k), grad)
    close(loss, wanted)
    close(own_dx, part(dx, group), 4)
    close(own_dk, dk, 16)
    assert same_on_all(loss, group)


def _linear_like_unsharded(dtype: torch.dtype, form: str, settings: Any, group: Group) -> None:
    k, weight = torch.rand(6) * 6 + 0.5, torch.rand(23)
    tensors = [*(torch.randn(shape, dtype=dtype) for shape in ((6, 5), (23, 5), (23,))), k]
    target = _target(form, 6, 23)
    all_of = [t.clone().requires_grad_() for t in tensors]
    logits = torch.nn.functional.linear(*all_of[:3])
    wanted = torchlml.lml_loss(logits, target, all_of[3], weight=weight, **settings)
    grad = torch.rand(wanted.shape, dtype=dtype)
    right = torch.autograd.grad(wanted, all_of, grad)
    own = [tensors[0], part(tensors[1], group, 0), part(tensors[2], group, 0), k]
    own = [t.clone().requires_grad_() for t in own]
    loss = torchlml.linear_lml_loss(
        own[0],
        own[1],
        _own(target, group),
        own[3],
        linear_bias=own[2],
        weight=part(weight, group),
        memory_limit=23 * 2 * 2 * dtype.itemsize,  # two rows at a time
        **settings,
        group=group,
    )
    found = torch.autograd.grad(loss, own, grad)
    close(loss, wanted)
    for mine, theirs, dim in zip(found, right, (None, 0, 0, None), strict=True):
        close(mine, theirs if dim is None else part(theirs, group, dim), 16)
    assert same_on_all(found[0], group)


@in_processes(2, 3, 4)
def test_half_precision(group: Group) -> None:
    x = (torch.randn(4, 40) * 3).bfloat16()
    for function in FUNCTIONS:
        per_row = function is torchlml.lml_dual
        wanted = function(x, 5)
        found = function(part(x, group), 5, group=group)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, wanted if per_row else part(wanted, group))
    with torch.autocast("cpu"):
        loss = torchlml.lml_loss(part(x, group), torch.tensor([3, 7, 0, 39]), 5, group=group)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, torchlml.lml_loss(x, torch.tensor([3, 7, 0, 39]), 5))


@in_processes(2, 4)
def test_rounds(group: Group) -> None:
    """A call takes at most 4 rounds for logits of scale 1 to 3, and at most 6 for scale 12.

    The backward pass takes one round for the layer and none for the loss.
    """
    for scale, most in ((1, 4), (3, 4), (12, 6)):
        for n in (100, 10_000):
            for k in (1, 5, 50, n // 10, n - 5):
                x = part(torch.randn(8, n) * scale, group)
                target = torch.randint(n, (8,))
                number = rounds(lambda x=x, k=k: torchlml.lml(x, k, group=group))
                assert number <= most, (scale, n, k, number)
                number = rounds(lambda x=x, k=k, t=target: torchlml.lml_loss(x, t, k, group=group))
                assert number <= most, ("loss", scale, n, k, number)
    x = part(torch.randn(16, 1000), group).requires_grad_()
    y = torchlml.lml(x, 5, group=group)
    assert rounds(lambda: y.sum().backward()) == 1
    loss = torchlml.lml_loss(x, torch.arange(16), 5, group=group)
    assert rounds(loss.backward) == 0


@in_processes(2, 3)
def test_rounds_of_any_row(group: Group) -> None:
    worst = 0
    for problem in SHORT:
        for order in (False, True):
            x = problem.row(torch.float32)
            x = part(x.sort().values if order else x, group)[None]
            worst = max(worst, rounds(lambda x=x, k=problem.k: torchlml.lml(x, k, group=group)))
    for scale in (1e2, 1e3, 1e5, 1e30):
        for k in (1, 7, 1000.5, 1999):
            x = part((torch.randn(4, 2000) * scale).sort().values, group)
            worst = max(worst, rounds(lambda x=x, k=k: torchlml.lml(x, k, group=group)))
    assert worst <= 12, worst


def passes(call: Callable[[], object]) -> int:
    """Count the passes over all entries in a call."""
    number = 0
    module: Any = solve_module
    evaluate = module.evaluate

    def count(*arguments: Any) -> Tensor:
        nonlocal number
        number += 1
        return evaluate(*arguments)

    module.evaluate = count
    try:
        call()
    finally:
        module.evaluate = evaluate
    return number


@in_processes(2)
def test_passes_over_the_entries(group: Group) -> None:
    """Each round has one pass, except the first, which only compares arguments. A bound adds a pass."""
    x, target = part(torch.randn(4, 100), group), torch.arange(4)
    for bound in BOUNDS:
        calls: list[Callable[[], object]] = [
            lambda bound=bound: torchlml.lml(x, 5, bound=bound, group=group),
            lambda bound=bound: torchlml.lml_loss(x, target, 5, bound=bound, group=group),
        ]
        for call in calls:
            found, number = passes(call), rounds(call)
            if bound == "exactly":
                assert found == number - 1, (found, number)
            else:
                assert found >= 2


@in_processes(2)
def test_modules_with_a_group(group: Group) -> None:
    logits, target, k = torch.randn(4, 12), torch.tensor([0, 5, 11, -100]), 3
    loss = torchlml.LMLLoss(k, group=group)
    close(loss(part(logits, group), target), torchlml.lml_loss(logits, target, k))
    h, n = torch.randn(4, 5), part(logits, group).shape[1]
    linear = torchlml.LinearLMLLoss(5, n, k, group=group)
    weight = whole(linear.linear.weight, group, 0)
    close(linear(h, target), torchlml.lml_loss(h @ weight.T, target, k))


@in_processes(3)
def test_numbers_sent(group: Group) -> None:
    """The amount of data sent in each round follows the formulas in docs/scale.md."""
    rows, sent = 16, []
    gather = group_module._all_gather

    def note(into: Tensor, part: Tensor, **more: Any) -> None:
        sent.append(part.numel() * part.element_size() / 8)
        gather(into, part, **more)

    group_module._all_gather = note
    try:
        x = part(torch.randn(rows, 999), group).requires_grad_()
        y = torchlml.lml(x, 5, group=group)
        assert sent[:2] == [256, 17 * rows]
        assert all(number / (9 * rows) <= 16 for number in sent[2:])
        assert sent[2] / (9 * rows) in (1, 3, 8, 16)
        sent.clear()
        y.square().sum().backward()
        assert sent == [rows]
        sent.clear()
        torchlml.lml_loss(x, torch.arange(rows), 5, group=group)
        assert sent[:2] == [256, 23 * rows]
        assert sent[2] / (14 * rows) in (1, 3, 8, 16)
        sent.clear()
        torchlml.lml(x[:1].detach() * 1e6, 5, group=group)
        assert 385 in sent
    finally:
        group_module._all_gather = gather


@in_processes(2, 3, 4)
def test_invalid_arguments(group: Group) -> None:
    """An invalid argument on one process raises a one-line error on every process."""
    rank = dist.get_rank(group)
    last = rank == dist.get_world_size(group) - 1
    x, target = torch.randn(4, 6), torch.tensor([0, 1, 2, 3])
    linear = torchlml.linear_lml_loss
    odd: Any = "\u00e9\U0001f600" * 600  # has more UTF-8 bytes than characters
    cases: list[tuple[str, Callable[[], object]]] = [
        ("same k", lambda: torchlml.lml(x, 2 + last, group=group)),
        ("same k", lambda: torchlml.lml(x, torch.full((4,), 2.0 + last), group=group)),
        ("same dtype", lambda: torchlml.lml(x.double() if last else x, 2, group=group)),
        ("same device", lambda: torchlml.lml(x.to("meta" if last else "cpu"), 2, group=group)),
        ("same row shape", lambda: torchlml.lml(x[:3] if last else x, 2, group=group)),
        ("same bound", lambda: torchlml.lml(x, 2, bound="at_most" if last else "exactly", group=group)),
        ("same function", lambda: (torchlml.log_lml if last else torchlml.lml)(x, 2, group=group)),
        ("same target", lambda: torchlml.lml_loss(x, target.flip(0) if last else target, 2, group=group)),
        ("`k` must be", lambda: torchlml.lml(x, -1 if last else 2, group=group)),
        ("`k` must be from 0 to n", lambda: torchlml.lml(x, 1000, group=group)),
        ("`x` must be", lambda: torchlml.lml(x.long() if last else x, 2, group=group)),
        ("`target` must contain class indices", lambda: torchlml.lml_loss(x, target + 1000, 2, group=group)),
        ("`target`", lambda: torchlml.lml_loss(x, target[:3], 2, group=group)),
        ("`target`", lambda: torchlml.lml_loss(x, (x > 0)[:, : 6 - last], 2, group=group)),
        ("`weight`", lambda: torchlml.lml_loss(x, target, 2, weight=torch.ones(7), group=group)),
        ("`linear_weight`", lambda: linear(x, torch.ones(9, 5 + last), target, 2, group=group)),
        ("`offsets`", lambda: torchlml.lml(x[0], 2, offsets=torch.tensor([0, 6]), group=group)),
        ("`bound`", lambda: torchlml.lml(x, 2, bound=odd if last else "exactly", group=group)),
        ("`offsets`", lambda: torchlml.lml_loss(x, target, 2, offsets=target if last else None, group=group)),
        ("`offsets`", lambda: topk_recall(x, target, 2, offsets=target if last else None, group=group)),
        ("`reduction`", lambda: torchlml.lml_loss(x, target, 2, reduction=WORDS[last], group=group)),
        ("dense", lambda: linear(x, x.to_sparse() if last else x, target, 2, group=group)),
        ("gradient requirement", lambda: linear(x.clone().requires_grad_(last), x, target, 2, group=group)),
        ("same autocast", lambda: _under_autocast(last, lambda: linear(x, x, target, 2, group=group))),
    ]
    for words, call in cases:
        with pytest.raises((ValueError, TypeError), match=re.escape(words)) as caught:
            call()
        assert "\n" not in str(caught.value)
    # After these errors, the group still works.
    close(torchlml.lml(part(x, group), 2, group=group), part(torchlml.lml(x, 2), group))


# The error message for the second value exceeds the maximum length that is sent to other processes.
WORDS: Any = ("mean", "ü" * 3000)


def _under_autocast(enabled: bool, call: Callable[[], Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        return call()


@in_processes(2, 3, 4)
def test_k_of_0_in_a_row_with_a_label(group: Group) -> None:
    """All processes raise an error, including those without the label, and the group remains usable."""
    logits, hidden, weight = torch.randn(2, 11), torch.randn(2, 3), torch.randn(11, 3)
    k, hot = torch.tensor([2.0, 0.0]), torch.arange(11) == torch.tensor([[4], [10]])
    for target in (torch.tensor([4, 10]), part(hot, group)):
        with pytest.raises(ValueError, match="`k` must be positive in every row that has a label"):
            torchlml.lml_loss(part(logits, group), target, k, group=group)
        with pytest.raises(ValueError, match="`k` must be positive in every row that has a label"):
            torchlml.linear_lml_loss(hidden, part(weight, group, 0), target, k, group=group)
    target = torch.tensor([4, -100])
    assert torchlml.lml_loss(part(logits, group), target, k, group=group).isfinite()
    assert torchlml.linear_lml_loss(hidden, part(weight, group, 0), target, k, group=group).isfinite()


@in_processes(2, 3, 4)
def test_labels_behind_a_mask(group: Group) -> None:
    x, mask = torch.randn(2, 6), torch.ones(2, 6, dtype=torch.bool)
    mask[1, 5] = False
    with pytest.raises(ValueError, match="`mask` is False"):
        torchlml.lml_loss(part(x, group), torch.tensor([0, 5]), 2, mask=part(mask, group), group=group)


@in_processes(2, 3, 4)
def test_transforms_raise(group: Group) -> None:
    x = part(torch.randn(2, 8, dtype=torch.float64), group)
    h, target = torch.randn(2, 3, dtype=torch.float64), torch.tensor([0, 1])
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: torchlml.lml(x, 2, group=group).sum(),
        lambda x: torchlml.lml_loss(x, target, 2, group=group),
        lambda x: torchlml.linear_lml_loss(h, x.mT @ torch.ones_like(h), target, 2, group=group),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match="With `group`, only plain calls"):
            torch.func.grad(call)(x)
        # The calls must raise, because a gradient without a graph would silently disable a gradient penalty.
        with pytest.raises(NotImplementedError, match="With `group`, second derivatives"):
            torch.autograd.grad(call(x.requires_grad_()), x, create_graph=True)
        x.requires_grad_(False)


@in_processes(2)
def test_compiled(group: Group) -> None:
    x = torch.randn(3, 12)
    compiled = torch.compile(lambda x: 2 * torchlml.lml(x, 2, group=group), backend="eager")
    close(compiled(part(x, group)), part(2 * torchlml.lml(x, 2), group))


@in_processes(2, 3, 4)
def test_metrics(group: Group) -> None:
    preds = torch.randint(-3, 3, (7, 20)).float()  # with ties
    mask, p = torch.rand(7, 20) < 0.9, torch.rand(20).clamp(min=0.01)
    ks, target = (1, 5, 30), {form: _target(form, 7, 20) for form in FORMS}
    cases: Any = [(TopKRecall(ks, group=group), topk_recall, form) for form in FORMS]
    cases += [(TopKPrecision(ks, group=group), topk_precision, "list")]
    cases += [(TopKNDCG(ks, group=group), topk_ndcg, "list")]
    psp = PropensityScoredPrecision(part(p, group), ks, group=group)
    cases += [(psp, lambda x, y, k, mask: propensity_scored_precision(x, y, p, k, mask=mask), "bool")]
    for metric, function, form in cases:
        # Disable synchronization by torchmetrics: with `group`, every process already has the full result.
        setattr(metric, "sync", lambda *a, **b: None)  # noqa: B010
        for which in (None, mask):
            metric.reset()
            own_mask = None if which is None else part(which, group)
            metric.update(part(preds, group), _own(target[form], group), mask=own_mask)
            wanted = function(preds, target[form], ks, mask=which)
            for name, value in metric.compute().items():
                torch.testing.assert_close(value, wanted[name])


@in_processes(2, 3, 4)
def test_metrics_raise_on_every_process(group: Group) -> None:
    x, y = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="propensities"):
        propensity_scored_precision(x, y, torch.ones(2 + (dist.get_rank(group) == 1)), 1, group=group)
    with pytest.raises(ValueError, match="must have the same k"):
        topk_precision(x, y, 1 + (dist.get_rank(group) == 1), group=group)


def test_no_group_is_initialized() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        torchlml.lml(torch.randn(3), 1, group=object())
