"""`torchlml bench subsets` and `torchlml figures sets`: the methods, and the table in docs/sets.md."""

import re
from pathlib import Path

import pytest
import torch

from tests.support import subsets
from torchlml_lab import cli
from torchlml_lab.bench import subsets as benchmark
from torchlml_lab.bench.measurements import read
from torchlml_lab.figures.geometry import gap

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["KSubset", "recursion", "untilted Fourier"])
def test_every_method_computes_the_same_distribution(name):
    (method,) = (each for each in benchmark.METHODS if each.name == name)
    x = subsets.long_row(12, 1.0)
    exact = subsets.enumerate_sets(x, 6)
    log_normalizer, inclusion = method.compute(x, 6)
    tolerance = 1e-5 if name == "untilted Fourier" else 1e-12  # untilted Fourier uses float32
    assert float(log_normalizer) == pytest.approx(float(exact.log_normalizer), rel=tolerance)
    assert inclusion.tolist() == pytest.approx([float(p) for p in exact.inclusion], rel=tolerance)


def test_the_untilted_transform_is_wrong_where_it_is_clamped():
    x = subsets.long_row(200, 1.0)
    truth, _ = benchmark.truth(x, 10)
    wrong, _ = benchmark.untilted_fourier(x, 10)
    assert abs(float(wrong) - truth) > 10


def test_the_reference_matches_dynamic_programming():
    x = subsets.long_row(60, 2.0)
    exact = subsets.dynamic_programming(x, 7)
    log_normalizer, inclusion = benchmark.truth(x, 7)
    assert log_normalizer == pytest.approx(float(exact.log_normalizer), rel=1e-15)
    assert inclusion == pytest.approx(float(exact.inclusion[int(x.argmax())]), rel=1e-14)


def test_gumbel_top_k_has_the_inclusion_probabilities_of_successive_draws():
    x = torch.tensor([2.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64).expand(20_000, 5)
    frequency = benchmark.gumbel_top_k(x, 2).mean(0)[0].item()
    weights = torch.tensor([2.0, 0, 0, 0, 0], dtype=torch.float64).exp()
    first = (weights[0] / weights.sum()).item()
    second = (1 - first) * (weights[0] / (weights.sum() - 1)).item()
    assert frequency == pytest.approx(first + second, abs=0.01)


def test_every_method_is_timed_at_least_once(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "LONG_ROWS", ())
    monkeypatch.setattr(benchmark, "BATCHES", ())
    table = tmp_path / "subsets.csv"
    assert (
        cli.main(["bench", "subsets", "--sizes", "30", "--ks", "3", "--seconds", "0", "--csv", str(table)])
        == 0
    )
    assert {row.provider for row in read(table, "--csv")} >= {"KSubset", "recursion"}


def test_the_command_writes_its_rows_and_prints_its_targets(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "LONG_ROWS", ((2000, 10, 1000.0), (2000, 5, 0.0)))
    monkeypatch.setattr(benchmark, "BATCHES", ((50, 5),))
    table = tmp_path / "subsets.csv"
    arguments = ["--sizes", "30", "--ks", "3", "40", "--repetitions", "1", "--csv", str(table)]
    assert cli.main(["bench", "subsets", *arguments]) == 0
    said = capsys.readouterr().out
    assert re.search(r"log_prob\+mean +2,000 +10 .* 1000 s +yes", said)
    assert re.search(r"log_prob\+mean +2,000 +5 .* 0 s +no", said)
    rows = read(table, "--csv")
    assert {row.provider for row in rows} >= {
        "KSubset",
        "recursion",
        "untilted Fourier",
        "Gumbel top-k, one sample",
    }
    errors = [row.p50 for row in rows if row.provider == "KSubset" and row.unit == "relative"]
    assert len(errors) == 2
    assert max(errors) < 1e-12
    assert {row.k for row in rows if row.n == 30} == {3}


def test_wrong_options_are_rejected(capsys, tmp_path):
    for option in (["--sizes", "1"], ["--ks", "0"], ["--scale", "-1"], ["--repetitions", "0"]):
        assert cli.main(["bench", "subsets", *option, "--csv", str(tmp_path / "x.csv")]) == 2
        assert option[0] in capsys.readouterr().err
    assert not (tmp_path / "x.csv").exists()


def test_the_page_shows_the_numbers_of_the_figure():
    page = (ROOT / "docs" / "sets.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (10+) \| ([\d.e-]+) \| ([\d.e-]+) \| ([\d.e-]+) \|$", page, re.MULTILINE)
    assert len(rows) == 4
    for n, *gaps in rows:
        size = int(n)
        found = [f"{gap(size, k):.1g}" for k in (1, size // 10, size // 2)]
        assert found == gaps
