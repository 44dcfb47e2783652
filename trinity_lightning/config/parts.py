"""Parts by name that a default run has none of: operators, workflows with arguments, and parts of one's own."""

import inspect
import sysconfig
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar, cast

from trinity_lightning.config.engines import Capabilities, EngineConfig
from trinity_lightning.config.registry import PARTS, import_object
from trinity_lightning.config.sections import PartConfig, part_config
from trinity_lightning.config.signatures import check_arguments, check_methods, parameters_beside
from trinity_lightning.config.values import one_of, unknown_name
from trinity_lightning.errors import ConfigError, UnfinishedClassError

A = TypeVar("A")

# -- experience operators ----------------------------------------------------------------------------------------------


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
    """The operators of {label: {name, args, on_error}}, in order; a ConfigError as `part_config`."""
    operators = {label: part_config(f"operators.{label}", it, label, OperatorConfig) for label, it in group.items()}
    for label, operator in operators.items():
        one_of("operator", operator.name, PARTS["experience operator"], with_paths=True)
        operator.on_error = on_error_of(label, operator.on_error)
    return operators


def on_error_of(label: str, given: OnError | str) -> OnError:
    """What follows when the operator of that label fails, also by its name; a ConfigError if there is no such."""
    if isinstance(given, OnError):
        return given
    return OnError(one_of(f"operators.{label}.on_error", given, [each.value for each in OnError]))


# -- arguments of workflows, which are dataclasses of their own --------------------------------------------------------


def arguments_of(workflow: str, kind: type[A], given: Mapping[str, Any]) -> A:
    """The settings of a workflow, by its name, as a dataclass of that kind.

    A ConfigError: a name that the workflow does not know, one that is missing, or a wrong value.
    """
    parameters = inspect.signature(kind).parameters
    for name in given:
        if name not in parameters:
            raise ConfigError(unknown_name(f"argument of workflow '{workflow}'", name, parameters))
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and given.get(name) is None:
            raise ConfigError(f"workflow '{workflow}' needs workflow.args.{name}.")
    return kind(**given)


# -- parts of one's own: what is said of those that are not there, and what engines of them can ------------------------


def check_module(path: str, error: ImportError | SyntaxError) -> None:
    """ConfigError if the module of this path was not found, or cannot be imported for a line of the user's own.

    If the line is of something installed, its traceback is the answer.
    """
    module, missing = path.rpartition(".")[0], getattr(error, "name", None)
    not_found = isinstance(error, ModuleNotFoundError) and missing is not None
    if not_found and (module == missing or module.startswith(f"{missing}.")):
        raise ConfigError(
            f"cannot import '{path}': there is no module '{missing}'. "
            "A module of your own must lie in the current folder or on PYTHONPATH."
        ) from error
    if isinstance(error, SyntaxError):
        file, line, what = error.filename, error.lineno, error.msg
    else:
        stack = traceback.extract_tb(error.__traceback__)
        place = [frame for frame in stack if not frame.filename.startswith("<frozen")][-1]
        file, line, what = place.filename, place.lineno, str(error)
    installed = (Path(__file__).parents[1], *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
    if file and not any(Path(file).is_relative_to(folder) for folder in installed):
        raise ConfigError(f"cannot import '{path}': {file}, line {line}: {type(error).__name__}: {what}.") from error


def refuse_attribute(module: ModuleType, attribute: str) -> NoReturn:
    """ConfigError: the module has no such name; the message has the nearest of those defined in it, or its package."""
    name = module.__name__
    package = name.partition(".")[0]
    known = [
        each
        for each, value in vars(module).items()
        if not each.startswith("_")
        and not isinstance(value, ModuleType)
        and str(getattr(value, "__module__", package)).partition(".")[0] == package
    ]
    raise ConfigError(f"cannot import '{name}.{attribute}': {unknown_name(f'name in module {name}', attribute, known)}")


def refuse_unfinished(kind: str, part: Any) -> NoReturn:
    """UnfinishedClassError: a class of that kind lacks these methods or properties, which its base leaves to it."""
    lacking = ", ".join(sorted(part.__abstractmethods__))
    raise UnfinishedClassError(f"{kind} '{part.__name__}' does not define {lacking}: see its base class.")


def own_capabilities(name: str) -> Capabilities:
    """Those of an engine that is not built in; a ConfigError: there is no such, or it lacks members of `Engine`."""
    try:
        engine = import_object(PARTS["engine"].get(name, name))
    except ValueError as error:
        raise ConfigError(f"engine.name: {error}") from error
    if not isinstance(found := getattr(engine, "capabilities", None), Capabilities):
        raise ConfigError(
            f"engine.name: '{name}' is no engine: give a subclass of trinity_lightning.explorer.models.engine.Engine."
        )
    if getattr(engine, "__abstractmethods__", None):
        refuse_unfinished("engine.name:", engine)
    check_methods("engine", cast("type", engine))
    return found


ENGINE_ARGS = "engine.args"


def engine_arguments(kind: type[Any], model: str, config: EngineConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of an engine's constructor: the model's name and the section by name, and its own.

    It has some if the user's constructor takes more than these two, which stand first or are called `model` and
    `config`.

    Raises:
        ArgumentError: an argument that it does not have, or lacks.
        ConfigError: a constructor that does not take these two.
    """
    what = f"engine '{config.name}'"
    parameters = inspect.signature(kind).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD][:2]
    if {"model", "config"} <= {each.name for each in parameters}:
        names = ["model", "config"]
    if len(names) < 2:
        raise ConfigError(f"{what} is made as {kind.__name__}(model, config), and takes ({', '.join(names)}).")
    [owner] = [each for each in kind.__mro__ if "__init__" in vars(each)][:1]
    own = parameters_beside(kind, names) if not owner.__module__.startswith("trinity_lightning.") else []
    args = dict(config.args) if own else {}
    check_arguments(what, kind, args, ENGINE_ARGS, names)
    return dict(zip(names, (model, config), strict=True)), args
