"""The subset loss -log P(labels ⊆ S), compared with sums over all sets, for every target format."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import torchlml
from tests.support import subsets
from torchlml.distributions import KSubset

INF = math.inf
LABELS = torch.tensor([[0, 3, 5], [1, -100, -100], [-100, -100, -100], [8, 2, -100]])


def log_contains(x: torch.Tensor, k: int, labels: tuple[int, ...]) -> float:
    """Return log P(labels ⊆ S), computed by enumeration."""
    exact = subsets.enumerate_sets(x, k)
    inside = [p for members, p in exact.sets.items() if set(labels) <= set(members)]
    outside = [p for members, p in exact.sets.items() if not set(labels) <= set(members)]
    total, missing = (subsets.MP.fsum(subsets.MP.exp(p) for p in part) for part in (inside, outside))
    if total == 0:
        return -INF
    return float(subsets.MP.log1p(-missing) if missing < total else subsets.MP.log(total))


@pytest.mark.parametrize("name", subsets.HOSTILE)
def test_difficult_rows_match_enumeration(name):
    x, k = subsets.HOSTILE[name]
    order = x.argsort(descending=True).tolist()
    for labels in {(order[0],), (order[-1],), tuple(order[:k]), tuple(order[-k:]), tuple(order[: 2 * k : 2])}:
        if not 1 <= len(labels) <= k or len(labels) >= len(x):
            continue
        loss = torchlml.subset_loss(x, torch.tensor([*labels, *[-100] * (len(x) + 1 - len(labels))]), k)
        expected = -log_contains(x, k, labels)
        assert loss.item() == pytest.approx(expected, rel=1e-10, abs=1e-13)


def test_loss_of_one_label_is_minus_the_log_of_its_inclusion_probability():
    x, y = torch.randn(6, 300, dtype=torch.float64) * 2, torch.randint(300, (6,))
    for k in (1, 20, 150, 299):
        loss = torchlml.subset_loss(x, y, k, reduction="none")
        expected = -KSubset(k, logits=x).mean.gather(-1, y[:, None]).squeeze(-1).log()
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torchlml.subset_loss(x, y, 1), torch.nn.functional.cross_entropy(x, y))


def test_loss_of_k_labels_is_minus_the_log_probability_of_their_set():
    x = torch.randn(4, 50, dtype=torch.float64) * 3
    index = torch.stack([torch.randperm(50)[:6] for _ in range(4)])
    loss = torchlml.subset_loss(x, index, 6, reduction="none")
    torch.testing.assert_close(loss, -KSubset(6, logits=x).log_prob(index), rtol=1e-12, atol=0)


def test_all_formats_of_targets_give_the_same_loss():
    x = torch.randn(4, 9, dtype=torch.float64)
    hot = torch.zeros(4, 9, dtype=torch.bool)
    for row, labels in zip(hot, LABELS, strict=True):
        row[labels[labels >= 0]] = True
    expected = torchlml.subset_loss(x, LABELS, 4, reduction="none")
    assert expected[2] == 0
    offsets = torch.arange(5) * 9
    for logits, target, settings in (
        (x, hot, {}),
        (x, hot.double(), {}),
        (x, torch.cat([LABELS.flip(1), LABELS], 1), {}),
        (x.flatten(), hot.flatten(), {"offsets": offsets}),
        (x.flatten(), hot.flatten().nonzero().flatten(), {"offsets": offsets}),
    ):
        torch.testing.assert_close(
            torchlml.subset_loss(logits, target, 4, reduction="none", **settings), expected
        )
    torch.testing.assert_close(torchlml.subset_loss(x, LABELS, 4), expected.sum() / 3)
    torch.testing.assert_close(torchlml.subset_loss(x, LABELS, 4, reduction="sum"), expected.sum())
    by_label = torchlml.subset_loss(x, LABELS, 4, reduction="none", label_reduction="mean")
    torch.testing.assert_close(by_label, expected / torch.tensor([3, 1, 1, 2]))


def test_the_loss_of_a_row_is_multiplied_by_the_mean_weight_of_its_labels():
    x, weight = torch.randn(4, 9, dtype=torch.float64), torch.rand(9, dtype=torch.float64)
    rows = torchlml.subset_loss(x, LABELS, 4, reduction="none")
    weighted = torchlml.subset_loss(x, LABELS, 4, reduction="none", weight=weight)
    means = torch.stack([weight[labels[labels >= 0]].mean() for labels in LABELS]).nan_to_num(0)
    torch.testing.assert_close(weighted, rows * means)


def test_masked_and_ragged_rows():
    x, mask = torch.randn(2, 8, dtype=torch.float64), torch.arange(8) < 5
    y = torch.tensor([1, 4])
    expected = torchlml.subset_loss(x[:, :5], y, 3, reduction="none")
    torch.testing.assert_close(torchlml.subset_loss(x, y, 3, mask=mask, reduction="none"), expected)
    # A row with at most k entries has zero loss.
    values, offsets = torch.randn(11, dtype=torch.float64), torch.tensor([0, 2, 2, 11])
    rows = torchlml.subset_loss(values, torch.tensor([1, 5]), 3, offsets=offsets, reduction="none")
    assert rows[:2].tolist() == [0, 0]
    torch.testing.assert_close(rows[2], torchlml.subset_loss(values[2:], torch.tensor(3), 3))


def test_a_k_per_row():
    x, k = torch.randn(4, 9, dtype=torch.float64), torch.tensor([3, 1, 5, 7])
    rows = torchlml.subset_loss(x, LABELS, k, reduction="none")
    for i in range(4):
        torch.testing.assert_close(rows[i], torchlml.subset_loss(x[i], LABELS[i], int(k[i])))


def test_derivatives():
    x = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    for k in (3, 8):
        function = functools.partial(torchlml.subset_loss, target=LABELS, k=k)
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x, fast_mode=True)


def test_the_gradient_is_a_difference_of_inclusion_probabilities():
    x = torch.randn(12, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(torchlml.subset_loss(x, torch.tensor([2, 7]), 5), x)
    left = torch.where(torch.isin(torch.arange(12), torch.tensor([2, 7])), -INF, x.detach())
    given = KSubset(3, logits=left).mean
    given[[2, 7]] = 1
    torch.testing.assert_close(grad, KSubset(5, logits=x.detach()).mean - given)


def test_rows_without_labels_and_impossible_labels():
    x = torch.randn(3, 6, dtype=torch.float64)
    x[0, 2], x[1, 1] = math.nan, -INF
    x.requires_grad_()
    loss = torchlml.subset_loss(x, torch.tensor([-100, 1, 1]), 2, reduction="none")
    assert loss[0] == 0
    assert loss[1] == INF
    (grad,) = torch.autograd.grad(loss[[0, 2]].sum(), x)
    assert (grad[0] == 0).all()
    assert grad.isfinite().all()
    assert torchlml.subset_loss(x, torch.tensor([1, 1, 1]), 2, reduction="none")[0].isnan()


def test_compiled_and_bfloat16_losses():
    x = torch.randn(4, 9)
    torch.compiler.reset()
    compiled = torch.compile(functools.partial(torchlml.subset_loss, k=4), backend="aot_eager")
    assert torch.equal(compiled(x, LABELS), torchlml.subset_loss(x, LABELS, 4))
    narrow = torchlml.subset_loss(x.bfloat16(), LABELS, 4)
    assert narrow == torchlml.subset_loss(x.bfloat16().double(), LABELS, 4).bfloat16()


def test_the_module_matches_its_function():
    x, weight = torch.randn(4, 9), torch.rand(9)
    module = torchlml.SubsetLoss(4, weight=weight, reduction="sum")
    assert torch.equal(module(x, LABELS), torchlml.subset_loss(x, LABELS, 4, weight=weight, reduction="sum"))
    assert repr(torchlml.SubsetLoss(4)) == "SubsetLoss(k=4, reduction='mean')"


X = torch.zeros(3, 6)
Y = torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: torchlml.subset_loss(X, Y, 2.5), ValueError, "`k` must be an integer"),
        (lambda: torchlml.SubsetLoss(2.5), ValueError, "`k` must be an integer"),
        (lambda: torchlml.subset_loss(X, Y, 7), ValueError, "`k` must be from 0 to n = 6"),
        (lambda: torchlml.subset_loss(X, Y, 0), ValueError, "row 0 has 1 labels and k = 0"),
        (lambda: torchlml.subset_loss(X, X > -1, 2), ValueError, "row 0 has 6 labels and k = 2"),
        (lambda: torchlml.subset_loss(X, Y + 5, 2), ValueError, "class indices"),
        (lambda: torchlml.subset_loss(X, Y, 2, reduction="avg"), ValueError, "`reduction` must be"),
        (
            lambda: torch.func.vmap(lambda x: torchlml.subset_loss(x, Y[0], 2))(X),
            NotImplementedError,
            "torch.func",
        ),
    ],
)
def test_wrong_arguments(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
