"""Checks of the arguments of add strategies and operators: each returns the value, or says what was expected."""

import math
from collections.abc import Iterable
from typing import Any

from trinity_lightning.common.errors import ConfigError
from trinity_lightning.common.suggest import unknown_name


def number(name: str, value: Any, *, above: float = -math.inf, least: float = -math.inf) -> float:
    """A finite number, above one bound and at least another.

    Raises:
        ConfigError: it is something else.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= above or value < least:
        bound = f" above {above:g}" if above > -math.inf else f" of at least {least:g}" if least > -math.inf else ""
        raise ConfigError(f"{name} must be a finite number{bound}, not {value!r}.")
    return value


def whole_number(name: str, value: Any, *, least: int) -> int:
    """A whole number of at least `least`.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}.")
    return value


def flag(name: str, value: Any) -> bool:
    """True or False.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {value!r}.")
    return value


def text(name: str, value: Any) -> str:
    """Text that is not empty.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} must be text, not {value!r}.")
    return value


def one_of(name: str, value: Any, options: Iterable[str]) -> str:
    """One of a few names.

    Raises:
        ConfigError: it is something else; the message lists them.
    """
    if not isinstance(value, str) or value not in options:
        raise ConfigError(unknown_name(name, value, options))
    return value
