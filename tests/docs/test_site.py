"""The site builds without warnings, fetches no external files, and has working links and snippets."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import torchlml
import torchlml.metrics
from tests.support.example_rows import example_rows

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "recipes")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    pytest.importorskip("mkdocstrings", reason="the `docs` extra is not installed")
    pytest.importorskip("material", reason="the `docs` extra is not installed")
    folder = tmp_path_factory.mktemp("site")
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


class Html(HTMLParser):
    """The links, anchors and fetched files of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.fetched: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        of = {name: value or "" for name, value in attributes}
        self.anchors |= {of[name] for name in ("id", "name") if name in of}
        if "src" in of:
            self.fetched.append(of["src"])
        if "href" in of:
            (self.links if tag == "a" else self.fetched).append(of["href"])


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, Html]:
    return {page: Html(page) for page in sorted(site.rglob("*.html"))}


def test_titles_start_with_the_heading_and_headings_with_the_navigation_entry(site: Path) -> None:
    text = (site / "llms.txt").read_text(encoding="utf-8")
    entries = re.findall(r"^- \[(.+?)\]\((.+?\.html)\)(?:: .+)?$", text, re.M)
    assert len(entries) > 30
    for name, address in entries:
        page = (site / address).read_text(encoding="utf-8")
        title, heading = re.search(r"<title>(.*?)</title>.*?<h1[^>]*>(.*?)<", page, re.DOTALL).groups()  # type: ignore[union-attr]
        assert heading.startswith(name), address
        assert title.startswith(heading), address


def test_every_page_has_its_own_description(site: Path) -> None:
    """Search results and llms.txt show the first sentences of a page, which end with a period."""
    text = (site / "llms.txt").read_text(encoding="utf-8")
    summaries = dict(re.findall(r"^- \[.+?\]\((.+?\.html)\): (.+)$", text, re.M))
    unsummarized = {"index.html", "playground/index.html"}  # these two pages define their own description
    assert set(re.findall(r"\((\S+\.html)\)", text)) == set(summaries) | unsummarized
    assert len(set(summaries.values())) == len(summaries)
    for address, summary in summaries.items():
        page = (site / address).read_text(encoding="utf-8")
        found = re.search(r'<meta name="description" content="([^"]*)">', page)
        assert found is not None, address
        assert unescape(found[1]) == summary
        assert re.fullmatch(r".{40,300}[.)]", summary), summary


def test_the_site_fetches_nothing_from_elsewhere(site: Path, pages: dict[Path, Html]) -> None:
    assert len(pages) > 20
    for page, html in pages.items():
        for name in html.fetched:
            parts = urlsplit(name)
            assert parts.scheme in ("", "data"), (page.name, name)
            assert not parts.netloc, (page.name, name)
            if parts.scheme == "" and page.name != "404.html":
                assert (page.parent / unquote(parts.path)).resolve().is_file(), (page.name, name)
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", style.read_text(encoding="utf-8")), style.name


def test_every_link_on_the_site_has_a_target(site: Path, pages: dict[Path, Html]) -> None:
    followed = 0
    for page, html in pages.items():
        for link in html.links:
            parts = urlsplit(link)
            if parts.scheme or page.name == "404.html":  # links on the 404 page start at the site root
                assert parts.scheme in ("", "https"), (page.name, link)
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert target.is_relative_to(site.resolve()), (page.name, link)
            assert target.is_file(), (page.name, link)
            if parts.fragment and target.suffix == ".html" and "playground" not in target.parts:
                assert unquote(parts.fragment) in pages[site / target.relative_to(site.resolve())].anchors, (
                    page.name,
                    link,
                )
            followed += 1
    assert followed > 500


def test_every_public_name_is_in_the_api(site: Path) -> None:
    anchors = {anchor for page in (site / "api").glob("*.html") for anchor in Html(page).anchors}
    modules = ("metrics", "distributions")
    names = {f"torchlml.{name}" for name in torchlml.__all__ if name not in modules}
    names |= {f"torchlml.metrics.{name}" for name in torchlml.metrics.__all__}
    names |= {"torchlml.compat.LML", "torchlml.distributions.KSubset"}
    assert names - anchors == set()


def test_lists_and_return_values_are_rendered_as_written(site: Path) -> None:
    """A list needs an empty line before it, and a `Returns:` section may have several lines."""
    sections = 0
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for paragraph in re.findall(r"<p>(.*?)</p>", text, re.DOTALL):
            assert not re.search(r"\n\s*(-|\d+\.) ", paragraph), (page.name, paragraph)
        for section in re.findall(r"Returns:.*?</ul>", text, re.DOTALL):
            assert section.count("<li") == 1, (page.name, section)
            sections += 1
    assert sections > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_every_snippet_of_a_page_runs(page: Path) -> None:
    """The Python blocks of a page run in order. Recipes are separate files with their own tests."""
    names: dict[str, object] = {"__name__": "snippet"}
    for snippet in re.findall(
        r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    ):
        exec(compile(snippet, page.name, "exec"), names)


def test_the_numbers_on_the_first_page_are_right() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for comment, y in example_rows(text):
        assert [float(each) for each in comment.split()[:4]] == pytest.approx(y.tolist(), abs=0.006)


def test_spelling() -> None:
    pytest.importorskip("codespell_lib", reason="codespell is not installed")
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*"), *(ROOT / "results").rglob("*.md")]
    texts = [str(path) for path in files if path.suffix in (".md", ".py", ".html", ".css")]
    assert len(texts) > 30
    done = subprocess.run(
        [sys.executable, "-m", "codespell_lib", *texts], capture_output=True, text=True, check=False
    )
    assert done.stdout == ""
    assert done.returncode == 0


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="session")
def served(site: Path) -> Iterator[str]:
    """Serve the site locally, and yield its address."""
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def visit(browser: Any, address: str, **settings: Any) -> Iterator[Any]:
    """Open a page, and check that it fetches files only from the site."""
    page = browser.new_page(**settings)
    strangers: list[str] = []
    host = address.split("/")[2]
    page.on(
        "request", lambda request: strangers.append(request.url) if host not in request.url[:40] else None
    )
    page.goto(address)
    yield page
    page.close()
    assert [url for url in strangers if not url.startswith(("data:", "blob:"))] == []


def test_the_search_finds_a_page_and_opens_it(browser: Any, served: str) -> None:
    with visit(browser, f"{served}/index.html", viewport={"width": 1300, "height": 900}) as page:
        for words, where in (("sparsemax", "related"), ("gradient accumulation", "trainers")):
            page.locator("input.md-search__input").click()
            page.locator("input.md-search__input").fill("")
            page.locator("input.md-search__input").press_sequentially(words)
            page.locator(f".md-search-result__link[href*={where}]").first.wait_for(timeout=20000)
        page.locator(".md-search-result__link[href*=trainers]").first.click()
        page.wait_for_url("**/recipes/trainers.html**")
        assert page.locator("h1").inner_text().startswith("Training frameworks")


def test_tabs_and_sections_lead_to_their_pages(browser: Any, served: str) -> None:
    with visit(browser, f"{served}/index.html", viewport={"width": 1300, "height": 900}) as page:
        for place, name, title in (
            ("nav.md-nav--primary a", "Choosing a loss", "Choosing a loss"),
            ("nav.md-tabs a", "API", "API index"),
            ("nav.md-nav--primary a", "Projection", "Projection"),
            ("nav.md-tabs a", "Research", "Results"),
            ("nav.md-tabs a", "Guide", "torchlml: differentiable top-k"),
            ("nav.md-nav--primary a", "Playground", "Playground"),
        ):
            page.locator(place, has_text=name).first.click()
            page.wait_for_function(
                "title => document.querySelector('h1')?.innerText.startsWith(title)", arg=title
            )
        page.locator("a", has_text="Docs").click()
        page.wait_for_url("**/index.html")


def test_site_and_playground_share_a_theme(browser: Any, served: str) -> None:
    def dark() -> bool:
        light = page.evaluate("Number(getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0])")
        return light < 128

    with visit(
        browser,
        f"{served}/index.html",
        viewport={"width": 1300, "height": 900},
        color_scheme="light",
        reduced_motion="reduce",
    ) as page:
        assert not dark()
        page.locator("label[for=__palette_1]").click()
        page.wait_for_function("document.body.dataset.mdColorScheme === 'slate'")
        page.goto(f"{served}/playground/index.html")
        assert dark()
        stored = "localStorage.getItem('/.__palette')"
        written = page.evaluate(stored)
        page.click("#theme")
        page.click("#theme")
        assert page.evaluate(f"JSON.parse({stored})") == json.loads(written)  # in the site's format
        page.click("#theme")
        assert not dark()
        page.goto(f"{served}/faq.html")
        page.wait_for_function("document.body.dataset.mdColorScheme === 'default'")
        page.locator("label[for=__palette_1]").wait_for()  # the button offers the dark theme again


def test_the_preview_image_gets_an_absolute_address() -> None:
    pytest.importorskip("mkdocs", reason="the `docs` extra is not installed")
    pytest.importorskip("latex2mathml", reason="the `docs` extra is not installed")
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    page = (ROOT / "docs" / "playground" / "index.html").read_text(encoding="utf-8")
    changed = hooks["absolute_preview"](page, "https://example.org/lml/")
    line = '<meta property="og:image" content="https://example.org/lml/images/social-card.png">'
    assert line in changed.splitlines()
    assert len(set(changed.splitlines()) - set(page.splitlines())) == 1


def test_a_phone_opens_the_navigation(browser: Any, served: str) -> None:
    with visit(browser, f"{served}/choosing-a-loss.html", viewport={"width": 390, "height": 800}) as page:
        page.locator("label.md-header__button[for=__drawer]").click()
        page.locator("nav.md-nav--primary a", has_text="Choosing a relaxation").first.click()
        page.wait_for_url("**/choosing-a-relaxation.html")


# Lay out each page in an off-screen frame, because painting it would take most of the time.
LAID_OUT = """async ([name, widths]) => {
    const frame = document.createElement("iframe");
    frame.style.cssText = `position: fixed; left: -9999px; border: 0; height: 800px; width: ${widths[0]}px`;
    frame.src = name;
    await new Promise(done => { frame.onload = done; document.body.append(frame); });
    const found = widths.map(width => {
        frame.style.width = `${width}px`;
        const page = frame.contentDocument;
        const tables = [...page.querySelectorAll(".md-typeset__scrollwrap")];
        const clipped = tables.filter(e => e.scrollWidth > e.clientWidth + 1);
        return [page.documentElement.scrollWidth, clipped.map(e => e.innerText.slice(0, 60))];
    });
    frame.remove();
    return found;
}"""


def test_no_page_scrolls_sideways_and_no_table_is_clipped(browser: Any, served: str, site: Path) -> None:
    pages = [
        path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html")) if path.name != "404.html"
    ]
    widths = [1280, 390]
    with visit(browser, f"{served}/index.html", viewport={"width": 1280, "height": 800}) as page:
        # Otherwise, every page would build the search index again.
        page.route("**/search_index.json", lambda route: route.abort())
        for name in pages:
            for width, (needed, clipped) in zip(
                widths, page.evaluate(LAID_OUT, [f"/{name}", widths]), strict=True
            ):
                assert needed <= width, (name, width)
                assert clipped == [], (name, width)
