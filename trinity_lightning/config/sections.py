"""What sections of the configuration are made of: the base of their dataclasses, and parts by name and arguments."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

from omegaconf import BooleanNode, DictConfig, OmegaConf

from trinity_lightning import config as late
from trinity_lightning.config.registry import PARTS
from trinity_lightning.config.values import one_of
from trinity_lightning.errors import ConfigError

# -- sections ----------------------------------------------------------------------------------------------------------


class Section:
    """Base of the configuration's dataclasses: an unknown keyword in a script is refused as such a key in a file is.

    Args:
        key: where the section stands, and its messages say so; none if it may stand under any name.

    Raises:
        ConfigError: of every section: an unknown key, a value of another type or out of its range, settings that do not
            go together, or a file or a package that is not there. The message names the key and the fix.
    """

    _key: ClassVar[str]

    def __init_subclass__(cls, key: str = "") -> None:
        cls._key = f"{key}." if key else ""

    def __new__(cls, *_: Any, **given: Any) -> Self:
        known: Mapping[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]
        for name in given:
            if name not in known:
                raise ConfigError(late.explain.unknown_key(f"{cls._key}{name}", known))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check every field by its rule (`checked`); rules that a subclass has in addition come after these."""
        for each in fields(self):  # type: ignore[arg-type]
            key, value, rules = f"{self._key}{each.name}", getattr(self, each.name), each.metadata
            inner = each.default_factory
            if isinstance(inner, type) and issubclass(inner, Section) and not isinstance(value, inner):  # in a script
                value = section_of(key, inner, value)
                setattr(self, each.name, value)
            if check := rules.get("check"):
                check(key, value)
            needed, among = rules.get("only_with"), rules.get("among", ())
            if needed and value != each.default:
                other = getattr(self, needed)
                if not (other in among if among else other):
                    words = f"{self._key}{needed}" + (f"={' or '.join(among)}" if among else "")
                    raise ConfigError(f"{key} has no effect without {words}: set that, or leave it out.")


T = TypeVar("T")


def checked(
    default: T,
    check: Callable[..., Any] | None = None,
    *,
    only_with: str | None = None,
    among: Sequence[str] = (),
    **rule: Any,
) -> T:
    """A field with this default and a rule for its values, out of `values`: `checked(1.0, number, least=0)`.

    `only_with` names another field of the section, without which (or, if given, without one of the values `among`)
    another value than the default has no effect.
    """
    rules = {"check": check and partial(check, **rule), "only_with": only_with, "among": among}
    return field(default=default, metadata=rules)


def plain(section: Any) -> dict[str, Any]:
    """A section as a checkpoint holds it, which is read without pickle: a dict, names instead of enumerations."""
    return asdict(section, dict_factory=lambda items: {k: v.name if isinstance(v, Enum) else v for k, v in items})


S = TypeVar("S", bound=Section)


def section_of(key: str, kind: type[S], given: S | Mapping[str, Any] | None) -> S:
    """The section of that kind that stands under the dotted key: of these values, or a copy of what was one already.

    Both are checked, with the errors of every section: a dataclass can be changed after it was made.
    """
    if isinstance(given, kind):
        return _checked_copy(given)
    return late.explain.section_given(key, kind, {} if given is None else given)


def _checked_copy(section: T) -> T:
    """A copy of a section that shares nothing with it; all of its dataclasses are checked as when they were made."""
    values: dict[str, Any] = {each.name: getattr(section, each.name) for each in fields(section)}  # type: ignore[arg-type]
    copies = {name: _checked_copy(v) if is_dataclass(v) else copy.deepcopy(v) for name, v in values.items()}
    return type(section)(**copies)


class _Flag(BooleanNode):
    """True or false, or a word for it: OmegaConf alone would take every number for one of them."""

    def _validate_and_convert_impl(self, value: Any) -> bool:
        return super()._validate_and_convert_impl(value if isinstance(value, bool | str) else None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Flag":
        copied = _Flag()
        self._deepcopy_impl(copied, memo)
        return copied


def schema_of(kind: Any) -> DictConfig:
    """The schema of a section's class, or one that was made already, with flags that take no numbers."""
    schema = kind if isinstance(kind, DictConfig) else OmegaConf.structured(kind)
    for name in schema:
        node = schema._get_node(name)
        if isinstance(node, BooleanNode):
            schema.__dict__["_content"][name] = _Flag(node._value(), name, schema, is_optional=node._is_optional())
        elif isinstance(node, DictConfig) and not node._is_none():
            schema_of(node)
    return schema


# -- parts: {name, args}, of which a bare name is short for {name: it} -------------------------------------------------


@dataclass
class PartConfig:
    """A part.

    Attributes:
        name: a registered name, or the dotted path of your own (in a script, for some parts, a class); in a group of
            parts the key that it stands under, if left out.
        args: its arguments.
    """

    name: str
    args: dict[str, Any] = field(default_factory=dict)


P = TypeVar("P", bound=PartConfig)


def part_config(key: str, given: Any, name: str | None = None, kind: type[P] = PartConfig) -> P:  # type: ignore[assignment]
    """The part of that kind that stands under a key, however it is written: a part already, a bare name, a mapping,
    or None; `name` is its name unless it has one.

    Raises:
        ConfigError: an unknown key, no name, or a value of the wrong kind.
    """
    if isinstance(given, kind):
        return given
    known = [each.name for each in fields(kind)]
    entry = {"name": given} if isinstance(given, str) else {} if given is None else given
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{key} is {entry!r}; give {{{', '.join(known)}}}, each of them optional.")
    for each in entry:
        if each not in known:
            said = late.explain.unknown_key(f"{key}.{each}", known)
            raise ConfigError(f"{said} Arguments go into {key}.args: {key}.args.{each}.")
    name, args = entry.get("name") or name, entry.get("args") or {}
    if name is None:
        raise ConfigError(f"{key} has no name: give {key}.name=NAME, in the place of {key}=NAME if there are args too.")
    if not (isinstance(name, str) or callable(name)):
        raise ConfigError(f"{key}.name is {name!r}; give a registered name, or a dotted path.")
    if not isinstance(args, Mapping):
        raise ConfigError(f"{key}.args is {args!r}; give {{argument: value}}.")
    return kind(**{**entry, "name": name, "args": dict(args)})


def strategies(group: Mapping[str, Any]) -> dict[str, PartConfig]:
    """The add strategies of {label: {name, args}}, in order; a ConfigError as `part_config`, or an unknown strategy."""
    found = {label: part_config(f"add_strategy.{label}", given, label) for label, given in group.items()}
    for strategy in found.values():
        one_of("add_strategy", strategy.name, PARTS["add strategy"], with_paths=True)
    return found
