"""What sections of the configuration are made of: the base of their dataclasses, and parts by name and arguments."""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

from omegaconf import BooleanNode, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from trinity_lightning.config.registry import PARTS, config_dir
from trinity_lightning.config.values import nearest, one_of
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
    _root: ClassVar[type[Any]]  # the whole configuration, in which every other section stands

    def __init_subclass__(cls, key: str = "", root: bool = False) -> None:
        cls._key = f"{key}." if key else ""
        if root:
            Section._root = cls

    def __new__(cls, *_: Any, **given: Any) -> Self:
        known: Mapping[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]
        for name in given:
            if name not in known:
                raise ConfigError(unknown_key(f"{cls._key}{name}", known))
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
                    raise ConfigError(f"{key} has no effect without {words}", key=key, fix="set that, or leave it out")


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
    return section_given(key, kind, {} if given is None else given)


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
        raise ConfigError(f"{key} is {entry!r}", key=key, fix=f"give {{{', '.join(known)}}}, each of them optional")
    for each in entry:
        if each not in known:
            said = unknown_key(f"{key}.{each}", known)
            raise ConfigError(f"{said} Arguments go into {key}.args: {key}.args.{each}.")
    name, args = entry.get("name") or name, entry.get("args") or {}
    if name is None:
        raise ConfigError(
            f"{key} has no name", key=key, fix=f"give {key}.name=NAME, in the place of {key}=NAME if there are args too"
        )
    if not (isinstance(name, str) or callable(name)):
        raise ConfigError(f"{key}.name is {name!r}", key=f"{key}.name", fix="give a registered name, or a dotted path")
    if not isinstance(args, Mapping):
        raise ConfigError(f"{key}.args is {args!r}: give {{argument: value}}.", key=f"{key}.args")
    return kind(**{**entry, "name": name, "args": dict(args)})


def strategies(group: Mapping[str, Any]) -> dict[str, PartConfig]:
    """The add strategies of {label: {name, args}}, in order; a ConfigError as `part_config`, or an unknown strategy."""
    found = {label: part_config(f"add_strategy.{label}", given, label) for label, given in group.items()}
    for strategy in found.values():
        one_of("add_strategy", strategy.name, PARTS["add strategy"], with_paths=True)
    return found


def groups() -> set[str]:
    return {path.name for path in config_dir("conf").iterdir() if path.is_dir()}


# What keys of earlier versions, and of other libraries, are called here.
RENAMED = {
    "algorithm.beta": "algorithm.kl.coef",
    "algorithm.kl_coef": "algorithm.kl.coef",
    "algorithm.policy_loss_args": "algorithm.policy_loss.args",
    "engine.kind": "engine.name",
    "learning_rate": "optimizer.lr",
    "max_completion_length": "sampling.max_tokens",
    "max_steps": "steps",
    "num_generations": "explorer.repeat_times",
    "optimizer.learning_rate": "optimizer.lr",
}


def unknown_key(key: str, siblings: Iterable[str]) -> str:
    """A message for a key that is not there: what it is called, or the nearest of its siblings."""
    if key in RENAMED:
        return f"unknown key '{key}'. It is called {RENAMED[key]}."
    prefix, _, name = key.rpartition(".")
    if name == "name" and prefix in groups():
        return f"unknown key '{key}'. Choose by {prefix}=NAME or, in a recipe's defaults, '- override /{prefix}: NAME'."
    names = sorted(siblings)
    meant = [each if each == _RECIPE else f"'{each}'" for each in _keys_meant(prefix, name, names)]
    hint = f" Did you mean {' or '.join(meant)}?" if meant else ""
    return f"unknown key '{key}'.{hint} Known here: {', '.join(names) or 'none'}."


_MOST_SUGGESTED = 3

_RECIPE = "+recipe=NAME"


def _keys_meant(prefix: str, name: str, siblings: Sequence[str]) -> list[str]:
    """The keys that a name in a section may stand for: those of the same last part elsewhere, or else the nearest.

    A top-level name is compared with its siblings and with the last parts of all keys: `lr` is optimizer.lr.
    """
    places = {key: [new] for key, new in RENAMED.items() if "." not in key} | {"recipe": [_RECIPE]}
    for key in _dotted_keys(schema_of(Section._root)):
        places.setdefault(key.rpartition(".")[2], []).append(key)
    meant = places.get(name, [])
    if (
        not meant
        and (match := nearest(name, siblings if prefix else {**dict.fromkeys(siblings), **places})) is not None
    ):
        meant = [f"{prefix}.{match}".removeprefix(".")] if match in siblings else places[match]
    within = [key for key in meant if prefix and key.startswith(f"{prefix}.")]
    return (within or meant)[:_MOST_SUGGESTED]


def _dotted_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """The keys of a schema, dotted, those of sections too."""
    for key in map(str, node):
        yield f"{prefix}{key}"
        inner = node._get_node(key)
        if isinstance(inner, DictConfig) and not inner._is_none() and not inner._is_missing():
            yield from _dotted_keys(inner, f"{prefix}{key}.")


def choice_of(group: str) -> str:
    """What to write instead of the name of a choice as the value of its group."""
    return f"{group} has keys: a recipe chooses them in its defaults, '- override /{group}: NAME'."


_NULL = re.compile(r"Incompatible value 'None' for field|field '[\w.]+' is not Optional")

_OF_A_RESOLVER = "ConfigError raised while resolving interpolation: "

# What OmegaConf says of a wrong value, and what we say.
_WRONG_VALUES = [
    (re.compile(pattern), said)
    for pattern, said in (
        (r"Value '(.*)' of type '\w+' could not be converted to Integer", "is '{}': give a whole number"),
        (r"Value '(.*)' of type '\w+' could not be converted to Float", "is '{}': give a number"),
        (r"Value '(.*)' is not a valid bool", "is '{}': give true or false"),
        (r"Invalid value '(.*)', expected one of \[(.*)\]", "is '{}': give one of {}"),
        (r"Cannot convert '\w+' to string: '(.*)'", "is {}: give some text"),
        (r"Invalid value assigned: \w+ is not a ListConfig, list or tuple", "holds several values: give a list, [A,B]"),
        (r"Value '(.*)' of type '\w+' is incompatible .* 'Union\[int", "is '{}': give a whole number or a name"),
        (r"Value '(.*)' of type '\w+' is incompatible .* 'Union\[bool", "is '{}': give true, false or a name"),
        (r"Merge error: .* is not a subclass of .* value: (.*)", "holds '{}' where keys belong: give {{KEY: VALUE}}"),
        (r"Cannot merge DictConfig with ListConfig", "holds a list where keys belong: give {{KEY: VALUE}}"),
        (r"(?:Cannot assign|Invalid type assigned:) \w+ (?:to|is not a subclass of)", "has keys: give {{KEY: VALUE}}"),
        (r"does not support deletion", "cannot be left out: give another value"),
    )
]


def sentence_of(error: OmegaConfBaseException) -> str:
    """What OmegaConf found wrong: the key, and what to give."""
    key = str(error.full_key or error.key or "")
    if isinstance(error, MissingMandatoryValue):
        return f"{key} has no default: give it a value."
    if error.parent_node is not None and error.key is not None and "not in" in str(error):
        return _not_there(key, error.parent_node)
    message = str(error).strip().splitlines()[0]
    if _OF_A_RESOLVER in message:  # one of ours, which says it all
        return message.partition(_OF_A_RESOLVER)[2]
    if _NULL.search(message):
        return f"{key} cannot be null: {_instead_of_null(key, error)}.".lstrip()
    for pattern, said in _WRONG_VALUES:
        if found := pattern.search(message):
            said = re.sub("'(True|False)'", lambda flag: flag[1].lower(), said.format(*found.groups()))
            return f"{key} {said}.".lstrip()
    return f"{key}: {message}" if key else message


def _instead_of_null(key: str, error: OmegaConfBaseException) -> str:
    """What to give: a value, or, of a section, its keys or nothing."""
    parent = error.parent_node
    if not (
        isinstance(parent, DictConfig) and isinstance(parent._get_node(error.key, validate_access=False), DictConfig)
    ):
        return "give a value"
    can_be_deleted = error.object_type in (dict, Section._root)
    return "give {KEY: VALUE}, or leave it out" + (f": '~{key}'" if can_be_deleted else "")


def _not_there(key: str, parent: Any) -> str:
    """What to write for a key that its parent does not have: an argument, an addition, or the nearest key."""
    siblings = [str(each) for each in parent] if isinstance(parent, DictConfig) else []
    prefix, _, name = key.rpartition(".")
    if key in RENAMED or nearest(name, siblings) or (not prefix and _keys_meant(prefix, name, siblings)):
        return unknown_key(key, siblings)
    if name == "args":
        return f"'{prefix}' is a bare name, which has no arguments: give {prefix}.name=NAME as well as {key}."
    if "args" in siblings:
        return f"unknown key '{key}'. Arguments go into {prefix}.args: {prefix}.args.{name}=VALUE."
    if OmegaConf.get_type(parent) is dict:
        return f"'{key}' is not set yet: add it with a plus sign, +{key}=VALUE."
    return unknown_key(key, siblings)


def section_given(key: str, kind: type[S], given: Any) -> S:
    """The section of that kind that stands under the dotted key, of these values; errors as `section_of`."""
    named = tuple(each.name for each in fields(kind))  # type: ignore[arg-type]
    if not isinstance(given, Mapping):
        raise ConfigError(f"{key} is {given!r}", key=key, fix=f"give a mapping of {', '.join(named)}, or leave it out")
    tree = OmegaConf.create()
    OmegaConf.update(tree, key, schema_of(kind))
    section = OmegaConf.select(tree, key)
    try:
        section.merge_with(given)
        return OmegaConf.to_object(section)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(sentence_of(error)) from error
    except ConfigError as error:
        said = str(error)
        raise ConfigError(said if kind._key else f"{key}{'.' if said.startswith(named) else ': '}{said}") from error
