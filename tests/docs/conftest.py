"""A headless Chromium for tests that open pages. Without Chromium, these tests are skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The installed Chromium, controlled through Playwright."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("Chromium is not installed (looked for " + ", ".join(NAMES) + ")")
    # Chromium's sandbox does not work for root, the default user in a container.
    arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=arguments)
        yield chromium
        chromium.close()
