"""Where a value cannot be encoded, and why, for messages."""

from typing import Any

import numpy as np
from torch import Tensor

from trinity_lightning.common.experience.codec import PACKING_ERRORS, Writer


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
