"""Lightning's own objects (`trainer`, `logger`, `callbacks`): whether what describes them can be made."""

import importlib.util
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trinity_lightning.config.registry import import_object
from trinity_lightning.config.sections import unknown_key
from trinity_lightning.errors import ConfigError

FREE = ("trainer", "logger", "callbacks")  # sections of Lightning's own objects, whose keys we do not know

HANDED_ON = {"WandbLogger": "wandb.init"}  # what takes the arguments that a class does not have itself


def check_targets(config: DictConfig) -> None:
    """Refuse a `_target_` that is not there, which is imported, and keys that are no argument of it; a ConfigError."""
    for key, entry in lightning_objects(config).items():
        _check_arguments(key, entry)


# What Lightning's loggers need, and how it is installed; the first of several packages, one of which is enough.
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
    """Refuse W&B online without a key of its API: asked for in the middle of a run, nobody may be there to answer."""
    import wandb

    try:
        if wandb.setup().settings.mode != "online" or wandb.login(prompt=False, verify=False):
            return
        problem = "this machine has no login"
    except wandb.Error as error:  # a key that can be none
        problem = str(error).rstrip(".")
    raise ConfigError(
        f"{key} uploads to W&B, and {problem}",
        key=key,
        fix="run `wandb login`, set WANDB_API_KEY, or choose logger=wandb_offline",
    )


def lightning_objects(config: DictConfig) -> dict[str, Mapping[str, Any]]:
    """What `_target_` describes (trainer, callbacks, loggers), by key; a ConfigError: an entry that does not."""
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
        try:
            part = import_object(node["_target_"])
        except ConfigError as error:
            raise ConfigError(f"{key}._target_: {error}", key=f"{key}._target_") from error
        check_arguments(key, part, [name for name in node if not name.startswith("_")])
    for name, value in node.items():
        if isinstance(value, Mapping):
            _check_arguments(f"{key}.{name}", value)


def check_arguments(key: str, part: Any, names: Iterable[str]) -> None:
    """Refuse names, which stand under the key, that a class or function has no argument for; a ConfigError."""
    known = _arguments(part)
    for name in names if known else ():
        if name not in known:
            raise ConfigError(unknown_key(f"{key}.{name}", known))


def _arguments(part: Any) -> set[str]:
    """Names of arguments; none if it takes any. A class of this package hands further keywords on to its bases."""
    makers = [each.__init__ for each in part.__mro__ if "__init__" in vars(each)] if isinstance(part, type) else [part]
    known: set[str] = set()
    for maker in makers:
        parameters = inspect.signature(maker).parameters.values()
        known |= {each.name for each in parameters if each.kind is not each.VAR_KEYWORD and each.name != "self"}
        if all(each.kind is not each.VAR_KEYWORD for each in parameters):
            return known
        if not part.__module__.startswith("trinity_lightning."):
            break
    names = [each.__name__ for each in part.__mro__] if isinstance(part, type) else []
    handed_on = next((HANDED_ON[name] for name in names if name in HANDED_ON), None)
    return known | _arguments(import_object(handed_on)) if handed_on else set()
