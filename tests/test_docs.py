"""Generated pages are up to date."""

import sys

from conftest import ROOT


def test_config_pages_are_up_to_date() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import config_docs  # pyright: ignore[reportMissingImports]
    finally:
        sys.path.pop(0)
    written = {path.name: path.read_text() for path in (ROOT / "docs" / "config").glob("*.md")}
    assert written == config_docs.pages(), "run: python scripts/config_docs.py"
