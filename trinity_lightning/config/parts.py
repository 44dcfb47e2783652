"""Parts by name and arguments: {name, args}, of which a bare name is short for {name: it}."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar

from trinity_lightning.config.keys import unknown_key
from trinity_lightning.config.registry import PARTS
from trinity_lightning.config.values import one_of
from trinity_lightning.errors import ConfigError


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


class OnError(Enum):
    """What follows when an operator fails: `stop` the run, or `skip` the operator for this explore step."""

    stop = "stop"
    skip = "skip"


@dataclass
class OperatorConfig(PartConfig):
    """One experience operator.

    Attributes:
        on_error: `stop`, with the step's experiences saved to `rejected/`; or `skip`: the step goes on as if the
            operator were not there.
    """

    on_error: OnError = OnError.stop


P = TypeVar("P", bound=PartConfig)


def part_config(key: str, given: Any, name: str | None = None, kind: type[P] = PartConfig) -> P:  # type: ignore[assignment]
    """The part that stands under a key, however it is written.

    Args:
        key: where it stands, for messages.
        given: a part already, a bare name, a mapping, or None.
        name: its name, unless one is given.
        kind: what to make of it.

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
            raise ConfigError(f"{unknown_key(f'{key}.{each}', known)} Arguments go into {key}.args: {key}.args.{each}.")
    name, args = entry.get("name") or name, entry.get("args") or {}
    if name is None:
        raise ConfigError(f"{key} has no name: give {key}.name.")
    if not (isinstance(name, str) or callable(name)):
        raise ConfigError(f"{key}.name is {name!r}; give a registered name, or a dotted path.")
    if not isinstance(args, Mapping):
        raise ConfigError(f"{key}.args is {args!r}; give {{argument: value}}.")
    return kind(**{**entry, "name": name, "args": dict(args)})


def operator_configs(group: Mapping[str, Any]) -> dict[str, OperatorConfig]:
    """The operators of {label: {name, args, on_error}}, in order.

    Raises:
        ConfigError: an unknown operator or key, or a value of the wrong kind.
    """
    operators = {label: part_config(f"operators.{label}", it, label, OperatorConfig) for label, it in group.items()}
    for label, operator in operators.items():
        one_of("operator", operator.name, PARTS["experience operator"], with_paths=True)
        if not isinstance(operator.on_error, OnError):
            one_of(f"operators.{label}.on_error", operator.on_error, [each.value for each in OnError])
            operator.on_error = OnError(operator.on_error)
    return operators


def strategies(group: Mapping[str, Any]) -> dict[str, PartConfig]:
    """The add strategies of {label: {name, args}}, in order.

    Raises:
        ConfigError: an unknown strategy or key, or a value of the wrong kind.
    """
    found = {label: part_config(f"add_strategy.{label}", given, label) for label, given in group.items()}
    for strategy in found.values():
        one_of("add_strategy", strategy.name, PARTS["add strategy"], with_paths=True)
    return found
