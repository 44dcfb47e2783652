"""Reads files of a run's folder, which may be missing, torn or damaged; without torch."""

import json
from pathlib import Path
from typing import Any

import yaml


def text_of(path: Path) -> str:
    """The text of a file; empty without the file."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object in a text; None if it is torn, or something else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def settings_in(text: str) -> dict[str, Any]:
    """The configuration in a text of YAML; empty if it is damaged."""
    settings = _yaml(text)
    return settings if isinstance(settings, dict) else {}


def overrides_in(text: str) -> dict[str, str]:
    """The overrides of a command, values by key, in a text of YAML as Hydra records them; empty if it is damaged."""
    recorded = _yaml(text)
    texts = map(str, recorded if isinstance(recorded, list) else ())
    pairs = (text.lstrip("+").partition("=") for text in texts)
    return {key: value for key, equals, value in pairs if equals}


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None
