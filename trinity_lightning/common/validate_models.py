"""Checks of what generates, before torch is imported: the policy's engine, its runners, and the models beside it."""

import importlib.util
import os

from omegaconf import DictConfig, OmegaConf

from trinity_lightning.common import known_names as known
from trinity_lightning.common.auxiliary import auxiliary_configs
from trinity_lightning.common.config import AuxiliaryConfig
from trinity_lightning.common.errors import ConfigError
from trinity_lightning.common.model_files import check_model_name, check_trainable
from trinity_lightning.common.operator_config import operator_configs
from trinity_lightning.common.require import require_ray, require_vllm
from trinity_lightning.common.suggest import unknown_name
from trinity_lightning.common.validate_engines import (
    check_auxiliary_engine,
    check_engine,
    check_reach,
    check_synchronizer,
)


def check_models(config: DictConfig) -> None:
    """Refuse models and engines that are not there, or do not go together.

    Raises:
        ConfigError: names the key and the fix.
    """
    if OmegaConf.is_missing(config.model, "name"):
        raise ConfigError("model=custom needs model.name=FOLDER or model.name=org/name.")
    check_model_name(config.model.name)
    check_trainable(config.model.name)
    if config.buffer.storage in ("file", "sql"):  # no rollouts, no engine
        return
    engine = config.engine.kind.value
    _check_vllm(config)
    _check_auxiliary_models(config)
    if config.explorer.sync_offset > 0 and engine != "vllm_server":
        raise ConfigError(
            f"explorer.sync_offset is {config.explorer.sync_offset}: engine={engine} computes in this process and "
            "cannot generate while the trainer trains. Choose engine=vllm_server."
        )
    methods = ("checkpoint", *known.WEIGHT_GROUPS) if engine == "vllm_server" else ("memory",)
    if config.synchronizer.method not in ("auto", *methods):
        raise ConfigError(
            f"synchronizer.method is {config.synchronizer.method}, and weights reach engine={engine} by "
            f"{' or '.join(methods)}: set synchronizer={methods[0]}, or auto."
        )
    if config.explorer.runner == "ray":
        require_ray()
        if engine != "vllm_server":
            raise ConfigError(
                f"explorer.runner=ray: engine={engine} computes in this process, where Ray runners cannot reach it. "
                "Choose engine=vllm_server, or explorer.runner=local."
            )
    check_engine(config)
    check_synchronizer(config)
    check_reach(config, auxiliary_configs(config.auxiliary_models))


def _check_vllm(config: DictConfig) -> None:
    engine = config.engine
    here = engine.kind.value == "vllm" or (engine.kind.value == "vllm_server" and not engine.urls)
    here = here or any(model.url is None for model in auxiliary_configs(config.auxiliary_models).values())
    if here:
        require_vllm()


def _check_auxiliary_models(config: DictConfig) -> None:
    models = auxiliary_configs(config.auxiliary_models)
    for name, model in models.items():
        check_auxiliary_engine(name, model, config.explorer.sync_offset)
        if model.url is None:
            check_model_name(model.model)
        else:
            _check_endpoint(name, model)
    if config.workflow.name == "evaluation":
        raise ConfigError("workflow.name=evaluation trains nothing: give it as eval_workflow.")
    if config.workflow.name in known.ASKING_WORKFLOWS:
        _check_asked(config.workflow, list(models))
    for operator in operator_configs(config.operators):
        if operator.name == "judge" and operator.args.get("model") not in models:
            message = unknown_name("auxiliary model", str(operator.args.get("model")), list(models))
            raise ConfigError(f"operator judge: {message} Give it, such as +auxiliary_models.judge.model=FOLDER.")


def _check_endpoint(name: str, model: AuxiliaryConfig) -> None:
    key = f"auxiliary_models.{name}"
    if importlib.util.find_spec("openai") is None:
        raise ConfigError(f"{key}.url needs the package openai: `pip install 'trinity-lightning[openai]'`.")
    if model.api_key_env is not None and not os.environ.get(model.api_key_env):
        raise ConfigError(
            f"{key}.api_key_env: the environment variable {model.api_key_env} is not set. Set it to the endpoint's "
            "key, or leave api_key_env out for a server that needs none."
        )


def _check_asked(workflow: DictConfig, models: list[str]) -> None:
    """The workflow's argument that says which model is asked is a number of one."""
    key = known.ASKING_WORKFLOWS[workflow.name]
    asked = workflow.args.get(key, 0)
    if isinstance(asked, bool) or not isinstance(asked, int):
        number = models.index(asked) if asked in models else 0
        raise ConfigError(
            f"workflow.args.{key} is {asked!r}: workflows number auxiliary models, from 0. Give "
            f"workflow.args.{key}={number}."
        )
    if not 0 <= asked < len(models):
        raise ConfigError(
            f"workflow={workflow.name} asks auxiliary model {asked}, and there are {len(models)}: give one, such as "
            "+auxiliary_models.judge.model=FOLDER."
        )
