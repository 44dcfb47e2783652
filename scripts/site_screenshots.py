"""Take pictures of the documentation's first page, as wide as a desktop's window and as a phone's.

    make docs && python scripts/site_screenshots.py [FOLDER]     docs/images by default

Needs Chromium (CHROMIUM=PATH if it is elsewhere) and the site in site/.
"""

import os
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
WIDTHS = {1280: 800, 400: 800}  # width and height of the window


def take(folder: Path, page: str = "index.html") -> None:
    """Write site_WIDTH.png of a page of the site on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width, height in WIDTHS.items():
            window = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
            window.goto((ROOT / "site" / page).as_uri())
            window.screenshot(path=folder / f"site_{width}.png")
        browser.close()


if __name__ == "__main__":
    take(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs" / "images")
