"""Checks of the arguments of add strategies."""

import math

from trinity_lightning.common.errors import ConfigError


def finite(name: str, value: float) -> float:
    """The value itself.

    Raises:
        ConfigError: it is not a finite number.
    """
    if not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, not {value}.")
    return value


def not_negative(name: str, value: float) -> float:
    """The value itself.

    Raises:
        ConfigError: it is not a finite number of at least 0.
    """
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} must be a finite number of at least 0, not {value}.")
    return value
