"""The paper's timing study: who is timed, the files, and verdicts that follow from the numbers."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torchlml_lab.bench.records import Record

import torchlml
from torchlml_lab import cli
from torchlml_lab.bench import command, paper, paper_words, records, timing
from torchlml_lab.bench.cases import Case

TINY = ["--paper", "--sizes", "12", "30", "--ks", "2", "5", "--batches", "4", "--repetitions", "2"]
TIMED = {(name, "forward") for name in paper_words.NAMES} | {
    (name, "backward") for name in paper_words.BACKWARD
}


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch):
    monkeypatch.setattr(paper, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(timing, "_WARM_UP_SECONDS", 0.0)


def test_run_writes_every_competitor_the_figure_and_the_verdicts(capsys, tmp_path):
    path = tmp_path / "results" / "timing.csv"
    assert cli.main(["bench", *TINY, "--csv", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    rows = records.read(path, "--csv")
    expected = {(name, mode, n, k) for name, mode in TIMED for n in (12, 30) for k in (2, 5)}
    assert {(row.provider, row.mode, row.n, row.k) for row in rows} == expected
    assert len(rows) == len(expected)
    for row in rows:
        assert (row.operator, row.batch, row.metric, row.unit) == ("paper", 4, "time", "us")
        assert json.loads(row.config)["rounds"] == 2
        assert 0 < row.p20 <= row.p50 <= row.p80
    names = sorted(p.name for p in path.parent.iterdir())
    assert names == ["timing.csv", "timing.png", "timing.svg"]
    assert captured.out.count("The paper: ") == 4
    picture = tmp_path / "again.png"
    assert cli.main(["figures", "timing", "--csv", str(path), "--out", str(picture)]) == 0
    assert picture.read_bytes() == path.with_suffix(".png").read_bytes()


def test_a_run_that_dies_writes_nothing(capsys, tmp_path, monkeypatch):
    calls = []

    def fail(case, where):
        calls.append(case)
        if case.n == 30:
            raise RuntimeError("out of memory")
        return {f"{name} {mode}": lambda: None for name, mode in TIMED}

    monkeypatch.setattr(paper, "_calls", fail)
    before = torch.get_num_threads()
    assert cli.main(["bench", *TINY, "--csv", str(tmp_path / "t.csv")]) == 1
    assert len(calls) == 3
    assert not list(tmp_path.iterdir())
    assert torch.get_num_threads() == before


def test_the_selection_is_that_of_section_5_1(monkeypatch):
    ran = []
    monkeypatch.setattr(command, "run", lambda settings, console: ran.append(settings))
    command.main(["--paper"])
    command.main(["--paper", "--quick"])
    cases = list(command._cases(ran[0]))
    assert {(case.batch, case.n, case.k) for case in cases} == {
        (256, n, k) for n in (1000, 10_000) for k in (5, 50, 100)
    }
    assert ran[0].repetitions == 50
    assert ran[1] == replace(command.QUICK_PAPER, paper=True, quick=True)


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (["--plot", "x.pdf"], "must end in `.png`"),
        (["--plot", "."], "`--plot` names `.`"),
        (["--csv", __file__], "`--csv` names"),
        (["--ks", "0"], "`--ks` must be numbers"),
        (["--ks", "5", "20"], "below the smallest of `--sizes`"),
        (["--ks", "n/2"], "`--ks` must be numbers"),
        (["--batches", "4", "8"], "`--batches` has several values"),
        (["--scales", "1", "8"], "`--scales` has several values"),
    ],
)
def test_bad_input_is_refused_before_the_work(capsys, tmp_path, monkeypatch, words, needle):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paper, "measure", lambda *a: pytest.fail("measured something"))
    assert cli.main(["bench", *TINY, *words]) == 2
    error = capsys.readouterr().err
    assert needle in error
    assert error.count("\n") == 1
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
    assert set(calls) == {f"{name} {mode}" for name, mode in TIMED}
    for call in calls.values():
        call()
        call()  # can be repeated


def measured(**ratios):
    """Rows of a run in which a competitor takes so many times what the baseline takes, for k = 5 and 100."""
    everything = dict.fromkeys(paper_words.NAMES, (1.0, 1.0)) | {
        name.replace("_", "-"): value for name, value in ratios.items()
    }
    return [
        Record(
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


def test_the_papers_numbers_give_the_papers_verdicts():
    said = paper_words.sentences(
        measured(smooth_svm_summation=(5, 80), smooth_svm=(4, 40), lml_algorithm_1=(3, 3.1), lml=(2, 2.1))
    )
    assert len(said) == 4
    for sentence in said:
        assert sentence.endswith("It holds.")
    assert "16 (Smooth SVM by summation), 10 (Smooth SVM by divide and conquer)" in said[0]
    assert "5 to 80 (Smooth SVM by summation)" in said[3]


def test_other_numbers_give_other_verdicts():
    said = paper_words.sentences(
        measured(
            truncated_entropy=(1, 6),
            smooth_svm_summation=(20, 21),
            smooth_svm=(20, 90),
            lml_algorithm_1=(100, 400),
            lml=(0.5, 1),
        )
    )
    assert "It holds in 1 of 2 cases." in said[0]
    assert "4 (LML by Algorithm 1), 2 (LML by our kernel). It does not hold." in said[1]
    assert "6 (truncated entropy). It does not hold." in said[2]
    assert (
        "It holds against Smooth SVM by summation, Smooth SVM by divide and conquer, LML by Algorithm 1."
        in said[3]
    )
    assert said[3].endswith("LML by our kernel is faster than it in every case.")
    said = paper_words.sentences(measured(lml=(0.5, 2)))
    assert said[3].endswith("It does not hold.")


def test_one_k_says_nothing_about_growth():
    assert len(paper_words.sentences([row for row in measured() if row.k == 5])) == 1


def test_on_a_gpu_a_call_lasts_until_its_work_is_done(monkeypatch):
    happened = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("done"))
    paper._finished(lambda: happened.append("launched"))()
    assert happened == ["launched", "done"]
