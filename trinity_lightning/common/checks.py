"""Checks of values of the configuration and of checkpoints: each refuses with the name and the fix."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from trinity_lightning.common.errors import ConfigError
from trinity_lightning.common.suggest import unknown_name

T = TypeVar("T")
AUTO = "auto"


def at_least(least: float, key: str, value: float | None) -> None:
    """ConfigError unless the value is a finite number of at least `least`, or null."""
    if value is not None and not math.isfinite(value):
        raise ConfigError(f"{key} is {value}; give a finite number.")
    if value is not None and value < least:
        raise ConfigError(f"{key} is {value}; give {least:g} or more.")


def auto_or_at_least(least: int, key: str, value: int | str) -> None:
    """ConfigError unless the value is `auto`, or a number of at least `least`."""
    if isinstance(value, str) and value != AUTO:
        raise ConfigError(f"{key} is '{value}'; give {AUTO}, or {least} or more.")
    if not isinstance(value, str):
        at_least(least, key, value)


def above_zero(key: str, value: float | None) -> None:
    """ConfigError unless the value is a finite number above 0, or null."""
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{key} is {value}; give a {'' if math.isfinite(value) else 'finite '}number above 0.")


def within(low: float, high: float, key: str, value: float | None) -> None:
    """ConfigError unless low <= value <= high, or null."""
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{key} is {value}; give a number from {low:g} to {high:g}.")


def is_url(key: str, value: str, example: str) -> None:
    """ConfigError unless the value begins as a URL does."""
    if not value.startswith(("http://", "https://")):
        raise ConfigError(f"{key}: {value!r} is no URL; give one such as {example}.")


def one_of(key: str, value: str | None, names: Sequence[str], with_paths: bool = False) -> None:
    """ConfigError unless the value is one of these names, null, or, `with_paths`, a dotted path."""
    if value is None or value in names or (with_paths and "." in value):
        return
    raise ConfigError(unknown_name(key, value, names) + (" Your own goes by its dotted path." if with_paths else ""))


def checked_copy(section: T) -> T:
    """A copy of a section that shares nothing with it; all of its dataclasses are checked as when they were made."""
    values: dict[str, Any] = {each.name: getattr(section, each.name) for each in fields(section)}  # type: ignore[arg-type]
    copies = {name: checked_copy(v) if is_dataclass(v) else copy.deepcopy(v) for name, v in values.items()}
    return type(section)(**copies)


def check_version(state: Mapping[str, Any], names: Sequence[str], part: str) -> None:
    """ConfigError unless a checkpoint's state of that part of a run has all these names: earlier versions had fewer."""
    missing = [name for name in names if name not in state]
    if missing:
        raise ConfigError(
            f"the checkpoint is of an earlier version (its state of {part} lacks '{missing[0]}') and cannot go on: "
            "finish that run with its version, or begin a new one."
        )
