"""Rules for Lightning's objects (`trainer`, `logger`, `callbacks`), which are `_target_` nodes without a schema."""

import importlib.util
import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trinity_lightning.config.registry import import_object
from trinity_lightning.config.sections import unknown_key
from trinity_lightning.config.signatures import is_of_the_library
from trinity_lightning.errors import ConfigError

FREE = ("trainer", "logger", "callbacks")  # sections without a schema
HANDED_ON = {"WandbLogger": "wandb.init"}  # classes, and the functions that get their further keywords


def check_modules(config: DictConfig) -> None:
    """Refuse a `_target_` in a module that is nowhere, before Lightning is imported for others; a ConfigError."""
    for key, entry in lightning_objects(config).items():
        package = str(entry["_target_"]).partition(".")[0]
        if package and package not in sys.modules and importlib.util.find_spec(package) is None:
            _import(key, entry)


def check_targets(config: DictConfig) -> None:
    """Import every `_target_`. Refuse one that does not exist, and keys that are not its arguments; a ConfigError."""
    for key, entry in lightning_objects(config).items():
        _check_arguments(key, entry)


# Packages of Lightning's loggers, and pip's argument that installs the first of them. One package is enough.
LOGGER_PACKAGES = {
    "TensorBoardLogger": (("tensorboard", "tensorboardX"), "'trinity-lightning[tensorboard]'"),
    "MLFlowLogger": (("mlflow",), "mlflow"),
    "CometLogger": (("comet_ml",), "comet_ml"),
    "NeptuneLogger": (("neptune",), "neptune"),
}


def check_loggers(config: DictConfig) -> None:
    """Refuse loggers whose package is not installed, and W&B online without a login; a ConfigError."""
    for key, node in (config.logger or {}).items():
        kind = node["_target_"].rpartition(".")[2]
        packages, install = LOGGER_PACKAGES.get(kind, ((), ""))
        if packages and not any(importlib.util.find_spec(name) for name in packages):
            raise ConfigError(
                f"logger.{key} needs the package {packages[0]}, which is not installed",
                key=f"logger.{key}",
                fix=f"pip install {install}, or choose logger=csv",
            )
        if kind in (*HANDED_ON, "RunLogger") and not node.get("offline"):
            _check_login(f"logger.{key}")


def _check_login(key: str) -> None:
    """Refuse W&B online without an API key: W&B would ask for the key in the middle of a run; a ConfigError."""
    import wandb

    try:
        if wandb.setup().settings.mode != "online" or wandb.login(prompt=False, verify=False):
            return
        problem = "this machine has no login"
    except wandb.Error as error:  # text that cannot be a key
        problem = str(error).rstrip(".")
    raise ConfigError(
        f"{key} uploads to W&B, and {problem}",
        key=key,
        fix="run `wandb login`, set WANDB_API_KEY, or choose logger=wandb_offline",
    )


def lightning_objects(config: DictConfig) -> dict[str, Mapping[str, Any]]:
    """The nodes of trainer, callbacks and loggers by key; a ConfigError for a node without a `_target_`."""
    objects: dict[str, Any] = {}
    for name in FREE:
        node: Any = OmegaConf.to_container(config[name], resolve=False) if config[name] else {}
        objects |= {name: node} if name == "trainer" else {f"{name}.{key}": entry for key, entry in node.items()}
    for key, entry in objects.items():
        if not isinstance(entry, Mapping) or "_target_" not in entry:
            raise ConfigError(f"{key} is {entry!r}: give {{_target_: DOTTED.PATH, ARGUMENT: VALUE}}.", key=key)
    return objects


def _check_arguments(key: str, node: Mapping[str, Any]) -> None:
    if "_target_" in node:
        part = _import(key, node)
        check_arguments(key, part, [name for name in node if not name.startswith("_")])
    for name, value in node.items():
        if isinstance(value, Mapping):
            _check_arguments(f"{key}.{name}", value)


def _import(key: str, node: Mapping[str, Any]) -> Any:
    try:
        return import_object(node["_target_"])
    except ConfigError as error:
        raise ConfigError(f"{key}._target_: {error}", key=f"{key}._target_") from error


def check_arguments(key: str, part: Any, names: Iterable[str]) -> None:
    """Refuse names below a key that are not arguments of a class or function; a ConfigError."""
    known = _arguments(part)
    for name in names if known else ():
        if name not in known:
            raise ConfigError(unknown_key(f"{key}.{name}", known), key=f"{key}.{name}")


def _arguments(part: Any) -> set[str]:
    """Names of the arguments of a class or function; empty if it takes any name.

    A class of this package hands further keywords on to its bases.
    """
    makers = [cls.__init__ for cls in part.__mro__ if "__init__" in vars(cls)] if isinstance(part, type) else [part]
    known: set[str] = set()
    for maker in makers:
        parameters = inspect.signature(maker).parameters.values()
        known |= {option.name for option in parameters if option.kind is not option.VAR_KEYWORD} - {"self"}
        if all(option.kind is not option.VAR_KEYWORD for option in parameters):
            return known
        if not is_of_the_library(part):
            break
    names = [cls.__name__ for cls in part.__mro__] if isinstance(part, type) else []
    handed_on = next((HANDED_ON[name] for name in names if name in HANDED_ON), None)
    return known | _arguments(import_object(handed_on)) if handed_on else set()
