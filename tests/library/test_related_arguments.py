"""Invalid arguments to the related operators raise errors that name the argument."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import torchlml
from tests.support.related_names import MEMBERS

NAN = math.nan


WRONG: dict[str, tuple[Any, list[str]]] = {
    "bound": (lambda: torchlml.lml(torch.zeros(3), 1, bound="less"), ["`bound`", "at_most", "'less'"]),
    "bound of the dual": (lambda: torchlml.lml_dual(torch.zeros(3), 1, bound="x"), ["`bound`"]),
    "bound of a layer": (lambda: torchlml.LML(1, bound="x"), ["`bound`"]),
    "bound of a loss": (lambda: torchlml.LMLLoss(1, bound="x"), ["`bound`"]),
    "at_least with k > n": (
        lambda: torchlml.lml(torch.zeros(3), 4, bound="at_least"),
        ["`k`", "n = 3", "4"],
    ),
    "negative k": (lambda: torchlml.lml(torch.zeros(3), -1, bound="at_most"), ["`k`", "-1"]),
    "bounds sum to less than k": (
        lambda: torchlml.constrained_softmax(torch.zeros(4), 2, upper=0.3),
        ["`upper`", "1.2", "k = 2"],
    ),
    "bounds sum to less than k in one row": (
        lambda: torchlml.constrained_sparsemax(
            torch.zeros(2, 4), 2, upper=torch.tensor([[1.0] * 4, [0.1] * 4])
        ),
        ["`upper`", "0.4", "k = 2"],
    ),
    "negative bound": (
        lambda: torchlml.constrained_sparsemax(torch.zeros(4), 1, upper=torch.tensor([1, 1, -0.5, 1])),
        ["`upper`", "-0.5"],
    ),
    "NaN bound": (lambda: torchlml.constrained_softmax(torch.zeros(4), 1, upper=NAN), ["`upper`", "nan"]),
    "shape of the bounds": (
        lambda: torchlml.constrained_softmax(torch.zeros(4), 1, upper=torch.ones(3)),
        ["`upper`", "(4,)", "(3,)"],
    ),
    "text as bounds": (
        lambda: torchlml.constrained_softmax(torch.zeros(4), 1, upper="1"),
        ["`upper`", "'1'"],
    ),
    "bool as bounds": (
        lambda: torchlml.constrained_softmax(torch.zeros(4), 1, upper=torch.ones(4) > 0),
        ["`upper`", "torch.bool"],
    ),
    "topk_mask, fractional k": (lambda: torchlml.topk_mask(torch.zeros(4), 1.5), ["`k`", "integer", "1.5"]),
    "sample_subset, fractional k": (
        lambda: torchlml.sample_subset(torch.zeros(2, 4), torch.tensor([1, 1.5])),
        ["`k`", "integer"],
    ),
    "a number as generator": (
        lambda: torchlml.sample_subset(torch.zeros(4), 1, generator=42),  # type: ignore[arg-type]
        ["`generator`", "torch.Generator", "42"],
    ),
    "a numpy generator": (
        lambda: torchlml.sample_subset(torch.zeros(4), 1, generator=np.random.default_rng(0)),  # type: ignore[arg-type]
        ["`generator`", "torch.Generator"],
    ),
    "a list of bounds": (
        lambda: torchlml.constrained_softmax(torch.zeros(2), 1, upper=[1.0, 1.0]),  # type: ignore[arg-type]
        ["`upper`", "[1.0, 1.0]"],
    ),
    "no bounds": (
        lambda: torchlml.constrained_softmax(torch.zeros(2), 1, upper=None),  # type: ignore[arg-type]
        ["`upper`", "None"],
    ),
    "an array of bounds": (
        lambda: torchlml.constrained_sparsemax(torch.zeros(2), 1, upper=np.ones(2)),  # type: ignore[arg-type]
        ["`upper`", "tensor"],
    ),
    "a bound beyond the float range": (
        lambda: torchlml.constrained_softmax(torch.zeros(2), 1, upper=10**400),
        ["`upper`", "float64", "1329 bits"],
    ),
    "a bound below the float range": (
        lambda: torchlml.constrained_softmax(torch.zeros(2), 1, upper=-(10**400)),
        ["`upper`", "nonnegative", "1329 bits"],
    ),
    "bounds on another device": (
        lambda: torchlml.constrained_softmax(torch.zeros(2), 1, upper=torch.ones(2, device="meta")),
        ["`upper`", "cpu", "meta"],
    ),
    "one bound on another device": (
        lambda: torchlml.constrained_softmax(torch.zeros(2), 1, upper=torch.ones((), device="meta")),
        ["`upper`", "cpu", "meta"],
    ),
    "text as samples": (
        lambda: torchlml.lml_bracketing(torch.zeros(3), 1, samples="3"),  # type: ignore[arg-type]
        ["`samples`", "'3'"],
    ),
    "text as tolerance": (
        lambda: torchlml.lml_bracketing(torch.zeros(3), 1, tolerance="1"),  # type: ignore[arg-type]
        ["`tolerance`", "'1'"],
    ),
    "text as max_iterations": (
        lambda: torchlml.lml_bracketing(torch.zeros(3), 1, max_iterations="9"),  # type: ignore[arg-type]
        ["`max_iterations`", "'9'"],
    ),
    "topk_mask, k above n": (lambda: torchlml.topk_mask(torch.zeros(4), 5), ["`k`", "n = 4"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    call, words = WRONG[case]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("x", [[1.0, 2.0], None, np.zeros(3), 1.5], ids=["list", "None", "array", "number"])
@pytest.mark.parametrize("name", MEMBERS)
def test_x_must_be_a_tensor(name: str, x: Any) -> None:
    with pytest.raises(TypeError, match=r"`x` must be a torch\.Tensor, but its type is"):
        getattr(torchlml, name)(x, 1)


@pytest.mark.parametrize("k", [[1], None, "1", np.ones(1)], ids=["list", "None", "text", "array"])
@pytest.mark.parametrize("name", MEMBERS)
def test_k_must_be_a_number_or_tensor(name: str, k: Any) -> None:
    with pytest.raises(TypeError, match="`k` must be a number or a tensor, but it is"):
        getattr(torchlml, name)(torch.zeros(1, 3), k)


@pytest.mark.parametrize("mask", [[True, False, True], np.ones(3, bool), 1], ids=["list", "array", "number"])
@pytest.mark.parametrize("name", MEMBERS)
def test_mask_must_be_a_tensor(name: str, mask: Any) -> None:
    with pytest.raises(TypeError, match="`mask` must be a bool tensor"):
        getattr(torchlml, name)(torch.zeros(3), 1, mask=mask)
