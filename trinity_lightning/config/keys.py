"""Keys of the configuration: one sentence for each that is not there, or whose value does not fit."""

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Self, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from trinity_lightning.config.values import nearest
from trinity_lightning.errors import ConfigError

# What keys of earlier versions are called now.
RENAMED = {
    "algorithm.policy_loss_args": "algorithm.policy_loss.args",
    "engine.kind": "engine.name",
    "workflow.args.environment_args": "workflow.args.environment.args",
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
        raise ConfigError(sentence_of(error)) from error
    except ConfigError as error:
        raise ConfigError(str(error) if kind._key else f"{key}.{error}") from error


def _checked_copy(section: T) -> T:
    """A copy of a section that shares nothing with it; all of its dataclasses are checked as when they were made."""
    values: dict[str, Any] = {each.name: getattr(section, each.name) for each in fields(section)}  # type: ignore[arg-type]
    copies = {name: _checked_copy(v) if is_dataclass(v) else copy.deepcopy(v) for name, v in values.items()}
    return type(section)(**copies)


_OF_A_RESOLVER = "ConfigError raised while resolving interpolation: "
# What OmegaConf says of a wrong value, and what we say.
_WRONG_VALUES = [
    (re.compile(pattern), said)
    for pattern, said in (
        (r"Value '(.*)' of type '\w+' could not be converted to Integer", "is '{}'; give a whole number"),
        (r"Value '(.*)' of type '\w+' could not be converted to Float", "is '{}'; give a number"),
        (r"Value '(.*)' is not a valid bool", "is '{}'; give true or false"),
        (r"Invalid value '(.*)', expected one of \[(.*)\]", "is '{}'; give one of {}"),
        (r"Cannot convert '\w+' to string: '(.*)'", "is {}; give some text"),
        (r"Invalid value assigned: \w+ is not a ListConfig, list or tuple", "holds several values; give a list, [A,B]"),
        (
            r"Value '(.*)' of type '\w+' is incompatible with type hint 'Union\[int",
            "is '{}'; give a whole number or a name",
        ),
        (
            r"Value '(.*)' of type '\w+' is incompatible with type hint 'Union\[bool",
            "is '{}'; give true, false or a name",
        ),
        (
            r"Merge error: \w+ is not a subclass of \w+. value: (.*)",
            "holds '{}' where keys belong; give {{KEY: VALUE}}",
        ),
        (r"Cannot merge DictConfig with ListConfig", "holds a list where keys belong; give {{KEY: VALUE}}"),
        (r"(?:Cannot assign|Invalid type assigned:) \w+ (?:to|is not a subclass of)", "has keys; give {{KEY: VALUE}}"),
        (r"Incompatible value 'None' for field|field '[\w.]+' is not Optional", "cannot be null; give a value"),
        (r"does not support deletion", "cannot be left out; give another value"),
    )
]


def sentence_of(error: OmegaConfBaseException) -> str:
    """What OmegaConf found wrong, as one sentence: the key, and what to give."""
    key = str(error.full_key or error.key or "")
    if isinstance(error, MissingMandatoryValue):
        return f"{key} has no default: give it a value."
    if error.parent_node is not None and error.key is not None and "not in" in str(error):
        return _not_there(key, error.parent_node)
    message = str(error).strip().splitlines()[0]
    if _OF_A_RESOLVER in message:  # one of ours, which says it all
        return message.partition(_OF_A_RESOLVER)[2]
    for pattern, said in _WRONG_VALUES:
        if found := pattern.search(message):
            return f"{key} {said.format(*found.groups())}.".lstrip()
    return f"{key}: {message}" if key else message


def _not_there(key: str, parent: Any) -> str:
    """What to write for a key that its parent does not have: an argument, an addition, or the nearest key."""
    siblings = [str(each) for each in parent] if isinstance(parent, DictConfig) else []
    prefix, _, name = key.rpartition(".")
    if key in RENAMED or nearest(name, siblings):
        return unknown_key(key, siblings)
    if name == "args":
        return f"'{prefix}' is a bare name, which has no arguments: give {prefix}.name=NAME beside {key}."
    if "args" in siblings:
        return f"unknown key '{key}'. Arguments go into {prefix}.args: {prefix}.args.{name}=VALUE."
    if OmegaConf.get_type(parent) is dict:
        return f"'{key}' is not set yet: add it with a plus sign, +{key}=VALUE."
    return unknown_key(key, siblings)
