"""What of experiences cannot be encoded, where it is and why, for messages."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from trinity_lightning.common.experience.codec import COLUMN_TYPES, PACKING_ERRORS, Columns, Writer
from trinity_lightning.common.experience.experience import Experience, ExperienceError


def refuse_unencodable(experiences: Sequence[Experience], columns: Columns) -> None:
    """Refuse the first value of their plain fields that cannot be encoded with an ExperienceError."""
    for name, column in columns.items():
        for experience, value in zip(experiences, column, strict=True):
            if where := find_unencodable(value):
                raise ExperienceError(f"experience {experience.eid.uid}: {name}{where}") from None


def refuse_wrong_type(experiences: Sequence[Experience], columns: Columns) -> None:
    """Refuse the first value of a type that its field must not have with an ExperienceError."""
    if problem := find_wrong_type(columns):
        raise ExperienceError(f"experience {experiences[problem[0]].eid.uid}: {problem[1]}")


def find_wrong_type(columns: Columns) -> tuple[int, str] | None:
    """The first value whose type its column must not have, as (row, message)."""
    for name, column in columns.items():
        kinds = COLUMN_TYPES[name]
        for row, value in enumerate(column if not set(map(type, column)) <= set(kinds) else ()):
            if not isinstance(value, kinds):
                return row, f"{name}: expected {' or '.join(k.__name__ for k in kinds)}, got {type(value).__name__}."
    return None


def reason_of(value: Any) -> str:
    """Why a value cannot be encoded."""
    if type(value) is int:
        return "an integer beyond 64 bits cannot be serialized; use a str."
    if isinstance(value, Tensor):
        return f"a tensor of dtype {value.dtype}, layout {value.layout} on {value.device} cannot be serialized."
    if isinstance(value, np.ndarray):
        return f"an array of dtype {value.dtype} cannot be serialized; use numbers, or a list."
    if isinstance(value, (dict, list, tuple)):
        return f"a {type(value).__name__} that is nested too deeply, or contains itself, cannot be serialized."
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"a value of type {kind} cannot be serialized; use plain values, tensors or arrays."


def find_unencodable(value: Any, depth: int = 16) -> str | None:
    """Where and why a value cannot be encoded, as "['key'][index]: reason", to this depth; None if it can.

    It packs the parts again and again.
    """
    if _can_encode(value):
        return None
    children = value.items() if isinstance(value, dict) else ()
    for key, child in enumerate(value) if isinstance(value, (list, tuple)) else children:
        if depth and not _can_encode(child):
            return f"[{key!r}]{find_unencodable(child, depth - 1)}"
    for key, _ in children:
        if not _can_encode(key):
            return f": the key {key!r}: {reason_of(key)}"
    return f": {reason_of(value)}"


def _can_encode(value: Any) -> bool:
    try:
        Writer().encode(value)
    except PACKING_ERRORS:
        return False
    return True
