"""The base class of all sections, parts with a name and arguments, and messages about unknown keys."""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

from omegaconf import BooleanNode, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from trinity_lightning.config.registry import PARTS, groups
from trinity_lightning.config.values import nearest, one_of
from trinity_lightning.errors import ConfigError

# -- sections ----------------------------------------------------------------------------------------------------------


class Section:
    """Base of the configuration's dataclasses. An unknown keyword in a script is refused like an unknown key in a file.

    Args:
        key: dotted key of the section, for messages; empty for a section that stands under several keys.
        root: True for the class of the whole configuration.

    Raises:
        ConfigError: an unknown key, a value of the wrong type or out of range, settings that contradict each other, or
            a missing file or package. This holds for every section. The message names the key and the fix.
    """

    _key: ClassVar[str]  # ends with a dot
    _root: ClassVar[type[Any] | None] = None  # TrainConfig, once config/run.py is imported

    def __init_subclass__(cls, key: str = "", root: bool = False) -> None:
        cls._key = f"{key}." if key else ""
        if root:
            Section._root = cls

    def __new__(cls, *_: Any, **keywords: Any) -> Self:
        known: Mapping[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]
        for name in keywords:
            if name not in known:
                raise ConfigError(unknown_key(f"{cls._key}{name}", known), key=f"{cls._key}{name}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check every field by its rule (see `checked`). A subclass calls this first, then checks its own rules."""
        for option in fields(self):  # type: ignore[arg-type]
            key, value, rules = f"{self._key}{option.name}", getattr(self, option.name), option.metadata
            inner = option.default_factory
            if isinstance(inner, type) and issubclass(inner, Section) and not isinstance(value, inner):  # a script's
                value = section_of(key, inner, value)
                setattr(self, option.name, value)
            if check := rules.get("check"):
                check(key, value)
            other_name, among = rules.get("only_with"), rules.get("among", ())
            if other_name and value != option.default:
                other = getattr(self, other_name)
                if not (other in among if among else other):
                    setting = f"{self._key}{other_name}" + (f"={' or '.join(among)}" if among else "")
                    raise ConfigError(
                        f"{key} has no effect without {setting}", key=key, fix="set that, or leave it out"
                    )


T = TypeVar("T")


def checked(
    default: T,
    check: Callable[..., Any] | None = None,
    *,
    only_with: str | None = None,
    among: Sequence[str] = (),
    **rule: Any,
) -> T:
    """A dataclass field with a default and a rule from `values`: `checked(1.0, number, least=0)`.

    Args:
        default: the default value.
        check: the rule; `rule` are its keyword arguments.
        only_with: another field of the section, which must be set for this one to have an effect.
        among: values of the other field that count as set; empty: any true value.
    """
    rules = {"check": check and partial(check, **rule), "only_with": only_with, "among": among}
    return field(default=default, metadata=rules)


def plain(section: Any) -> dict[str, Any]:
    """A section as plain dicts, with names in place of enumerations, for a checkpoint that is read without pickle."""
    return asdict(section, dict_factory=lambda items: {k: v.name if isinstance(v, Enum) else v for k, v in items})


S = TypeVar("S", bound=Section)


def section_of(key: str, kind: type[S], value: S | Mapping[str, Any] | None) -> S:
    """The section under a dotted key, made from its values or copied from a section, and checked. Errors as `Section`.

    A copy is checked too, because a dataclass can be changed after it was made.
    """
    if isinstance(value, kind):
        return _checked_copy(value)
    return _section_from_values(key, kind, {} if value is None else value)


def _checked_copy(section: T) -> T:
    """A deep copy of a section, checked like a new one."""
    values: dict[str, Any] = {option.name: getattr(section, option.name) for option in fields(section)}  # type: ignore[arg-type]
    copies = {name: _checked_copy(v) if is_dataclass(v) else copy.deepcopy(v) for name, v in values.items()}
    return type(section)(**copies)


class _Flag(BooleanNode):
    """A boolean node that takes true, false, or a word for them. OmegaConf's class also takes every number."""

    def _validate_and_convert_impl(self, value: Any) -> bool:
        return super()._validate_and_convert_impl(value if isinstance(value, bool | str) else None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Flag":
        copied = _Flag()
        self._deepcopy_impl(copied, memo)
        return copied


def schema_of(kind: Any) -> DictConfig:
    """The OmegaConf schema of a section's class, with booleans that take no numbers. A schema is changed in place."""
    schema = kind if isinstance(kind, DictConfig) else OmegaConf.structured(kind)
    for name in schema:
        node = schema._get_node(name)
        if isinstance(node, BooleanNode):
            schema.__dict__["_content"][name] = _Flag(node._value(), name, schema, is_optional=node._is_optional())
        elif isinstance(node, DictConfig) and not node._is_none():
            schema_of(node)
    return schema


# -- parts: {name: NAME, args: {...}}, or a bare NAME ------------------------------------------------------------------


@dataclass
class PartConfig:
    """A part.

    Attributes:
        name: a registered name, or the dotted path of your own part. In a script, some parts may be given as a class.
            In a group of parts the default is the part's key.
        args: arguments of the part.
    """

    name: str
    args: dict[str, Any] = field(default_factory=dict)


P = TypeVar("P", bound=PartConfig)


def part_config(key: str, value: Any, name: str | None = None, kind: type[P] = PartConfig) -> P:  # type: ignore[assignment]
    """The part under a key. It may be written as a part, a bare name, a mapping, or None.

    Args:
        key: the dotted key.
        value: the part as written.
        name: the part's name if `value` has none.
        kind: the dataclass to return.

    Raises:
        ConfigError: an unknown key, no name, or a value of the wrong kind.
    """
    if isinstance(value, kind):
        return value
    known = [option.name for option in fields(kind)]
    entry = {"name": value} if isinstance(value, str) else {} if value is None else value
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{key} is {entry!r}", key=key, fix=f"give {{{', '.join(known)}}}, each of them optional")
    for option in entry:
        if option not in known:
            message = unknown_key(f"{key}.{option}", known)
            raise ConfigError(f"{message} Arguments go into {key}.args: {key}.args.{option}.", key=f"{key}.{option}")
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
    """The add strategies of {label: {name, args}}, in order.

    Raises:
        ConfigError: as `part_config`, or an unknown strategy.
    """
    parts = {label: part_config(f"add_strategy.{label}", value, label) for label, value in group.items()}
    for label, part in parts.items():
        known = PARTS["add strategy"]
        one_of(f"add_strategy.{label}", part.name, known, with_paths=True, label="add_strategy")
    return parts


# -- messages about keys that do not exist, and about values that OmegaConf refuses ------------------------------------


# Keys of earlier versions and of other libraries, and their present names.
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
    """The message about a key that does not exist: its present name, or the nearest key; then its siblings."""
    if key in RENAMED:
        return f"unknown key '{key}'. It is called {RENAMED[key]}."
    prefix, _, name = key.rpartition(".")
    if name == "name" and prefix in groups():
        return f"unknown key '{key}'. Choose by {prefix}=NAME or, in a recipe's defaults, '- override /{prefix}: NAME'."
    names = sorted(siblings)
    meant = [other if other == RECIPE else f"'{other}'" for other in _keys_meant(prefix, name, names)]
    hint = f" Did you mean {' or '.join(meant)}?" if meant else ""
    return f"unknown key '{key}'.{hint} Known here: {', '.join(names) or 'none'}."


_MOST_SUGGESTED = 3
RECIPE = "+recipe=NAME"


def _keys_meant(prefix: str, name: str, siblings: Sequence[str]) -> list[str]:
    """The keys that the user may have meant: keys elsewhere with the same last part, or else the nearest key.

    At the top level, a name is compared with the last parts of all keys: `lr` means optimizer.lr.
    """
    keys_by_last_part = {key: [new] for key, new in RENAMED.items() if "." not in key} | {"recipe": [RECIPE]}
    for key in () if Section._root is None else _known_keys(Section._root):
        keys_by_last_part.setdefault(key.rpartition(".")[2], []).append(key)
    meant = keys_by_last_part.get(name, [])
    if not meant:
        match = nearest(name, siblings if prefix else {**dict.fromkeys(siblings), **keys_by_last_part})
        if match is not None:
            meant = [f"{prefix}.{match}".removeprefix(".")] if match in siblings else keys_by_last_part[match]
    within = [key for key in meant if prefix and key.startswith(f"{prefix}.")]
    return (within or meant)[:_MOST_SUGGESTED]


def keys_like(name: str, kind: type[Any]) -> list[str]:
    """The keys of a configuration's class that a name may mean: `lr` means optimizer.lr, `recipe` is `RECIPE`."""
    keys = list(_known_keys(kind))
    if "." not in name and name not in keys:
        return _keys_meant("", name, [key for key in keys if "." not in key])
    return [match] if (match := name if name in keys else nearest(name, keys)) else []


def _known_keys(kind: type[Any]) -> Iterator[str]:
    """The dotted keys of a configuration's class, and those of the section that only this command has (`plan`)."""
    schema = schema_of(kind)
    for section in Section.__subclasses__():
        name = section._key.removesuffix(".")
        if name and "." not in name and name not in schema:
            yield from (f"{name}.{option.name}" for option in fields(section))  # type: ignore[arg-type]
    yield from _dotted_keys(schema)


def _dotted_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """The dotted keys of a schema: of its sections and of their options."""
    for key in map(str, node):
        yield f"{prefix}{key}"
        inner = node._get_node(key)
        if isinstance(inner, DictConfig) and not inner._is_none() and not inner._is_missing():
            yield from _dotted_keys(inner, f"{prefix}{key}.")


def choice_of(group: str) -> str:
    """The message about a recipe that sets a group to the name of a choice, such as `logger: csv`."""
    return f"{group} has keys: a recipe chooses them in its defaults, '- override /{group}: NAME'."


_NULL = re.compile(r"Incompatible value 'None' for field|field '[\w.]+' is not Optional")
_OF_A_RESOLVER = "ConfigError raised while resolving interpolation: "
# Patterns of OmegaConf's messages about wrong values, and our wordings.
_WRONG_VALUES = [
    (re.compile(pattern), message)
    for pattern, message in (
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
    """OmegaConf's error as a sentence with the key and the fix."""
    key = key_of(error)
    if isinstance(error, MissingMandatoryValue):
        return f"{key} has no default: give it a value."
    if error.parent_node is not None and error.key is not None and "not in" in str(error):
        return _not_there(key, error.parent_node)
    message = str(error).strip().splitlines()[0]
    if _OF_A_RESOLVER in message:  # a ConfigError of this package, whose message is enough
        return message.partition(_OF_A_RESOLVER)[2]
    if _NULL.search(message):
        return f"{key} cannot be null: {_instead_of_null(key, error)}.".lstrip()
    for pattern, sentence in _WRONG_VALUES:
        if match := pattern.search(message):
            sentence = re.sub("'(True|False)'", lambda flag: flag[1].lower(), sentence.format(*match.groups()))
            return f"{key} {sentence}.".lstrip()
    return f"{key}: {message}" if key else message


def key_of(error: OmegaConfBaseException) -> str:
    """The dotted key that OmegaConf's error is about; empty if it names none."""
    return str(error.full_key or error.key or "")


def _instead_of_null(key: str, error: OmegaConfBaseException) -> str:
    """The fix for a key that cannot be null: give it a value; if it is a section, give it keys or leave it out."""
    parent = error.parent_node
    if not (
        isinstance(parent, DictConfig) and isinstance(parent._get_node(error.key, validate_access=False), DictConfig)
    ):
        return "give a value"
    can_be_deleted = error.object_type in (dict, Section._root)
    return "give {KEY: VALUE}, or leave it out" + (f": '~{key}'" if can_be_deleted else "")


def _not_there(key: str, parent: Any) -> str:
    """The message about a key that its parent does not have.

    It says where an argument belongs, how to add a key to a mapping, or which key is the nearest.
    """
    siblings = [str(sibling) for sibling in parent] if isinstance(parent, DictConfig) else []
    prefix, _, name = key.rpartition(".")
    if key in RENAMED or nearest(name, siblings) or (not prefix and _keys_meant(prefix, name, siblings)):
        return unknown_key(key, siblings)
    if name == "args":
        return f"'{prefix}' is a bare name, which has no arguments: give {prefix}.name=NAME as well as {key}."
    if "args" in siblings:
        return f"unknown key '{key}'. Arguments go into {prefix}.args: {prefix}.args.{name}=VALUE."
    if prefix in ("tasksets", "eval_tasksets"):
        return f"'{key}' is not there yet: add it as a whole, '+{prefix}={{{name}: {{KEY: VALUE, ...}}}}'."
    if OmegaConf.get_type(parent) is dict:
        return f"'{key}' is not set yet: add it with a plus sign, +{key}=VALUE."
    return unknown_key(key, siblings)


# -- a section from a mapping of a script or of a checkpoint -----------------------------------------------------------


def _section_from_values(key: str, kind: type[S], value: Any) -> S:
    """The section under a dotted key, from these values; errors as `Section`, with this key."""
    names = tuple(option.name for option in fields(kind))  # type: ignore[arg-type]
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} is {value!r}", key=key, fix=f"give a mapping of {', '.join(names)}, or leave it out")
    tree = OmegaConf.create()
    OmegaConf.update(tree, key, schema_of(kind))
    section = OmegaConf.select(tree, key)
    try:
        section.merge_with(value)
        return OmegaConf.to_object(section)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(sentence_of(error), key=key_of(error)) from error
    except ConfigError as error:
        if kind._key:
            raise
        message, inner = str(error), error.key
        message = f"{key}{'.' if message.startswith(names) else ': '}{message}"
        raise ConfigError(message, key=key if inner is None else f"{key}.{inner}") from error
