"""`torchlml bench layer` and `torchlml bench constrained`: measurements, output files and options."""

import csv
import errno
import io
import json
import os
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import torchlml
from tests.support.command_lines import each_rejection, rejected, rejections
from tests.support.fresh import run
from torchlml_lab import cli, commands
from torchlml_lab.bench import grid_benchmark, measurements, timing
from torchlml_lab.bench.cases import BASELINE, DTYPES, FAMILY, LAYER, Case, call_of, case_grid
from torchlml_lab.bench.settings import MODES, QUICK, LayerSettings
from torchlml_lab.bench.timing import Quantiles
from torchlml_lab.engine.settings import cores

TINY = ["--sizes", "8", "24", "--ks", "n/2", "--batches", "3", "--scales", "1", "--repetitions", "2"]
HERE = [provider.name for provider in LAYER if provider.absent() is None]


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch):
    monkeypatch.setattr(timing, "_SAMPLE_SECONDS", 1e-6)
    monkeypatch.setattr(timing, "_WARM_UP_SECONDS", 0.0)


def bench(capsys, *words):
    code = cli.main(["bench", "layer", *TINY, *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_run_writes_one_row_per_measurement_and_a_plot(capsys, tmp_path):
    path = tmp_path / "results" / "bench.csv"
    code, out, err = bench(capsys, "--csv", str(path))
    assert (code, err) == (0, "")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == measurements.COLUMNS
    metrics = ["time", "memory"] if timing.measurable() else ["time"]
    expected = {
        (provider, mode, metric, n, k)
        for provider in HERE
        for mode in MODES
        for metric in metrics
        for n, k in (("8", "4"), ("24", "12"))
    }
    assert {(r["provider"], r["mode"], r["metric"], r["n"], r["k"]) for r in rows} == expected
    assert len(rows) == len(expected)
    for row in rows:
        assert row["operator"] == "projection"
        assert float(row["p20"]) <= float(row["p50"]) <= float(row["p80"])
        assert float(row["ratio_p20"]) <= float(row["ratio_p50"]) <= float(row["ratio_p80"])
        assert (row["torch"], row["torchlml"]) == (torch.__version__, torchlml.__version__)
        assert json.loads(row["config"])["rounds"] >= 1
        if row["metric"] == "time":
            assert row["unit"] == "us"
            assert float(row["p20"]) > 0
            if row["provider"] == BASELINE:
                assert row["ratio_p50"] == "1"
    assert sorted(p.name for p in path.parent.iterdir()) == ["bench.csv", "bench.png"]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for mode in MODES:
        assert f"{mode}: time relative to softmax" in out
    assert str(path) in out


def test_second_run_appends_and_compares(capsys, tmp_path):
    path, plot = tmp_path / "bench.csv", tmp_path / "plots" / "p.png"
    narrow = ["--modes", "forward", "--metrics", "time", "--providers", "sigmoid", "--csv", str(path)]
    assert bench(capsys, *narrow)[0] == 0
    first = path.read_text()
    earlier = tmp_path / "earlier.csv"
    earlier.write_text(first)
    code, out, err = bench(capsys, *narrow, "--compare", str(earlier), "--plot", str(plot))
    assert (code, err) == (0, "")
    assert path.read_text().startswith(first)
    assert path.read_text().count("operator") == 1
    assert len(measurements.read(path, "--csv")) == 2 * 4
    assert out.count("(was ") == 2
    assert plot.exists()


def test_comparing_with_other_problems_prints_a_note(capsys, tmp_path):
    path, other = tmp_path / "bench.csv", tmp_path / "other.csv"
    narrow = ["--modes", "forward", "--metrics", "time", "--providers", "sigmoid"]
    assert bench(capsys, *narrow, "--csv", str(other))[0] == 0
    code, out, _ = bench(capsys, *narrow, "--sizes", "9", "--csv", str(path), "--compare", str(other))
    assert code == 0
    assert "contains none of these measurements" in out
    assert "(was" not in out


@pytest.mark.skipif(not timing.measurable(), reason="measuring memory requires Linux with the GNU C library")
def test_memory_alone_draws_no_plot(capsys, tmp_path):
    narrow = ["--modes", "forward", "--metrics", "memory", "--providers", "sigmoid"]
    code, out, err = bench(capsys, *narrow, "--csv", str(tmp_path / "b.csv"))
    assert (code, err) == (0, "")
    assert "forward: memory" in out
    assert [path.name for path in tmp_path.iterdir()] == ["b.csv"]


def test_every_dtype_runs(capsys, tmp_path):
    words = ["--dtypes", *DTYPES, "--modes", "forward+backward", "--csv", str(tmp_path / "b.csv")]
    assert bench(capsys, *words, "--sizes", "8", "--ks", "n-1", "--metrics", "time")[0] == 0
    found = {(r.dtype, r.k) for r in measurements.read(tmp_path / "b.csv", "--csv")}
    assert found == {(dtype, 7) for dtype in DTYPES}


def test_quick_sets_defaults_that_other_options_override(monkeypatch):
    ran = []
    monkeypatch.setattr(grid_benchmark, "run", lambda settings, *others: ran.append(settings))
    assert cli.main(["bench", "layer", "--quick", "--sizes", "8"]) == 0
    assert cli.main(["bench", "layer"]) == 0
    usual = LayerSettings()
    assert ran == [replace(usual, **{**QUICK, "sizes": (8,)}, quick=True), usual]


@each_rejection(
    rejections("`{}` must be finite and at least 2, but it is {}", "--sizes 1"),
    rejections("`{}` must be finite and at least 1, but it is {}", "--batches 0", "--repetitions 0"),
    rejections(
        "`{}` must be finite and at least 0, but it is {}", "--scales -1", "--scales inf", "--scales nan"
    ),
    rejections("`{}` must be finite and at least 0, but it is {}", "--seconds -1", "--seconds nan"),
    rejections(f"`{{}}` must be from 1 to {cores()}, but it is {{}}", "--threads 0", "--threads 100000"),
    rejections(
        "`{}` must be integers, `n/NUMBER` or `n-NUMBER`, but it contains `{}`", "--ks n*2", "--ks 2.5"
    ),
    rejections("for an n in `--sizes`, but it is {1}", "--ks 0", "--ks 24", "--ks n/0"),
    rejections("but it contains `{1}`", "--dtypes int8", "--providers softmin", "--modes sideways"),
    rejections("but it contains `{1}`", "--metrics energy"),
    rejections("`{}` must be a file, but `{}` is a directory", "--csv .", "--plot ."),
    rejections("`{1}` (`{0}`)", "--compare no-such-file.csv"),
    rejections("`{}` needs", "--sizes", "--modes"),
    rejections("`{}`", "--sizes a", "--ks", "--batches x", "--repetitions 1.5"),
    {"--nonsense": "no option `--nonsense`", "--repetition 3": "Did you mean `--repetitions`?"},
    {"--plot x.pdf": "must end in `.png` or `.svg`", "--quick yes": "yes"},
    {f"{option} '{__file__}'": f"`{__file__}` (`{option}`)" for option in ("--csv", "--compare")},
)
def test_bad_input_is_a_one_line_error_before_any_work(capsys, tmp_path, monkeypatch, options, needle):
    monkeypatch.setattr(grid_benchmark, "_measure", lambda *a: pytest.fail("a measurement was started"))
    arguments = ["bench", "layer", *TINY, "--csv", tmp_path / "b.csv", *options]
    assert needle in rejected(capsys, arguments)
    assert not list(tmp_path.iterdir())


def test_an_unavailable_provider_is_rejected_with_the_reason(capsys, monkeypatch):
    absent = replace(LAYER[1], absent=lambda: "no GPU")
    monkeypatch.setattr(grid_benchmark, "LAYER", (LAYER[0], absent))
    code, _, err = bench(capsys, "--providers", absent.name)
    assert code == 2
    assert err == f"torchlml: `--providers` contains `{absent.name}`, which is not available: no GPU.\n"


def test_the_thread_count_is_restored_even_after_a_failure(monkeypatch, capsys, tmp_path):
    seen = []

    def fail(*arguments):
        seen.append(torch.get_num_threads())
        raise RuntimeError("broken")

    before = torch.get_num_threads()
    monkeypatch.setattr(grid_benchmark, "race", fail)
    assert bench(capsys, "--threads", "1", "--csv", str(tmp_path / "b.csv"))[0] == 1
    assert seen == [1]
    assert torch.get_num_threads() == before


def test_a_failed_write_keeps_the_old_file(monkeypatch, tmp_path, capsys):
    path = tmp_path / "bench.csv"
    assert bench(capsys, *NARROW, "--csv", str(path))[0] == 0
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert bench(capsys, *NARROW, "--csv", str(path))[0] == 1
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("provider", [p for p in LAYER if p.name.startswith("lml")], ids=lambda p: p.name)
def test_every_lml_provider_computes_the_projection(provider, one_thread):
    if (reason := provider.absent()) is not None:
        pytest.skip(reason)
    case = Case(n=40, k=7, batch=5, scale=3.0, dtype="float64", threads=1)
    x = case.logits()
    torch.testing.assert_close(call_of(provider, case, "forward")(), torchlml.lml(x, 7), rtol=0, atol=1e-11)
    x.requires_grad_()
    grad = torch.randn(5, 40, generator=torch.Generator().manual_seed(case.n)).double()
    (expected,) = torch.autograd.grad(torchlml.lml(x, 7), x, grad)
    for mode in ("backward", "forward+backward"):
        call = call_of(provider, case, mode)
        for _ in range(2):  # repeated calls must give the same result
            torch.testing.assert_close(call(), expected, rtol=0, atol=1e-10)


def test_the_copy_writes_new_memory(one_thread):
    case = Case(n=40, k=7, batch=5, scale=3.0, dtype="float32", threads=1)
    (copy,) = (provider for provider in LAYER if provider.name == "copy")
    x = case.logits()
    y = copy.function(x, case.k)
    assert torch.equal(y, x)
    assert y.data_ptr() != x.data_ptr()


def test_the_grid_has_every_valid_combination_once():
    cases = case_grid((4, 10), ("5", "n/2", "n-1"), (3,), (1.0, 2.0), ("float32",), (2, 1))
    assert {(case.n, case.k) for case in cases} == {(4, 2), (4, 3), (10, 5), (10, 9)}
    assert len(cases) == len(set(cases)) == 4 * 2 * 2


def test_long_rows_get_smaller_batches():
    cases = case_grid((100, 1_000_000, 8_000_000), ("5",), (256,), (1.0,), ("float32",), (1,))
    assert [(case.n, case.batch) for case in cases] == [(100, 256), (1_000_000, 4), (8_000_000, 1)]


def test_bench_alone_lists_the_benchmarks(capsys):
    assert cli.main(["bench"]) == 0
    said = capsys.readouterr().out
    for name, entry in commands.BENCHMARKS.items():
        assert f"  {name:<18}{entry.summary}\n" in said


def test_an_option_before_the_name_lists_the_names(capsys):
    assert cli.main(["bench", "--paper"]) == 2
    assert f"one of {', '.join(commands.BENCHMARKS)}.\n" in capsys.readouterr().err


@pytest.mark.parametrize("width", [40, 80, 132])
def test_no_name_is_truncated_and_ratios_are_printed(width):
    def row(provider):
        value = Quantiles(1, 1, 1)
        return measurements.measured("family", provider, "forward", CASE, value, value, 1)

    rows = [row(provider.name) for provider in FAMILY]
    screen = io.StringIO()
    console = Console(width=width, file=screen)
    for part in grid_benchmark.tables(rows, {row.key: row for row in rows}, width):
        console.print(part)
    said = screen.getvalue()
    for provider in FAMILY:
        assert re.search(rf"(?<![\w-]){provider.name}(?![\w-])", said), provider.name
    assert "…" not in said
    assert said.count("1.00 (was 1.00)") == len(FAMILY) - 1
    assert max(map(len, said.splitlines())) <= width
    assert "time relative to softmax" in " ".join(said.split())


CASE = Case(n=10, k=2, batch=3, scale=1.0, dtype="float32", threads=1)


def test_related_operators_are_timed_with_a_separate_plot(capsys, tmp_path):
    words = ["--sizes", "8", "--ks", "2", "--batches", "3", "--scales", "1", "--repetitions", "1"]
    words += ["--modes", "forward", "--metrics", "time", "--csv", str(tmp_path / "b.csv")]
    assert cli.main(["bench", "constrained", *words]) == 0
    assert {row.provider for row in measurements.read(tmp_path / "b.csv", "--csv")} == {
        provider.name for provider in FAMILY if provider.absent() is None
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b-constrained.png", "b.csv"]


def test_importing_the_benchmarks_writes_nothing():
    program = (
        "import sys; sys.addaudithook(lambda event, args: event == 'open' and 'clear_refs' in str(args[0]) "
        "and sys.exit('written')); from torchlml_lab.bench import grid_benchmark, paper, targets"
    )
    assert run(program).returncode == 0


NARROW = ["--modes", "forward", "--metrics", "time", "--providers", "sigmoid"]


@pytest.mark.parametrize("option", ["--csv", "--plot"])
@pytest.mark.parametrize("place", ["file.txt/x.png", "/proc/x.png", "/dev/full"])
def test_an_unwritable_path_is_rejected_before_any_work(capsys, tmp_path, monkeypatch, option, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").touch()
    monkeypatch.setattr(grid_benchmark, "_measure", lambda *a: pytest.fail("a measurement was started"))
    code, out, err = bench(capsys, *NARROW, option, place)
    assert (code, out) == (2, "")
    assert f"`{option}`" in err
    assert f"`{place}`" in err
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]


def test_a_full_disk_keeps_the_table_on_the_screen(capsys, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device", "x")

    monkeypatch.setattr(os, "replace", full)
    code, out, err = bench(capsys, *NARROW, "--csv", str(tmp_path / "b.csv"))
    assert code == 1
    assert "sigmoid" in out
    assert "is missing the last 4 rows: there is no space left on the disk." in err
    assert "could not be written" in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_pending_rows_are_written_when_there_is_space(tmp_path, monkeypatch):
    file = measurements.RowFile(tmp_path / "b.csv")
    value = Quantiles(1, 1, 1)
    row = measurements.measured("family", "lml", "forward", CASE, value, value, 1)
    with monkeypatch.context() as patch:
        patch.setattr(measurements, "append", lambda *a: (_ for _ in ()).throw(OSError(28, "full")))
        file.add([row])
    assert file.lacks() is not None
    file.add([row])
    assert file.lacks() is None
    assert len(measurements.read(tmp_path / "b.csv", "--csv")) == 2


def test_an_interrupted_benchmark_reports_its_partial_results(capsys, tmp_path, monkeypatch):
    real, begun = grid_benchmark._measure, []

    def interrupted(*arguments):
        begun.append(arguments)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(grid_benchmark, "_measure", interrupted)
    path = tmp_path / "b.csv"
    code, _, err = bench(capsys, *NARROW, "--csv", str(path))
    assert (code, err) == (130, f"torchlml: Interrupted: 1 of 2 measurements are in {path}.\n")
    assert len(measurements.read(path, "--csv")) == 2
