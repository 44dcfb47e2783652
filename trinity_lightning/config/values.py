"""Checks of single values and names. A check returns the value, or raises a ConfigError with the key and the fix."""

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

from trinity_lightning.errors import ConfigError


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that the user probably meant, or None.

    A name that begins with `name` comes first, then one with the same letters in another order, then the most similar.
    """
    names = list(allowed)
    longer = [candidate for candidate in names if len(name) > 2 and candidate.startswith(name)]
    # difflib rates swapped letters no higher than wrong ones.
    swapped = [candidate for candidate in names if sorted(candidate) == sorted(name)]
    return next(iter(longer or swapped or difflib.get_close_matches(name, names, n=1, cutoff=0.5)), None)


def unknown_name(kind: str, name: object, allowed: Iterable[str]) -> str:
    """The message about an unknown `name` of a `kind`: the nearest match, then all allowed names."""
    names = sorted(allowed)
    match = nearest(str(name), names)
    hint = f" Did you mean '{match}'?" if match else ""
    return f"unknown {kind} '{name}'.{hint} Known: {', '.join(names) or 'none'}."


T = TypeVar("T")
AUTO = "auto"
FLOAT32_MOST = 3.4028234663852886e38  # the largest float32, which bounds rewards


def number(
    key: str | None,
    value: T,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    optional: bool = False,
    label: str = "",
) -> T:
    """Check a finite number: at least `least`, above `above`, at most `most`; None is allowed if `optional`.

    A `label` stands for the key in the message, as in all checks that have one.
    """
    if optional and value is None:
        return value
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not (above < value and least <= value <= most):  # type: ignore[operator]
        kind = "a finite number" if most == math.inf else "a number"
        raise ConfigError(
            f"{label or key} is {value!r}",
            key=key,
            fix=f"give {kind}{_bounds(least, above, most)}{_or_null(optional)}",
        )
    return value


def whole_number(
    key: str | None,
    value: T,
    *,
    least: int,
    most: float = math.inf,
    optional: bool = False,
    auto: bool = False,
    label: str = "",
) -> T:
    """Check a whole number from `least` to `most`; None is allowed if `optional`, "auto" if `auto`."""
    if (optional and value is None) or (auto and value == AUTO):
        return value
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most:  # type: ignore[operator]
        others = f", or {AUTO}" if auto else _or_null(optional)
        raise ConfigError(
            f"{label or key} is {value!r}", key=key, fix=f"give a whole number{_bounds(least, -math.inf, most)}{others}"
        )
    return value


def flag(key: str, value: T, *, auto: bool = False) -> T:
    """Check that the value is True or False; "auto" is allowed if `auto`."""
    if not isinstance(value, bool) and not (auto and value == AUTO):
        choices = f"true, false or {AUTO}" if auto else "true or false"
        raise ConfigError(f"{key} is {value!r}", key=key, fix=f"give {choices}")
    return value


def text(key: str, value: T, *, optional: bool = False) -> T:
    """Check for text that is not empty; None is allowed if `optional`."""
    if (not isinstance(value, str) or not value) and not (optional and value is None):
        raise ConfigError(f"{key} is {value!r}", key=key, fix=f"give some text{_or_null(optional)}")
    return value


def url(key: str, value: T, example: str) -> T:
    """Check for text that begins with http:// or https://; `example` is shown in the message."""
    if not isinstance(value, str) or not value.startswith(("http://", "https://")):
        raise ConfigError(f"{key}: {value!r} is no URL", key=key, fix=f"give one such as {example}")
    return value


def one_of(
    key: str, value: T, names: Collection[str], *, with_paths: bool = False, optional: bool = False, label: str = ""
) -> T:
    """Check for one of these names; a dotted path is allowed if `with_paths`, None if `optional`."""
    is_path = with_paths and isinstance(value, str) and "." in value
    if (optional and value is None) or is_path or (isinstance(value, str) and value in names):
        return value
    hint = " Your own goes by its dotted path." if with_paths else ""
    raise ConfigError(unknown_name(label or key, value, names) + hint, key=key)


def numbered(names: Sequence[str]) -> list[str]:
    """The names, with a number behind each repeated one: a, b, a_2, a_3."""
    return [name if (n := names[: i + 1].count(name)) == 1 else f"{name}_{n}" for i, name in enumerate(names)]


def as_float(value: Any) -> float | None:
    """A real number, or a scalar of NumPy or torch, as float; None for anything else."""
    if hasattr(value, "shape"):
        value = value.item() if math.prod(value.shape) == 1 else None
    return float(value) if isinstance(value, Real) else None


def check_version(state: Mapping[str, Any], names: Sequence[str], part: str) -> None:
    """Refuse a checkpoint of an earlier version, in which a part's state lacks one of the names; a ConfigError."""
    missing = [name for name in names if name not in state]
    if missing:
        raise ConfigError(
            f"the checkpoint is of an earlier version (its state of {part} lacks '{missing[0]}') and cannot go on",
            key="ckpt_path",
            fix="finish that run with its version, or begin a new one",
        )


def _or_null(optional: bool) -> str:
    return ", or null" if optional else ""


def _bounds(least: float, above: float, most: float) -> str:
    if above > -math.inf:
        return f" above {above:g}" + (f", at most {most:g}" if most < math.inf else "")
    if most < math.inf:
        return f" from {least:g} to {most:g}"
    return f" of {least:g} or more" if least > -math.inf else ""
