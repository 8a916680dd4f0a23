"""Recommendation models and metrics, compared with direct computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.interactions import Interactions
from torchlml_lab.multilabel.losses import PADDING, named, padded, topk_softmax
from torchlml_lab.recommend import item_weights
from torchlml_lab.recommend.histories import Batch, Users
from torchlml_lab.recommend.model import Autoencoder, MatrixFactorization, choose, graph, propagate
from torchlml_lab.recommend.ranking import fit_scale, measures


def test_measures_match_a_direct_computation():
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


def test_the_autoencoder_matches_a_dense_computation():
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
    model = MatrixFactorization(users=5, items=7, dimension=3, temperature=0.2, level=-1.0)
    scores = model(torch.tensor([4, 0]), torch.full((2, 1), PADDING)).scores()
    cosine = torch.nn.functional.cosine_similarity(model.user[[4, 0]][:, None], model.item[None], dim=-1)
    assert torch.allclose(scores, cosine / 0.2 - 1, atol=1e-5)


def random_pairs(users, items, seed=0, share=0.3, new_to=None):
    """Return random user-item pairs that are not in the matrix `new_to`, and the matrix of these pairs."""
    matrix = torch.rand(users, items, generator=torch.Generator().manual_seed(seed)) < share
    if new_to is not None:
        matrix &= new_to == 0
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), matrix.sum(1).cumsum(0)])
    names = [f"u{u}" for u in range(users)], [f"i{i}" for i in range(items)]
    return Interactions(*names, starts, matrix.nonzero()[:, 1]), matrix.double()


@pytest.mark.parametrize(("users", "items"), [(40, 9), (7, 11)])  # fewer items than users, and vice versa
def test_ease_is_a_ridge_regression_of_each_item_on_the_others(monkeypatch, users, items):
    monkeypatch.setattr(item_weights, "ROWS", 4)  # so that there are several blocks
    have, matrix = random_pairs(users, items)
    have = have.keep(have.user != 2)  # this user has no items
    matrix[2] = 0
    x, penalty = matrix.numpy(), 3.0
    expected = np.zeros((items, items))
    for item in range(items):
        others = np.delete(np.arange(items), item)
        a = x[:, others]
        expected[others, item] = np.linalg.solve(a.T @ a + penalty * np.eye(items - 1), a.T @ x[:, item])
    model, chosen = item_weights.fit_ease(have, penalty, lambda _: pytest.fail("there is nothing to choose"))
    assert chosen == penalty
    alone = model(torch.zeros(items), torch.arange(items)[:, None]).scores().detach().numpy()
    assert np.allclose(alone, expected, atol=1e-6)
    model.scale.data.fill_(2.0)
    history = padded([have.of(u) for u in range(users)])
    scores = model(torch.arange(users), history).scores().detach().numpy()
    assert np.allclose(scores, 2 * x @ expected, atol=1e-5)


def test_ease_keeps_the_largest_weights_of_each_item(monkeypatch):
    monkeypatch.setattr(item_weights, "KEPT", 3)
    weights = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    model = item_weights.ItemWeights(8)
    model.set_weights(torch.arange(8), [weights])
    expected = torch.zeros(8, 8)
    for row in range(8):
        for place in sorted(range(8), key=lambda place: -abs(float(weights[row, place])))[:3]:
            expected[row, place] = weights[row, place]
    history = padded([torch.tensor([2]), torch.tensor([], dtype=torch.int64), torch.tensor([0, 7])])
    scores = model(torch.zeros(3), history).scores()
    assert torch.allclose(scores, torch.stack([expected[2], torch.zeros(8), expected[0] + expected[7]]))


def test_ease_of_many_users_and_items_has_weights_for_the_most_popular_items_only(monkeypatch):
    monkeypatch.setattr(item_weights, "MOST", 4)
    have, matrix = random_pairs(40, 9)
    model, _ = item_weights.fit_ease(have, 3.0, lambda _: 0.0)
    counts = matrix.sum(0)
    chosen = sorted(sorted(range(9), key=lambda item: (-counts[item], item))[:4])
    x = matrix[:, chosen].numpy()
    inverse = np.linalg.inv(x.T @ x + 3 * np.eye(4))
    expected = np.zeros((9, 9))
    expected[np.ix_(chosen, chosen)] = np.eye(4) - inverse / np.diag(inverse)
    alone = model(torch.zeros(9), torch.arange(9)[:, None]).scores().detach().numpy()
    assert np.allclose(alone, expected, atol=1e-6)


def test_ease_chooses_the_penalty_by_the_metric():
    have, _ = random_pairs(30, 8)
    size: dict[int, float] = {}

    def recall(model):
        size[len(size)] = float(model.weight.detach().norm())
        return [0.1, 0.3, 0.2, 0.3, 0.0][len(size) - 1]

    model, penalty = item_weights.fit_ease(have, None, recall)
    assert penalty == item_weights.PENALTIES[1]
    assert float(model.weight.detach().norm()) == pytest.approx(size[1])
    assert list(size.values()) == sorted(size.values(), reverse=True)  # larger penalties give smaller weights


def test_ease_raises_before_any_work_if_its_matrices_do_not_fit(monkeypatch):
    have, _ = random_pairs(30, 8)
    monkeypatch.setattr(item_weights, "memory_available", lambda: 8 * 8 * 23)
    monkeypatch.setattr(item_weights, "products", lambda *_: pytest.fail("the matrices were computed"))
    with pytest.raises(
        BadInput, match=r"needs about 0.0 GB for 28 users and 8 items, but only 0.0 GB of memory"
    ):
        item_weights.fit_ease(have, 1.0, lambda _: 0.0)
    assert item_weights.memory_needed("ease", 29_858, 40_981) == 29_858**2 * 4 + 40_981 * 1_024 * 8
    assert 0 < item_weights.memory_available() < 2**50


@pytest.mark.parametrize(("users", "items", "rank"), [(40, 9, 3), (7, 11, 512)])
def test_the_graph_filter_is_the_dense_one_with_the_best_weight(monkeypatch, users, items, rank):
    monkeypatch.setattr(item_weights, "ROWS", 4)  # several blocks
    monkeypatch.setattr(item_weights, "RANK", rank)
    have, matrix = random_pairs(users, items)
    tried = []

    def recall(model):
        tried.append(model.weight.detach().clone())
        return [0.1, 0.3, 0.2][len(tried) - 1]

    model, weight = item_weights.fit_graph_filter(have, recall)
    assert weight == item_weights.LOW_PASS_WEIGHTS[1]
    assert len(tried) == 3
    x = matrix.numpy()
    x = x[x.sum(1) > 0]
    root = np.sqrt(np.maximum(x.sum(0), 1))
    n = x / np.sqrt(x.sum(1))[:, None] / root
    v = np.linalg.svd(n)[2][: min(rank, len(x) - 1, items - 1)].T
    expected = n.T @ n + weight * (v / root[:, None]) @ (v * root[:, None]).T
    alone = model(torch.zeros(items), torch.arange(items)[:, None]).scores().detach().numpy()
    assert np.allclose(alone, expected, atol=1e-5)


def test_the_graph_filter_of_a_single_item_has_no_low_pass_part():
    have, _ = random_pairs(5, 1, share=1.0)
    model, _ = item_weights.fit_graph_filter(have, lambda _: 0.0)
    assert model(torch.zeros(1), torch.zeros(1, 1, dtype=torch.int64)).scores().item() == pytest.approx(1.0)


def dense_propagation(matrix, layers):
    """Return the mean of powers 0 to `layers` of the normalized adjacency matrix, in float64."""
    users, items = matrix.shape
    a = torch.zeros(users + items, users + items, dtype=torch.float64)
    a[:users, users:], a[users:, :users] = matrix, matrix.T
    scale = a.sum(1).clamp(min=1).rsqrt()
    a = scale[:, None] * a * scale
    return sum(torch.linalg.matrix_power(a, power) for power in range(layers + 1)) / (layers + 1)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_propagation_is_the_mean_of_the_powers_of_a_dense_matrix(layers):
    have, matrix = random_pairs(11, 7, share=0.25)
    torch.manual_seed(0)
    vectors = torch.randn(18, 3, dtype=torch.float64)
    dense = dense_propagation(matrix, layers)
    found = torch.cat(propagate(vectors[:11], vectors[11:], graph(have), layers))
    assert torch.allclose(found, dense @ vectors, atol=1e-6)  # the weights of the graph are float32


def test_a_model_with_layers_has_the_scores_and_gradients_of_a_dense_model():
    have, matrix = random_pairs(11, 7, share=0.25)
    torch.manual_seed(0)
    model = MatrixFactorization(11, 7, 3, 0.2, -1.0, graph(have), 2)
    users, history = torch.tensor([4, 0, 9]), torch.full((3, 1), PADDING)
    dense = dense_propagation(matrix, 2)
    leaves = [part.detach().double().requires_grad_() for part in (model.user, model.item)]
    user, item = torch.nn.functional.normalize(dense @ torch.cat(leaves)).split([11, 7])
    expected = user[users] @ item.T / 0.2 - 1
    direction = torch.randn(3, 7)
    found = model(users, history).scores()
    assert torch.allclose(found.double(), expected, atol=1e-5)
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    for own, leaf in zip((model.user, model.item), leaves, strict=True):
        assert own.grad is not None
        assert leaf.grad is not None
        assert torch.allclose(own.grad.double(), leaf.grad, atol=1e-4)
    # In evaluation mode, the vectors are computed only once. Calling `eval` again recomputes them.
    with torch.no_grad():
        model.eval()
        assert torch.allclose(model(users, history).scores().double(), expected, atol=1e-5)
        model.item.mul_(-1)
        assert torch.allclose(model(users, history).scores().double(), expected, atol=1e-5)
        assert not torch.allclose(model.eval()(users, history).scores().double(), expected, atol=1e-2)


def test_new_users_get_the_vector_that_the_layers_would_give_them():
    have, matrix = random_pairs(11, 7, share=0.25)
    torch.manual_seed(0)
    model = MatrixFactorization(11, 7, 3, 0.2, -1.0, graph(have), 2).eval()
    items = torch.tensor([1, 2, 5])
    # A new user sends no messages to items, so the new user's vector is computed from the item vectors before
    # the last layer.
    sent = (dense_propagation(matrix, 1) @ torch.cat([model.user, model.item]).double())[11:]
    vector = (sent[items] * matrix.sum(0)[items, None].rsqrt()).sum(0)
    item = model.vectors()[1].double()
    expected = torch.nn.functional.normalize(vector, dim=0) @ item.T / 0.2 - 1
    history = padded([items, torch.tensor([3])])
    scores = model(torch.tensor([-1, 6]), history).scores().double()
    assert torch.allclose(scores[0], expected, atol=1e-5)
    assert torch.allclose(scores[1], model(torch.tensor([6]), history[1:]).scores()[0].double(), atol=1e-6)


def test_topk_softmax_is_a_weighted_softmax_with_the_exact_threshold():
    torch.manual_seed(0)
    x = 3 * torch.randn(3, 12, dtype=torch.float64)
    lists, k, width = [[0, 4, 7], [], [11]], 4, 1.7
    labels = padded([torch.tensor(one).long() for one in lists])

    def weights(row):
        low, high = -50.0, 50.0
        for _ in range(200):  # find the threshold by bisection
            middle = (low + high) / 2
            low, high = (middle, high) if (1 / (1 + np.exp(middle - row))).sum() > k else (low, middle)
        return 1 / (1 + np.exp((low - row) / width))

    fixed = [weights(row.numpy()) for row in x]

    def value(logits):
        total = 0.0
        for row, items, weight in zip(logits, lists, fixed, strict=True):
            total += sum(weight[i] * (np.log(np.exp(row).sum()) - row[i]) for i in items)
        return total / 2  # the row without labels is ignored

    leaf = x.clone().requires_grad_()
    found = topk_softmax(leaf, labels, k, width)
    assert found.item() == pytest.approx(value(x.numpy()), rel=1e-10)
    found.backward()
    assert leaf.grad is not None
    step = 1e-6
    for place in np.ndindex(*x.shape):
        moved = np.zeros(x.shape)
        moved[place] = step
        slope = (value(x.numpy() + moved) - value(x.numpy() - moved)) / (2 * step)
        assert float(leaf.grad[place]) == pytest.approx(slope, abs=1e-7)
    assert float(named("topk-softmax-4")(x, labels)) == pytest.approx(float(topk_softmax(x, labels, 4)))


@pytest.mark.parametrize("name", ["lml-labels", "softmax", "bce", "truncated-entropy-2", "topk-softmax-3"])
def test_the_loss_of_factors_equals_that_of_their_scores(name):
    torch.manual_seed(0)
    loss, rows, n = named(name), 300, 20
    hidden, weight, bias = torch.randn(rows, 4), torch.randn(n, 4), torch.randn(n)
    labels = padded([torch.randperm(n)[: 1 + row % 5] for row in range(rows)])
    results = []
    for of in (loss.of_factors, lambda h, w, b, at: loss(torch.nn.functional.linear(h, w, b), at)):
        leaves = [part.clone().requires_grad_() for part in (hidden, weight, bias)]
        value = of(*leaves, labels)
        (2 * value).backward()
        results.append([value.detach(), *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, atol=1e-5, rtol=1e-4)


class Fixed(torch.nn.Module):
    """A model that returns the given scores."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def forward(self, users, history):
        return item_weights.Scores(self.values[users])


def test_the_weights_are_those_of_the_best_mixture():
    torch.manual_seed(0)
    users, items = 60, 400
    history, known = random_pairs(users, items, seed=1, share=0.02)
    later, matrix = random_pairs(users, items, seed=2, share=0.02, new_to=known)
    noise = torch.randn(2, users, items)
    split = Users(history, later)
    half = torch.arange(items) < items // 2
    # Each of the first two models ranks one half of the items well. The third one returns noise.
    models = {
        "first": Fixed(noise[0] + 6 * (matrix.float() * half)),
        "second": Fixed(100 * (noise[1] + 6 * (matrix.float() * ~half))),
        "nothing": Fixed(torch.randn(users, items)),
    }
    choice = choose(models, split, "recall@20")
    assert choice.weights == {"first": 0.5, "second": 0.5}
    assert choice.factors["first"] / choice.factors["second"] == pytest.approx(100, rel=0.5)
    assert "50% `first`, 50% `second`" in choice.in_words()
    alone = choose({"nothing": models["nothing"], "all": Fixed(matrix.float())}, split, "recall@20")
    assert alone.weights == {"all": 1.0}
    assert "is `all`" in alone.in_words()


def test_the_scale_maximizes_the_likelihood():
    history, known = random_pairs(50, 30, seed=1, share=0.1)
    later, _ = random_pairs(50, 30, seed=2, share=0.1, new_to=known)
    torch.manual_seed(0)
    scores = torch.randn(50, 30)
    scores[later.user, later.item] += 1
    users = Users(history, later)
    scale = fit_scale(lambda batch: scores[batch.users], users)
    batch = users.__getitems__(list(range(len(users))))
    left = scores[batch.users].double()
    for row, items in enumerate(batch.history):
        left[row, items[items != PADDING]] = -torch.inf

    def value(factor):
        log = (factor * left).log_softmax(-1)
        return -sum(log[row, item] for row, items in enumerate(batch.labels) for item in items if item >= 0)

    assert value(scale) <= min(value(0.9 * scale), value(1.1 * scale))
