"""`torchlml bench short`: the command prints the complete table and writes every measurement."""

from __future__ import annotations

import csv

import pytest

from torchlml_lab import cli
from torchlml_lab.bench import targets, timing


def test_the_table_has_every_line_and_the_csv_every_measurement(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "_SAMPLE_SECONDS", 1e-6)
    monkeypatch.setattr(timing, "_WARM_UP_SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "140")
    path = tmp_path / "short.csv"
    options = ["--repetitions", "1", "--scales", "1", "12", "--csv", str(path)]
    assert cli.main(["bench", "short", *options]) == 0
    said = capsys.readouterr().out
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * len(targets.WORKS)
    for work in targets.WORKS:
        assert f"{work.batch} x {work.n}" in said
    for row in rows:
        assert float(row["p50"]) > 0
        if row["provider"] in ("softmax", "cross_entropy"):
            assert float(row["ratio_p50"]) == pytest.approx(1)


def test_a_target_is_met_only_if_every_scale_meets_it():
    work = targets.Work("lml / softmax", "forward", 4096, 64, 8, 1.3)
    assert targets._line(work, [1.3, 0.9])[-2:] == ("1.3", "yes")
    assert targets._line(work, [1.31, 0.9])[-1] == "no"


@pytest.mark.parametrize(
    ("options", "needle"),
    [(["--dtypes", "int8"], "but it contains `int8`"), (["--threads", "0"], "but it is 0")],
)
def test_wrong_options_are_rejected_before_any_work(options, needle, tmp_path, capsys):
    path = tmp_path / "short.csv"
    assert cli.main(["bench", "short", *options, "--csv", str(path)]) != 0
    assert needle in " ".join(capsys.readouterr().err.split())
    assert not path.exists()
