"""Whether Lightning's own objects (`trainer`, `logger`, `callbacks`) have the arguments that their nodes give them."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trinity_lightning.config.registry import import_object
from trinity_lightning.config.schema import FREE
from trinity_lightning.errors import ConfigError

HANDED_ON = {"WandbLogger": "wandb.init"}  # what takes the arguments that a class does not have itself


def check_targets(config: DictConfig) -> None:
    """Refuse a `_target_` that is not there, and keys that it has no argument for; imports it.

    Raises:
        ConfigError: names the key, and the nearest argument.
    """
    for name in FREE:
        node: Any = OmegaConf.to_container(config[name], resolve=False) if config[name] else {}
        objects = {name: node} if name == "trainer" else {f"{name}.{key}": entry for key, entry in node.items()}
        for key, entry in objects.items():
            if not isinstance(entry, Mapping) or "_target_" not in entry:
                raise ConfigError(f"{key} is {entry!r}; give {{_target_: DOTTED.PATH, ARGUMENT: VALUE}}.")
            _check_arguments(key, entry)


def _check_arguments(key: str, node: Mapping[str, Any]) -> None:
    if "_target_" in node:
        try:
            part = import_object(node["_target_"])
        except ConfigError as error:
            raise ConfigError(f"{key}._target_: {error}") from error
        check_arguments(key, part, [name for name in node if not name.startswith("_")])
    for name, value in node.items():
        if isinstance(value, Mapping):
            _check_arguments(f"{key}.{name}", value)


def check_arguments(key: str, part: Any, names: Iterable[str]) -> None:
    """Refuse names, which stand under the key, that a class or function has no argument for; a ConfigError."""
    known = _arguments(part)
    for name in names if known else ():
        if name not in known:
            from trinity_lightning.config.explain import unknown_key

            raise ConfigError(unknown_key(f"{key}.{name}", known))


def _arguments(part: Any) -> set[str]:
    """Names of the arguments of a class or function; none if it takes any.

    A class of this package hands further keywords on to its bases.
    """
    makers = [each.__init__ for each in part.__mro__ if "__init__" in vars(each)] if isinstance(part, type) else [part]
    known: set[str] = set()
    for maker in makers:
        parameters = inspect.signature(maker).parameters.values()
        known |= {each.name for each in parameters if each.kind is not each.VAR_KEYWORD and each.name != "self"}
        if all(each.kind is not each.VAR_KEYWORD for each in parameters):
            return known
        if not part.__module__.startswith("trinity_lightning."):
            break
    handed_on = HANDED_ON.get(getattr(part, "__name__", ""))
    return known | _arguments(import_object(handed_on)) if handed_on else set()
