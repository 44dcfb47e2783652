"""The parts that are configured by name and arguments: experience operators and add strategies."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from omegaconf import OmegaConf

from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError


class OnError(Enum):
    """What follows when an operator fails: `stop` the run, or `skip` the operator for this explore step."""

    stop = "stop"
    skip = "skip"


@dataclass
class OperatorConfig:
    """One experience operator.

    Attributes:
        name: a registered name, or the dotted path of your own class; where left out, the key that it stands under.
        args: its arguments.
        on_error: `stop`, with the step's experiences saved to `rejected/`; or `skip`: the step goes on as if the
            operator were not there.
    """

    name: str
    args: dict[str, Any] = field(default_factory=dict)
    on_error: OnError = OnError.stop


def operator_configs(config: Mapping[str, Any] | None) -> list[OperatorConfig]:
    """The operators of a config {label: {name, args, on_error}}, each key optional, in order.

    A plain dict rather than a typed one: Hydra cannot add an entry to a dict of dataclasses from the command line.

    Raises:
        ConfigError: an unknown key, a value of the wrong kind, or one that has no default and was not given.
    """
    if not config:
        return []
    if OmegaConf.is_config(config) and (missing := OmegaConf.missing_keys(config)):
        raise ConfigError(f"operators.{min(missing)} has no default: give it a value.")
    plain = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config  # type: ignore[arg-type]
    return [_operator_config(str(label), entry) for label, entry in dict(plain).items()]  # type: ignore[arg-type]


def _operator_config(label: str, entry: Any) -> OperatorConfig:
    key = f"operators.{label}"
    if not isinstance(entry, dict | None):
        raise ConfigError(f"{key} is {entry!r}; give {{name, args, on_error}}, each of them optional.")
    entry = entry or {}
    known = [each.name for each in fields(OperatorConfig)]
    for name in entry:
        if name not in known:
            hint = f" Arguments go into {key}.args."
            raise ConfigError(unknown_name("key", f"{key}.{name}", [f"{key}.{each}" for each in known]) + hint)
    args, on_error = entry.get("args") or {}, entry.get("on_error", "stop")
    if not isinstance(args, dict):
        raise ConfigError(f"{key}.args is {args!r}; give {{argument: value}}.")
    choices = [each.value for each in OnError]
    on_error = on_error.value if isinstance(on_error, OnError) else str(on_error)
    if on_error not in choices:
        raise ConfigError(unknown_name(f"{key}.on_error", on_error, choices))
    return OperatorConfig(str(entry.get("name") or label), args, OnError(on_error))


def strategies(config: Any) -> list[tuple[str, object]]:
    """Label and arguments of each add strategy of a config {label: {name: optional, ...}}, in order.

    Raises:
        ConfigError: there is none.
    """
    if not config:
        raise ConfigError("add_strategy is empty: choose one, such as add_strategy=grpo.")
    plain = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
    return [(str(label), {} if arguments is None else arguments) for label, arguments in dict(plain).items()]  # type: ignore[arg-type]
