"""`torchlml bench scale` writes every measurement, here with sizes small enough to finish in seconds."""

from __future__ import annotations

from pathlib import Path

from torchlml_lab import cli
from torchlml_lab.bench.measurements import read
from torchlml_lab.bench.timing import measurable


def test_every_measurement_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    small = ["--batch", "8", "--labels", "2000", "--features", "4", "--most-labels", "3000"]
    small += ["--longest-row", "5000", "--repetitions", "1", "--threads", "1", "--seconds", "1"]
    assert cli.main(["bench", "scale", *small, "--csv", str(path)]) == 0
    rows = read(path, "--csv")
    found = {(row.operator, row.mode, row.metric) for row in rows}
    assert ("linear loss", "forward+backward", "time") in found
    assert ("long row", "forward", "time") in found
    assert [row.p50 <= 12 for row in rows if row.metric == "rounds"] == [True] * 4
    if measurable():
        assert ("linear loss", "whole process", "memory") in found
        assert len([row for row in rows if row.mode == "beyond the gradient"]) == 7
