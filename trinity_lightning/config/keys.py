"""Keys of the configuration, and the base of its dataclasses, which refuses those that are not there."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Self, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_lightning.config.values import nearest
from trinity_lightning.errors import ConfigError

# What keys of earlier versions are called now.
RENAMED = {
    "algorithm.policy_loss_args": "algorithm.policy_loss.args",
    "engine.kind": "engine.name",
}


def unknown_key(key: str, siblings: Iterable[str]) -> str:
    """A message for a key that is not there: what it is called now, or the nearest of those beside it."""
    if key in RENAMED:
        return f"unknown key '{key}'. It is {RENAMED[key]} now."
    prefix, dot, name = key.rpartition(".")
    names = sorted(siblings)
    match = nearest(name, names)
    hint = f" Did you mean '{prefix}{dot}{match}'?" if match else ""
    return f"unknown key '{key}'.{hint} Known here: {', '.join(names) or 'none'}."


def choice_of(group: str) -> str:
    """What to write instead of the name of a choice as the value of its group."""
    return f"{group} has keys: a recipe chooses them in its defaults, '- override /{group}: NAME'."


class Section:
    """Base of the configuration's dataclasses: a script's keyword is refused as the same key of a file is.

    Args:
        key: where the section stands, and its messages say so; none if it may stand under any name.

    Raises:
        ConfigError: there is no such key.
    """

    _key: ClassVar[str]

    def __init_subclass__(cls, key: str = "") -> None:
        cls._key = f"{key}." if key else ""

    def __new__(cls, *_: Any, **given: Any) -> Self:
        known: Mapping[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]
        for name in given:
            if name not in known:
                raise ConfigError(unknown_key(f"{cls._key}{name}", known))
        return super().__new__(cls)


S = TypeVar("S", bound=Section)
T = TypeVar("T")


def section_of(key: str, kind: type[S], given: S | Mapping[str, Any] | None) -> S:
    """The section of that kind that stands under the dotted key: of these values, or a copy of what was one already.

    Raises:
        ConfigError: an unknown key, or a value that the section refuses; a dataclass can be changed after it was made.
    """
    if isinstance(given, kind):
        return _checked_copy(given)
    tree = OmegaConf.create()
    OmegaConf.update(tree, key, OmegaConf.structured(kind))
    section = OmegaConf.select(tree, key)
    try:
        section.merge_with(given or {})
        return OmegaConf.to_object(section)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        from trinity_lightning.config.explain import sentence_of

        raise ConfigError(sentence_of(error)) from error
    except ConfigError as error:
        raise ConfigError(str(error) if kind._key else f"{key}.{error}") from error


def _checked_copy(section: T) -> T:
    """A copy of a section that shares nothing with it; all of its dataclasses are checked as when they were made."""
    values: dict[str, Any] = {each.name: getattr(section, each.name) for each in fields(section)}  # type: ignore[arg-type]
    copies = {name: _checked_copy(v) if is_dataclass(v) else copy.deepcopy(v) for name, v in values.items()}
    return type(section)(**copies)
