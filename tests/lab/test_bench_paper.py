"""The paper's timing study: competitors, output files, and verdicts that follow from the numbers."""

import json
import math

import pytest
import torch

import torchlml
from tests.support.command_lines import each_rejection, rejected, rejections
from torchlml_lab import cli
from torchlml_lab.bench import measurements, paper, timing
from torchlml_lab.bench.cases import Case
from torchlml_lab.bench.measurements import Measurement
from torchlml_lab.bench.paper import Entry

TINY = ["--sizes", "12", "30", "--ks", "2", "5", "--batch", "4", "--trials", "2"]
TIMED = {(name, "forward") for name in paper.NAMES} | {(name, "backward") for name in paper.BACKWARD}


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch):
    monkeypatch.setattr(paper, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(timing, "_WARM_UP_SECONDS", 0.0)


def study(*words):
    return cli.main(["bench", "paper", *TINY, *map(str, words)])


def test_run_writes_every_competitor_the_figure_and_the_claims(capsys, tmp_path):
    path = tmp_path / "results" / "timing.csv"
    assert study("--csv", path) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    rows = measurements.read(path, "--csv")
    expected = {(name, mode, n, k) for name, mode in TIMED for n in (12, 30) for k in (2, 5)}
    assert {(row.provider, row.mode, row.n, row.k) for row in rows} == expected
    assert len(rows) == len(expected)
    for row in rows:
        assert (row.operator, row.batch, row.metric, row.unit) == ("paper", 4, "time", "us")
        assert json.loads(row.config)["rounds"] == 2
        assert 0 < row.p20 <= row.p50 <= row.p80
    assert sorted(p.name for p in path.parent.iterdir()) == ["timing.csv", "timing.png"]
    assert "the paper's claims" in captured.out
    picture = tmp_path / "again.png"
    assert cli.main(["figures", "timing", "--csv", str(path), "--out", str(picture)]) == 0
    assert picture.read_bytes() == path.with_suffix(".png").read_bytes()


class _Interrupted:
    """Stand-ins for the study's losses that compute nothing. Call number `stop` raises `error`."""

    def __init__(self, stop, error=KeyboardInterrupt):
        self.begun, self.stop, self.error = 0, stop, error

    def calls(self, case, where):
        return {Entry(case, name, mode): self.call for name, mode in TIMED}

    def call(self):
        self.begun += 1
        if self.begun == self.stop:
            raise self.error


# Each row length has 2 problems with 8 functions each. A function is called once for warm-up and once in each
# of 2 trials, so a row length takes 48 calls.
def test_an_interrupted_study_keeps_its_results_and_resumes(capsys, tmp_path, monkeypatch):
    path = tmp_path / "t.csv"
    with monkeypatch.context() as patch:
        patch.setattr(paper, "_calls", _Interrupted(48 + 16 + 16 + 3).calls)
        assert study("--csv", path) == 130
    said = capsys.readouterr().err
    assert said == (
        f"torchlml: Interrupted: 1 of 2 row lengths are complete. Rows added to {path}: 32. "
        "Continue with `--resume`.\n"
    )
    kept = measurements.read(path, "--csv")
    assert [json.loads(row.config)["rounds"] for row in kept] == [2] * 16 + [1] * 16
    again = _Interrupted(None)
    monkeypatch.setattr(paper, "_calls", again.calls)
    assert study("--csv", path, "--resume") == 0
    assert again.begun == 48  # only the second row length is timed
    rows = measurements.read(path, "--csv")
    assert rows[:32] == kept
    assert {row.n for row in rows[32:]} == {30}
    out = capsys.readouterr().out
    assert "n 12" in out
    assert "n 30" in out


def test_resuming_ignores_rows_with_another_number_of_trials(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(paper, "_calls", _Interrupted(None).calls)
    path = tmp_path / "t.csv"
    assert study("--csv", path) == 0
    assert study("--csv", path, "--trials", 3, "--resume") == 0
    assert "Timing 2 of 2 row lengths with 3 trials each" in capsys.readouterr().out


def test_a_failure_keeps_the_rows_of_earlier_lengths(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(paper, "_calls", _Interrupted(50, RuntimeError("out of memory")).calls)
    before = torch.get_num_threads()
    assert study("--csv", tmp_path / "t.csv") == 1
    assert {row.n for row in measurements.read(tmp_path / "t.csv", "--csv")} == {12}
    assert torch.get_num_threads() == before


def test_the_default_problems_are_those_of_section_5_1(monkeypatch):
    ran = []
    monkeypatch.setattr(paper, "run", lambda settings, console: ran.append(settings))
    assert cli.main(["bench", "paper"]) == 0
    assert cli.main(["bench", "paper", "--quick"]) == 0
    cases = [case for group in paper._groups(ran[0]) for case in group]
    assert {(case.batch, case.n, case.k) for case in cases} == {
        (256, n, k) for n in (1000, 10_000) for k in (5, 50, 100)
    }
    assert ran[0].trials == 50
    assert (ran[1].sizes, ran[1].trials) == ((1000,), 5)


@each_rejection(
    rejections("`{1}` (`{0}`)", "--plot /proc/x.png", "--csv /proc/x.csv"),
    rejections("`{}` must be a file, but `{}` is a directory", "--plot .", "--csv ."),
    rejections("`{}` must be finite and at least 1, but it is {}", "--ks 0", "--batch 0", "--trials 0"),
    rejections("`{}` must be below 12, the smallest of `--sizes`, but it contains {}", "--ks 5 20"),
    rejections("`{}` must be an integer, but got `{}`", "--ks n/2"),
    {"--scales 1": "no option `--scales`", "--plot x.pdf": "must end in `.png`"},
    {f"--csv '{__file__}'": f"`{__file__}` (`--csv`)"},
)
def test_bad_input_is_rejected_before_the_work(capsys, tmp_path, monkeypatch, options, needle):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paper, "measure", lambda *a: pytest.fail("a measurement was started"))
    assert needle in rejected(capsys, ["bench", "paper", *TINY, *options])
    assert not list(tmp_path.iterdir())


def test_every_competitor_computes_its_loss():
    case = Case(n=9, k=2, batch=5, scale=2.0, dtype="float64", threads=1)
    x, target = case.logits(), torch.tensor([0, 3, 8, 2, 2])
    values = {name: loss(x).item() for name, loss in paper.losses(target, 2).items()}
    lml = -torchlml.lml(x, 2).gather(1, target.unsqueeze(1)).log().mean().item()
    assert values["lml"] == pytest.approx(lml, abs=1e-10)
    assert values["lml-algorithm-1"] == pytest.approx(lml, abs=1e-10)
    assert values["smooth-svm"] == pytest.approx(values["smooth-svm-summation"], abs=1e-10)
    assert values["truncated-entropy"] == torchlml.truncated_entropy_loss(x, target, 2).item()
    calls = paper._calls(case, torch.device("cpu"))
    assert set(calls) == {Entry(case, name, mode) for name, mode in TIMED} == set(paper._entries(case))
    for call in calls.values():
        call()
        call()  # a second call must also work


def measured(**ratios):
    """Return measurements with the given times for k = 5 and k = 100, as multiples of the baseline's time."""
    everything = dict.fromkeys(paper.NAMES, (1.0, 1.0)) | {
        name.replace("_", "-"): value for name, value in ratios.items()
    }
    return [
        Measurement(
            operator="paper",
            provider=name,
            mode="forward",
            metric="time",
            unit="us",
            n=1000,
            k=k,
            batch=256,
            scale=1.0,
            dtype="float32",
            threads=1,
            p20=math.nan,
            p50=math.nan,
            p80=math.nan,
            ratio_p20=math.nan,
            ratio_p50=value,
            ratio_p80=math.nan,
            config="",
            machine="",
            torch="",
            torchlml="",
            date="",
        )
        for name, values in everything.items()
        for k, value in zip((5, 100), values, strict=True)
    ]


def decided(**ratios):
    return {
        claim.says: (paper.span(claim.ratios), paper.verdict(claim))
        for claim in paper.claims_of(measured(**ratios))
    }


def test_the_papers_numbers_give_the_papers_verdicts():
    said = decided(smooth_svm_summation=(5, 80), smooth_svm=(4, 40), lml_algorithm_1=(3, 3.1), lml=(2, 2.1))
    assert len(said) == 9
    assert {verdict for _, verdict in said.values()} == {"yes"}
    assert said["Smooth SVM by summation grows from k = 5 to 100"] == ("16", "yes")
    assert said["Smooth SVM by summation is slower than truncated entropy"] == ("5 to 80", "yes")


def test_other_numbers_give_other_verdicts():
    said = decided(
        truncated_entropy=(1, 6),
        smooth_svm_summation=(20, 21),
        lml_algorithm_1=(100, 400),
        lml=(0.5, 7),
    )
    assert said["Smooth SVM by summation grows from k = 5 to 100"] == ("1.1", "no")
    assert said["LML by Algorithm 1 does not grow from k = 5 to 100"] == ("4", "no")
    assert said["truncated entropy does not grow from k = 5 to 100"] == ("6", "no")
    assert said["LML by our kernel is slower than truncated entropy"] == ("0.5 to 1.2", "in 1 of 2")


def test_one_k_gives_no_verdict_about_growth():
    claims = list(paper.claims_of([row for row in measured() if row.k == 5]))
    assert len(claims) == 4
    assert all("slower" in claim.says for claim in claims)


def test_a_timed_call_on_a_gpu_waits_for_its_result(monkeypatch):
    happened = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("done"))
    paper._finished(lambda: happened.append("launched"))()
    assert happened == ["launched", "done"]
