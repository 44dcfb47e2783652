"""Compares the settings of several runs."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trinity_lightning.monitor.report.hiding import hidden

# Keys of the place that a run writes to, which differ between any two runs.
_PLACES = ("output_dir", "output_root", "ckpt_path")
MISSING = "—"


def flattened(config: Mapping[str, Any]) -> dict[str, str]:
    """The values of a configuration as text by dotted key, without secrets and without the place that it writes to."""
    leaves: dict[str, str] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, Mapping) and node:
            for key, value in node.items():
                walk(value, f"{path}.{key}" if path else str(key))
        elif not is_place(path):
            text = node if isinstance(node, str) else json.dumps(node, ensure_ascii=False, default=str)
            leaves[path] = text.replace("e-0", "e-") if isinstance(node, float) else text  # as people write it

    walk(hidden(config), "")
    return leaves


def differing(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys whose values are not the same everywhere, in order of appearance."""
    keys = dict.fromkeys(key for leaves in settings for key in leaves)
    return [key for key in keys if len({leaves.get(key) for leaves in settings}) > 1]


def is_place(key: str) -> bool:
    """True for the key of a place that a run writes to, or for one of Hydra's own."""
    return key in _PLACES or key.startswith("hydra.")


def is_seed(key: str) -> bool:
    """True for the key of a seed: runs that differ in seeds alone are one experiment, repeated."""
    return key.rpartition(".")[2] == "seed"
