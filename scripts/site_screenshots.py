"""Take pictures of the documentation's first page, as wide as a desktop's window and as a phone's.

    make docs && python scripts/site_screenshots.py [FOLDER]     docs/images by default

It needs playwright and Chromium (`apt-get install chromium`), and the site in site/.
"""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
WINDOWS = ((1280, 800), (400, 800))  # width and height
COLOURS = 64  # of a picture's palette: few, and files are small


def take(folder: Path, page: str = "index.html") -> None:
    """Write site_WIDTH.png of a page of the site on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for width, height in WINDOWS:
            window = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
            window.goto((ROOT / "site" / page).as_uri())
            picture = Image.open(io.BytesIO(window.screenshot())).convert("RGB")
            picture.quantize(COLOURS, dither=Image.Dither.NONE).save(folder / f"site_{width}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    take(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs" / "images")
