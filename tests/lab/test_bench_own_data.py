"""`torchlml bench own-data`: metrics, resuming, missing packages and the committed tables."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.multiclass import OneVsRestClassifier
from sklearn.svm import LinearSVC

from tests.support.command_lines import rejected
from tests.support.tagged_texts import tagged_texts
from torchlml_lab import cli
from torchlml_lab.bench import own_data
from torchlml_lab.bench.own_data_methods import (
    METHODS,
    Method,
    Prediction,
    Problem,
    best_rule,
    best_threshold,
)
from torchlml_lab.data.labeled_rows import Columns, LabeledRows, label_matrix

RESULTS = Path(__file__).parents[2] / "results" / "own-data"


def problem(count: int = 120) -> Problem:
    samples = tagged_texts(2 * count, seed=0)
    labels, names = label_matrix([tags for _, tags in samples])
    features = sparse.csr_array((2 * count, 0), dtype=np.float32)
    rows = LabeledRows(features, labels, names, [text for text, _ in samples], ())
    return Problem(
        rows.take(np.arange(count)),
        rows.take(np.arange(count, 2 * count)),
        Columns(("text",), (), ("tags",), ";"),
        seed=0,
    )


def test_linear_svc_matches_scikit_learn():
    samples = problem()
    found = METHODS["LinearSVC"].predict(samples)
    vectorizer = TfidfVectorizer()
    x = vectorizer.fit_transform(samples.training.texts)
    model = OneVsRestClassifier(LinearSVC()).fit(x, samples.training.labels.toarray())
    expected = model.decision_function(vectorizer.transform(samples.test.texts))
    assert found.scores == pytest.approx(expected, abs=1e-3)
    assert np.array_equal(found.sets, expected > 0)
    assert found.setting == "default"


@pytest.mark.parametrize("method", ["torchlml", "logistic, tuned"])
def test_methods_find_the_tags(method):
    row = own_data._compared("texts", method, problem())
    assert row.ndcg5 > 0.9
    assert row.micro_f1 > 0.8
    assert row.seconds > 0


def test_metrics_match_their_definitions(monkeypatch):
    labels, names = label_matrix([["a"], ["a", "b"], ["b", "c"], ["a"]])
    rows = LabeledRows(sparse.csr_array((4, 1), dtype=np.float32), labels, names)
    scores = np.array([[3, 2, 1], [1, 3, 2], [3, 1, 2], [2, 1, 3]], dtype=np.float32)
    sets = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1], [0, 0, 0]], dtype=bool)
    method = Method(lambda samples: Prediction(scores, sets, "default", 0.0), "sklearn")
    monkeypatch.setitem(METHODS, "fixed", method)
    row = own_data._compared("four", "fixed", Problem(rows, rows, None, seed=0))
    assert row.p1 == 0.5
    assert row.exact == 0.5
    assert row.micro_f1 == pytest.approx(2 * 4 / (5 + 6), abs=1e-5)
    discount = 1 / np.log2([2, 3, 4])
    expected = np.mean(
        [
            1,
            (discount[0] + discount[2]) / discount[:2].sum(),
            (discount[1] + discount[2]) / discount[:2].sum(),
            discount[1],
        ]
    )
    assert row.ndcg5 == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_no_other_threshold_has_better_sets(seed, least):
    random = np.random.default_rng(seed)
    labels = random.random((20, 6)) < 0.3
    scores = (labels + random.normal(size=labels.shape)).astype(np.float32).round(1)  # with ties

    def quality(threshold):
        sets = scores > threshold
        for row, values in enumerate(scores.tolist()):
            for j in sorted(range(6), key=lambda j: -values[j])[:least]:
                sets[row, j] = True
        f1 = 2 * (sets & labels).sum() / (sets.sum() + labels.sum())
        return f1 + (sets == labels).all(axis=1).mean()

    found = best_threshold(scores, labels, least)
    best = max(quality(threshold) for threshold in np.arange(-5, 5, 0.05))
    assert quality(found.threshold) == pytest.approx(best, abs=1e-12)
    assert found.least == least


@pytest.mark.parametrize(
    ("scores", "labels", "least"),
    [
        # In the first case, a threshold is enough. In the others, each row's scores have a different scale.
        ([[2, 1, -1], [1, -1, -2]], [[1, 1, 0], [1, 0, 0]], 0),
        ([[-5, -6, -7], [5, 4, -4]], [[1, 0, 0], [1, 1, 0]], 1),
        ([[-5, -6, -7], [5, 4, -4]], [[1, 1, 0], [1, 1, 0]], 2),
    ],
)
def test_the_best_rule_is_chosen(scores, labels, least):
    rule = best_rule(np.array(scores, dtype=np.float32), np.array(labels, dtype=bool))
    assert rule.least == least
    assert rule.sets(np.array(scores)).tolist() == np.array(labels, dtype=bool).tolist()


@pytest.fixture
def data(tmp_path) -> Path:
    """A data directory in which small files replace those of corel5k."""
    folder = tmp_path / "data" / "multilabel"
    folder.mkdir(parents=True)
    import gzip

    lines = "".join(f"{i % 4},{4 + i % 3} {i % 4}:1 {4 + i % 3}:1\n" for i in range(60))
    for part in ("train", "test"):
        with gzip.open(folder / f"corel5k.{part}.svm.gz", "wt") as file:
            file.write(lines)
    return tmp_path / "data"


def test_finished_comparisons_are_not_repeated(data, tmp_path, monkeypatch, capsys):
    calls = []

    def counted(samples: Problem) -> Prediction:
        calls.append(len(samples.training))
        return METHODS["LinearSVC"].predict(samples)

    monkeypatch.setitem(METHODS, "counted", Method(counted, "sklearn"))
    words = ["bench", "own-data", "--data", str(data), "--csv", str(tmp_path / "rows.csv")]
    words += ["--sets", "corel5k", "--methods", "counted", "LinearSVC"]
    assert cli.main([*words, "--seeds", "0", "--sizes", "30"]) == 0
    assert cli.main([*words, "--seeds", "0", "1", "--sizes", "30", "40", "0", "500"]) == 0
    assert calls == [30, 40, 60, 30, 40, 60]  # 0 and 500 both select all 60 samples
    rows = own_data.TABLE.read(tmp_path / "rows.csv", "--csv")
    assert [(row.samples, row.method, row.seed) for row in rows] == [
        (samples, method, seed)
        for samples in (30, 40, 60)
        for method in ("LinearSVC", "counted")
        for seed in (0, 1)
    ]
    assert "corel5k" in capsys.readouterr().out


def test_a_missing_package_is_reported(data, tmp_path, monkeypatch, capsys):
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "libmultilabel" else there(name)
    )
    words = ["bench", "own-data", "--data", data, "--csv", tmp_path / "rows.csv"]
    said = rejected(capsys, [*words, "--methods", "LibMultiLabel"])
    assert "`--methods` contains `LibMultiLabel`, which needs the package `libmultilabel`" in said
    assert "pip install 'torchlml[competitors]'" in said
    assert not (tmp_path / "rows.csv").exists()


@pytest.mark.parametrize(
    ("options", "needle"),
    [
        ("--sets yelp", "`--sets` must be one of bibtex, corel5k, delicious, goemotions"),
        ("--methods svm", "`--methods` must be one of torchlml, LinearSVC"),
        ("--seeds -1", "`--seeds` must be finite and at least 0, but it is -1"),
        ("--sizes -1", "`--sizes` must be finite and at least 0, but it is -1"),
    ],
)
def test_bad_options(options, needle, tmp_path, capsys):
    words = ["bench", "own-data", "--csv", tmp_path / "rows.csv", *options.split()]
    assert needle in rejected(capsys, words)


def test_missing_data_files_are_reported(tmp_path, capsys):
    words = ["bench", "own-data", "--data", tmp_path, "--csv", tmp_path / "rows.csv", "--sets", "bibtex"]
    said = rejected(capsys, [*words, "--methods", "LinearSVC"])
    assert f"`{tmp_path}` (`--data`) does not contain `multilabel/bibtex.train.svm.gz`" in said


def test_an_incomplete_csv_is_not_drawn(tmp_path, capsys):
    rows = own_data.TABLE.read(RESULTS / "own-data.csv", "--csv")
    words = ["figures", "own-data", "--csv", tmp_path / "rows.csv", "--out", tmp_path / "x.png"]
    own_data.TABLE.write(tmp_path / "rows.csv", rows[1:])
    assert "is incomplete: results for some seeds of `LibMultiLabel` on bibtex" in rejected(capsys, words)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


def test_the_data_directory_is_required(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TORCHLML_DATA", raising=False)
    words = ["bench", "own-data", "--methods", "LinearSVC", "--csv", tmp_path / "rows.csv"]
    assert "`--data` is missing" in rejected(capsys, words)


def test_the_committed_tables_match_the_csv():
    rows = own_data.TABLE.read(RESULTS / "own-data.csv", "--csv")
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    for metric in own_data.METRICS:
        assert own_data.summary(rows, metric) in page
    assert own_data.targets(rows) in page
    for data in {row.data for row in rows}:
        assert own_data.details(rows, data) in page
    # A changed value changes the tables.
    other = dataclasses.replace(rows[0], ndcg5=rows[0].ndcg5 + 0.1)
    assert own_data.details([other, *rows[1:]], rows[0].data) not in page
