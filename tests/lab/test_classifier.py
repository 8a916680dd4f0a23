"""`TopKClassifier`: scikit-learn's estimator checks, all label formats, and accuracy."""

from __future__ import annotations

import doctest
import pickle
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import f1_score
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

from torchlml_lab import TopKClassifier
from torchlml_lab.classifier import estimator

LABELS = np.array(["ash", "birch", "cedar", "elm", "fir", "oak"])
# A model that is small enough for a test and learns within a few epochs.
QUICK: Any = {"hidden": 0, "epochs": 8, "learning_rate": 0.1, "batch_size": 32, "random_state": 0}


def rows(count: int = 240) -> tuple[Any, Any]:
    """Return features and multi-hot labels: for each sample, the 1 to 3 labels with the highest scores."""
    random = np.random.default_rng(0)
    x = random.normal(size=(count, 8))
    order = np.argsort(-(x @ random.normal(size=(8, 6))), axis=1)
    y = np.zeros((count, 6), dtype=np.int64)
    for row, places, k in zip(y, order, random.integers(1, 4, size=count), strict=True):
        row[places[:k]] = 1
    return x, y


X, Y = rows()
NAMES = [LABELS[row > 0].tolist() for row in Y]


def test_the_checks_of_scikit_learn() -> None:
    model = TopKClassifier(hidden=8, epochs=15, learning_rate=0.05, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # from a scikit-learn check with infinite labels
        results = check_estimator(model, on_skip=None)
    passed = {result["check_name"] for result in results if result["status"] == "passed"}
    assert len(passed) > 45
    assert {"check_fit_idempotent", "check_classifiers_train", "check_estimator_sparse_array"} <= passed


def test_the_example() -> None:
    assert doctest.testmod(estimator) == (0, 5)


def test_predictions_have_the_form_of_the_labels() -> None:
    matrix = TopKClassifier(k=2, **QUICK).fit(X, Y)
    found = matrix.predict(X)
    assert found.shape == Y.shape
    assert found.dtype.kind == "i"
    assert (found.sum(axis=1) == 2).all()
    f1_score(Y, found, average="samples")
    thin = TopKClassifier(k=2, **QUICK).fit(X, sparse.csr_array(Y)).predict(X)
    assert sparse.issparse(thin)
    assert (thin.toarray() == found).all()
    for names in (NAMES, [set(row) for row in NAMES], np.array([*NAMES, None], dtype=object)[:-1]):
        named = TopKClassifier(k=2, **QUICK).fit(X, names)
        assert named.classes_.tolist() == LABELS.tolist()
        best = named.predict(X)
        assert [sorted(row) for row in best] == [sorted(LABELS[row > 0].tolist()) for row in found]
        chances = named.predict_proba(X)
        assert all(
            chances[i, named.classes_ == a] >= chances[i, named.classes_ == b]
            for i, (a, b) in enumerate(best)
        )
    first = LABELS[Y.argmax(axis=1)]
    single = TopKClassifier(**QUICK).fit(X, first)
    assert single.k_ == 1
    assert single.predict(X).dtype == first.dtype
    assert single.score(X, first) == pytest.approx((single.predict(X) == first).mean())


def test_probabilities_sum_to_k() -> None:
    for k, expected in (("labels", round(Y.sum(axis=1).mean())), (1, 1), (4, 4)):
        model = TopKClassifier(k=k, **QUICK).fit(X, Y)
        assert model.k_ == expected
        chances = model.predict_proba(X)
        assert ((chances > 0) & (chances < 1)).all()
        np.testing.assert_allclose(chances.sum(axis=1), expected, rtol=1e-6)
        assert (model.predict(X, k=3).sum(axis=1) == 3).all()


@pytest.mark.parametrize("loss", ["lml", "softmax", "bce", "truncated-entropy"])
@pytest.mark.parametrize("hidden", [0, 16])
def test_the_classifier_learns_from_dense_and_sparse_rows(loss: Any, hidden: int) -> None:
    settings = QUICK | {"hidden": hidden, "dropout": 0.1}
    for x in (X, sparse.csr_matrix(X)):
        model = TopKClassifier(loss=loss, **settings).fit(x[:180], Y[:180])
        assert model.score(x[180:], Y[180:]) > 0.7  # chance would be about one third
        assert model.score(sparse.csr_array(X[180:]), Y[180:]) == model.score(x[180:], Y[180:])


def test_the_score_is_the_recall_at_each_rows_own_count() -> None:
    model = TopKClassifier(**QUICK).fit(X[:100], NAMES[:100])
    chances = model.predict_proba(X[100:])
    names = [["unheard", *row] if i % 7 == 0 else row for i, row in enumerate(NAMES[100:])]
    names[3] = []
    recalls = [
        len(set(LABELS[np.argsort(-chance)[: len(row)]]) & set(row)) / len(row)
        for chance, row in zip(chances, names, strict=True)
        if row
    ]
    assert model.score(X[100:], names) == pytest.approx(np.mean(recalls))


def test_pipelines_and_grids() -> None:
    texts = [" ".join([*row, *row, "leaf", "tree"]) for row in NAMES]
    pipeline = make_pipeline(TfidfVectorizer(), TopKClassifier(**QUICK))
    grid = GridSearchCV(pipeline, {"topkclassifier__k": [1, "labels"]}, cv=KFold(2)).fit(texts, NAMES)
    assert grid.best_score_ > 0.9
    assert set(pipeline.fit(texts, NAMES).predict(["a birch and an elm"], k=2)[0]) == {"birch", "elm"}
    for scoring in (None, "f1_samples", "average_precision"):
        assert cross_val_score(TopKClassifier(**QUICK), X, Y, cv=2, scoring=scoring).min() > 0.5


def test_copies_give_the_same_results_and_torchs_generator_is_unchanged() -> None:
    model = TopKClassifier(**(QUICK | {"hidden": 8}))
    before = torch.get_rng_state()
    chances = model.fit(X, Y).predict_proba(X)
    assert torch.equal(torch.get_rng_state(), before)
    assert (pickle.loads(pickle.dumps(model)).predict_proba(X) == chances).all()
    assert (clone(model).fit(X, Y).predict_proba(X) == chances).all()
    other = clone(model).set_params(random_state=1).fit(X, Y)
    assert (other.predict_proba(X) != chances).any()


def test_the_best_epoch_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def judge(network: Any, loss: Any, aside: Any) -> Any:
        seen.append((network, loss, aside))
        return real(network, loss, aside)

    real = estimator.judge
    monkeypatch.setattr(estimator, "judge", judge)
    random = np.random.default_rng(1).permuted(Y, axis=1)  # nothing can be learned, so training stops early
    settings = QUICK | {"epochs": 60, "patience": 3, "verbose": True}
    model = TopKClassifier(**settings).fit(X, random)
    said = capsys.readouterr().out
    gains = [float(gain) for gain in re.findall(r"nDCG@5 (\S+)", said)]
    assert len(gains) == said.count("\n") == model.n_iter_ == len(seen) < 60
    assert len(seen[0][2]) == 24
    assert gains.index(max(gains)) == model.n_iter_ - 4
    assert real(*seen[-1]).ndcg == pytest.approx(max(gains), abs=1e-4)
    assert TopKClassifier(**(settings | {"verbose": False})).fit(X[:90], random[:90]).n_iter_ == 60
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("settings", "y", "words"),
    [
        ({"k": 6}, Y, r"`k` must be less than the number of labels \(6\)"),
        ({"k": 0}, Y, '`k` must be a positive integer or "labels", but it is 0'),
        ({"k": 2.5}, Y, '`k` must be a positive integer or "labels", but it is 2.5'),
        ({"loss": "hinge"}, Y, "`loss` must be one of lml"),
        ({"hidden": -1}, Y, "`hidden` must be an integer of at least 0"),
        ({"epochs": 0}, Y, "`epochs` must be an integer of at least 1"),
        ({"dropout": 1.0}, Y, "`dropout` must be at least 0 and less than 1"),
        ({"learning_rate": 0}, Y, "`learning_rate` must be a positive number"),
        ({}, Y * 2, "`y` must be a matrix of 0s and 1s"),
        ({}, Y[:5], "inconsistent numbers of samples"),
        ({}, Y[:, :1].ravel() * 0, "two labels"),
        ({}, Y * 0, "`y` must contain labels, but no sample has any"),
        ({}, [["oak", 3], *NAMES[1:]], "names of one type, but their types are int and str"),
    ],
)
def test_invalid_training_data_is_rejected(settings: Any, y: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TopKClassifier(**(QUICK | settings)).fit(X, y)


def test_invalid_prediction_input_is_rejected() -> None:
    model = TopKClassifier(**QUICK).fit(X, Y)
    with pytest.raises(ValueError, match="`k` must be an integer from 1 to 6, but it is 7"):
        model.predict(X, k=7)
    with pytest.raises(ValueError, match="`y` must have 6 columns, as in `fit`, but it has 4"):
        model.score(X, Y[:, :4])


def test_a_validation_fraction_must_leave_rows_to_train_on() -> None:
    with pytest.raises(
        ValueError,
        match=r"`validation_fraction` must leave .* but it is 0.997, which holds out all 150 samples",
    ):
        TopKClassifier(validation_fraction=0.997, **QUICK).fit(X[:150], Y[:150])
    TopKClassifier(validation_fraction=0.99, **QUICK).fit(X[:150], Y[:150])


BAD_NAMES: dict[str, tuple[list[list[Any]], str]] = {
    "tuples": (
        [[("ash", 1)], [("elm", 2), ("ash", 1)]],
        r"strings or numbers, but it contains \('ash', 1\) of type tuple",
    ),
    "lists": ([[["ash"]], [["elm"], ["oak"]]], r"but it contains \['ash'\] of type list"),
    "None": ([["ash", None], ["elm"]], "but it contains None of type NoneType"),
    "NaN": ([[1.0, float("nan")], [2.0]], "must not contain NaN"),
    "nothing": ([[], []], "`y` must contain labels, but no sample has any"),
    "two types": ([["ash", 1], ["elm"]], "names of one type, but their types are int and str"),
}


@pytest.mark.parametrize("name", BAD_NAMES)
def test_invalid_label_names_are_rejected(name: str) -> None:
    lists, needle = BAD_NAMES[name]
    with pytest.raises(ValueError, match=needle):
        TopKClassifier(**QUICK).fit(X[:100], lists * 50)


def test_a_matrix_without_columns_has_no_labels() -> None:
    with pytest.raises(ValueError, match="`y` must contain labels, but no sample has any"):
        TopKClassifier(**QUICK).fit(X, np.zeros((len(X), 0)))


def test_large_integers_stay_integers() -> None:
    names = [2**63 + 1, 2**63 + 3, -3]  # as numpy floats, the first two would be equal
    lists = [[names[i % 3], names[(i + 1) % 3]] if i % 2 else [names[i % 3]] for i in range(len(X))]
    model = TopKClassifier(k=1, **QUICK).fit(X, lists)
    assert model.classes_.tolist() == sorted(names)
    assert all(type(name) is int and name in names for (name,) in model.predict(X))
    assert model.score(X, lists) > 0
    with pytest.raises(
        ValueError, match=f"integers that fit in int64, but they range from -3 to {2**63 + 3}"
    ):
        TopKClassifier(**QUICK).fit(X, [name for (name, *_) in lists])


class Series:
    """A column of lists. Like a polars Series, it yields each list as another Series."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __iter__(self) -> Any:
        return (Series(value) if isinstance(value, list) else value for value in self.values)

    def __len__(self) -> int:
        return len(self.values)

    def to_list(self) -> list[Any]:
        return self.values


def test_a_series_of_lists() -> None:
    model = TopKClassifier(k=2, **QUICK).fit(X, Series(NAMES))
    again = TopKClassifier(k=2, **QUICK).fit(X, NAMES)
    assert model.predict(X) == again.predict(X)
    assert model.score(X, Series(NAMES)) == again.score(X, NAMES)
    single = TopKClassifier(k=1, **QUICK).fit(X, Series([row[0] for row in NAMES]))
    assert set(single.predict(X)) <= set(LABELS)
