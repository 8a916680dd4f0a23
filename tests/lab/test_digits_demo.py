"""The demo: its data, its metrics (compared with hand-computed values), and the sentences in its report."""

import re

import pytest
import torch

from tests.support.command_lines import each_rejection, rejected, rejections
from torchlml_lab import cli
from torchlml_lab.engine.settings import cores, use_threads
from torchlml_lab.studies.digits import demo, model, report
from torchlml_lab.studies.digits.model import Images, Measured, measure


@pytest.mark.parametrize("condition", model.CONDITIONS)
def test_images_show_k_digits_and_name_one_of_them(condition):
    train, test = model.make(4, 300, 200, condition, seed=1)
    for part, count in ((train, 300), (test, 200)):
        assert part.pixels.shape == (count, 8, 32)
        assert (part.present.sum(1) == 4).all()
        assert part.present.gather(1, part.named.unsqueeze(1)).all()
    assert not digits(train) & digits(test), "some digits appear in both training and test images"


def digits(part):
    single = part.pixels.unflatten(2, (4, 8)).permute(0, 2, 1, 3).flatten(0, 1)
    return {tuple(digit.flatten().tolist()) for digit in single}


def test_conditions_differ_only_in_the_named_label():
    uniform, _ = model.make(3, 4000, 10, "uniform", seed=0)
    skewed, _ = model.make(3, 4000, 10, "skewed", seed=0)
    assert torch.equal(uniform.pixels, skewed.pixels)
    counts = [torch.bincount(part.named, minlength=10) / part.present.sum(0) for part in (uniform, skewed)]
    assert (counts[0] - 1 / 3).abs().max() < 0.06
    assert counts[1][0] > 4 * counts[1][9]


def test_measures_by_hand():
    # In the first image, 0 and 1 are present and 0 is labeled. In the second, 2 and 3 are present and 3 is
    # labeled.
    present = torch.zeros(2, 10, dtype=torch.bool)
    present[0, :2] = present[1, 2:4] = True
    shown = Images(torch.zeros(2, 8, 16), present, torch.tensor([0, 3]))
    p = torch.full((2, 10), 0.05)
    p[0, 0], p[0, 1] = 0.95, 0.65  # exactly right
    p[1, 3], p[1, 4] = 0.95, 0.85  # 2 is not predicted, 4 is wrong
    found = measure(p, p, shown)
    assert found.recall == pytest.approx(3 / 4)
    assert found.hidden_recall == pytest.approx(1 / 2)
    assert found.exact == pytest.approx(1 / 2)
    assert found.top_set == pytest.approx(1 / 2)
    ranking = p.clone()
    ranking[1, 2] = 0.9
    assert measure(p, ranking, shown).top_set == pytest.approx(1)
    assert found.count == pytest.approx(2)
    # Bins: 16 digits at 0.05 (one present), 1 at 0.65 (present), 1 at 0.85 (absent), 2 at 0.95 (present).
    expected = (16 * abs(0.05 - 1 / 16) + 0.35 + 0.85 + 2 * 0.05) / 20
    assert found.calibration_error == pytest.approx(expected, rel=1e-5)


def test_stacked_networks_are_independent(one_thread):
    sets = [model.make(2, 200, 10, "uniform", seed)[0] for seed in (0, 1)]
    lml = model.METHODS[-1]
    both = model.train(lml, sets, [0, 1], 2, 2, lambda: None)
    alone = model.train(lml, sets[1:], [1], 2, 2, lambda: None)
    for together, single in zip(both.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(together[1], single[0], rtol=1e-4, atol=1e-5)


def results_where(lml, softmax, count=10.0):
    """Return synthetic measurements for three seeds, with the given values for LML and cross-entropy."""
    nothing = torch.zeros(3, 10)

    def measured(value):
        return Measured(value, value, value, value, count, value, nothing)

    names = [method.name for method in model.METHODS] + [model.SCALED]
    table = {("uniform", name): [measured(0.5 + i / 100) for i in range(3)] for name in names}
    table["uniform", "LML"] = [measured(value) for value in lml]
    table["uniform", "cross-entropy"] = [measured(value) for value in softmax]
    return table


@pytest.mark.parametrize(
    ("lml", "softmax", "said"),
    [
        ((0.9, 0.8, 0.7), (0.8, 0.7, 0.6), "LML is higher for every seed, by 0.100 ± 0.000"),
        ((0.8, 0.7, 0.6), (0.9, 0.8, 0.7), "LML is lower for every seed, by 0.100 ± 0.000"),
        ((0.9, 0.7, 0.7), (0.8, 0.8, 0.6), "there is no consistent difference: +0.033 ± 0.115"),
    ],
)
def test_sentences_follow_the_numbers(lml, softmax, said):
    ranking = report.sentences(results_where(lml, softmax), "uniform", 3)[0]
    mean = sum(softmax) / 3
    assert f"Compared with cross-entropy ({mean:.3f}), {said}. Compared with sigmoid BCE" in ranking


def test_collapse_is_reported_only_when_measured():
    values = (0.9, 0.8, 0.7)
    assert "collapses" in report.sentences(results_where(values, values, count=10.0), "uniform", 3)[1]
    assert "does not collapse" in report.sentences(results_where(values, values, count=3.0), "uniform", 3)[1]


def test_demo_writes_table_plots_and_report(capsys, tmp_path):
    out = tmp_path / "a" / "b"
    words_of_command = [
        "demo",
        "--images",
        "600",
        "--epochs",
        "3",
        "--k",
        "2",
        "--seeds",
        "2",
        "--out",
        str(out),
    ]
    assert cli.main(words_of_command) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert sorted(path.name for path in out.iterdir()) == ["calibration.png", "report.html", "scores.png"]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"(?!data:)", page), "the report refers to another file"
    assert page.count("data:image/png;base64,") == 2 + 4
    # All numbers in the printed table are in the report.
    found = re.findall(r"^ *LML ((?: *[0-9.]+±[0-9.]+){5}) *$", captured.out, re.MULTILINE)
    assert len(found) == 2, "a row of the table does not fit into 80 columns"
    for cell in " ".join(found).split():
        middle, _, deviation = cell.partition("±")
        assert f"{middle} ± {'0' * deviation.startswith('.')}{deviation}" in page


def test_an_unwritable_path_is_rejected_before_any_work(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "run", None)
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--out", str(tmp_path / "file" / "x")]) == 2
    assert "(`--out`) cannot be written: not a directory" in capsys.readouterr().err


def test_a_full_disk_keeps_the_tables(capsys, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "draw_calibration", full)
    assert cli.main(["demo", "--images", "100", "--epochs", "1", "--seeds", "2", "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("LML") > 4
    assert "the tables above contain all results" in captured.err


def test_one_thread_is_the_default(tmp_path, monkeypatch):
    used = []

    def stop(*arguments):
        used.append(torch.get_num_threads())
        raise RuntimeError("That is enough.")

    monkeypatch.setattr(demo, "run", stop)
    with use_threads(cores() + 1):
        for options in ([], ["--threads", str(cores())]):
            assert cli.main(["demo", "--out", str(tmp_path), *options]) == 1
    assert used == [1, cores()]


@each_rejection(
    rejections("`{}` must be from 2 to 9, but it is {}", "--k 1"),
    rejections("`{}` must be at least 2, but it is {}", "--seeds 1"),
    rejections("`{}` must be at least 100, but it is {}", "--images 5"),
    {"--threads 0": "`--threads`"},
)
def test_bad_options(capsys, options, needle):
    assert needle in rejected(capsys, ["demo", *options])


def test_figures_projection_prints_the_table_and_draws_the_picture(capsys, tmp_path):
    picture = tmp_path / "a" / "b.png"
    assert cli.main(["figures", "projection", "--k", "2.5", "--out", str(picture)]) == 0
    captured = capsys.readouterr()
    assert re.search(r"sum .*1\.0000 .*2\.5000", captured.out)
    assert sorted(path.name for path in picture.parent.iterdir()) == ["b.png"]


def test_figures_lists_its_names_and_rejects_others(capsys):
    assert cli.main(["figures"]) == 0
    assert "projection" in capsys.readouterr().out
    assert cli.main(["figures", "nothing"]) == 2
    assert "Unknown NAME `nothing`" in capsys.readouterr().err
