"""The models beside the policy, as the configuration has them: {name: {model, url, engine, ...}}."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from trinity_lightning.common.config import AuxiliaryConfig, EngineConfig
from trinity_lightning.common.errors import ConfigError
from trinity_lightning.common.suggest import unknown_name


def auxiliary_configs(node: Mapping[str, Any] | None) -> dict[str, AuxiliaryConfig]:
    """The typed configuration of each, by name.

    A plain mapping in the schema, and typed only here: Hydra cannot add to a mapping of dataclasses from the command
    line.

    Raises:
        ConfigError: a key or a value that such a model does not have, or no model.
    """
    return {str(name): _typed(str(name), value) for name, value in (node or {}).items()}


def _typed(name: str, value: Any) -> AuxiliaryConfig:
    key = f"auxiliary_models.{name}"
    plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    needs = f"{key} needs a model: {key}.model=FOLDER, or the name that an endpoint (url) knows."
    if not isinstance(plain, dict):
        raise ConfigError(needs)
    try:
        typed = OmegaConf.merge(OmegaConf.structured(AuxiliaryConfig), plain)
    except ConfigKeyError as error:
        inner = str(error.full_key).rpartition(".")[0]  # "engine", or nothing
        fields = dataclasses.fields(EngineConfig if inner else AuxiliaryConfig)
        known = [".".join(filter(None, (key, inner, field.name))) for field in fields]
        raise ConfigError(unknown_name("key", f"{key}.{error.full_key}", known)) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from error
    if OmegaConf.is_missing(typed, "model") or typed.model is None:
        raise ConfigError(needs)
    try:
        return OmegaConf.to_object(typed)  # type: ignore[return-value]
    except ConfigError as error:  # a section does not know under what name it stands
        raise ConfigError(f"{key}.{error}") from error
