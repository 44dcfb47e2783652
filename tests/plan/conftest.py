"""A file of findings, as `doctor` reads them."""

import json
from pathlib import Path
from typing import Any

import pytest

from trinity_lightning.plan.trial import tell_to

Findings = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture
def told(tmp_path: Path) -> tuple[Any, Any]:
    file = tmp_path / "findings"

    def read() -> Findings:
        lines = file.read_text().splitlines() if file.exists() else []
        findings = map(json.loads, lines)
        return {(finding["section"], finding["name"]): finding for finding in findings}

    return tell_to(file), read
