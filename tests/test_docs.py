"""Generated pages are up to date."""

import pytest
from conftest import ROOT


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts that write the pages can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def test_config_pages_are_up_to_date() -> None:
    import config_docs  # pyright: ignore[reportMissingImports]

    written = {path.name: path.read_text() for path in (ROOT / "docs" / "config").glob("*.md")}
    assert written == config_docs.pages(), "run: python scripts/config_docs.py"


def test_the_page_of_metrics_is_up_to_date() -> None:
    import metrics_docs  # pyright: ignore[reportMissingImports]

    assert metrics_docs.PAGE.read_text() == metrics_docs.metrics_page(), "run: python scripts/metrics_docs.py"
