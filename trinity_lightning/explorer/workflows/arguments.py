"""Settings of the workflows that have some: the task's `workflow_args` as a dataclass."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError

A = TypeVar("A")


def arguments_of(workflow: str, kind: type[A], given: Mapping[str, Any]) -> A:
    """The settings of a workflow, by its name, as a dataclass of that kind.

    Raises:
        ConfigError: a name that the workflow does not know, one that is missing, or a wrong value.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = [field.name for field in fields]
    for name in given:
        if name not in names:
            raise ConfigError(unknown_name(f"argument of workflow '{workflow}'", name, names))
    missing = dataclasses.MISSING
    for field in fields:
        required = field.default is missing and field.default_factory is missing
        if required and given.get(field.name) is None:
            raise ConfigError(f"workflow '{workflow}' needs workflow.args.{field.name}.")
    return kind(**given)
