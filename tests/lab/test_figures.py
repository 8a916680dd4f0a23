"""The figures: each one is drawn as PNG and SVG, `all` goes on without the tables that are missing."""

import re
import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest

from torchlml_lab import cli
from torchlml_lab.bench import records
from torchlml_lab.cli import Command
from torchlml_lab.errors import BadInput
from torchlml_lab.figures import command, style, tables


def size(png):
    """Width and height in the header of a PNG."""
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


def test_all_draws_what_needs_no_data_and_names_the_commands_for_the_rest(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["figures", "all", "--out", "pictures"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    drawn = {"projection", "polytopes", "root-finding", "entropies", "which-relaxation"}
    assert {path.name for path in Path("pictures").iterdir()} == {
        f"{name}.{kind}" for name in drawn for kind in ("png", "svg")
    }
    for name in drawn:
        # The width of a page at 200 dots per inch, so that type has the same size in all of them.
        assert size(Path("pictures", f"{name}.png"))[0] == 1400
        assert ElementTree.parse(Path("pictures", f"{name}.svg")).getroot().tag.endswith("svg")
    missing = dict(re.findall(r"Not drawn: (\S+)\. There is no .* to draw: `(.*)` makes it\.", captured.out))
    assert set(missing) == set(command.FIGURES) - drawn
    assert missing["timing"] == "torchlml bench --paper"
    assert missing["cifar100"] == "torchlml sweep cifar100"


def test_all_finishes_the_others_before_it_complains(capsys, tmp_path, monkeypatch):
    drawn = []

    def draw(arguments):
        drawn.append(arguments)
        if "bad" in arguments[1]:
            raise BadInput("This table is damaged.")

    monkeypatch.setattr(
        command,
        "FIGURES",
        {name: Command("torchlml_lab.figures.entropies", "") for name in ("bad", "b")},
    )
    monkeypatch.setattr("torchlml_lab.figures.entropies.main", draw)
    assert cli.main(["figures", "all", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "torchlml: This table is damaged.\n"
    assert drawn == [["--out", str(tmp_path / f"{name}.png")] for name in ("bad", "b")]


def test_the_same_figure_is_the_same_file(capsys, tmp_path):
    for name in ("a", "b"):
        assert cli.main(["figures", "root-finding", "--out", str(tmp_path / name / "x.png")]) == 0
    for kind in ("png", "svg"):
        assert (tmp_path / "a" / f"x.{kind}").read_bytes() == (tmp_path / "b" / f"x.{kind}").read_bytes()


def test_a_figure_that_fails_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError, match="broken"), style.new_figure(tmp_path / "a" / "x.png", 2, 2):
        raise RuntimeError("broken")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (["all", "--out", __file__], "which is a file: give a folder"),
        (["all", "--k", "3"], "--k"),
        (["entropies", "--out", "."], "`--out` names `.`, which is a folder"),
        (["polytopes", "--out", "x.pdf"], "`--out` names `x.pdf`, which must end in `.png`"),
        (["projection", "--out", "x.svg"], "`--out` names `x.svg`, which must end in `.png`"),
        (["projection", "--k", "10"], "`--k` is 10"),
        (["timing", "--csv", "no.csv"], "There is no `no.csv` to draw: `torchlml bench --paper` makes it."),
        (["timing", "--csv", __file__], "cannot be read as benchmarks"),
        (
            ["cifar100", "--csv", "no.csv"],
            "There is no `no.csv` to draw: `torchlml sweep cifar100` makes it.",
        ),
    ],
)
def test_bad_input_is_one_sentence(capsys, tmp_path, monkeypatch, words, needle):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["figures", *words]) == 2
    error = capsys.readouterr().err
    assert needle in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_timing_refuses_the_table_of_another_benchmark(capsys, tmp_path):
    records.append(tmp_path / "b.csv", [])
    assert cli.main(["figures", "timing", "--csv", str(tmp_path / "b.csv")]) == 2
    assert "has no row of `torchlml bench --paper`" in capsys.readouterr().err


def test_ones_own_table_comes_before_that_of_the_study(tmp_path):
    own, study = tmp_path / "own.csv", tmp_path / "study.csv"
    with pytest.raises(tables.NotMadeYet, match=r"own\.csv` to draw: `make it` makes it"):
        tables.find(None, (own, study), "make it")
    study.touch()
    assert tables.find(None, (own, study), "") == study
    own.touch()
    assert tables.find(None, (own, study), "") == own
    assert tables.find(study, (own,), "") == study
