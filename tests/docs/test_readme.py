"""The README and the results page: every snippet runs, every command, link and test they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import torchlml
from torchlml_lab import cli

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
RESULTS = ROOT / "results" / "README.md"
PAGES = (
    README,
    RESULTS,
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "results").glob("*/README.md")),
)
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_every_snippet_runs() -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for snippet in SNIPPETS:
        exec(compile(snippet, "README.md", "exec"), names)
    # The last projection of the quick start is the packed one: both its rows sum to 2.
    y = names["y"]
    assert isinstance(y, torch.Tensor)
    torch.testing.assert_close(torch.stack([y[:3].sum(), y[3:].sum()]), torch.tensor([2.0, 2.0]))


def test_the_readme_names_only_what_there_is() -> None:
    named = set(re.findall(r"torchlml\.([A-Za-z_]+)", "\n".join(SNIPPETS)))
    assert len(named) > 5
    assert {name for name in named if not hasattr(torchlml, name) and name != "metrics"} == set()


def commands() -> dict[str, list[str]]:
    """Every `torchlml ...` in code on the pages: the words of the command, and the options given to it."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        shell = [line for language, block in blocks if language in ("", "sh") for line in block.split("\n")]
        variables = dict(re.findall(r'^(\w+)="(.*)"$', text, re.MULTILINE))
        for written in [*re.findall(r"`(torchlml [^`\n]*)`", text), *shell]:
            line = written
            for name, value in variables.items():
                line = line.replace(f"${name} ", f"{value} ")
            if line.startswith("torchlml "):
                words = line.split("#")[0].split()[1:]
                options = [word for word in words if word.startswith("--")]
                name = " ".join(words[: words.index(options[0])] if options else words)
                found.setdefault(name, []).extend(options)
    return found


COMMANDS = commands()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_exists_with_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*name.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert [option for option in COMMANDS[name] if option not in said] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page as the web makes them: small letters and digits, a hyphen for a space."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if not link.startswith("https://"):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_results_page_names_real_tests() -> None:
    text = RESULTS.read_text(encoding="utf-8")
    claims = (ROOT / "tests" / "test_paper.py").read_text(encoding="utf-8")
    selected = set(re.findall(r"pytest tests/test_paper.py -k (\w+)", text))
    assert len(selected) > 8
    for word in selected:
        assert re.search(rf"def test_\w*{word}", claims), word
