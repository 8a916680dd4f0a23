"""Commands for scene-graph runs: sweeps, evaluation, prediction, figures, and step times."""

import csv
import json
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.support.command_lines import each_rejection, made, rejected, rejections
from tests.support.scene_graphs import draw, write_vg
from torchlml_lab import cli
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.plots import new_figure
from torchlml_lab.studies.scene_graph import datasets, prediction, sweep
from torchlml_lab.studies.scene_graph.objectives import parse_method
from torchlml_lab.studies.scene_graph.prediction import usual_image
from torchlml_lab.studies.scene_graph.settings import METHODS, SceneGraphSettings, SweepSettings
from torchlml_lab.studies.scene_graph.sweep import RecallRecord, grid
from torchlml_lab.studies.scene_graph.task import RECALLS


@pytest.fixture(scope="module")
def vg(tmp_path_factory):
    return write_vg(tmp_path_factory.mktemp("vg"), draw(40))


def words(vg, out, *more):
    common = ["--run.vg", str(vg), "--run.validation", "6", "--run.hidden", "8", "--run.epochs", "2"]
    chosen = ["--methods", "softmax", "lml-3", "truncated-entropy-20", "--seeds", "0", "1", "--workers", "1"]
    return ["sweep", "scene-graph", *common, *chosen, "--once", "softmax", "--out", str(out), *more]


@pytest.fixture(scope="module")
def swept(vg, tmp_path_factory):
    return made(words(vg, tmp_path_factory.mktemp("swept") / "sweep"))


@pytest.fixture(scope="module")
def run(swept):
    return swept / "lml-3_lr0.001_seed1"


def test_a_sweep_gives_one_table(swept):
    with (swept / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    tested = [(row["method"], row["seed"]) for row in rows if row["split"] == "test"]
    assert tested == [
        ("frequency", "0"),
        ("lml-3", "0"),
        ("lml-3", "1"),
        ("softmax", "0"),
        ("truncated-entropy-20", "0"),
        ("truncated-entropy-20", "1"),
    ]
    result = json.loads((swept / "lml-3_lr0.001_seed1" / "result.json").read_text())
    mine = [row for row in rows if (row["method"], row["seed"]) == ("lml-3", "1")]
    assert [(row["epoch"], row["split"]) for row in mine if row["split"] != "test"] == [
        ("1", "train"),
        ("1", "validation"),
        ("2", "train"),
        ("2", "validation"),
    ]
    for split in ("validation", "test"):
        (row,) = (row for row in mine if row["split"] == split and row["chosen"] == "1")
        assert int(row["epoch"]) == result["best_epoch"]
        for name in RECALLS:
            assert float(row[sweep.column(name)]) == result[split][name]


def test_finished_runs_are_skipped(capsys, vg, swept):
    before = (swept / "results.csv").read_bytes()
    assert cli.main(words(vg, swept)) == 0
    said = capsys.readouterr().out
    assert "5 runs, 5 of them already finished" in said
    assert "vision-free" in said
    # Names and numbers are not truncated, even on an 80-column terminal.
    assert "…" not in said
    assert max(len(line) for line in said.split("\n") if not line.startswith("Results written to")) <= 80
    assert said.count("truncated-entropy-20") == 2
    assert (swept / "results.csv").read_bytes() == before


def record(**changes):
    numbers = dict.fromkeys(RecallRecord.__dataclass_fields__, 0.5)
    words = {"data": "vg", "vision": "vision-free", "method": "lml-20", "variant": "", "split": "validation"}
    counts = {"seed": 100, "epochs": 4, "epoch": 2, "chosen": 1}
    return RecallRecord(**{**numbers, **words, **counts, **changes})


def test_tuning_uses_the_best_epoch_on_validation(tmp_path):
    found = [
        record(learning_rate=1e-3, recall=0.6),
        record(learning_rate=2e-3, recall=0.7),
        record(learning_rate=1e-3, recall=0.9, chosen=0),
        record(learning_rate=1e-3, recall=0.9, split="test"),
    ]
    path = tmp_path / "t.csv"
    sweep.TABLE.write(path, found)
    assert set(sweep.TABLE.read(path, "--csv")) == set(found)
    common = SceneGraphSettings(vg=tmp_path)
    runs = grid(SweepSettings(methods=("lml-20",), tuned=path, run=common))
    assert [(run.learning_rate, run.seed) for run in runs] == [(2e-3, 0), (2e-3, 1), (2e-3, 2)]
    with pytest.raises(BadInput, match="no runs with the method `bce`"):
        grid(SweepSettings(methods=("bce",), tuned=path, run=common))
    with pytest.raises(BadInput, match="same data and seeds"):
        sweep.best_rates([*found, record(learning_rate=3e-3, seed=5)], [("lml-20", "")], path)


def test_an_untuned_k_uses_the_learning_rate_of_the_nearest_tuned_k(tmp_path):
    found = [
        record(method="lml-20", learning_rate=1e-3),
        record(method="lml-100", learning_rate=2e-3),
        record(method="truncated-entropy-50", learning_rate=5e-4),
    ]
    methods = ("lml-5", "lml-20", "lml-50", "lml-90", "lml-200", "truncated-entropy-20")
    wanted = [(method, "") for method in methods]
    best = sweep.best_rates(found, wanted, tmp_path)
    assert list(best) == wanted
    assert list(best.values()) == [1e-3, 1e-3, 1e-3, 2e-3, 2e-3, 5e-4]
    with pytest.raises(BadInput, match="no runs with the method `softmax`"):
        sweep.best_rates(found, [("softmax", "")], tmp_path)


def test_every_bias_is_tuned_separately(tmp_path):
    path = tmp_path / "t.csv"
    found = [
        record(variant=variant, learning_rate=rate, recall=recall)
        for variant, recalls in (("", (0.6, 0.7)), ("without-bias", (0.7, 0.6)), ("counts", (0.5, 0.8)))
        for rate, recall in zip((1e-3, 2e-3), recalls, strict=True)
    ]
    sweep.TABLE.write(path, found)
    common = SceneGraphSettings(vg=tmp_path, counts=tmp_path / "counts.npz")
    biases = ("counted", "leave-one-out", "outside", "none")
    settings = SweepSettings(methods=("lml-20",), biases=biases, seeds=(0, 1), tuned=path, run=common)
    runs = grid(settings)
    # Leave-one-out was not tuned, so it uses the learning rate tuned for the default bias.
    assert [run.learning_rate for run in runs] == [2e-3, 2e-3, 2e-3, 1e-3] * 2
    assert [run.seed for run in runs] == [0] * 4 + [1] * 4
    assert [run.counts is not None for run in runs[:4]] == [False, False, True, False]
    assert [run.leave_one_out for run in runs[:4]] == [False, True, False, False]
    assert [run.without_bias for run in runs[:4]] == [False, False, False, True]
    assert len({run.out for run in runs}) == 8
    # Tuning runs all biases with the first learning rate, and then all biases with the second.
    tuning = grid(replace(settings, tuned=None, learning_rates=(2e-3, 1e-3), seeds=(0,)))
    assert [run.learning_rate for run in tuning] == [2e-3] * 4 + [1e-3] * 4
    assert {run.out for run in runs if run.seed == 0} < {run.out for run in tuning}


def test_methods():
    assert parse_method("truncated-entropy-100") == ("truncated-entropy", 100)
    assert parse_method("softmax")[0] == "softmax"
    runs = grid(SweepSettings(once=METHODS[2:], run=SceneGraphSettings(vrd=SweepSettings().out)))
    assert len(runs) == 3 + 3 + 6
    for name in ("lml", "lml-", "softmax-20", "bce-x", "hinge"):
        with pytest.raises(BadInput, match="may contain only softmax, lml-K"):
            parse_method(name)


@each_rejection(
    rejections("`{}` may contain only methods from `--methods`, but it contains `{}`", "--once bce"),
    rejections("`{1}` (`{0}`)", "--tuned no.csv"),
    rejections("`{}` cannot be given", "--run.k 5", "--run.objective bce"),
    rejections("`{}` must be at least 1, but it is {}", "--workers 0"),
    {"--methods lml": "but it contains `lml`", "--methods lml-0 --once": "`--k` must be at least 1"},
    {"--biases none --run.without-bias": "`--run.without-bias` cannot be combined with `--biases`"},
    {"--biases none outside": "`--biases outside` and `--run.counts` must be used together"},
)
def test_bad_sweeps(capsys, vg, tmp_path, options, needle):
    assert needle in rejected(capsys, words(vg, tmp_path / "sweep", *options))


def test_evaluate_repeats_the_results_of_the_run(capsys, run):
    assert cli.main(["evaluate", str(run), "--cpu"]) == 0
    said = capsys.readouterr().out
    result = json.loads((run / "result.json").read_text())
    assert f"10 test images, epoch {result['best_epoch']}, vision-free" in said
    numbers = re.search(r"lml-3, constrained R +([\d.]+) +([\d.]+) +([\d.]+)", said)
    assert numbers
    assert [float(n) for n in numbers.groups()] == [
        pytest.approx(100 * result["test"][name], abs=0.051) for name in RECALLS[:3]
    ]
    assert "frequencies alone, unconstrained mR" in said
    assert re.search(r"near +\d+ ", said)


def test_predict_prints_and_draws(capsys, run, tmp_path):
    picture = tmp_path / "a" / "graph.png"
    assert cli.main(["predict", str(run), "--relations", "5", "--out", str(picture)]) == 0
    said = capsys.readouterr().out
    found = [float(p) for p in re.findall(r"^(0\.\d{3}) ", said, re.MULTILINE)]
    assert len(found) == 5
    assert found == sorted(found, reverse=True)
    assert re.search(r"image 10\d\d \(test\), vision-free", said)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["predict", str(run), "--image", "1007", "--out", str(picture)]) == 0
    assert "image 1007 (test)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "options", "needle"),
    [
        ("predict", ["--image", "7"], "in the run's data, but it is `7`"),
        ("predict", ["--relations", "0"], "`--relations` must be from 1 to 50, but it is 0"),
        ("predict", ["--relations", "100000"], "`--relations` must be from 1 to 50, but it is 100000"),
        ("predict", ["--out", "/proc/x/y.png"], "(`--out`) cannot be written"),
        ("predict", ["--vrd", "x"], "`--vrd` is given, but the run"),
        ("evaluate", ["--vrd", "x"], "`--vrd` is given, but the run"),
        ("step-time", ["--threads", "1000"], "`--threads` must be from 1 to"),
        ("step-time", ["--batch-size", "100000"], "`--batch-size` must be from 1 to 1024, but it is 100000"),
        ("predict", ["--out", "x.jpg"], "must end in `.png`"),
        ("evaluate", ["--split", "all"], "all"),
    ],
)
def test_bad_requests(capsys, run, command, options, needle):
    assert needle in rejected(capsys, [command, run, *options])


def test_a_folder_without_a_run_is_rejected(capsys, tmp_path):
    for command in ("evaluate", "predict"):
        assert cli.main([command, str(tmp_path)]) == 2
        assert "is not a run directory" in capsys.readouterr().err


def test_the_default_image_has_many_relations_and_few_objects(vg):
    graphs = datasets.read_visual_genome(vg)[1].with_relations()
    objects, relations = graphs.box_offsets.diff(), graphs.relation_offsets.diff()
    assert relations[usual_image(graphs)] == relations[objects <= 8].max()
    crowded = graphs[(objects == objects.max()).nonzero().squeeze(1)]
    assert 0 <= usual_image(crowded) < len(crowded)


def test_predict_shows_the_default_image(capsys, run, tmp_path, monkeypatch):
    monkeypatch.setattr(prediction, "usual_image", lambda graphs: graphs.names.index("1011"))
    assert cli.main(["predict", str(run), "--out", str(tmp_path / "x.png")]) == 0
    assert "image 1011 (test)" in capsys.readouterr().out


def test_a_crowded_image_can_be_read(vg, tmp_path, monkeypatch):
    """Every object has its own position, and no two lines of the list overlap."""
    places: set[Any] = set()
    lines: list[Any] = []

    @contextmanager
    def may_read(*arguments):
        with new_figure(*arguments) as figure:
            yield figure
            figure.canvas.draw()
            panels: Any = {axes.get_label(): axes for axes in figure.axes}
            places.update(tuple(dot.get_xydata()[0].round(6)) for dot in panels["graph"].lines)
            boxes = (text.get_window_extent() for text in panels["words"].texts)
            lines.extend(sorted((box.y0 / figure.bbox.height, box.y1 / figure.bbox.height) for box in boxes))

    monkeypatch.setattr(prediction, "new_figure", may_read)
    pairs = [(subject, object_) for subject in range(20) for object_ in range(20) if subject != object_]
    triples = [prediction.Triple(((0, a), (1, b)), "near", 0.5, False) for a, b in pairs[::7][:50]]
    prediction.draw(datasets.read_visual_genome(vg)[1], 0, triples, tmp_path / "x.png")
    assert len(places) == len({box for one in triples for _, box in one.ends})
    assert len(lines) == 50
    assert all(below[1] <= above[0] for below, above in pairwise([(0.0, 0.0), *lines, (1.0, 1.0)]))


def test_moved_data_are_found_through_an_option(capsys, vg, run, tmp_path):
    moved, copy = tmp_path / "elsewhere", tmp_path / "run"
    shutil.copytree(vg, moved)
    shutil.copytree(run, copy)
    stored = json.loads((copy / "settings.json").read_text())
    (copy / "settings.json").write_text(json.dumps({**stored, "vg": str(tmp_path / "gone")}))
    assert cli.main(["evaluate", str(copy)]) == 2
    assert f"`--vg {tmp_path / 'gone'}`, which no longer exists" in capsys.readouterr().err
    assert cli.main(["evaluate", str(copy), "--vg", str(moved)]) == 0
    picture = tmp_path / "x.png"
    assert cli.main(["predict", str(copy), "--vg", str(moved), "--out", str(picture)]) == 0
    assert picture.exists()


def test_figure_and_tables(capsys, swept, tmp_path):
    picture = tmp_path / "curves.png"
    options = ["--csv", str(swept / "results.csv"), "--out", str(picture)]
    assert cli.main(["figures", "scene-graph", *options]) == 2
    assert "has no run with the method `lml-20`" in capsys.readouterr().err
    assert cli.main(["figures", "scene-graph", *options, "--methods", "softmax", "lml-3"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = (tmp_path / "curves.md").read_text().splitlines()
    assert [line.split(" | ")[:2] for line in lines if line.startswith("| ") and "---" not in line] == [
        *[["| method", "seeds"], ["| frequency", "1"], ["| softmax", "1"]],
        *[["| lml-3", "2"], ["| truncated-entropy-20", "2"]],
    ] * 2
    rows = sweep.TABLE.read(swept / "results.csv", "--csv")
    (softmax,) = (row for row in rows if (row.method, row.split) == ("softmax", "test"))
    assert f"| softmax | 1 | {100 * softmax.r20:.1f} | {100 * softmax.r50:.1f} |" in "\n".join(lines)


def test_the_figure_of_the_biases(capsys, tmp_path):
    rows = [
        record(
            method=method,
            variant=variant,
            split=split,
            seed=seed,
            learning_rate=rate,
            r20=recall + 0.02 * seed,
        )
        for method, rate in (("softmax", 1e-3), ("lml-20", 2e-3))
        for variant, recall in (("", 0.4), ("leave-one-out", 0.5), ("counts", 0.6), ("without-bias", 0.7))
        for split in ("validation", "test")
        for seed in (0, 1)
    ]
    rows += [record(method="frequency", variant=one, split="test", seed=0) for one in ("", "counts")]
    path, picture = tmp_path / "b.csv", tmp_path / "b.png"
    sweep.TABLE.write(path, rows)
    words = ["figures", "scene-graph-bias", "--csv", str(path), "--out", str(picture)]
    assert cli.main(words) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = picture.with_suffix(".md").read_text().splitlines()
    assert len([line for line in lines if line.startswith("| lml-20 |")]) == 8
    assert "| lml-20 | none | 0.002 | 2 | 50.0±0.0 | 71.0±1.4 |" in "\n".join(lines)
    assert [line.split(" | ")[1] for line in lines if line.startswith("| frequency")] == [
        "counted",
        "outside",
    ]
    sweep.TABLE.write(path, [*rows, record(split="test", learning_rate=5e-3)])
    assert cli.main(words) == 2
    assert "a tuning sweep" in capsys.readouterr().err


def test_step_time(capsys, vg):
    options = ["--vg", str(vg), "--steps", "2", "--batch-size", "2"]
    assert cli.main(["step-time", *options]) == 0
    said = capsys.readouterr().out
    assert re.search(r"softmax +[\d.]+ +\+0\.0%", said)
    assert re.search(r"lml +[\d.]+ +[+-][\d.]+%", said)
    for name, milliseconds, over in re.findall(r"^(\S+) +([\d.]+) +([+-][\d.]+)%", said, re.MULTILINE):
        (softmax,) = map(float, re.findall(r"^softmax +([\d.]+)", said, re.MULTILINE))
        # Up to rounding, the last column follows from the two printed medians.
        assert float(over) == pytest.approx(
            100 * (float(milliseconds) / softmax - 1), abs=10 / softmax + 0.1
        ), name
    assert cli.main(["step-time", "--vg", str(vg), "--steps", "0"]) == 2
    assert "`--steps` must be at least 1, but it is 0" in capsys.readouterr().err
