"""Wrong arguments of the family: one sentence that names them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import torchlml

NAN = math.nan


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
