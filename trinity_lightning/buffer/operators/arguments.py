"""Checks of the arguments of operators."""

import math
from typing import Any

from trinity_lightning.common.errors import ConfigError


def number(name: str, value: Any, *, above: float = -math.inf) -> float:
    """The value itself.

    Raises:
        ConfigError: it is no number, NaN, infinite, or not above the bound.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= above:
        bound = "" if above == -math.inf else f" above {above:g}"
        raise ConfigError(f"{name} must be a finite number{bound}, not {value!r}.")
    return value


def whole_number(name: str, value: Any, *, least: int) -> int:
    """The value itself.

    Raises:
        ConfigError: it is no whole number, or below the least one.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}.")
    return value
