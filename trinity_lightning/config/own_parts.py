"""Parts of one's own, by their dotted paths: what is said of those that are not there, and what engines of them can."""

from types import ModuleType
from typing import NoReturn

from trinity_lightning.config.engines import Capabilities
from trinity_lightning.config.registry import PARTS, import_object
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError


def check_module(path: str, error: ModuleNotFoundError) -> None:
    """ConfigError if it is the module of this path that was not found.

    If it exists, and one of its own imports fails, that traceback is the answer.
    """
    module, missing = path.rpartition(".")[0], error.name
    if missing is not None and (module == missing or module.startswith(missing + ".")):
        raise ConfigError(
            f"cannot import '{path}': there is no module '{missing}'. "
            "A module of your own must lie in the current folder or on PYTHONPATH."
        ) from error


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


def own_capabilities(name: str) -> Capabilities:
    """Those of an engine that is not built in.

    Raises:
        ConfigError: there is no such engine, or it lacks members of `Engine`.
    """
    try:
        engine = import_object(PARTS["engine"].get(name, name))
    except ValueError as error:
        raise ConfigError(f"engine.name: {error}") from error
    if not isinstance(found := getattr(engine, "capabilities", None), Capabilities):
        raise ConfigError(
            f"engine.name: '{name}' is no engine: give a subclass of trinity_lightning.explorer.models.engine.Engine."
        )
    if lacking := sorted(getattr(engine, "__abstractmethods__", ())):
        raise ConfigError(f"engine.name: '{name}' does not define {', '.join(lacking)}: see the docstring of Engine.")
    return found
