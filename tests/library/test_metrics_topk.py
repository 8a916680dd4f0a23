"""Top-k recall compared with a loop that follows its definition."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.support.fresh import run
from torchlml.metrics import SceneGraphRecall, TopKRecall


def plain_recall(rows, k):
    """Return the mean over rows of |Y ∩ P| / |Y| for labels Y and top-k predictions P.

    The recall is averaged over all ways to break ties. `rows` is a list of (scores, available, labels).
    """
    recalls = []
    for scores, available, labels in rows:
        if not labels:
            continue
        candidates = sorted((j for j in range(len(scores)) if available[j]), key=lambda j: -scores[j])
        threshold = scores[candidates[min(k, len(candidates)) - 1]] if candidates else math.inf
        sure = {j for j in candidates if scores[j] > threshold}
        tied = [j for j in candidates if scores[j] == threshold]
        ways = list(itertools.combinations(tied, min(k, len(candidates)) - len(sure))) or [()]
        recalls.append(sum(len(labels & (sure | set(way))) for way in ways) / len(ways) / len(labels))
    return sum(recalls) / len(recalls)


def random_rows(count, n, ties):
    scores = torch.randint(4, (count, n)).float() if ties else torch.randn(count, n)
    return scores, torch.rand(count, n) < torch.rand(count, 1) * 0.5


def as_plain(scores, observed, mask=None):
    mask = torch.ones_like(observed) if mask is None else mask
    labels = [set(row.nonzero().flatten().tolist()) for row in observed]
    return list(zip(scores.tolist(), mask.tolist(), labels, strict=True))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("k", [1, 3, 9, 20])
def test_recall_matches_its_definition_for_every_format(ties, k):
    scores, observed = random_rows(30, 9, ties)
    mask = (torch.rand(30, 9) < 0.7) | observed
    lists = torch.where(observed, torch.arange(9), -100)
    offsets = torch.arange(31) * 9
    expected, masked = (plain_recall(as_plain(scores, observed, m), k) for m in (None, mask))
    for value, arguments in (
        (expected, (scores, observed)),
        (expected, (scores.bfloat16() if ties else scores, observed.float() * 3)),
        (expected, (scores, torch.cat([lists, lists], 1))),
        (expected, (scores.reshape(5, 6, 9), observed.reshape(5, 6, 9))),
        (masked, (scores, observed, mask)),
        (expected, (scores.flatten(), observed.flatten(), None, offsets)),
        (masked, (scores.flatten(), observed.flatten().nonzero().flatten(), mask.flatten(), offsets)),
    ):
        recall = TopKRecall(k)
        given, rows = arguments[:2], dict(zip(("mask", "offsets"), arguments[2:], strict=False))
        recall.update(*given, **rows)
        assert recall.compute().item() == pytest.approx(value, abs=1e-6)


def test_ragged_rows_of_any_length():
    offsets = torch.tensor([0, 4, 4, 5, 20])
    scores, observed = torch.randint(3, (20,)).float(), torch.rand(20) < 0.4
    observed[4] = True
    rows = [
        (scores[a:b].tolist(), [True] * (b - a), set(observed[a:b].nonzero().flatten().tolist()))
        for a, b in itertools.pairwise(offsets.tolist())
    ]
    recall = TopKRecall((1, 2, 50))
    recall.update(scores, observed, offsets=offsets)
    for k in (1, 2, 50):
        assert recall.compute()[f"recall@{k}"].item() == pytest.approx(plain_recall(rows, k), abs=1e-6)


def test_recall_with_one_label_is_top_k_accuracy():
    scores, labels = torch.randn(200, 10), torch.randint(10, (200,))
    labels[:20] = -100
    recall = TopKRecall(k=(1, 5))
    found = recall(scores, labels)
    top = scores[20:].topk(5).indices == labels[20:, None]
    assert found["recall@1"].item() == pytest.approx(top[:, :1].any(-1).float().mean().item())
    assert found["recall@5"].item() == pytest.approx(top.any(-1).float().mean().item())


def test_one_k_gives_a_tensor_and_several_a_dict():
    scores, labels = torch.tensor([[0.1, 0.7, 0.2]]), torch.tensor([1])
    one, several = TopKRecall(k=2), TopKRecall(k=(2,))
    for metric in (one, several):
        metric.update(scores, labels)
    assert one.compute().item() == 1
    assert {name: value.item() for name, value in several.compute().items()} == {"recall@2": 1}
    with pytest.raises(TypeError, match="'k'"):
        TopKRecall()


def test_batches_accumulate_and_reset_clears_them():
    scores, observed = random_rows(40, 8, ties=True)
    whole, parts = TopKRecall(3), TopKRecall(3)
    whole.update(scores, observed)
    for part in range(0, 40, 7):
        parts(scores[part : part + 7], observed[part : part + 7])
    torch.testing.assert_close(parts.compute(), whole.compute())
    parts.reset()
    parts.update(scores[:5], observed[:5] | True)
    assert parts.compute().item() == pytest.approx(3 / 8)


def test_a_constant_model_has_chance_recall_for_every_label():
    for label in range(10):
        recall = TopKRecall(3)
        recall.update(torch.zeros(1, 10), torch.tensor([label]))
        assert recall.compute().item() == pytest.approx(0.3)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_labels_that_cannot_be_found():
    recall = TopKRecall(1)
    assert recall.compute().isnan()
    recall = TopKRecall(1)
    scores = torch.tensor([[math.nan, 1.0, 0.0], [5.0, 1.0, 0.0], [math.nan] * 3])
    mask = torch.tensor([[True, True, True], [False, True, True], [False] * 3])
    recall.update(scores, torch.tensor([1, 0, 2]), mask=mask)
    assert recall.compute().item() == pytest.approx(1 / 3)
    recall.update(scores[:, :0], torch.zeros(3, 0, dtype=torch.bool))
    assert recall.compute().item() == pytest.approx(1 / 3)


@pytest.mark.parametrize("k", [0, (), (1, 0), 2.5, "5"])
def test_a_wrong_k_is_rejected(k):
    with pytest.raises((TypeError, ValueError), match="`k` must be"):
        TopKRecall(k)


@pytest.mark.parametrize("metric", [TopKRecall(k=1), SceneGraphRecall(k=1)])
def test_states_are_summed_across_processes(metric):
    assert {reduction.__name__ for reduction in metric._reductions.values()} == {"dim_zero_sum"}


def test_torchmetrics_is_needed_for_the_metrics_only():
    program = (
        "import sys; sys.modules['torchmetrics'] = None\n"
        "import torchlml\n"
        "try:\n    import torchlml.metrics\n"
        "except ImportError as error:\n    print(error)\n"
    )
    said = "`torchlml.metrics` requires torchmetrics. Install it with `pip install torchlml[metrics]`.\n"
    assert run(program).stdout == said
