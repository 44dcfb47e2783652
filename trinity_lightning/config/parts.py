"""Parts by name and arguments: {name, args}, of which a bare name is short for {name: it}."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from trinity_lightning.config.keys import unknown_key
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError


@dataclass
class PartConfig:
    """A part.

    Attributes:
        name: a registered name, or the dotted path of your own (in a script, for some parts, a class).
        args: its arguments.
    """

    name: str
    args: dict[str, Any] = field(default_factory=dict)


def part_config(key: str, given: Any) -> PartConfig:
    """The part that stands under a key, however it is written.

    Raises:
        ConfigError: an unknown key, no name, or a value of the wrong kind.
    """
    if isinstance(given, PartConfig):
        return given
    entry = _entry(key, given, ("name", "args"))
    if entry["name"] is None:
        raise ConfigError(f"{key} has no name: give {key}.name.")
    return PartConfig(entry["name"], entry["args"])


class OnError(Enum):
    """What follows when an operator fails: `stop` the run, or `skip` the operator for this explore step."""

    stop = "stop"
    skip = "skip"


@dataclass
class OperatorConfig:
    """One experience operator.

    Attributes:
        name: a registered name, or the dotted path of your own class; if left out, the key that it stands under.
        args: its arguments.
        on_error: `stop`, with the step's experiences saved to `rejected/`; or `skip`: the step goes on as if the
            operator were not there.
    """

    name: str
    args: dict[str, Any] = field(default_factory=dict)
    on_error: OnError = OnError.stop


def operator_configs(config: Mapping[str, Any] | None) -> list[OperatorConfig]:
    """The operators of {label: {name, args, on_error}}, in order.

    Plain mappings rather than typed ones: Hydra cannot add to a mapping of dataclasses from the command line.

    Raises:
        ConfigError: an unknown key, or a value of the wrong kind.
    """
    operators = []
    for key, entry in _entries("operators", config, ("name", "args", "on_error")):
        given = entry.get("on_error", OnError.stop)
        try:
            on_error = OnError(given)
        except ValueError:
            raise ConfigError(unknown_name(f"{key}.on_error", given, [each.value for each in OnError])) from None
        operators.append(OperatorConfig(entry["name"], entry["args"], on_error))
    return operators


def strategies(config: Mapping[str, Any] | None) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of each add strategy of {label: {name, args}}, in order.

    Raises:
        ConfigError: there is none, an unknown key, or a value of the wrong kind.
    """
    chosen = [(entry["name"], entry["args"]) for _, entry in _entries("add_strategy", config, ("name", "args"))]
    if not chosen:
        raise ConfigError("add_strategy is empty: choose one, such as add_strategy=grpo.")
    return chosen


def _entries(group: str, config: Mapping[str, Any] | None, keys: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The key of each part of a group, and what is given under it; without a name the last part of the key is it."""
    if isinstance(config, DictConfig):
        for missing in sorted(OmegaConf.missing_keys(config)):
            raise ConfigError(f"{group}.{missing} has no default: give it a value.")
        config = cast(Mapping[str, Any], OmegaConf.to_container(config, resolve=True))
    for label, given in (config or {}).items():
        key = f"{group}.{label}"
        entry = _entry(key, given, keys)
        yield key, {**entry, "name": entry["name"] or str(label)}


def _entry(key: str, given: Any, keys: Sequence[str]) -> dict[str, Any]:
    entry = {"name": given} if isinstance(given, str) else {} if given is None else given
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{key} is {entry!r}; give {{{', '.join(keys)}}}, each of them optional.")
    for name in entry:
        if name not in keys:
            raise ConfigError(f"{unknown_key(f'{key}.{name}', keys)} Arguments go into {key}.args: {key}.args.{name}.")
    if not (entry.get("name") is None or isinstance(entry["name"], str) or callable(entry["name"])):
        raise ConfigError(f"{key}.name is {entry['name']!r}; give a registered name, or a dotted path.")
    args = entry.get("args") or {}
    if not isinstance(args, Mapping):
        raise ConfigError(f"{key}.args is {args!r}; give {{argument: value}}.")
    return {**entry, "name": entry.get("name"), "args": dict(args)}
