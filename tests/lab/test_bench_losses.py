"""`torchlml bench losses`: the CSV is complete, and the ratio of each baseline to itself is 1."""

from __future__ import annotations

import csv

import pytest

from torchlml_lab import cli
from torchlml_lab.bench import measurements, paper, timing


def test_the_losses_are_timed_into_the_csv(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "_SAMPLE_SECONDS", 1e-6)
    monkeypatch.setattr(timing, "_WARM_UP_SECONDS", 0.0)
    path = tmp_path / "losses.csv"
    assert cli.main(["bench", "losses", "--repetitions", "1", "--csv", str(path)]) == 0
    said = capsys.readouterr().out
    assert "smooth_topk_svm_loss" in said
    assert max(map(len, said.replace(str(path), "").splitlines())) <= 80
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    compared = {(row["operator"], row["n"], row["k"]) for row in rows}
    assert len(compared) == 5
    # These rows are not mistaken for measurements of the paper's timing study.
    assert not paper.of_study(measurements.read(path, "--csv"))
    for row in rows:
        assert float(row["p50"]) > 0
        if row["provider"] in ("cross_entropy", "lml_loss, dense"):
            assert float(row["ratio_p50"]) == pytest.approx(1)
