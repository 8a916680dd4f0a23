"""Recall, precision, nDCG and propensity-scored precision compared with an enumeration of all rankings."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from torchlml.metrics import (
    PropensityScoredPrecision,
    TopKNDCG,
    TopKPrecision,
    TopKRecall,
    label_propensities,
    propensity_scored_precision,
    topk_ndcg,
    topk_precision,
    topk_recall,
)

N = 6
KS = (1, 2, 4, 6, 50)
PROPENSITIES = torch.tensor([0.9, 0.5, 0.03, 0.25, 1.0, 0.4])


def recall(found, labels, k):
    return (sum(label in labels for label in found) / len(labels), 1) if labels else (0, 0)


def precision(found, labels, k):
    return sum(label in labels for label in found) / k, 1


def ndcg(found, labels, k):
    gain = sum(1 / math.log2(place + 2) for place, label in enumerate(found) if label in labels)
    best = sum(1 / math.log2(place + 2) for place in range(min(k, len(labels))))
    return (gain / best if labels else 0), 1


def psp(found, labels, k):
    worth = {label: 1 / PROPENSITIES[label].item() for label in labels}
    best = sorted(worth.values(), reverse=True)[:k]
    return sum(worth.get(label, 0) for label in found) / k, sum(best) / k


def make_psp(k, **settings):
    return PropensityScoredPrecision(PROPENSITIES, k, **settings)


def psp_of(preds, target, k, **settings):
    return propensity_scored_precision(preds, target, PROPENSITIES, k, **settings)


# name -> the definition for one ranking, the metric class and the function
METRICS: dict[str, Any] = {
    "recall": (recall, TopKRecall, topk_recall),
    "precision": (precision, TopKPrecision, topk_precision),
    "ndcg": (ndcg, TopKNDCG, topk_ndcg),
    "psp": (psp, make_psp, psp_of),
}
every = pytest.mark.parametrize("name", METRICS)


def truth(measure, scores, observed, mask, k):
    """Return the ratio of two sums over rows. A row with ties is averaged over all possible rankings."""
    found = possible = 0.0
    for row, labels, available in zip(scores.tolist(), observed, mask, strict=True):
        entries = available.nonzero().flatten().tolist()
        orders = [
            order
            for order in itertools.permutations(entries)
            if all(row[a] >= row[b] for a, b in itertools.pairwise(order))
        ]
        results = [measure(order[:k], set(labels.nonzero().flatten().tolist()), k) for order in orders]
        found += sum(result[0] for result in results) / len(results)
        possible += results[0][1]
    return found / possible


def random_rows(ties):
    scores = torch.randint(3, (12, N)).float() if ties else torch.randn(12, N)
    observed = torch.rand(12, N) < torch.rand(12, 1)
    observed[:2] = False
    observed[2] = True
    return scores, observed, torch.rand(12, N) < 0.7


@every
@pytest.mark.parametrize("ties", [False, True])
def test_every_format_of_target_matches_the_definition(name, ties):
    measure, _, function = METRICS[name]
    scores, observed, mask = random_rows(ties)
    lists = torch.where(observed, torch.arange(N), -100)
    offsets, places = torch.arange(13) * N, observed.flatten().nonzero().flatten()
    flat = {"offsets": offsets}
    if name == "psp":
        flat["classes"] = torch.arange(N).repeat(12)
    everything = torch.ones_like(mask)
    for expected, calls in (
        (
            everything,
            (
                (scores, observed, {}),
                (scores.bfloat16() if ties else scores.double(), observed.float() * 0.3, {}),
                (scores, torch.cat([lists, lists], 1), {}),
                (scores.reshape(3, 4, N), observed.reshape(3, 4, N), {}),
                (scores.flatten(), observed.flatten(), flat),
            ),
        ),
        (
            mask,
            (
                (scores, observed, {"mask": mask}),
                (scores.where(mask, math.nan), observed, {"mask": mask}),
                (scores.flatten(), places, {"mask": mask.flatten(), **flat}),
            ),
        ),
    ):
        values = {f"{name}@{k}": truth(measure, scores, observed, expected, k) for k in KS}
        for preds, target, settings in calls:
            assert function(preds, target, KS, **settings) == pytest.approx(values, abs=2e-7)


@every
def test_a_nan_ranks_below_all_other_available_scores(name):
    measure, _, function = METRICS[name]
    scores, observed, mask = random_rows(ties=True)
    low = scores.masked_fill(scores == 0, -math.inf)
    values = {f"{name}@{k}": truth(measure, low, observed, mask, k) for k in KS}
    preds = low.where(low.isfinite(), math.nan)
    assert function(preds, observed, KS, mask=mask) == pytest.approx(values, abs=2e-7)


@every
def test_one_class_index_per_row(name):
    measure, _, function = METRICS[name]
    scores, labels = torch.randint(3, (12, N)).float(), torch.randint(N, (12,))
    labels[3] = 200
    observed = torch.arange(N) == labels[:, None]
    for k in (1, 3):
        value = function(scores, labels.byte(), k, ignore_index=200)
        assert value.item() == pytest.approx(
            truth(measure, scores, observed, torch.ones(12, N, dtype=torch.bool), k), abs=2e-7
        )


@every
def test_ragged_rows_of_any_length(name):
    """A row of a ragged batch gives the same result as a dense row in which all other classes are masked."""
    measure, _, function = METRICS[name]
    lengths = torch.tensor([4, 0, 1, 6, 3])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    classes = torch.cat([torch.randperm(N)[:length] for length in lengths.tolist()])
    row = torch.arange(5).repeat_interleave(lengths)
    scores, observed = torch.zeros(5, N), torch.zeros(5, N, dtype=torch.bool)
    mask = observed.clone()
    preds, target = torch.randint(3, (14,)).float(), torch.rand(14) < 0.5
    scores[row, classes], observed[row, classes], mask[row, classes] = preds, target, torch.tensor(True)
    settings = {"offsets": offsets, **({"classes": classes} if name == "psp" else {})}
    for k in (1, 2, 50):
        found = function(preds, target, k, **settings)
        assert found.item() == pytest.approx(truth(measure, scores, observed, mask, k), abs=2e-7)


@every
def test_accumulated_batches_match_the_function_on_all_rows(name):
    _, make, function = METRICS[name]
    scores, observed, mask = random_rows(ties=True)
    metric = make((1, 3))
    for rows in torch.arange(12).split(5):
        metric(scores[rows], observed[rows], mask=mask[rows])
    copied = pickle.loads(pickle.dumps(metric))
    assert metric.compute() == function(scores, observed, (1, 3), mask=mask) == copied.compute()
    assert function(scores, observed, 3, mask=mask) == metric.compute()[f"{name}@3"]
    metric.reset()
    metric.update(scores[3:5], observed[3:5])
    assert metric.compute() == function(scores[3:5], observed[3:5], (1, 3))


@every
def test_metrics_in_a_half_precision_model(name):
    _, make, function = METRICS[name]
    scores, observed, _ = random_rows(ties=False)
    metric = make(2)
    nn.Sequential(nn.Linear(2, 2), metric).to(torch.bfloat16).half()
    metric.set_dtype(torch.float16)
    for _ in range(50):
        metric.update(scores, observed)
    assert metric.compute().item() == pytest.approx(function(scores, observed, 2).item(), abs=2e-7)
    assert {state.dtype for state in (metric.found, metric.possible)} == {torch.int64}
    assert metric._reductions.keys() == {"found", "possible"}
    assert {reduction.__name__ for reduction in metric._reductions.values()} == {"dim_zero_sum"}


@every
def test_no_rows_no_labels_or_no_columns(name):
    _, _, function = METRICS[name]
    assert function(torch.zeros(0, N), torch.zeros(0, N, dtype=torch.bool), 2).isnan()
    assert function(torch.zeros(2, N), torch.full((2, 3), -100), 2).item() == pytest.approx(
        {"precision": 0, "ndcg": 0}.get(name, math.nan), nan_ok=True
    )
    if name != "psp":
        empty = function(torch.zeros(3, 0), torch.zeros(3, 0, dtype=torch.bool), 2)
        assert empty.item() == pytest.approx({"recall": math.nan}.get(name, 0), nan_ok=True)


def test_equal_propensities_give_precision_relative_to_the_best():
    scores, observed, _ = random_rows(ties=True)
    for k in KS:
        best = observed.sum(-1).clamp(max=k).double().mean() / k
        found = propensity_scored_precision(scores, observed, torch.full((N,), 0.125), k)
        torch.testing.assert_close(found, (topk_precision(scores, observed, k) / best).float())


def test_propensities_match_the_published_model():
    counts, rows = torch.tensor([0, 1, 40, 900]), 1000
    for a, b in ((0.55, 1.5), (0.6, 2.6), (0.5, 0.4)):
        c = (math.log(rows) - 1) * (b + 1) ** a
        expected = [1 / (1 + c * math.exp(-a * math.log(count + b))) for count in counts.tolist()]
        found = label_propensities(counts, rows, a, b)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)
    assert torch.equal(label_propensities(counts, rows), label_propensities(counts.float(), rows, 0.55, 1.5))


X, Y = torch.zeros(2, N), torch.tensor([0, 1])
RAGGED = {"target": torch.tensor([0]), "offsets": torch.tensor([0, 2, 3])}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: label_propensities([1, 2], 10), "`counts` must be a torch.Tensor, but its type is list"),
        (lambda: label_propensities(torch.zeros(2, 2), 10), "`counts` .* shape \\(2, 2\\)"),
        (lambda: label_propensities(torch.tensor([-1.0]), 10), "`counts` .* negative"),
        (
            lambda: label_propensities(torch.tensor([1]), 2),
            "`rows` must be a number that is at least 3, but it is 2",
        ),
        (lambda: label_propensities(torch.tensor([1]), 9, a=-1), "`a` must be a nonnegative number"),
        (lambda: label_propensities(torch.tensor([0]), 9, b=0), "`b` must be positive"),
        (lambda: PropensityScoredPrecision([0.5], 1), "`propensities` must be a torch.Tensor"),
        (
            lambda: PropensityScoredPrecision(torch.tensor([2, 3]), 1),
            "`propensities` must be a floating-point tensor",
        ),
        (
            lambda: PropensityScoredPrecision(torch.tensor([0.0, 1]), 1),
            "`propensities` must be from .* 0 to 1",
        ),
        (lambda: PropensityScoredPrecision(torch.tensor([0.5, 3.0]), 1), "`propensities` .* from 0.5 to 3"),
        (lambda: psp_of(X[:, :4], Y, 1), "`preds` must have 6 columns.* it has 4"),
        (lambda: psp_of(X, Y, 1, classes=Y), "`classes` must be None without `offsets`"),
        (lambda: psp_of(torch.zeros(3), k=1, **RAGGED), "`classes`.* is required"),
        (lambda: psp_of(torch.zeros(3), k=1, classes=Y, **RAGGED), "`classes` must be an int64 .*\\(3,\\)"),
        (lambda: psp_of(torch.zeros(3), k=1, classes=torch.tensor([0, 1, N]), **RAGGED), "from 0 to 5"),
        (lambda: topk_precision(X, [0, 1], 1), "`target` must be a torch.Tensor"),
        (lambda: topk_ndcg(X, Y, 0), "`k` must be at least 1"),
    ],
)
def test_wrong_arguments_are_rejected(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()
