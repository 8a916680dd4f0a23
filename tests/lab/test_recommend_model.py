"""The models and metrics of recommendation, compared with direct computations."""

from __future__ import annotations

import math

import pytest
import torch
from accelerate import Accelerator

from torchlml_lab.multilabel.losses import PADDING, padded
from torchlml_lab.recommend.histories import Batch
from torchlml_lab.recommend.model import Autoencoder, MatrixFactorisation
from torchlml_lab.recommend.ranking import measures


def test_measures_are_those_of_a_plain_computation():
    torch.manual_seed(0)
    users, items, ks = 37, 160, (1, 5, 20, 100)
    scores = torch.randn(users, items)
    order = [torch.randperm(items).tolist() for _ in range(users)]
    history = [order[u][: u % 9 + (90 if u == 5 else 0)] for u in range(users)]
    labels = [order[u][100 : 100 + 1 + u % 30] for u in range(users)]
    batch = Batch(
        torch.arange(users), *(padded([torch.tensor(r).long() for r in lists]) for lists in (history, labels))
    )
    found = measures(lambda part: scores[part.users], [batch], Accelerator(cpu=True), ks)
    for k in ks:
        recall = precision = ndcg = 0.0
        for u in range(users):
            ranking = sorted(set(range(items)) - set(history[u]), key=lambda i: -float(scores[u, i]))[:k]
            hits = [item in labels[u] for item in ranking]
            recall += sum(hits) / len(labels[u]) / users
            precision += sum(hits) / k / users
            gain = sum(hit / math.log2(place + 2) for place, hit in enumerate(hits))
            ndcg += gain / sum(1 / math.log2(p + 2) for p in range(min(k, len(labels[u])))) / users
        for name, value in (("recall", recall), ("precision", precision), ("ndcg", ndcg)):
            assert found[f"{name}@{k}"] == pytest.approx(value, abs=1e-6), (name, k)


def test_the_autoencoder_is_the_dense_one():
    torch.manual_seed(0)
    model = Autoencoder(items=11, dimension=3, dropout=0.5, level=-2.0).eval()
    lists = [[1, 4, 7], [], [0, 1, 2, 3, 9]]
    history = padded([torch.tensor(one).long() for one in lists])
    dense = torch.zeros(3, 11)
    for row, items in enumerate(lists):
        dense[row, items] = 1 / max(1, len(items)) ** 0.5
    expected = torch.tanh(dense @ model.encoder + model.encoder_bias) @ model.decoder.T + model.decoder_bias
    assert torch.allclose(model(torch.arange(3), history).scores(), expected, atol=1e-6)
    assert (history == PADDING).sum() == 7


def test_matrix_factorization_scores_are_cosines_over_the_temperature():
    torch.manual_seed(0)
    model = MatrixFactorisation(users=5, items=7, dimension=3, temperature=0.2, level=-1.0)
    scores = model(torch.tensor([4, 0]), torch.full((2, 1), PADDING)).scores()
    cosine = torch.nn.functional.cosine_similarity(model.user[[4, 0]][:, None], model.item[None], dim=-1)
    assert torch.allclose(scores, cosine / 0.2 - 1, atol=1e-5)
