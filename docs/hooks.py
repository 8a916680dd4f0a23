"""MkDocs hooks that add pages from outside docs/, translate links, render formulas and write llms.txt.

The studies in results/, CHANGELOG.md and other pages in the root directory stay where readers of the
repository expect them. The hooks add them to the site and translate relative links, which are written for the
repository. Formulas are converted to MathML at build time, so that pages need no script from another host.
"""

from __future__ import annotations

import contextlib
import html
import io
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from torchlml_lab import cli, commands

ROOT = Path(__file__).parents[1]
# Pages in the root directory and their names on the site. README.md is for the repository only.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "ARCHITECTURE.md": "architecture.md",
}
# Site pages that replace links to sections of README.md.
SECTIONS = {
    "install": "install.md",
    "losses": "choosing-a-loss.md",
    "benchmarks": "benchmarks.md",
}
# Titles of the pages with generated tables, whose files contain no headings.
TABLES = {
    "results/benchmarks.md": "Benchmarks: all tables",
    "results/multilabel/kept-labels.md": "Multi-label: all tables",
    "results/own-data/own-data.md": "Tagging: all tables",
    "results/recommend/gowalla.md": "Recommendation: all runs on Gowalla",
    "results/routing/routing.md": "Routing: all routers",
    "results/scene-graph/vg.md": "Scene graphs: tables for Visual Genome",
    "results/scene-graph/vg-bias.md": "Scene graphs: frequency bias on Visual Genome",
    "results/scene-graph/vrd.md": "Scene graphs: tables for VRD",
    "results/scene-graph/vrd-bias.md": "Scene graphs: frequency bias on VRD",
    "results/which-k/which-k.md": "Which k: all tables",
}
KINDS = {".md", ".png", ".svg", ".csv"}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
OUTSIDE = ("https://", "http://", "mailto:", "#")
SUMMARIES: dict[str, str] = {}
"""The summary of each page, by its address on the site. Search results and llms.txt show them."""
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def elsewhere() -> dict[str, str]:
    """Map the site name of each file from outside docs/ to its path in the repository."""
    found = {site: path for path, site in PAGES.items() if (ROOT / path).is_file()}
    for path in sorted((ROOT / "results").rglob("*")):
        if path.is_file() and path.suffix in KINDS:
            name = path.relative_to(ROOT).as_posix()
            found[name] = name
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Drop navigation entries whose file does not exist."""
    there = elsewhere()
    config.nav = _existing(
        config.nav, lambda name: name in there or name == "cli.md" or (ROOT / "docs" / name).is_file()
    )
    return config


def _existing(entries: list[Any] | None, exists: Any) -> list[Any]:
    kept: list[Any] = []
    for entry in entries or []:
        if isinstance(entry, str):
            kept += [entry] if exists(entry) else []
            continue
        ((title, content),) = entry.items()
        if isinstance(content, list):
            content = _existing(content, exists)
        elif not exists(content):
            content = None
        kept += [{title: content}] if content else []
    return kept


def command_reference() -> str:
    """Return a page with the help text of every command."""
    os.environ.update(COLUMNS="88", NO_COLOR="1")
    names = [*commands.SINGLE, *(f"train {task}" for task in commands.TASKS)]
    names += [f"sweep {task}" for task in commands.TASKS]
    for command in ("evaluate", "predict", "export", "step-time"):
        able = (task for task, entry in commands.TASKS.items() if getattr(entry, command.replace("-", "_")))
        names += [f"{command} {task}" for task in able]
    names += [f"bench {name}" for name in commands.BENCHMARKS]
    names += [f"figures {name}" for name in commands.FIGURES]
    parts = [
        "# Command line reference",
        "This page is generated: it shows the output of `torchlml COMMAND --help` for every command.",
    ]
    for name in names:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            cli.main([*name.split(), "--help"])
        parts.append(f"## torchlml {name}\n\n```text\n{output.getvalue().strip()}\n```")
    return "\n\n".join(parts) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files from other directories to the site."""
    for site, path in elsewhere().items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "cli.md", content=command_reference()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Translate the relative links of a page from repository paths to site paths, and set its title.

    The title in the browser and in search results is the heading of the page, which is longer than its entry
    in the navigation.
    """
    site = page.file.src_uri
    if site in TABLES:
        markdown = f"# {TABLES[site]}\n\n{markdown}"
        page.meta["hide"] = ["navigation", "toc"]  # both are empty, and wide tables need the space
    if heading := re.match(r"# (.+)", markdown):
        page.meta["title"] = heading[1]
    repository = elsewhere().get(site, f"docs/{site}")
    folder, here = posixpath.dirname(repository), posixpath.dirname(site)

    def translate(match: re.Match[str]) -> str:
        image, text, link = match.groups()
        if link.startswith(OUTSIDE):
            return match.group()
        path, _, anchor = link.partition("#")
        path = posixpath.normpath(posixpath.join(folder, path))
        target = _site_name(path, anchor)
        anchor = "" if path == "README.md" else anchor
        if files.get_file_from_path(target) is None:
            if (ROOT / path).exists():
                return text  # a source file, which is not part of the site
            return match.group()  # mkdocs reports the broken link
        target = posixpath.relpath(target, here or ".")
        return f"{image}[{text}]({target}{'#' + anchor if anchor else ''})"

    parts = re.split(r"(^```.*?^```[^\S\n]*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(translate, part) for part in parts)


def _site_name(path: str, anchor: str) -> str:
    """Return the name that a file in the repository has on the site."""
    if path == "README.md":
        return SECTIONS.get(anchor, "index.md")
    return PAGES.get(path, path.removeprefix("docs/"))


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Set the description of a page, replace its formulas with MathML, and label the cells of its tables."""

    def formula(match: re.Match[str]) -> str:
        display = "inline" if match[2] == "(" else "block"
        return convert(html.unescape(match[3]), display=display)

    summary = _summary(content)
    if summary and not page.is_homepage:  # the home page has the description of the site
        page.meta["description"] = html.escape(summary)  # the theme does not escape it
        SUMMARIES[page.file.dest_uri] = summary
    return TABLE.sub(_label_cells, FORMULA.sub(formula, content))


def _summary(content: str) -> str:
    """Return the first sentences of a page's first paragraph or list item, as plain text."""
    for match in re.finditer(r"<(p|li)>(.*?)</\1>", content, re.DOTALL):
        text = " ".join(html.unescape(re.sub(r"<[^>]+>", "", match[2])).split())
        if not text:
            continue  # an image
        first, *others = re.split(r"(?<=\.) ", text)
        for sentence in others:
            if len(first) > 60 and len(first) + len(sentence) > 200:
                break
            first += f" {sentence}"
        return re.sub(":$", ".", first)
    return ""


def _label_cells(match: re.Match[str]) -> str:
    """Return the table with the column name as an attribute of every cell except the first of each row."""
    heads = [
        re.sub(r"<[^>]+>", "", head).strip()
        for head in re.findall(r"<th[^>]*>(.*?)</th>", match[0], re.DOTALL)
    ]

    def label_row(row: re.Match[str]) -> str:
        names = iter(heads)

        def label(cell: re.Match[str]) -> str:
            name = html.escape(html.unescape(next(names, "")), quote=True)
            first = cell.start() == row[0].index("<td")
            return cell[0] if first or not name else f'<td data-label="{name}"{cell[1]}>'

        return re.sub(r"<td([^>]*)>", label, row[0])

    wide = " data-wide" if len(heads) > 7 else ""
    labeled = re.sub(r"<tr>.*?</tr>", label_row, match[0], flags=re.DOTALL)
    return labeled.replace("<table>", f"<table data-cards{wide}>", 1)


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt, a plain list of the pages for language models, and fix the playground's preview URL."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for section in config.nav or []:
        ((title, entries),) = section.items()
        lines += [f"## {title}", "", *_listed(entries), ""]
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines), encoding="utf-8")
    playground = Path(config.site_dir, "playground", "index.html")
    if config.site_url and playground.is_file():
        text = playground.read_text(encoding="utf-8")
        playground.write_text(absolute_preview(text, config.site_url), encoding="utf-8")


def absolute_preview(page: str, site_url: str) -> str:
    """Return the page with an absolute URL for its preview image, as most services require."""
    return page.replace(
        'property="og:image" content="../', f'property="og:image" content="{site_url.rstrip("/")}/'
    )


def _listed(entries: list[Any]) -> list[str]:
    """Return Markdown links to the pages of a navigation section."""
    found: list[str] = []
    for entry in entries:
        ((title, content),) = entry.items() if isinstance(entry, dict) else (("Recipes", entry),)
        if isinstance(content, list):
            found += _listed(content)
        else:
            address = re.sub(r"README(?=\.md$)", "index", content).removesuffix(".md").removesuffix(".html")
            summary = SUMMARIES.get(f"{address}.html")
            found.append(f"- [{title}]({address}.html)" + (f": {summary}" if summary else ""))
    return found
