"""The losses for label lists match their definitions in float64, with padding and with a linear layer."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import brentq
from torch import nn

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.multilabel.losses import PADDING, LabelLoss, named

NAMES = ("bce", "softmax", "lml-2", "lml-labels", "truncated-entropy-1", "truncated-entropy-2")
LISTS = [[0, 3], [], [5], [4, 1, 2]]
LOGITS = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([row + [PADDING] * (3 - len(row)) for row in LISTS])


def by_definition(name: str, x: list[float], row: list[int]) -> float:
    """Return the loss of one row, computed with Python floats."""
    k = len(row) if name.endswith("labels") else int(name[-1]) if name[-1].isdigit() else 0
    if name == "bce":
        return sum(math.log1p(math.exp(-v if j in row else v)) for j, v in enumerate(x))
    if name == "softmax":
        return sum(math.log(sum(map(math.exp, x))) - x[j] for j in row)
    if name.startswith("lml"):
        nu = brentq(lambda nu: sum(1 / (1 + math.exp(-v - nu)) for v in x) - k, -50, 50, xtol=1e-13)
        return sum(math.log1p(math.exp(-x[j] - nu)) for j in row)
    others = sorted(v for j, v in enumerate(x) if j not in row)[: len(x) - k]
    return sum(math.log1p(sum(math.exp(v - x[j]) for v in others)) for j in row)


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_is_the_mean_of_its_definition_over_rows_with_labels(name: str) -> None:
    expected = [by_definition(name, x, row) for x, row in zip(LOGITS.tolist(), LISTS, strict=True) if row]
    found = named(name)(LOGITS, LABELS)
    assert found.item() == pytest.approx(sum(expected) / 3, rel=1e-5)
    # More padding, up to the width of the logits, does not change the loss.
    wide = nn.functional.pad(LABELS, (0, 3), value=PADDING)
    assert torch.equal(named(name)(LOGITS, wide), found)
    assert str(named(name)) == name


def test_bce_counts_rows_without_labels_on_request() -> None:
    expected = [by_definition("bce", x, row) for x, row in zip(LOGITS.tolist(), LISTS, strict=True)]
    found = LabelLoss("bce", empty=True)(LOGITS, LABELS)
    assert found.item() == pytest.approx(sum(expected) / 4, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_through_a_linear_layer(name: str) -> None:
    layer, hidden = nn.Linear(5, 6), torch.randn(4, 5, requires_grad=True)
    whole = named(name)(layer(hidden), LABELS)
    joined = named(name).of_linear(hidden, layer, LABELS)
    torch.testing.assert_close(joined, whole)
    wanted = (hidden, *layer.parameters())
    torch.testing.assert_close(torch.autograd.grad(joined, wanted), torch.autograd.grad(whole, wanted))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_labels_has_zero_loss(name: str) -> None:
    logits = LOGITS.clone().requires_grad_()
    loss = named(name)(logits, torch.full_like(LABELS, PADDING))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_unknown_losses_are_rejected() -> None:
    for text in ("lml", "bce-3", "lml-x", "lml-0", "hinge", ""):
        with pytest.raises(BadInput, match="must be bce, softmax"):
            named(text)
    for name, k in (("lml", None), ("bce", 3), ("truncated-entropy", "labels"), ("lml", 0)):
        with pytest.raises(BadInput):
            LabelLoss(name, k)
    LabelLoss("lml", 5).check_labels(6)
    with pytest.raises(BadInput, match="must be from 1 to 4, because there are 5 labels or items"):
        LabelLoss("lml", 5).check_labels(5)
