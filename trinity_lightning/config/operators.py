"""Experience operators in the configuration; imported by runs that have some."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from trinity_lightning.config.registry import PARTS
from trinity_lightning.config.sections import PartConfig, part_config
from trinity_lightning.config.values import one_of


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
