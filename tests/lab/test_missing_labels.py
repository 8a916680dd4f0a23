"""The methods, measures and data of `torchlml missing-labels`, compared with independent computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn import linear_model
from sklearn import metrics as sk

from torchlml_lab.cli_errors import BadInput
from torchlml_lab.studies.missing_labels import data, measures, methods, study
from torchlml_lab.studies.missing_labels.methods import METHODS, Batch

LABELS = 6


def batch(dtype: torch.dtype = torch.float64) -> Batch:
    """Return a batch of five samples for two configurations."""
    generator = torch.Generator().manual_seed(3)
    x = 2 * torch.randn(2, 5, LABELS, generator=generator, dtype=dtype)
    estimates = torch.randn(2, 5, LABELS, generator=generator, dtype=dtype)
    labels = torch.rand(5, LABELS, generator=generator) < 0.4
    observed = torch.randint(LABELS, (5,), generator=generator)
    k = torch.full((5,), 2.2, dtype=dtype)
    weight = torch.tensor([0.3, 2.0], dtype=dtype)
    return Batch(x, observed, k, weight, labels, estimates)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def cross_entropy(target: float, p: float) -> float:
    return -target * math.log(p) - (1 - target) * math.log(1 - p)


def entry(name: str, p: float, is_observed: bool, is_label: bool, w: float) -> float:
    """Return the contribution of one entry to a loss that is a mean over samples and labels."""
    if name == "bce-all":
        return cross_entropy(float(is_label), p)
    if name == "an-ls":
        return cross_entropy(1 - w / 2 if is_observed else w / 2, p)
    if is_observed:
        return -math.log(p)
    if name == "an":
        return -math.log(1 - p)
    if name == "wan":
        return -min(1.0, w / (LABELS - 1)) * math.log(1 - p)
    if name == "em":
        return -w * (-p * math.log(p) - (1 - p) * math.log(1 - p))
    if name == "asl":
        shifted = max(p - 0.05, 0.0)
        return -(shifted**w) * math.log(1 - shifted) if shifted else 0.0
    assert name in ("epr", "role")
    return 0.0


def count_penalty(p: np.ndarray, k: float) -> float:
    return float(((p.sum(1).mean() - k) / LABELS) ** 2)


def expected(name: str, given: Batch, configuration: int) -> float:
    """Compute the loss of a configuration with loops over samples and labels."""
    x, w = given.x[configuration].numpy(), float(given.weight[configuration])
    rows, k = len(x), float(given.k[0])
    p = np.array([[sigmoid(value) for value in row] for row in x])
    total = 0.0
    for i in range(rows):
        for j in range(LABELS):
            total += entry(name, p[i, j], j == given.observed[i], bool(given.labels[i, j]), w)
    total /= rows * LABELS
    if name == "epr":
        return total + w * count_penalty(p, k)
    if name == "role":
        assert given.estimates is not None
        q = np.array([[sigmoid(value) for value in row] for row in given.estimates[configuration].numpy()])
        observed = np.mean([-math.log(q[i, given.observed[i]]) for i in range(rows)]) / LABELS
        pairs = [(p[i, j], q[i, j]) for i in range(rows) for j in range(LABELS)]
        cross = np.mean([cross_entropy(b, a) + cross_entropy(a, b) for a, b in pairs])
        return 0.5 * float(cross + total + observed + w * count_penalty(p, k) + w * count_penalty(q, k))
    return total


SIGMOID = ["bce-all", "an", "an-ls", "wan", "epr", "role", "em", "asl"]


@pytest.mark.parametrize("name", SIGMOID)
def test_losses_match_their_papers(name):
    given = batch()
    found = METHODS[name].loss(given)
    assert found.tolist() == pytest.approx([expected(name, given, c) for c in range(2)], rel=1e-12)


@pytest.mark.parametrize("name", SIGMOID)
def test_gradients(name):
    """Gradients match finite differences. One term of ROLE treats the predictions p as constants."""
    given = batch()
    assert given.estimates is not None
    leaf = given.x.clone().requires_grad_()
    (found,) = torch.autograd.grad(METHODS[name].loss(given._replace(x=leaf)).sum(), leaf)
    step = 1e-6
    for place in ((0, 0, 0), (0, 1, int(given.observed[1])), (1, 4, 3), (1, 2, int(given.observed[2]))):
        values = []
        for sign in (1, -1):
            x = given.x.clone()
            x[place] += sign * step
            value = expected(name, given._replace(x=x), place[0])
            if name == "role":  # remove the term in which p is a constant target
                p, q = x[place[0]].sigmoid(), given.estimates[place[0]].sigmoid()
                value -= 0.5 * float((-p * q.log() - (1 - p) * (1 - q).log()).mean())
            values.append(value)
        assert float(found[place]) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-9)


def test_values_by_hand():
    """A sample has four labels with p = 1/2, so each cross-entropy is log 2. The first label is observed."""
    given = Batch(
        torch.zeros(1, 1, 4, dtype=torch.float64),
        torch.tensor([0]),
        torch.tensor([1.0], dtype=torch.float64),
        torch.tensor([0.5], dtype=torch.float64),
        torch.tensor([[True, True, False, False]]),
        torch.zeros(1, 1, 4, dtype=torch.float64),
    )
    log2 = math.log(2)
    wanted = {
        "bce-all": log2,
        "an": log2,
        "an-ls": log2,
        "wan": log2 / 4 * (1 + 3 * 0.5 / 3),
        "epr": log2 / 4 + 0.5 * (1 / 4) ** 2,
        "role": log2 + log2 / 4 + 0.5 * (1 / 4) ** 2,
        "em": log2 / 4 * (1 - 0.5 * 3),
        "asl": log2 / 4 - 3 / 4 * 0.45**0.5 * math.log(0.55),
        "softmax": math.log(4),
        "truncated-entropy": math.log(4),
        "lml": math.log(4),
        "subset": math.log(4),
    }
    for name, value in wanted.items():
        assert float(METHODS[name].loss(given)) == pytest.approx(value, rel=1e-12), name


def test_the_lml_loss_uses_the_k_of_each_sample():
    given = batch()._replace(k=torch.tensor([0.7, 1.4, 2.0, 2.6, 3.5], dtype=torch.float64))
    found = METHODS["lml"].loss(given)
    for c in range(2):
        parts = []
        for i in range(5):
            low, high = -60.0, 60.0
            for _ in range(200):
                nu = (low + high) / 2
                total = sum(sigmoid(float(value) + nu) for value in given.x[c, i])
                low, high = (nu, high) if total < float(given.k[i]) else (low, nu)
            parts.append(-math.log(sigmoid(float(given.x[c, i, given.observed[i]]) + nu)))
        assert float(found[c]) == pytest.approx(np.mean(parts), rel=1e-9)
    assert methods.integer_k(torch.tensor([0.3, 1.6, 3.4])).tolist() == [1, 2, 3]


def test_probabilities_of_every_link():
    x, k = torch.randn(2, 3, LABELS), torch.tensor([1.0, 2.0, 3.0])
    for link in ("lml", "subset"):
        p = methods.probabilities_of(link, methods.scores_of(link, x, k))
        torch.testing.assert_close(p.sum(-1), k.expand(2, 3), rtol=1e-5, atol=1e-5)
    p = methods.probabilities_of("softmax", methods.scores_of("softmax", x, k))
    torch.testing.assert_close(p, (x.softmax(-1) * k[:, None]).clamp(max=1))
    torch.testing.assert_close(
        methods.probabilities_of("sigmoid", methods.scores_of("sigmoid", x, k)), x.sigmoid()
    )


def test_the_search_of_every_method_starts_with_nine_configurations():
    for method in METHODS.values():
        recipes = methods.first_recipes(method)
        assert len(set(recipes)) == 9
        assert {recipe.weight for recipe in recipes} == set(method.weights[2:5] or (1.0,))
    single, several = methods.first_recipes(METHODS["an"]), methods.first_recipes(METHODS["wan"])
    assert {one.learning_rate for one in several} < {one.learning_rate for one in single}


def test_neighbors_differ_in_one_value():
    found = methods.neighbors(METHODS["epr"], methods.Recipe(0.001, 10.0))
    assert found == [(0.00056, 10.0), (0.0018, 10.0), (0.001, 1.0), (0.001, 100.0)]
    assert methods.neighbors(METHODS["lml"], methods.Recipe(0.1, 1.0)) == [(0.056, 1.0)]
    corner = methods.neighbors(METHODS["asl"], methods.Recipe(1e-5, 0.0))
    assert corner == [(1.8e-5, 0.0), (1e-5, 0.5)]


def test_the_estimates_of_role_follow_adam_on_the_whole_table():
    """Adam also updates the estimates for samples outside the batch, as with a dense gradient."""
    generator = torch.Generator().manual_seed(0)
    rates, observed = torch.tensor([1e-3, 2e-2]), torch.randint(6, (40,), generator=generator)
    estimates = methods.Estimates(observed, 6, rates, 0)
    known = estimates.logits.sigmoid()[:, torch.arange(40), observed]
    torch.testing.assert_close(known, torch.full((2, 40), 0.995))
    whole = [part.clone().requires_grad_() for part in estimates.logits]
    adams = [torch.optim.Adam([part], 10 * float(rate)) for part, rate in zip(whole, rates, strict=True)]
    number = 0
    for _ in range(8):
        for rows in torch.randperm(40, generator=generator).split(8):
            number += 1
            found = estimates.of(rows, number)
            for part, own in zip(whole, found, strict=True):
                torch.testing.assert_close(own.detach(), part.detach()[rows], rtol=0, atol=2e-5)
            gradient = found.detach().sin() + 0.3 * torch.randn(found.shape, generator=generator)
            estimates.update(rows, found, gradient, number)
            for part, adam, own in zip(whole, adams, gradient, strict=True):
                part.grad = torch.zeros_like(part)
                part.grad[rows] = own
                adam.step()
    start = methods.Estimates(observed, 6, rates, 0).logits[1]
    assert (whole[1] - start).abs().mean() > 0.3


# ------------------------------------------------------------------------------------ measures


def test_average_precision_with_ties():
    generator = torch.Generator().manual_seed(0)
    labels = torch.rand(200, 5, generator=generator) < 0.3
    labels[:, 4] = False
    for digits in (6, 0):  # without and with many equal scores
        scores = torch.randn(2, 200, 5, generator=generator).round(decimals=digits)
        found = measures.mean_average_precision(scores, labels)
        for c in range(2):
            wanted = sk.average_precision_score(
                labels[:, :4].numpy(), scores[c, :, :4].numpy(), average="macro"
            )
            assert float(found[c]) == pytest.approx(wanted, rel=1e-5)


def test_recall_brier_and_f1():
    generator = torch.Generator().manual_seed(1)
    labels = torch.rand(50, 8, generator=generator) < 0.4
    labels[:, 0] = True
    p = torch.rand(50, 8, generator=generator)
    wanted = [
        len(set(np.argsort(-row)[:3]) & set(np.flatnonzero(y))) / y.sum()
        for row, y in zip(p.numpy(), labels.numpy(), strict=True)
    ]
    assert measures.recall_at(p, labels, 3) == pytest.approx(np.mean(wanted))
    assert measures.brier_score(p, labels) == pytest.approx(
        sk.mean_squared_error(labels.float(), p), rel=1e-5
    )
    wanted_f1 = sk.f1_score(labels.numpy(), (p > 0.5).numpy(), average="micro")
    assert measures.f1_score(p > 0.5, labels) == pytest.approx(wanted_f1)


def test_the_calibration_error_by_hand():
    p = torch.tensor([[0.01, 0.02, 0.5, 0.52, 1.0]])
    labels = torch.tensor([[False, True, False, True, True]])
    # The bins are 1/15 wide. The sum of the probabilities and the number of labels are 0.03 and 1 in the bin
    # {0.01, 0.02}, 1.02 and 1 in {0.5, 0.52}, and 1 and 1 in {1.0}.
    assert measures.calibration_error(p, labels) == pytest.approx((0.97 + 0.02 + 0.0) / 5, rel=1e-5)


def test_recalibration_is_a_logistic_regression():
    generator = torch.Generator().manual_seed(2)
    scores = 40 + 5 * torch.randn(300, 7, generator=generator)
    labels = torch.rand(300, 7, generator=generator) < (0.7 * (scores - 42)).sigmoid()
    found = measures.recalibrated(scores, labels)
    model = linear_model.LogisticRegression(C=np.inf, tol=1e-10).fit(scores.reshape(-1, 1), labels.flatten())
    assert found.slope == pytest.approx(model.coef_[0, 0], rel=1e-3)
    assert found.offset == pytest.approx(model.intercept_[0], rel=1e-3)
    p = found.probabilities(scores)
    best = max(measures.f1_score(p > t, labels) for t in p.flatten().tolist())
    assert measures.f1_score(p > found.threshold, labels) >= best


def test_the_best_threshold_does_not_separate_equal_probabilities():
    p = torch.tensor([[0.9, 0.6, 0.6, 0.1]])
    labels = torch.tensor([[True, True, False, False]])
    threshold = measures.best_threshold(p, labels)
    assert 0.1 < threshold < 0.6  # F1 is 4/5 here, and 2/3 above 0.6


# ------------------------------------------------------------------------------------ data


def dataset(samples: int = 200, official: bool = True) -> data.Dataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 4, generator=generator) * 3 + 7
    labels = torch.rand(samples, 5, generator=generator) < 0.4
    labels[:, 0] |= ~labels.any(1)
    train = torch.arange(samples) < samples * 3 // 4 if official else None
    return data.Dataset("yeast", x, labels, train)


@pytest.mark.parametrize("official", [True, False])
def test_the_split_of_a_seed(official):
    source = dataset(official=official)
    one, same, other = (data.split_of(source, seed) for seed in (0, 0, 1))
    assert torch.equal(one.x, same.x)
    assert torch.equal(one.observed, same.observed)
    assert not torch.equal(one.x, other.x)
    tested = 50 if official else 60
    assert len(one.test_x) == tested
    assert len(one.validation_x) == round(0.2 * (200 - tested))
    assert len(one.x) + len(one.validation_x) == 200 - tested
    assert one.labels[torch.arange(len(one.x)), one.observed].all()
    together = torch.cat([one.x, one.validation_x])
    torch.testing.assert_close(together.mean(0), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(together.std(0), torch.ones(4))
    everything = torch.cat([together, one.test_x])
    assert len(everything.unique(dim=0)) == 200  # no sample is in two parts
    assert one.k == pytest.approx(one.validation_labels.sum(1).double().mean().item())
    assert torch.equal(one.test_x, other.test_x) == official


def test_the_observed_label_is_drawn_uniformly():
    labels = torch.tensor([[True, False, True, True]]).repeat(4000, 1)
    source = data.Dataset("yeast", torch.randn(4000, 2), labels, torch.arange(4000) < 3999)
    counts = data.split_of(source, 0).observed.bincount(minlength=4)
    assert counts[1] == 0
    assert (counts[[0, 2, 3]] - 1066).abs().max() < 120


def test_a_published_draw_is_used():
    source = dataset()
    drawn = source.labels[source.train].int().argmax(-1)
    split = data.split_of(data.Dataset("voc2012", source.x, source.labels, source.train, drawn), 0, True)
    assert torch.equal(split.observed, split.labels.int().argmax(-1))


def test_the_labeled_part_contains_validation_samples_only():
    split = data.split_of(dataset(), 0)
    part = data.labeled_part(split)
    assert torch.equal(torch.cat([part.x, part.validation_x]), split.validation_x)
    assert torch.equal(torch.cat([part.labels, part.validation_labels]), split.validation_labels)
    assert (len(part.x), len(part.validation_x)) == (22, 8)


def test_predicted_k_leaves_each_validation_sample_out():
    split = data.split_of(dataset(), 0)
    train, validation, test = (part.numpy() for part in data.predicted_k(split))
    x, count = split.validation_x.double().numpy(), split.validation_labels.sum(1).double().numpy()
    errors = {}
    for penalty in np.logspace(-1, 5, 13):
        found = []
        for i in range(len(x)):
            rest = np.arange(len(x)) != i
            model = linear_model.Ridge(alpha=penalty).fit(x[rest], count[rest])
            found.append(model.predict(x[i : i + 1])[0])
        errors[penalty] = float(np.mean((found - count) ** 2)), np.array(found)
    penalty = min(errors, key=lambda one: errors[one][0])
    low, high = count.min(), count.max()
    np.testing.assert_allclose(validation, errors[penalty][1].clip(low, high), rtol=1e-4)
    model = linear_model.Ridge(alpha=penalty).fit(x, count)
    np.testing.assert_allclose(test, model.predict(split.test_x.double()).clip(low, high), rtol=1e-4)
    np.testing.assert_allclose(train, model.predict(split.x.double()).clip(low, high), rtol=1e-4)


GOOD = {"x": np.ones((6, 2), np.float32), "y": np.eye(6, 3, dtype=bool) | (np.arange(3) == 0)}


@pytest.mark.parametrize(
    ("name", "arrays", "needle"),
    [
        ("yeast", {"y": GOOD["y"], "n_train": 4}, "has no array `x`"),
        ("yeast", GOOD, "has no array `train`"),
        ("yeast", {**GOOD, "y": GOOD["y"][:5], "n_train": 4}, "must have a float array `x` of shape"),
        ("yeast", {**GOOD, "x": GOOD["x"] * np.nan, "n_train": 4}, "finite features"),
        (
            "yeast",
            {**GOOD, "train": np.ones(5, bool)},
            "one value in `train` for each of its 6 samples, but `train` has shape (5,)",
        ),
        ("voc2012", {**GOOD, "train": np.arange(6) < 4}, "has no array `observed`"),
        (
            "voc2012",
            {**GOOD, "train": np.arange(6) < 4, "observed": np.zeros(6, int)},
            "one `observed` label",
        ),
        ("voc2012", {**GOOD, "train": np.arange(6) < 4, "observed": np.full(4, 2)}, "must also be in `y`"),
    ],
)
def test_damaged_arrays(tmp_path, name, arrays, needle):
    (tmp_path / "missing-labels").mkdir()
    np.savez(tmp_path / "missing-labels" / f"{name}.npz", **arrays)
    with pytest.raises(BadInput, match="missing-labels") as error:
        data.read_dataset(name, tmp_path)
    assert needle in str(error.value)


def test_a_file_that_is_not_npz(tmp_path):
    (tmp_path / "missing-labels").mkdir()
    path = tmp_path / "missing-labels" / "yeast.npz"
    for content in (b"text", b"PK\x03\x04 cut off"):
        path.write_bytes(content)
        with pytest.raises(BadInput, match=r"not a complete \.npz file"):
            data.read_dataset("yeast", tmp_path)


def test_svmlight_files_are_aligned(tmp_path):
    folder = tmp_path / "multilabel"
    folder.mkdir()
    (folder / "bibtex.train.svm.gz").write_text("5,2 1:1 3:2\n2 2:1\n 1:1\n")
    (folder / "bibtex.test.svm.gz").write_text("2,9 4:1\n5 1:3\n9 1:1\n")
    found = data.read_dataset("bibtex", tmp_path)
    assert found.train is not None
    assert found.train.tolist() == [True, True, False, False]  # samples without a known label are left out
    assert found.labels.sum(1).tolist() == [2, 1, 1, 1]
    assert torch.equal(found.labels[1], found.labels[2])
    assert found.x.shape[0] == 4
    assert float(found.x[0].sum()) == 3
    assert float(found.x[3].sum()) == 3


def test_batch_sizes():
    assert [study.batch_size(n) for n in (10, 281, 1200, 4574, 17215)] == [32, 32, 32, 128, 256]
