"""Make the pictures of the documentation in docs/images, from pages of real runs, in a headless Chromium.

    python scripts/screenshots.py --run outputs/grpo/TIME --runs outputs/schedules --site site

Any run and any folder of runs will do, and the site that `make docs` wrote. The committed pictures show runs of about
ten minutes on two cores:

    trinity-lightning +recipe=grpo explorer.eval_on_startup=false explorer.eval_interval=24 model.dtype=fp32

and, to be compared with it, the same with model.dtype=bf16, optimizer.lr=4e-5, optimizer.lr_scheduler=linear and
algorithm.entropy_coef=0.02, and one that was stopped. The run whose tokens are shown has steps=5 engine.dtype=bf16: in
float32 engine and trainer do not differ.

It needs playwright (`pip install playwright`) and Chromium (`apt-get install chromium`).
"""

import argparse
import io
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from trinity_lightning.report import write_comparison, write_report

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
COLOURS = 160  # of a picture's palette: few, and files are small
WIDE, PHONE = (1280, 940), (400, 860)  # pixels of the windows


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser, playwright's own or the machine's."""
    with sync_playwright() as started:
        downloaded = Path(started.chromium.executable_path)
        program = str(downloaded) if downloaded.exists() else shutil.which("chromium")
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def photograph(
    browser: Browser, address: str, name: str, size: tuple[int, int] = WIDE, scheme: Any = "light", at: str = ""
) -> Path:
    """Write a picture of the window's content, scrolled to the element `at` (a selector), and return its path.

    If this element can be chosen, it is clicked before.
    """
    width, height = size
    sharpness = 2 if width < 600 else 1
    window = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=sharpness
    )
    page = window.new_page()
    page.goto(address)
    if at:
        page.evaluate("selector => { const e = document.querySelector(selector); e.click(); e.scrollIntoView(); }", at)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    window.close()
    file = FOLDER / f"{name}.png"
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    return file


def report_pictures(browser: Browser, run: Path, pages: Path) -> Iterator[Path]:
    """The page of one run at two widths in both schemes, and its coloured tokens."""
    address = write_report(run, pages / "run.html").resolve().as_uri()
    yield from in_all_looks(browser, address, "report")
    if (run / "completions" / "tokens").is_dir():  # those of before version 0.1.0 have none
        yield photograph(browser, address, "report_tokens", at="#tokens")
        yield photograph(browser, address, "report_tokens_difference", at="#by-difference")


def comparison_pictures(browser: Browser, runs: Sequence[Path], pages: Path) -> Iterator[Path]:
    """The page of several runs at two widths in both schemes."""
    address = write_comparison(*runs, output=pages / "runs.html").resolve().as_uri()
    yield from in_all_looks(browser, address, "comparison")


def site_pictures(browser: Browser, site: Path) -> Iterator[Path]:
    """The first page of the documentation at two widths."""
    for size in (WIDE, PHONE):
        yield photograph(browser, (site / "index.html").resolve().as_uri(), f"site_{size[0]}", size)


def in_all_looks(browser: Browser, address: str, name: str) -> Iterator[Path]:
    """A page at two widths, in light and dark."""
    for size in (WIDE, PHONE):
        for scheme in ("light", "dark"):
            yield photograph(browser, address, f"{name}_{size[0]}_{scheme}", size, scheme)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make the pictures in docs/images.")
    parser.add_argument("--run", type=Path, help="folder of a run")
    parser.add_argument("--runs", type=Path, nargs="+", default=[], help="folders of runs to compare, or of a sweep")
    parser.add_argument("--site", type=Path, help="folder of the documentation's site")
    options = parser.parse_args(arguments)
    FOLDER.mkdir(exist_ok=True)
    pages = FOLDER.parents[1] / "outputs" / "pictures"
    pages.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for file in (
            *(report_pictures(browser, options.run, pages) if options.run else ()),
            *(comparison_pictures(browser, options.runs, pages) if options.runs else ()),
            *(site_pictures(browser, options.site) if options.site else ()),
        ):
            print(f"{file}: {file.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
