"""docs/gpu.md shows what the plan says."""

import pytest
from support.runs import ROOT


@pytest.mark.slow
def test_the_page_of_gpus_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands' outputs, and its table of 27 plans."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import gpu_docs  # pyright: ignore[reportMissingImports]

    page = gpu_docs.PAGE.read_text()
    section = page.partition(gpu_docs.SECTION)[2].partition("\n## ")[0]
    assert len(gpu_docs.COMMANDS.findall(section)) == len(gpu_docs.OUTPUTS.findall(section)) > 0
    assert len(gpu_docs.TABLE.findall(section)) == 1
    assert page == gpu_docs.page(), "run: python scripts/gpu_docs.py"
