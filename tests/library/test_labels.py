"""`pad_labels` creates targets for losses and metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchlml
from torchlml.metrics import topk_recall


def test_padded_lists_and_multi_hot_targets_give_the_same_loss() -> None:
    lists = [[1, 4], [], [0, 2, 3], [5]]
    hot = torch.zeros(4, 6, dtype=torch.bool)
    for i, row in enumerate(lists):
        hot[i, row] = True
    x = torch.randn(4, 6, dtype=torch.float64)
    for given in (
        lists,
        [torch.tensor(row, dtype=torch.int32) for row in lists],
        (tuple(row) for row in lists),
    ):
        target = torchlml.pad_labels(given)
        assert target.shape == (4, 3)
        torch.testing.assert_close(torchlml.lml_loss(x, target, 2), torchlml.lml_loss(x, hot, 2))
        torch.testing.assert_close(topk_recall(x, target, 2), topk_recall(x, hot, 2))


def test_padding_can_be_chosen() -> None:
    assert torchlml.pad_labels([[7], [1, 2]], ignore_index=-1).tolist() == [[7, -1], [1, 2]]


@pytest.mark.parametrize(("labels", "shape"), [([], (0, 1)), ([[], []], (2, 1)), ([[3]], (1, 1))])
def test_the_target_has_at_least_one_column(labels: Any, shape: tuple[int, int]) -> None:
    target = torchlml.pad_labels(labels)
    assert target.shape == shape
    assert target.dtype == torch.int64


@pytest.mark.parametrize(
    ("labels", "error", "words"),
    [
        ([[1], 2], TypeError, ["`labels[1]`", "2", "list"]),
        ([["cat"]], TypeError, ["`labels[0]`", "'cat'"]),
        (["12"], TypeError, ["`labels[0]`", "'12'"]),
        ([[1.5]], TypeError, ["`labels[0]`", "integers", "float"]),
        ([[True]], TypeError, ["`labels[0]`", "bool"]),
        ([[1], [0, -3]], ValueError, ["`labels[1]`", "-3"]),
        ([[[1]]], ValueError, ["`labels[0]`", "(1, 1)"]),
    ],
)
def test_wrong_labels(labels: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as raised:
        torchlml.pad_labels(labels)
    assert all(word in str(raised.value) for word in words)
