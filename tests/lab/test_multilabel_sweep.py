"""The study of partial labels: sampling, the sweep, its figure and tables, and the one-vs-rest baseline."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from torchlml_lab import cli
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.data.labeled_rows import label_matrix
from torchlml_lab.multilabel import one_vs_rest, sweep
from torchlml_lab.multilabel.samples import kept_labels, label_lists
from torchlml_lab.multilabel.settings import MultilabelSettings, OneVsRestSettings, SweepSettings


def test_a_part_of_the_labels_is_kept():
    labels, _ = label_matrix([[str(j) for j in range(1 + i % 40)] for i in range(2000)])
    whole = np.diff(labels.indptr)
    thinner = kept_labels(labels, 0.3, seed=0)
    counts = np.diff(thinner.indptr)
    assert (counts >= 1).all()
    assert counts[whole > 30].sum() / whole[whole > 30].sum() == pytest.approx(0.3, abs=0.01)
    assert (labels - thinner).min() >= 0  # no label was added
    assert (np.diff(kept_labels(labels, "one", seed=0).indptr) == 1).all()
    assert kept_labels(labels, 1.0, seed=0) is labels
    assert (kept_labels(labels, 0.3, seed=1) != thinner).nnz
    # Rows without labels, even at the end, do not affect other rows.
    lists = [[str(j) for j in row.indices] for row in labels]
    holes, _ = label_matrix([*lists[:2], [], *lists[2:], []])
    for keep in (0.3, "one"):
        found = kept_labels(holes, keep, seed=0)
        assert not np.diff(found.indptr)[[2, -1]].any()
        assert np.array_equal(
            found.toarray()[found.sum(axis=1) > 0], kept_labels(labels, keep, seed=0).toarray()
        )
    assert torch.equal(label_lists(labels[:2]), torch.tensor([[0, -100], [0, 1]]))


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """A file in svmlight format. The labels of each sample are the indices of its nonzero features."""
    path = tmp_path_factory.mktemp("lines") / "tiny.train.txt"
    path.write_text("".join(f"{i % 7},{7 + i % 3} {i % 7}:1 {7 + i % 3}:1\n" for i in range(120)))
    return path


def test_sweep(lines, tmp_path, monkeypatch):
    common = MultilabelSettings(train=lines, test=lines, epochs=3, batch_size=16, model="network")
    settings = SweepSettings(
        out=tmp_path,
        losses=("bce", "lml-2"),
        keeps=(1.0, "one"),
        seeds=(0,),
        learning_rates=(0.01, 1e-6),
        run=common,
    )
    runs = sweep.grid(settings)
    assert len(runs) == 8
    records = []
    for one in runs[:4]:
        result = sweep._run_one(one)
        assert sweep._run_one(one) == result  # a finished run is not trained again
        records.append(sweep.record(one, result))
    assert {(row.data, row.loss, row.keep) for row in records} == {
        ("tiny", "bce", "1.0"),
        ("tiny", "lml-2", "1.0"),
    }
    sweep.TABLE.write(tmp_path / "rows.csv", records)
    # Rows are sorted by learning rate.
    assert sweep.TABLE.read(tmp_path / "rows.csv", "--tuned")[0].r5 == records[1].r5
    tuned = sweep.grid(dataclasses.replace(settings, learning_rates=(), tuned=tmp_path / "rows.csv"))
    assert {(one.loss, one.k, one.learning_rate) for one in tuned} == {("bce", None, 0.01), ("lml", 2, 0.01)}
    assert sweep._table(records).row_count == 4
    with pytest.raises(BadInput, match=r"`--run.test` is missing"):
        sweep.grid(dataclasses.replace(settings, run=dataclasses.replace(common, test=None)))
    with pytest.raises(BadInput, match=r"`--losses` contains `topk-softmax-3`, which only"):
        sweep.grid(dataclasses.replace(settings, losses=("topk-softmax-3",)))


def test_figure_and_tables(tmp_path):
    rows = [
        sweep.LabelRecord(
            data, loss, keep, seed, 0.01, 3, 0.5, 0.6, 0.5, 0.4, value + seed / 100, 0.3, 0.2, 1.0
        )
        for data in ("tiny", "other")
        for loss, value in (("softmax", 0.5), ("lml-labels", 0.52), ("one-vs-rest", 0.4))
        for keep in ("1.0", "one")
        for seed in ((0,) if loss == "one-vs-rest" else (0, 1))
    ]
    sweep.TABLE.write(tmp_path / "rows.csv", rows)
    command = ["figures", "multilabel", "--csv", str(tmp_path / "rows.csv"), "--out", str(tmp_path / "x.png")]
    assert cli.main(command) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "x.md").read_text()
    assert "| lml-labels minus softmax | +2.0±0.0 | +2.0±0.0 |" in page
    assert "| one-vs-rest minus softmax | -10.0 | -10.0 |" in page
    assert "| lml-labels | 60.0±0.0 | 50.0±0.0 | 40.0±0.0 | 52.5±0.7 | 30.0±0.0 | 20.0±0.0 |" in page


def test_one_vs_rest(lines, tmp_path):
    settings = OneVsRestSettings(lines, lines, tmp_path / "o.csv", keeps=(1.0,), strengths=(100.0,))
    one_vs_rest.main(settings)
    one_vs_rest.main(settings)  # skips the existing result
    (row,) = sweep.TABLE.read(tmp_path / "o.csv", "--csv")
    assert row.p1 == 1
    assert row.r5 == 1
