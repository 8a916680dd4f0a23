"""The figures: each one is drawn, and `all` continues if some tables are missing."""

import math
import re
import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image, ImageSequence

from tests.support.command_lines import rejected
from torchlml_lab import cli, commands, plots
from torchlml_lab.bench import measurements
from torchlml_lab.cli_errors import BadInput
from torchlml_lab.commands import Command
from torchlml_lab.figures import projection


def size(png):
    """Return the width and height from the header of a PNG file."""
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


def test_all_draws_figures_without_data_and_names_the_commands_for_the_rest(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(projection, "FRAMES", 4)
    monkeypatch.setattr(projection, "HOLD", 1)
    assert cli.main(["figures", "all", "--out", "pictures"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    from_tables = {
        "benchmarks",
        "bandwidth",
        "alternatives",
        "timing",
        "cifar100",
        "missing-labels",
        "multilabel",
        "own-data",
        "recommend",
        "scene-graph",
        "scene-graph-bias",
        "which-k",
    }
    drawn = set(commands.FIGURES) - from_tables
    assert {path.name for path in Path("pictures").iterdir()} == {
        "sliding-sigmoid.gif",
        *(f"{name}.png" for name in drawn - {"sliding-sigmoid"}),
    }
    for name in drawn - {"sliding-sigmoid"}:
        # Figures are as wide as a page at 200 dots per inch, so that all text has the same size. Only the
        # first figure in the documentation is narrower, so that it is readable on phones.
        assert size(Path("pictures", f"{name}.png"))[0] == (920 if name == "projection" else 1400)
    with Image.open("pictures/sliding-sigmoid.gif") as animation:
        assert sum(1 for _ in ImageSequence.Iterator(animation)) >= 8
        # Frames are drawn on top of each other, so transparent frames would leave traces.
        assert animation.convert("RGBA").getpixel((0, 0)) == (255, 255, 255, 255)
    missing = dict(
        re.findall(r"Not drawn: (\S+)\. .* does not exist\. Create it with `(.*)`\.", captured.out)
    )
    assert set(missing) == set(commands.FIGURES) - drawn
    assert missing["timing"] == "torchlml bench paper"
    assert missing["benchmarks"] == missing["bandwidth"] == "torchlml bench layer"
    assert missing["alternatives"] == "torchlml bench alternatives"
    assert missing["own-data"] == "torchlml bench own-data"
    assert missing["cifar100"] == "torchlml sweep cifar100"


def test_all_draws_the_remaining_figures_before_it_reports_an_error(capsys, tmp_path, monkeypatch):
    drawn = []

    def draw(settings):
        drawn.append(settings.out)
        if "bad" in settings.out.name:
            raise BadInput("This table is damaged.")

    monkeypatch.setattr(
        commands,
        "FIGURES",
        {
            name: Command("figures.settings:EntropiesSettings", "figures.geometry:entropies")
            for name in ("bad", "b")
        },
    )
    monkeypatch.setattr("torchlml_lab.figures.geometry.entropies", draw)
    assert cli.main(["figures", "all", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "torchlml: This table is damaged.\n"
    assert drawn == [tmp_path / f"{name}.png" for name in ("bad", "b")]


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_figure_drawn_twice_gives_identical_files(capsys, tmp_path, kind):
    pictures = [tmp_path / name / f"x.{kind}" for name in ("a", "b")]
    for picture in pictures:
        assert cli.main(["figures", "root-finding", "--out", str(picture)]) == 0
        assert [path.name for path in picture.parent.iterdir()] == [picture.name]
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    if kind == "svg":
        assert ElementTree.parse(pictures[0]).getroot().tag.endswith("svg")


def test_a_figure_that_fails_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError, match="broken"), plots.new_figure(tmp_path / "a" / "x.png", 2, 2):
        raise RuntimeError("broken")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (["all", "--out", __file__], "`--out` must be a directory"),
        (["all", "--k", "3"], "--k"),
        (["entropies", "--out", "."], "`--out` must be a file, but `.` is a directory"),
        (["polytopes", "--out", "x.pdf"], "`--out` must end in `.png` or `.svg`, but it is `x.pdf`"),
        (["projection", "--out", "/proc/x.svg"], "`/proc/x.svg` (`--out`) cannot be written"),
        (["timing", "--out", "/proc/x.png"], "`/proc/x.png` (`--out`) cannot be written"),
        (["cifar100", "--out", "/proc/x.png"], "`/proc/x.png` (`--out`) cannot be written"),
        (["scene-graph", "--out", "/proc/x.png"], "`/proc/x.png` (`--out`) cannot be written"),
        (["all", "--out", "/proc/pictures"], "cannot be written"),
        (["projection", "--k", "10"], "`--k` must be greater than 0 and less than 10, but it is 10"),
        (["timing", "--csv", "no.csv"], "`no.csv` does not exist. Create it with `torchlml bench paper`."),
        (["timing", "--csv", __file__], "(`--csv`) cannot be read as a benchmark CSV"),
        (
            ["cifar100", "--csv", "no.csv"],
            "`no.csv` does not exist. Create it with `torchlml sweep cifar100`.",
        ),
    ],
)
def test_bad_input_is_a_one_line_error(capsys, tmp_path, monkeypatch, words, needle):
    monkeypatch.chdir(tmp_path)
    assert needle in rejected(capsys, ["figures", *words])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "needle"),
    [
        ("timing", "has no results from `torchlml bench paper`"),
        ("benchmarks", "has no times from `torchlml bench layer`"),
        ("bandwidth", "has no copy times from `torchlml bench layer`"),
        ("alternatives", "has no results from `torchlml bench alternatives`"),
    ],
)
def test_the_table_of_another_benchmark_is_rejected(capsys, tmp_path, name, needle):
    measurements.append(tmp_path / "b.csv", [])
    words = ["figures", name, "--csv", str(tmp_path / "b.csv"), "--out", str(tmp_path / "x.png")]
    assert cli.main(words) == 2
    assert needle in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["b.csv"]


def test_labels_of_lines_do_not_overlap_and_keep_their_order(tmp_path):
    with plots.new_figure(tmp_path / "x.svg", 3, 2) as figure:
        axes = figure.subplots()
        axes.set_yscale("log")
        axes.set_ylim(1, 100)
        heights = {"a": 10.0, "b": 10.1, "c": 9.9, "d": 50.0, "outside": 1e9}
        plots.label_lines(axes, ((y, name, "black") for name, y in heights.items()), 0.1)
        found = {text.get_text(): text.get_position()[1] for text in axes.texts}
    assert sorted(found, key=found.__getitem__) == ["c", "a", "b", "d", "outside"]
    assert found["outside"] == 1
    assert found["b"] - found["a"] == pytest.approx(0.1)
    assert found["a"] - found["c"] == pytest.approx(0.1)
    assert found["a"] == pytest.approx(0.5, abs=0.01)  # halfway between 1 and 100 on a log scale
    assert found["d"] == pytest.approx(math.log10(50) / 2)


def test_a_picture_is_transparent(tmp_path):
    with plots.new_figure(tmp_path / "x.png", 1, 1) as figure:
        figure.subplots()
    with Image.open(tmp_path / "x.png") as picture:
        assert picture.convert("RGBA").getchannel("A").getpixel((0, 0)) == 0


def test_a_user_table_takes_precedence_over_the_study(tmp_path):
    own, study = tmp_path / "own.csv", tmp_path / "study.csv"
    with pytest.raises(plots.NotMadeYet, match=r"own\.csv` does not exist\. Create it with `make it`"):
        plots.find_csv(None, (own, study), "make it")
    study.touch()
    assert plots.find_csv(None, (own, study), "") == study
    own.touch()
    assert plots.find_csv(None, (own, study), "") == own
    assert plots.find_csv(study, (own,), "") == study
