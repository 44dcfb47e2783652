"""What an experience operator is, and how configurations become operators.

class Shorter(ExperienceOperatorV1):  # operators.shorter.name=my_module.Shorter
    async def process(self, exps):
        return [exp for exp in exps if exp.response_length < 100], {}
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trinity_lightning.common.experience import Experience
from trinity_lightning.config.parts import OperatorConfig
from trinity_lightning.config.registry import Registry
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

# Clients of other models (judges, say), several for one model to share its load.
AuxiliaryModels = Mapping[str | int, "list[AsyncOpenAI]"]

# Under this key an operator's metrics hold {taskset_id: {"indices": [...], "values": [...]}} for a task selector.
SELECTOR_METRIC = "selector_metric"


class ExperienceOperator(ABC):
    """The older, synchronous kind: process and close."""

    @abstractmethod
    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """The experiences of an explore step after the operator, and metrics. There may be none."""

    def close(self) -> None:  # noqa: B027  # most operators hold nothing
        """Free what the operator holds."""


class ExperienceOperatorV1(ABC):
    """Changes, filters or measures all experiences of an explore step, before they are weighed.

    Attributes:
        auxiliary_models: clients by the name or number of their model; empty before `set_auxiliary_model`.
    """

    # An empty mapping that nobody can write into: operators need not call this class's constructor.
    auxiliary_models: AuxiliaryModels = MappingProxyType({})

    async def prepare(self) -> None:  # noqa: B027  # most operators have nothing to prepare
        """Load what the operator needs; awaited once, before the first `process`, on the same event loop."""

    @abstractmethod
    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """The experiences of an explore step after the operator, and metrics. There may be none.

        The list is the operator's own; the experiences may be changed in place. Every real number among the metrics is
        logged as `experience_pipeline/<operator>/<metric>`.
        """

    async def close(self) -> None:  # noqa: B027  # most operators hold nothing
        """Free what the operator holds."""

    def set_auxiliary_model(self, auxiliary_models: AuxiliaryModels | None) -> None:
        """Give the operator other models to ask."""
        self.auxiliary_models = {} if auxiliary_models is None else auxiliary_models


OperatorClass = type[ExperienceOperator] | type[ExperienceOperatorV1]
EXPERIENCE_OPERATORS: Registry[OperatorClass] = Registry("experience operator")


class LegacyOperator(ExperienceOperatorV1):
    """An operator of the older kind as one of the newer.

    Args:
        operator: what to wrap; it gets the auxiliary models if it has `set_auxiliary_model`.
    """

    def __init__(self, operator: ExperienceOperator) -> None:
        self.operator = operator

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """The wrapped operator's `process`."""
        return self.operator.process(exps)

    async def close(self) -> None:
        """The wrapped operator's `close`."""
        self.operator.close()

    def set_auxiliary_model(self, auxiliary_models: AuxiliaryModels | None) -> None:
        """Hand the models on, if the wrapped operator takes them."""
        super().set_auxiliary_model(auxiliary_models)
        if (take := getattr(self.operator, "set_auxiliary_model", None)) is not None:
            take(auxiliary_models)


def create_operators(
    operator_configs: Sequence[OperatorConfig], auxiliary_models: AuxiliaryModels | None = None
) -> list[ExperienceOperatorV1]:
    """The operators that the configurations describe, in order.

    Args:
        operator_configs: name (registered, or the dotted path of a class) and arguments of each.
        auxiliary_models: clients of other models, given to every operator that takes them.

    Raises:
        ValueError: an unknown name (the message lists the known ones), or nothing to import at that path.
        TypeError: a path that is no operator class; or wrong arguments: the message names operator and arguments.
        ConfigError: an argument's value is out of range.
    """
    operators = []
    for config in operator_configs:
        built = _create(_operator_class(config.name), config)
        operator = LegacyOperator(built) if isinstance(built, ExperienceOperator) else built
        operator.set_auxiliary_model(auxiliary_models)
        operators.append(operator)
    return operators


def class_name(operator: ExperienceOperatorV1) -> str:
    """Name of the operator's class, of the wrapped one for the older kind."""
    return type(operator.operator if isinstance(operator, LegacyOperator) else operator).__name__


def _operator_class(name: str) -> OperatorClass:
    found = EXPERIENCE_OPERATORS.resolve(name)
    if not (isinstance(found, type) and issubclass(found, ExperienceOperator | ExperienceOperatorV1)):
        raise TypeError(
            f"'{name}' is no experience operator, but {found!r}: give a class derived from ExperienceOperatorV1."
        )
    if inspect.isabstract(found):
        raise TypeError(f"'{name}' is an abstract class: define {', '.join(sorted(found.__abstractmethods__))} first.")
    return found


def _create(cls: OperatorClass, config: OperatorConfig) -> ExperienceOperator | ExperienceOperatorV1:
    signature = inspect.signature(cls)
    parameters = signature.parameters.values()
    takes = [str(p) for p in parameters]
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        for name in config.args:
            if name not in signature.parameters:
                raise TypeError(unknown_name(f"argument of operator '{config.name}'", name, signature.parameters))
    try:
        signature.bind(**config.args)
    except TypeError as error:
        raise TypeError(
            f"operator '{config.name}': {error}. Its arguments are: {', '.join(takes) or 'none'}."
        ) from error
    try:
        return cls(**config.args)
    except ConfigError as error:
        raise ConfigError(f"operator '{config.name}': {error}") from error
