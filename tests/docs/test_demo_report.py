"""The report of `torchlml demo` shows pictures before numbers and is readable on a phone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from torchlml_lab import cli


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    options = ["--images", "300", "--epochs", "1", "--k", "2", "--seeds", "2"]
    assert cli.main(["demo", *options, "--out", str(folder)]) == 0
    return folder / "report.html"


def test_pictures_come_before_numbers(report: Path) -> None:
    page = report.read_text(encoding="utf-8")
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert page.count("<img ") == 6
    assert page.count('<table class="results">') == 2
    assert page.rindex("<img ") < page.index('<table class="results">')
    assert all(re.findall(r'<img alt="([^"]*)"', page))


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_the_report_fits_a_phone(browser: Any, report: Path, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 844})
    page.goto(report.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.evaluate(
        "[...document.querySelectorAll('td, th, p, li, .example img')]"
        ".map(each => [each.textContent, each.getBoundingClientRect(), each.scrollWidth - each.clientWidth])"
        ".filter(([, box, hidden]) => box.left < 0 || box.right > innerWidth || hidden > 1)"
        ".map(([text]) => text)"
    )
    assert outside == []
    # Column names are above the numbers in a wide window, and next to each number in a narrow window.
    cell = page.locator("table.results td[data-label]").first
    label = cell.evaluate("each => getComputedStyle(each, '::before').content")
    head = page.locator("table.results th").nth(1)
    assert (label == f'"{cell.get_attribute("data-label")}"') == (width < 640)
    assert head.is_visible() == (width >= 640)
    # A plot stays wide enough for its text to be readable, and scrolls within its frame.
    assert page.locator(".plot img").first.bounding_box()["width"] >= 640
    page.close()
