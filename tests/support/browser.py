"""Chromium for tests that look at pages, where it is installed."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, playwright's own or the machine's; without either the test is skipped, with the reason."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        program = chromium_program(started)
        if program is None:
            pytest.skip("no Chromium is installed: apt-get install chromium, or playwright install chromium")
        chromium = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def chromium_program(started: Any) -> str | None:
    """The path of Chromium; None if there is none."""
    downloaded = Path(started.chromium.executable_path)
    return str(downloaded) if downloaded.exists() else shutil.which("chromium") or shutil.which("google-chrome")
