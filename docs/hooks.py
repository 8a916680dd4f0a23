"""What MkDocs does not do by itself: pages that live elsewhere in the repository, and links between them.

The studies in results/, CHANGELOG.md and the other pages of the root keep their places, where people who read
the repository find them. Here they become pages of the site, and every relative link is translated: it is
written for the repository, and must lead to the same file in the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Pages of the root, and what they are called in the site; README.md is the repository's own front door.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "ARCHITECTURE.md": "architecture.md",
}
# Where the site says what a section of README.md says.
SECTIONS = {
    "install": "install.md",
    "which-loss": "choosing-a-loss.md",
    "accuracy-and-special-rows": "numerics.md",
    "performance": "results/README.md",
}
KINDS = {".md", ".png", ".svg", ".csv"}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
OUTSIDE = ("https://", "http://", "mailto:", "#")


def elsewhere() -> dict[str, str]:
    """The files of the site that are not in docs/: what they are called there, and in the repository."""
    found = {site: path for path, site in PAGES.items() if (ROOT / path).is_file()}
    for path in sorted((ROOT / "results").rglob("*")):
        if path.is_file() and path.suffix in KINDS:
            name = path.relative_to(ROOT).as_posix()
            found[name] = name
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave out of the navigation what does not exist."""
    there = elsewhere()
    config.nav = _existing(config.nav, lambda name: name in there or (ROOT / "docs" / name).is_file())
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


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that are elsewhere."""
    for site, path in elsewhere().items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Translate the relative links of a page."""
    site = page.file.src_uri
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
                return text  # a source file: it is in the repository, not in the site
            return match.group()  # mkdocs says what is wrong with it
        target = posixpath.relpath(target, here or ".")
        return f"{image}[{text}]({target}{'#' + anchor if anchor else ''})"

    parts = re.split(r"(^```.*?^```[^\S\n]*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(translate, part) for part in parts)


def _site_name(path: str, anchor: str) -> str:
    """What a file of the repository is called in the site."""
    if path == "README.md":
        return SECTIONS.get(anchor, "index.md")
    return PAGES.get(path, path.removeprefix("docs/"))
