"""Settings of workflows: a dataclass each, filled from `workflow_args`."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError

T = TypeVar("T")


def read_arguments(kind: type[T], given: Mapping[str, Any], workflow: str) -> T:
    """The settings of a workflow.

    Args:
        kind: a dataclass; its `__post_init__` may check values.
        given: `workflow_args`.
        workflow: its name, for messages.

    Raises:
        ConfigError: a name that the workflow does not know, or one that is missing.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    names = [field.name for field in fields]
    for name in given:
        if name not in names:
            raise ConfigError(unknown_name(f"argument of workflow '{workflow}'", name, names))
    missing_default = dataclasses.MISSING
    required = [f.name for f in fields if f.default is missing_default and f.default_factory is missing_default]
    if missing := [name for name in required if given.get(name) is None]:
        raise ConfigError(f"workflow '{workflow}' needs workflow.args.{missing[0]}.")
    return kind(**given)


def check_call(function: Callable[..., Any], arguments: Mapping[str, Any], what: str) -> None:
    """Refuse arguments that a class or function cannot be called with.

    Raises:
        ConfigError: names what is wrong with them.
    """
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}.") from error
