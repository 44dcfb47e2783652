"""The engines of a run, made from its configuration, and their dtypes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from omegaconf import DictConfig

from trinity_lightning.common.hardware import faster_dtype
from trinity_lightning.common.inference import HeldModel
from trinity_lightning.common.thoughts import Markers
from trinity_lightning.config.engine import EngineConfig, EngineDtype, capabilities_of
from trinity_lightning.config.explorer import AuxiliaryConfig, auxiliary_servers
from trinity_lightning.config.model import WeightDtype
from trinity_lightning.config.model_files import BUILT_IN_MODELS, resolve_model
from trinity_lightning.config.registry import PARTS, import_object
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.config.servers import gpus_of_a_server
from trinity_lightning.config.trainer import compute_dtype, processes_of
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.explorer.models.openai_api import OpenAIModel
from trinity_lightning.explorer.models.vllm_server import VLLMServerEngine, server_cores

# -- the engines -------------------------------------------------------------------------------------------------------


def engines_of(config: TrainConfig, folder: Path) -> list[Engine]:
    """The engines that generate."""
    engine: Any = import_object(PARTS["engine"].get(config.engine.name, config.engine.name))
    return list(engine.of_run(config, folder))


def tell_thoughts(engines: Sequence[Engine], config: TrainConfig) -> None:
    """Have the engines of the policy know the markers of its thoughts that the configuration gives."""
    for engine in engines:
        engine.thoughts = Markers(*config.model.thoughts) if config.model.thoughts else None


def check_room(config: TrainConfig, sends: bool = True) -> None:
    """Refuse what vLLM would once it has loaded: a context beyond a model's own, a split of heads, too large caches.

    And, if weights are sent to it, a mixture of experts that cannot take them. A ConfigError.
    """
    started: list[tuple[str, str, EngineConfig, bool]] = []
    if config.auxiliary_models:
        started += auxiliary_servers(config)
    if capabilities_of(config.engine.name).is_vllm and not config.engine.urls:
        started.append(("engine", config.model.name, config.engine, False))
    for key, model, engine, follows in started:
        _check_model(key, model, engine, follows)
    caches = {key: engine.kv_cache_gb * engine.servers for key, _, engine, _ in started if engine.kv_cache_gb}
    if caches and not torch.cuda.is_available():
        from trinity_lightning.common.hardware import check_caches

        if config.engine.per_rank and "engine" in caches:
            caches["engine"] *= processes_of(config.trainer or {})
        check_caches(caches)
    if sends and config.model.name not in BUILT_IN_MODELS:
        from trinity_lightning.explorer.models.vllm_engine import check_experts

        check_experts(config)


def _check_model(key: str, name: str, engine: EngineConfig, follows: bool) -> None:
    from transformers import AutoConfig

    try:
        model = AutoConfig.from_pretrained(str(resolve_model(name)), trust_remote_code=False).get_text_config()
    except (OSError, ValueError):  # vLLM may know a model that transformers does not, or says what is wrong
        return
    if engine.gpus:
        gpus_of_a_server(key, engine, name, getattr(model, "num_attention_heads", 0))
    longest = getattr(model, "max_position_embeddings", None)
    # Scaled positions have rules of their own, and vLLM can be made to go beyond: both are left to it.
    scaled = "hf_overrides" in engine.args or "factor" in (getattr(model, "rope_parameters", None) or {})
    stretched = scaled or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1"
    if longest is not None and engine.max_model_len > longest and not stretched:
        context = f"the context of model '{name}' is {longest} tokens"
        fix = f"give engine.max_model_len={longest - 1}, a teacher has one more" if follows else "give that, or less"
        raise ConfigError(
            f"{key}.max_model_len is {engine.max_model_len}, and {context}: {fix}.", key=f"{key}.max_model_len"
        )


def auxiliary_models_of(config: TrainConfig, folder: Path) -> dict[str, HeldModel]:
    """The auxiliary models by name; what they are made of is imported if there are any."""
    if not config.auxiliary_models:
        return {}

    return {name: auxiliary_model(name, each, config, folder) for name, each in config.auxiliary_models.items()}


def thread_share(config: TrainConfig) -> list[L.Callback]:
    """What has the trainer leave threads to servers of this machine, if both compute at the same time on CPUs."""
    if config.explorer.sync_offset == 0 or torch.cuda.is_available():
        return []

    return [ThreadShare(config)]


# -- dtypes: what `auto` stands for, settled once at a run's start and recorded with its configuration ----------------


def settle_dtypes(config: DictConfig, checkpoint: str | Path | None) -> None:
    """Set `model.dtype` and `engine.dtype` of a validated configuration where they are `auto`.

    Weights are held as the checkpoint, which is resumed or evaluated, has them; without one, in the dtype that is
    faster here. The engine computes in what the trainer computes in, which is bfloat16 under mixed precision too;
    engine=transformers has no dtype of its own.
    """
    trainer = config.trainer or {}
    if config.model.dtype is WeightDtype.auto:
        if checkpoint is None:
            config.model.dtype = faster_dtype(trainer.get("accelerator", "auto"))
        else:
            from trinity_lightning.resume import dtype_of

            config.model.dtype = dtype_of(checkpoint)
    if config.engine.dtype is EngineDtype.auto and not capabilities_of(config.engine.name).shares_weights:
        config.engine.dtype = compute_dtype(config.model.dtype, trainer.get("precision"))


def auxiliary_model(name: str, auxiliary: AuxiliaryConfig, config: TrainConfig, folder: Path) -> HeldModel:
    """The client of a server that is there, or a server that the run starts and ends."""
    if auxiliary.url is not None:
        return OpenAIModel(auxiliary.url, auxiliary.model, auxiliary.api_key_env)
    engine = auxiliary.engine
    [cores] = server_cores(sorted(os.sched_getaffinity(0)), engine, overlaps=config.explorer.sync_offset > 0)
    return VLLMServerEngine(auxiliary.model, engine, cores=cores, gpus=engine.gpus, log=folder / f"{name}.log")


class ThreadShare(L.Callback):
    """Train with the threads that servers of this machine leave; for runs whose servers and trainer compute on its CPUs
    at the same time.

    Several processes that train on this machine share those; how they share without servers is Lightning's.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._before: int | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Take fewer threads, if servers are started here, for auxiliary models or the policy."""
        config, can = self._config, capabilities_of(self._config.engine.name)
        engines = [model.engine for model in config.auxiliary_models.values() if model.url is None]
        if can.is_vllm and can.overlaps_training and not config.engine.urls:
            engines.append(config.engine)
        if engines and trainer.node_rank == 0:  # they run where rank 0 does
            cores = sorted(os.sched_getaffinity(0))
            taken = {core for engine in engines for share in server_cores(cores, engine, True) for core in share}
            self._before = torch.get_num_threads()
            torch.set_num_threads(max((len(cores) - len(taken)) // trainer.num_devices, 1))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give them back: another job of a sweep may follow in this process."""
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """The same if training ends with an error."""
        self.teardown(trainer, pl_module, "fit")
