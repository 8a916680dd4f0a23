"""On real labels, the metrics match napkinXC, which follows the Extreme Classification Repository."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_svmlight_file
from sklearn.preprocessing import MultiLabelBinarizer

from torchlml.metrics import (
    label_propensities,
    propensity_scored_precision,
    topk_ndcg,
    topk_precision,
    topk_recall,
)

napkinxc = pytest.importorskip("napkinxc.metrics", reason="napkinXC is not installed")
pytestmark = pytest.mark.skipif("TORCHLML_DATA" not in os.environ, reason="TORCHLML_DATA is not set")
K, KS = 20, (1, 3, 5, 20)


@pytest.fixture(scope="module")
def delicious():
    """The labels of the Delicious dataset as multi-hot matrices, and noisy scores for its test samples."""
    folder = Path(os.environ["TORCHLML_DATA"]) / "multilabel"
    train, test = (
        MultiLabelBinarizer(classes=range(983)).fit_transform(
            load_svmlight_file(str(folder / f"delicious.{part}.svm.gz"), n_features=500, multilabel=True)[1]
        )
        for part in ("train", "test")
    )
    test = test[:800]
    test[::50] = 0  # samples without labels
    noise = np.random.default_rng(0).normal(size=test.shape)
    return train, test, np.log1p(train.sum(0)) + 2 * test + noise


def assert_same(found, theirs, name):
    assert found == pytest.approx({f"{name}@{k}": theirs[k - 1] for k in KS}, rel=2e-7)


def test_precision_and_ndcg(delicious):
    _, test, scores = delicious
    preds, target = torch.from_numpy(scores), torch.from_numpy(test).bool()
    assert_same(topk_precision(preds, target, KS), napkinxc.precision_at_k(test, scores, k=K), "precision")
    assert_same(topk_ndcg(preds, target, KS), napkinxc.ndcg_at_k(test, scores, k=K), "ndcg")
    # Recall ignores samples without labels.
    some = test.any(1)
    assert_same(topk_recall(preds, target, KS), napkinxc.recall_at_k(test[some], scores[some], k=K), "recall")


@pytest.mark.parametrize("ab", [(0.55, 1.5), (0.6, 2.6)])
def test_propensity_scored_precision(delicious, ab):
    train, test, scores = delicious
    theirs = napkinxc.Jain_et_al_propensity(train, *ab)
    ours = label_propensities(torch.from_numpy(train).sum(0), len(train), *ab)
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-13)
    found = propensity_scored_precision(torch.from_numpy(scores), torch.from_numpy(test).bool(), ours, KS)
    assert_same(found, napkinxc.psprecision_at_k(test, scores, 1 / theirs, k=K), "psp")
