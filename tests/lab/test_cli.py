"""The command line: help, exit codes, one-line errors, and `info`."""

import dataclasses
import itertools
import os
import re
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import torchlml
from tests.support import fresh
from tests.support.processes import restore_interrupts
from torchlml._cpu import loader
from torchlml_lab import cli, info
from torchlml_lab.bench.settings import (
    ConstrainedSettings,
    LayerSettings,
    LossesSettings,
    PaperSettings,
    ScaleSettings,
)
from torchlml_lab.cli_errors import BadInput, sentence
from torchlml_lab.commands import BENCHMARKS, FIGURES, SUMMARIES, TASKS
from torchlml_lab.files import replacing
from torchlml_lab.studies.settings import DemoSettings, WhichKSettings

ROOT = Path(__file__).parents[2]


def run(capsys, *words):
    code = cli.main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def raising(error):
    def fail():
        raise error

    return fail


def one_line_error(text):
    return text.startswith("torchlml: ") and text.endswith((".\n", "?\n")) and text.count("\n") == 1


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_help_lists_every_command(capsys, words):
    code, out, err = run(capsys, *words)
    assert code == 0
    assert err == ""
    for name, summary in SUMMARIES.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("demo", DemoSettings),
        ("which-k", WhichKSettings),
        ("bench layer", LayerSettings),
        ("bench constrained", ConstrainedSettings),
        ("bench losses", LossesSettings),
        ("bench scale", ScaleSettings),
        ("bench paper", PaperSettings),
    ],
)
def test_help_explains_every_option(capsys, command, settings):
    code, out, err = run(capsys, *command.split(), "--help")
    assert code == 0
    assert err == ""
    words = " ".join(re.sub("[│╭╰─╮╯]", " ", out).split())
    for field in dataclasses.fields(settings):
        # The option and its metavar (in capitals or brackets) are followed by a sentence.
        metavar = r"(?:[A-Z]+ |\[[^ ]+ \[[^ ]+ \.\.\.\]\] )?"
        end = r"(?= --|$)" if field.default in (None, ()) or field.default is False else r" \(default: \S"
        assert re.search(
            rf"--{field.name.replace('_', '-')} {metavar}[A-Z`][\w`]*(?: \S+){{3,}}\.{end}", words
        ), field.name
    assert "(default: None)" not in words


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"torchlml {torchlml.__version__}\n", "")


def test_version_is_the_same_everywhere():
    assert f"version: {torchlml.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{torchlml.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (["trian"], "no command `trian`. Did you mean `train`?"),
        (["nonsense"], "no command `nonsense`. The commands are demo, "),
        (["--versoin"], "Did you mean `--version`?"),
        (["bench", "layr"], "Unknown NAME `layr` for `torchlml bench`. Did you mean `layer`?"),
        (["bench", "peers-of-mine"], f"The names are {', '.join(BENCHMARKS)}."),
        (["bench", "paper", "--trails", "3"], "no option `--trails`. Did you mean `--trials`?"),
        (["bench", "paper", "--trails=3"], "no option `--trails`. Did you mean `--trials`?"),
        (["bench", "paper", "--trials", "3", "4"], "Unexpected argument `4`"),
        (
            ["bench", "paper", "--trials", "a"],
            "`--trials` must be an integer, but got `a`",
        ),
        (["bench", "paper", "--ks=a"], "Each value of `--ks` must be an integer, but got `a`"),
        (["bench", "losses", "--seconds", "x"], "`--seconds` must be a number, but got `x`"),
        (
            ["train", "multilabel", "--train", "x.csv", "--k", "five"],
            "`--k` must be an integer or `labels`, but got `five`",
        ),
        (
            ["train", "multilabel", "--train=x.csv", "--keep=two"],
            "`--keep` must be a number or `one`, but got `two`",
        ),
        (
            ["sweep", "multilabel", "--keeps", "1", "two"],
            "Each value of `--keeps` must be a number or `one`, but got `1 two`",
        ),
        (["bench", "losses", "--csv"], "`--csv` needs a value"),
        (["train", "cifar100", "--loss", "lmn"], "`--loss` must be one of "),
        (["--no-such-option"], "no command `--no-such-option`"),
        (["info", "--json"], "`--json`"),
        (["demo", "--k", "0"], "`--k` must be from 2 to 9, but it is 0"),
        (["demo", "--k", "10"], "`--k` must be from 2 to 9, but it is 10"),
        (["demo", "--k", "nan"], "--k"),
        (["demo", "--k", "three"], "--k"),
        (["demo", "--k"], "--k"),
        (["demo", "--out", __file__], "`--out`"),
        (["demo", "--kay", "3"], "--kay"),
    ],
)
def test_bad_input_is_a_one_line_error(capsys, words, needle):
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert one_line_error(err)
    assert needle in err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RuntimeError("the disk is full"), 1, "the disk is full."),
        (RuntimeError("line one\nline two."), 1, "line one line two."),
        (ValueError(), 1, "ValueError."),
        (MemoryError(), 1, "Not enough memory."),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
                "you tried to allocate 400000000000 bytes. Error code 12 (Cannot allocate memory)"
            ),
            1,
            "Not enough memory: an allocation of 373 GiB failed.",
        ),
        (
            OSError(28, "No space left on device", "rows.csv"),
            1,
            "`rows.csv` cannot be read or written: there is no space left on the disk.",
        ),
        (PermissionError(13, "Permission denied"), 1, "Permission denied."),
        (
            ModuleNotFoundError("No module named 'torchlml.x'", name="torchlml.x"),
            1,
            "No module named 'torchlml.x'.",
        ),
        (KeyboardInterrupt(), 130, "Interrupted."),
    ],
)
def test_failures_are_a_one_line_error_and_an_exit_code(capsys, monkeypatch, error, code, message):
    monkeypatch.setattr(info, "report", raising(error))
    assert run(capsys, "info") == (code, "", f"torchlml: {message}\n")


@pytest.mark.parametrize("words", [("--debug", "info"), ("info", "--debug")])
def test_debug_prints_the_traceback(capsys, monkeypatch, words):
    monkeypatch.setattr(info, "report", raising(RuntimeError("no")))
    code, _, err = run(capsys, *words)
    assert code == 1
    assert err.startswith("Traceback")
    assert err.endswith("torchlml: no.\n")


def test_info_names_the_kernel_in_use(capsys):
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


@pytest.mark.parametrize(("loaded", "said"), [(True, "C++ (AVX2)"), (False, "pure PyTorch (")])
def test_info_names_the_kernel(monkeypatch, loaded, said):
    monkeypatch.setattr(loader, "loaded", lambda: loaded)
    monkeypatch.setattr(loader, "instruction_set", lambda: "v3" if loaded else None)
    assert info.kernel().startswith(said)


def test_info_lists_incomplete_extras(monkeypatch):
    required = [
        "torch>=2.10",
        'no-such-package>=1; extra == "lab"',
        'pytest; extra == "dev"',
        'torchlml[lab]; extra == "dev"',
        'pytest; extra == "docs"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: required)
    hint = "missing no-such-package (pip install 'torchlml[{}]')"
    monkeypatch.setattr(info, "_extras", lambda: ["dev", "docs", "lab"])
    assert info.report()["extras"] == [
        f"dev: {hint.format('dev')}",
        "docs: installed",
        f"lab: {hint.format('lab')}",
    ]


# The script that pip creates for the entry point.
SCRIPT = "import sys; from torchlml_lab.cli import main; sys.exit(main())"


def script(*words, before="", **environment):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", before + SCRIPT, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        env=os.environ | environment,
    )


@pytest.mark.parametrize("words", [[], ["--version"], ["benhc"], ["bench"], ["bench", "layr"], ["train"]])
def test_commands_that_do_not_need_torch_do_not_import_it(words):
    absent = "import sys; sys.modules.update(torch=None, numpy=None, rich=None, tyro=None); "
    done = script(*words, before=absent)
    assert "torch`" not in done.stderr
    assert done.returncode == (2 if words[-1:] in (["benhc"], ["layr"]) else 0), done.stderr


EVERY_COMMAND = [
    [],
    *([name] for name in SUMMARIES),
    *(["train", task] for task in TASKS),
    *(["sweep", task] for task in TASKS),
    *(["bench", name] for name in BENCHMARKS),
    *(["figures", name] for name in [*FIGURES, "all"]),
]
"""Every command, without arguments and with each name that it accepts."""
SLOW = ("torch", "numpy", "scipy", "sklearn", "matplotlib", "accelerate", "h5py")


def test_help_and_wrong_options_import_nothing_slow():
    commands = [[*words, "--help"] for words in EVERY_COMMAND] + [
        [*words, "--no-such-option"] for words in EVERY_COMMAND
    ]
    program = (
        f"import sys; from torchlml_lab.cli import main; commands, slow = {commands!r}, {SLOW!r}\n"
        "for words in commands:\n"
        "    assert main(words) == (0 if words[-1] == '--help' else 2), words\n"
        "    found = [name for name in slow if name in sys.modules]\n"
        "    assert not found, (words, found)\n"
        "print('all', len(commands))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.endswith(f"all {2 * len(EVERY_COMMAND)}\n"), done.stderr
    assert len(EVERY_COMMAND) > 35


def test_a_wrong_environment_variable_is_a_one_line_error():
    done = fresh.run(SCRIPT, "info", TORCHLML_KERNEL="foo")
    assert (done.returncode, done.stdout) == (1, "")
    assert one_line_error(done.stderr)
    assert "`TORCHLML_KERNEL` must be 'torch', 'native' or unset" in done.stderr


def test_ctrl_c_while_torch_is_imported_is_a_one_line_error(tmp_path):
    (tmp_path / "torch.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "info"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        preexec_fn=restore_interrupts,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "torchlml: Interrupted.\n")


@pytest.mark.parametrize("words", [["bench", "layer", "--help"], ["figures", "projection"]])
def test_a_terminal_without_unicode_can_show_everything(words, tmp_path):
    words = words if words[-1] == "--help" else [*words, "--out", str(tmp_path / "x.png")]
    done = script(*words, PYTHONIOENCODING="ascii", LANG="C", LC_ALL="C")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert len(done.stdout) > 500


def test_characters_outside_the_output_encoding_are_replaced():
    program = "from torchlml_lab import cli; cli.main(['--version']); print('1±2 µs é')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.stdout.splitlines()[-1] == "1+-2 us ?"


HELPED = [["train", "cifar100"], ["bench", "layer"], ["bench", "paper"], ["sweep", "scene-graph"], ["info"]]


@pytest.mark.parametrize("words", [[], ["bench"], ["figures"], ["gpu-check"], *HELPED])
def test_help_fits_the_terminal(capsys, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, *words, "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80


def test_help_texts_fill_their_lines(capsys, monkeypatch):
    """Help texts fill the width of the terminal, and the lines of the description are not indented."""
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, "train", "multilabel", "--help")
    lines = [line.rstrip() for line in re.sub("[│╭╰─╮╯]", " ", out).splitlines()]
    start = next(i for i, line in enumerate(lines) if line.endswith(" options"))
    assert not any(line.startswith(" ") for line in lines[: start - 1])
    texts = [line if line.startswith(22 * " ") else "" for line in lines[start:]]
    width = max(map(len, texts))
    for line, following in itertools.pairwise(texts):
        assert not following or not line or len(f"{line} {following.split()[0]}") > width, line


WITHOUT_EXTRAS = """
import sys
from importlib import machinery

class TorchAlone:
    def find_spec(self, name, path=None, target=None):
        ours = {"torch", "torchlml", "torchlml_lab", "functorch", "torchgen", *NEEDED}
        found = name.partition(".")[0] in ours | set(sys.stdlib_module_names)
        return machinery.PathFinder.find_spec(name, path, target) if found else None

sys.meta_path[:] = [machinery.BuiltinImporter, machinery.FrozenImporter, TorchAlone()]
"""
# Packages that torch itself depends on and imports.
NEEDED = ["typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock"]


def test_with_torch_alone_info_works_and_other_commands_name_the_extra():
    blocked = f"NEEDED = {NEEDED}" + WITHOUT_EXTRAS
    program = "import torch, torchlml; print(torchlml.lml(torch.zeros(4), 2).sum().item()); "
    program += "from torchlml_lab.cli import main; print(*(main(words.split()) for words in sys.argv[1:]))"
    commands = ["info", "--help", "gpu-check", *LAB_COMMANDS]
    command = [sys.executable, "-W", "ignore", "-c", blocked + program, *commands]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.startswith("2.0\n"), done.stderr
    assert done.stdout.splitlines()[-1] == "0 0" + " 2" * (1 + len(LAB_COMMANDS)), done.stderr
    assert done.stderr.count("Run `pip install 'torchlml[lab]'`.") == len(LAB_COMMANDS)
    assert "Traceback" not in done.stderr


LAB_COMMANDS = [
    "demo",
    "bench layer",
    "bench constrained",
    "bench losses",
    "bench scale",
    "bench paper",
    "train cifar100",
    "sweep scene-graph",
    "figures all",
    "figures projection",
]


def test_a_pipe_that_is_closed_early_is_not_a_failure():
    command = f"{sys.executable} -m torchlml_lab --help | head -n 0"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def closing(closed, *words):
    """Run a command with the shell redirection `closed`, which closes stdout, stderr or both."""
    command = ["sh", "-c", f'exec "$0" -m torchlml_lab "$@" {closed}', sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_closed_output_is_not_a_failure(tmp_path, closed):
    # Output must not go into a file that reuses the descriptor of the closed stream.
    picture = tmp_path / "picture.png"
    done = closing(closed, "figures", "projection", "--out", str(picture))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_closed_error_output_keeps_the_exit_code():
    assert closing("2>&-", "trian").returncode == 2


def test_a_message_ends_with_one_period():
    assert sentence(BadInput("Stop!")) == "Stop!"
    assert sentence(RuntimeError("a\nb")) == "a b."


def test_a_file_is_replaced_atomically(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as temporary:
        temporary.write_text(f"ne{1 // 0}")
    assert path.read_text() == "old"
    with replacing(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
