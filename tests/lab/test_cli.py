"""The command line: help, exit codes, one sentence for every failure, and `info` and `demo` themselves."""

import dataclasses
import importlib
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torchlml_lab.bench.command import BenchSettings

import torchlml
from torchlml._kernels.cpu import native
from torchlml_lab import cli, info
from torchlml_lab.files import replacing
from torchlml_lab.tasks.hidden_labels.demo import DemoSettings

ROOT = Path(__file__).parents[2]


def run(capsys, *words):
    code = cli.main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def one_sentence(text):
    return text.startswith("torchlml: ") and text.endswith(".\n") and text.count("\n") == 1


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_help_lists_every_command(capsys, words):
    code, out, err = run(capsys, *words)
    assert code == 0
    assert err == ""
    for name, command in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.summary)}$", out, re.MULTILINE)


@pytest.mark.parametrize(("command", "settings"), [("demo", DemoSettings), ("bench", BenchSettings)])
def test_help_explains_every_option(capsys, command, settings):
    code, out, err = run(capsys, command, "--help")
    assert code == 0
    assert err == ""
    words = " ".join(re.sub("[│╭╰─╮╯]", " ", out).split())
    for field in dataclasses.fields(settings):
        # After the option and its metavar (in capitals or brackets) comes a sentence.
        metavar = r"(?:[A-Z]+ |\[[^ ]+ \[[^ ]+ \.\.\.\]\] )?"
        assert re.search(rf"--{field.name} {metavar}[A-Z`][\w`]*(?: \S+){{3,}}\. \(default", words), (
            field.name
        )


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"torchlml {torchlml.__version__}\n", "")


def test_version_is_the_same_everywhere():
    assert f"version: {torchlml.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{torchlml.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (["trian"], "no command `trian`"),
        (["--no-such-option"], "no command `--no-such-option`"),
        (["info", "--json"], "`--json`"),
        (["demo", "--k", "0"], "`--k` is 0"),
        (["demo", "--k", "10"], "`--k` is 10"),
        (["demo", "--k", "nan"], "--k"),
        (["demo", "--k", "three"], "--k"),
        (["demo", "--k"], "--k"),
        (["demo", "--out", __file__], "`--out`"),
        (["demo", "--kay", "3"], "--kay"),
    ],
)
def test_bad_input_is_one_sentence(capsys, words, needle):
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert one_sentence(err)
    assert needle in err


class _Broken:
    """A module whose command fails."""

    def __init__(self, error):
        self.error = error

    def main(self, arguments):
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RuntimeError("the disk is full"), 1, "the disk is full."),
        (RuntimeError("line one\nline two."), 1, "line one line two."),
        (ValueError(), 1, "ValueError."),
        (
            ModuleNotFoundError("No module named 'torchlml.x'", name="torchlml.x"),
            1,
            "No module named 'torchlml.x'.",
        ),
        (KeyboardInterrupt(), 130, "Interrupted."),
    ],
)
def test_failures_are_one_sentence_and_a_code(capsys, monkeypatch, error, code, message):
    monkeypatch.setattr(importlib, "import_module", lambda name: _Broken(error))
    assert run(capsys, "info") == (code, "", f"torchlml: {message}\n")


@pytest.mark.parametrize("words", [("--debug", "info"), ("info", "--debug")])
def test_debug_prints_the_traceback(capsys, monkeypatch, words):
    monkeypatch.setattr(importlib, "import_module", lambda name: _Broken(RuntimeError("no")))
    code, _, err = run(capsys, *words)
    assert code == 1
    assert err.startswith("Traceback")
    assert err.endswith("torchlml: no.\n")


def test_info_says_what_is_in_use(capsys):
    code, out, err = run(capsys, "info")
    assert code == 0
    assert err == ""
    found = {line[:12].strip(): line[12:] for line in out.splitlines() if line[:12].strip()}
    assert found["torchlml"] == torchlml.__version__
    assert found["torch"] == torch.__version__
    assert found["python"] == sys.version.split()[0]
    assert found["kernel"] == info.kernel()
    assert found["threads"] == f"{torch.get_num_threads()} of {os.cpu_count()}"
    assert found["devices"] == "cpu"


@pytest.mark.parametrize(("loaded", "said"), [(True, "native (v3)"), (False, "torch")])
def test_info_names_the_kernel(monkeypatch, loaded, said):
    monkeypatch.setattr(native, "loaded", lambda: loaded)
    monkeypatch.setattr(native, "instruction_set", lambda: "v3" if loaded else None)
    assert info.kernel() == said


def test_info_says_which_extras_are_incomplete(monkeypatch):
    required = [
        "torch>=2.10",
        'no-such-package>=1; extra == "lab"',
        'pytest; extra == "dev"',
        'torchlml[lab]; extra == "dev"',
        'pytest; extra == "docs"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: required)
    hint = "without no-such-package (pip install 'torchlml[{}]')"
    monkeypatch.setattr(info, "_extras", lambda: ["dev", "docs", "lab"])
    assert info.report()["extras"] == [
        f"dev: {hint.format('dev')}",
        "docs: installed",
        f"lab: {hint.format('lab')}",
    ]


WITHOUT_EXTRAS = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package in {"tyro", "rich", "matplotlib", "numpy", "sklearn", "h5py", "torchmetrics"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=package)

sys.meta_path.insert(0, Absent())
from torchlml_lab.cli import main
print(main(["info"]), main(["--help"]), main(["demo"]), main(["bench", "--quick"]))
"""


def test_without_the_extra_info_works_and_the_others_say_what_to_install():
    # -W ignore: torch itself warns when numpy is missing.
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_EXTRAS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.splitlines()[-1] == "0 0 2 2", done.stderr
    assert done.stderr.count("run `pip install 'torchlml[lab]'`.") == 2
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_early_is_no_failure():
    command = f"{sys.executable} -m torchlml --help | head -n 0"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as temporary:
        temporary.write_text(f"ne{1 // 0}")
    assert path.read_text() == "old"
    with replacing(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
