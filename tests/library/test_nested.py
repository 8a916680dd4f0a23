"""Nested tensors with the layout `torch.jagged`: the projection, losses and metrics, checked row by row."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchlml
from tests.support import truth
from tests.support.losses import EVERY
from torchlml.metrics import TopKRecall, topk_recall

LENGTHS = (3, 7, 5)


def jagged(rows: list[Tensor], **settings: Any) -> Any:
    return torch.nested.nested_tensor(rows, layout=torch.jagged, **settings)


def ragged_rows() -> list[Tensor]:
    """Return three rows of different lengths."""
    return [torch.randn(n, dtype=torch.float64) * 3 for n in LENGTHS]


def ragged_like(x: Any, values: Tensor) -> Any:
    """Return a nested tensor with the same ragged shape as `x`."""
    return torch.nested.nested_tensor_from_jagged(values, x.offsets())


@pytest.mark.parametrize("name", ["lml", "log_lml"])
def test_ragged_labels(name: str) -> None:
    rows, k = ragged_rows(), torch.tensor([1.0, 2.5, 2.0], dtype=torch.float64)
    x, ks = jagged(rows, requires_grad=True), k.clone().requires_grad_()
    y = getattr(torchlml, name)(x, ks)
    # y has the offsets of x, so that arithmetic with both works.
    g = torch.randn(sum(LENGTHS), dtype=torch.float64)
    (y * ragged_like(x, g) + 0 * x).sum().backward()
    assert x.grad is not None
    assert ks.grad is not None
    for i, (row, part) in enumerate(zip(rows, g.split(LENGTHS), strict=True)):
        solved = truth.solve(row.tolist(), float(k[i]))
        dx, dk = getattr(solved, f"{name}_gradient")(part.numpy())
        np.testing.assert_allclose(y[i].detach(), solved.y if name == "lml" else solved.log_y, atol=1e-11)
        np.testing.assert_allclose(x.grad[i], dx, atol=1e-11)
        np.testing.assert_allclose(ks.grad[i], dk, atol=1e-10)


def test_mask_layer_and_dual() -> None:
    rows = ragged_rows()
    x = jagged(rows)
    keep = [torch.arange(n) % 3 > 0 for n in LENGTHS]
    y = torchlml.LML(k=1, temperature=2.0)(x, mask=jagged(keep))
    nu = torchlml.lml_dual(x / 2, 1, mask=ragged_like(x, torch.cat(keep)))
    assert nu.shape == (3,)
    for i, (row, mask) in enumerate(zip(rows, keep, strict=True)):
        solved = truth.solve((row / 2).tolist(), 1, mask.tolist())
        np.testing.assert_allclose(y[i], solved.y, atol=1e-11)
        np.testing.assert_allclose(nu[i], solved.nu, atol=1e-10)


@pytest.mark.parametrize("dim", [-1, 1])
def test_dense_labels_with_a_ragged_number_of_rows(dim: int) -> None:
    """The labels may be dim -1 of shape (B, j, n) or dim 1 of shape (B, n, j), where j is ragged."""
    parts = [torch.randn(n, 4, dtype=torch.float64) for n in (2, 3)]
    k = torch.tensor([1.0, 2.0, 1.5, 3.0, 0.5], dtype=torch.float64)
    x = jagged(parts, requires_grad=True)
    turned = x if dim == -1 else x.transpose(1, 2)
    mask = torch.tensor([True, True, False, True])
    y = torchlml.lml(turned, ragged_like(x, k), dim, mask=mask if dim == -1 else mask[:, None])
    nu = torchlml.lml_dual(turned, ragged_like(x, k), dim)
    assert (y + turned).shape == turned.shape
    assert (nu + ragged_like(x, k)).shape == (2, x.shape[1])
    values = (y if dim == -1 else y.transpose(1, 2)).values()
    for row, target, got, dual in zip(torch.cat(parts), k, values, nu.values(), strict=True):
        expected = truth.projection(row.tolist(), float(target), mask.tolist())
        np.testing.assert_allclose(got.detach(), expected, atol=1e-11)
        np.testing.assert_allclose(dual.detach(), truth.solve(row.tolist(), float(target)).nu, atol=1e-10)
    y.values().square().sum().backward()
    assert x.grad.shape == x.shape


# Label 1 in the first row, labels 0 and 6 in the second, and none in the third, in all target formats.
HOT = [[False, True, False], [True, *[False] * 5, True], [False] * 5]
TARGETS: dict[str, Callable[[Any], Any]] = {
    "multi-hot": lambda x: jagged([torch.tensor(row) for row in HOT]),
    "multi-hot of weights": lambda x: ragged_like(x, torch.cat([torch.tensor(row) for row in HOT]).double()),
    "padded lists": lambda x: torch.tensor([[1, -100], [6, 0], [-100, -100]]),
    "nested lists": lambda x: jagged([torch.tensor([1]), torch.tensor([0, 6]), torch.tensor([]).long()]),
}


@pytest.mark.parametrize("target", TARGETS)
def test_losses_of_ragged_labels(target: str) -> None:
    rows = ragged_rows()
    x = jagged(rows, requires_grad=True)
    logs = [truth.solve(row.tolist(), 2).log_y for row in rows[:2]]
    expected = [-logs[0][1], -logs[1][0] - logs[1][6], 0]
    given = TARGETS[target](x)
    each = torchlml.lml_loss(x, given, 2, reduction="none")
    np.testing.assert_allclose(each.detach(), expected, atol=1e-11)
    torchlml.LMLLoss(k=2)(x, given).backward()
    values = torch.cat(rows).requires_grad_()
    flat = torch.cat([torch.tensor(row) for row in HOT])
    torchlml.lml_loss(values, flat, 2, offsets=x.offsets()).backward()
    torch.testing.assert_close(x.grad.values(), values.grad)
    loss = torchlml.truncated_entropy_loss(x, given, 2, reduction="none")
    for i, labels in enumerate([[1], [0, 6], []]):
        row = rows[i].tolist()
        others = sorted(row[j] for j in range(len(row)) if j not in labels)[: max(0, len(row) - 2)]
        terms = [np.log1p(np.exp(np.array(others) - row[j]).sum()) for j in labels]
        np.testing.assert_allclose(loss[i].detach(), sum(terms), atol=1e-11)
    hits = [float(rows[0].argsort(descending=True).tolist().index(1) < 2)]
    ranks = rows[1].argsort(descending=True).tolist()
    hits.append(((ranks.index(0) < 2) + (ranks.index(6) < 2)) / 2)
    recall = TopKRecall(k=2)
    recall.update(x.detach(), given)
    assert float(recall.compute()) == float(topk_recall(x, given, 2)) == pytest.approx(np.mean(hits))


def test_losses_of_dense_labels() -> None:
    """All losses accept shape (B, j, n) with a ragged j, because all rows have the same n classes."""
    x = jagged([torch.randn(n, 4, dtype=torch.float64) for n in (2, 3)], requires_grad=True)
    target = torch.tensor([0, 3, -100, 1, 2])
    weight = torch.rand(4, dtype=torch.float64)
    for function in EVERY:
        each = function(x, ragged_like(x, target), 2, weight=weight, reduction="none")
        assert each.shape == (2, x.shape[1])
        dense = function(x.values().detach(), target, 2, weight=weight, reduction="none")
        torch.testing.assert_close(each.values().detach(), dense)
        mean = function(x, ragged_like(x, target), 2, weight=weight)
        torch.testing.assert_close(mean.detach(), dense.sum() / 4)
        assert torch.autograd.grad(mean, x)[0].shape == x.shape


def test_compiled() -> None:
    rows = ragged_rows()
    x = jagged(rows, requires_grad=True)
    keep = ragged_like(x, torch.arange(sum(LENGTHS)) % 4 > 0)

    def project(x: Any, mask: Any) -> Any:
        return torchlml.lml(x * 2, 1, mask=mask) + x

    fast = torch.compile(project, backend="aot_eager", fullgraph=True)
    result, plain = fast(x, keep), project(x, keep)
    torch.testing.assert_close(result.values(), plain.values())
    found = [torch.autograd.grad(out.values().sin().sum(), x)[0].values() for out in (result, plain)]
    torch.testing.assert_close(*found)


def holes() -> Any:
    starts, lengths = torch.tensor([0, 1]), torch.tensor([2, 3])
    return torch.nested.narrow(torch.randn(2, 6), 1, starts, lengths, layout=torch.jagged)


def strided() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this layout a prototype
        return torch.nested.nested_tensor([torch.randn(2), torch.randn(3)])


X = jagged([torch.randn(2), torch.randn(3)])
OTHER = jagged([torch.ones(3, dtype=torch.bool), torch.ones(2, dtype=torch.bool)])
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "holes": (lambda: torchlml.lml(holes(), 1), "`x` must be contiguous, but it has holes"),
    "offsets": (lambda: torchlml.lml(X, 1, offsets=X.offsets()), "`offsets` must be None for a nested `x`"),
    "dim": (lambda: torchlml.lml(X, 1, dim=0), "`dim` must be the ragged dimension"),
    "ragged dim next to a dense one": (
        lambda: torchlml.lml(jagged([torch.randn(2, 4)]), 1, dim=1),
        "`dim` must be the ragged dimension",
    ),
    "k": (
        lambda: torchlml.lml(X, jagged([torch.ones(1), torch.ones(1)])),
        "`k` must be one number for each row",
    ),
    "nested k, dense x": (lambda: torchlml.lml(torch.randn(2, 4), X), "`k` must be a dense tensor"),
    "mask": (lambda: torchlml.lml(X, 1, mask=OTHER), "`mask` must be ragged like `x`"),
    "dense mask": (
        lambda: torchlml.lml(X, 1, mask=torch.ones(2, 1).bool()),
        "`mask` must be a nested tensor",
    ),
    "nested mask, dense x": (
        lambda: torchlml.lml(torch.randn(2, 4), 1, mask=OTHER),
        "`mask` must be a dense tensor, but it is nested",
    ),
    "target": (lambda: torchlml.lml_loss(X, OTHER, 1), "`target` must be ragged like `logits`"),
    "dense target": (
        lambda: torchlml.lml_loss(X, torch.ones(5).bool(), 1),
        "`target` must be a nested tensor",
    ),
    "label": (
        lambda: torchlml.lml_loss(X, torch.tensor([2, 0]), 1),
        "it contains 2, which is outside its row",
    ),
    "lists": (
        lambda: torchlml.lml_loss(X, jagged([torch.tensor([0])] * 3), 1),
        "`target` must be a 2-d nested tensor that lists the labels of 2 rows, but it is 2-d and has 3 rows",
    ),
    "integers": (
        lambda: torchlml.lml_loss(X, ragged_like(X, torch.ones(5).long()), 1),
        "`target` is torch.int64 and ragged like the logits",
    ),
    "svm": (lambda: torchlml.topk_svm_loss(X, torch.tensor([0, 1]), 1), "must have rows of equal length"),
    "topk_mask": (lambda: torchlml.topk_mask(X, 1), "`x` must be a dense tensor for this function"),
    "strided": (
        lambda: torchlml.lml(strided(), 1),
        "`x` must be a nested tensor with the layout torch.jagged, but its layout is torch.strided",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments(wrong: str) -> None:
    call, sentence = WRONG[wrong]
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
