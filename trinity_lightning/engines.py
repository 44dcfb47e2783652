"""The engines of a run, made from its configuration; the threads and memory that they may use; and the dtypes."""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from omegaconf import DictConfig
from transformers import AutoConfig

from trinity_lightning.common.hardware import check_caches, faster_dtype
from trinity_lightning.common.inference import HeldModel
from trinity_lightning.common.pictures.families import FAMILIES, check_family
from trinity_lightning.common.pictures.processor import load_processor
from trinity_lightning.common.thoughts import Markers
from trinity_lightning.config.engines import CAPABILITIES, EngineConfig, EngineDtype, capabilities_of
from trinity_lightning.config.explorer import (
    TEACHER_OPERATOR,
    TEACHER_WORKFLOW,
    AuxiliaryConfig,
    auxiliary_servers,
)
from trinity_lightning.config.model import WeightDtype
from trinity_lightning.config.models import load_config, reads_pictures, resolve_model
from trinity_lightning.config.registry import PARTS, SINGLE_RESPONSE_WORKFLOWS, import_object
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.config.servers import gpus_of_a_server, trains_meanwhile
from trinity_lightning.config.trainer import compute_dtype, processes_of
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.explorer.models.openai_api import OpenAIModel
from trinity_lightning.explorer.models.server import server_cores
from trinity_lightning.explorer.models.vllm_engine import check_experts
from trinity_lightning.explorer.models.vllm_server import VLLMServerEngine
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.resume import dtype_of

logger = logging.getLogger(__name__)

# Arguments of vLLM that tasks with pictures do not go with, and what to do instead.
VLLMS_OWN = {
    "mm_processor_cache_gb": "leave it out: what vLLM makes of pictures is kept without its own cache",
    "mm_processor_kwargs": "set model.processor_args, which the trainer's processor has too",
}

# -- the engines -------------------------------------------------------------------------------------------------------


def engines_of(config: TrainConfig, folder: Path) -> list[Engine]:
    """The engines that generate."""
    engine: Any = import_object(PARTS["engine"].get(config.engine.name, config.engine.name))
    return list(engine.of_run(config, folder))


def tell_settings(engines: Sequence[Engine], config: TrainConfig, sources: Iterable[TaskSource]) -> None:
    """Tell the engines of the policy the configured markers of its thoughts, and what they need to know of pictures."""
    for engine in engines:
        engine.processor_args = config.model.processor_args
        engine.most_pictures = most_pictures(config, sources)
        engine.thoughts = Markers(*config.model.thoughts) if config.model.thoughts else None


# -- pictures ----------------------------------------------------------------------------------------------------------


def most_pictures(config: TrainConfig, sources: Iterable[TaskSource]) -> int | None:
    """Largest number of pictures of a prompt; None: entries are not all known, or a workflow may add pictures."""
    if {config.workflow.name, config.eval_workflow} - {None, "evaluation", *SINGLE_RESPONSE_WORKFLOWS}:
        return None
    tasksets = [taskset for source in sources for taskset in source.taskset.tasksets.values()]
    counts = [taskset.most_pictures for taskset in tasksets if taskset.all_checked]
    return max(counts) if len(counts) == len(tasksets) else None


def check_pictures(config: TrainConfig, sources: Sequence[TaskSource]) -> None:
    """Refuse tasks with pictures where a model or an engine would not get them.

    Raises:
        ConfigError: a model reads text alone, its family is refused, or its processor has no such argument; or an
            engine or an operator takes no pictures.
        ModelLoadError: the model's processor cannot be loaded.
    """
    name, processor_args = config.model.name, config.model.processor_args
    if processor_args:
        load_processor(name, processor_args)
    tasksets = [taskset for source in sources for taskset in source.taskset.tasksets.values() if taskset.most_pictures]
    if not tasksets:
        if reads_pictures(name) and most_pictures(config, sources) == 0:
            logger.warning(
                "model '%s' reads pictures, and no entry of a taskset has any: taskset.images_field names the column.",
                name,
            )
        return
    for is_so, obstacle, key, fix in _picture_obstacles(config):
        if is_so:
            has = f"the entries of taskset '{tasksets[0].name}' have pictures, and"
            raise ConfigError(f"{has} {obstacle}", key=key, fix=fix)
    check_family(model := load_config(name))
    if model.model_type not in FAMILIES:
        logger.warning("no test trains models of type '%s' on pictures: their rows are padded.", model.model_type)


def _picture_obstacles(config: TrainConfig) -> Iterator[tuple[bool, str, str, str]]:
    """Obstacles between pictures and a model, one by one: True if the run has it, its words, its key, and the fix."""
    name, engine = config.model.name, capabilities_of(config.engine.name)
    reads = reads_pictures(name) is not False and load_processor(name, config.model.processor_args) is not None
    fix = "choose a model that reads pictures, or leave their field out of the entries"
    yield not reads, f"model '{name}' reads text alone", "model.name", fix
    critic = config.algorithm.critic and config.algorithm.critic.model
    text_critic = critic is not None and reads_pictures(critic) is False
    yield text_critic, f"the critic '{critic}' reads text alone", "algorithm.critic.model", "choose one that reads both"
    able = " or ".join(name for name, capabilities in CAPABILITIES.items() if capabilities.takes_pictures)
    yield not engine.takes_pictures, f"engine '{config.engine.name}' takes none", "engine.name", f"choose {able}"
    fix = "leave the key out: the engine of rank 0 generates then"
    yield config.engine.per_rank, "engines of other ranks are sent tokens alone", "engine.per_rank", fix
    alone, fix = config.synchronizer.lora == "adapter", "set synchronizer.lora=merged, or choose engine=vllm"
    yield alone and engine.overlaps_training, "a server reads those without adapters", "synchronizer.lora", fix
    operators = [label for label, operator in config.operators.items() if operator.name == TEACHER_OPERATOR]
    fix = f"choose workflow={TEACHER_WORKFLOW}, whose teacher is shown them"
    yield bool(operators), f"operator {TEACHER_OPERATOR} sends its teacher tokens alone", "operators", fix
    for argument, fix in VLLMS_OWN.items():
        present = engine.is_vllm and bool(config.engine.args.get(argument))
        yield present, f"engine.args.{argument} would be vLLM's alone", f"engine.args.{argument}", fix


def check_room(config: TrainConfig, sends: bool = True) -> None:
    """Refuse settings that vLLM would refuse only after it has loaded.

    Args:
        config: the run's configuration, or an evaluation's.
        sends: True if weights are sent to the engine.

    Raises:
        ConfigError: the context is longer than the model's own; heads cannot be split over the GPUs; caches are larger
            than free memory; or weights are sent to a mixture of experts that cannot take them.
    """
    started = auxiliary_servers(config)
    if capabilities_of(config.engine.name).is_vllm and not config.engine.urls:
        started.append(("engine", config.model.name, config.engine, False))
    for key, model, engine, follows in started:
        _check_model(key, model, engine, follows)
    caches = {key: engine.kv_cache_gb * engine.servers for key, _, engine, _ in started if engine.kv_cache_gb}
    if caches and not torch.cuda.is_available():
        if config.engine.per_rank and "engine" in caches:
            caches["engine"] *= processes_of(config.trainer or {})
        check_caches(caches)
    if sends:
        check_experts(config)


def _check_model(key: str, name: str, engine: EngineConfig, follows: bool) -> None:
    """Refuse a context that is longer than the model's, and a number of GPUs that does not divide its heads.

    Args:
        key: key of the engine.
        name: name or folder of the model.
        engine: the engine.
        follows: True if the engine's context is one token longer than the policy's, as a teacher's is.
    """
    try:
        model = AutoConfig.from_pretrained(str(resolve_model(name)), trust_remote_code=False).get_text_config()
    except (OSError, ValueError):  # vLLM may know a model that transformers does not, or has a better message
        return
    if engine.gpus:
        gpus_of_a_server(key, engine, name, getattr(model, "num_attention_heads", 0))
    longest = getattr(model, "max_position_embeddings", None)
    # vLLM has its own rules for scaled positions, and a variable that allows a longer context.
    scaled = "hf_overrides" in engine.args or "factor" in (getattr(model, "rope_parameters", None) or {})
    stretched = scaled or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1"
    if longest is not None and engine.max_model_len > longest and not stretched:
        context = f"the context of model '{name}' is {longest} tokens"
        fix = f"give engine.max_model_len={longest - 1}, a teacher has one more" if follows else "give that, or less"
        raise ConfigError(
            f"{key}.max_model_len is {engine.max_model_len}, and {context}", key=f"{key}.max_model_len", fix=fix
        )


def auxiliary_models_of(config: TrainConfig, folder: Path) -> dict[str, HeldModel]:
    """The auxiliary models by name."""
    models = config.auxiliary_models.items()
    return {name: _auxiliary_model(name, auxiliary, config, folder) for name, auxiliary in models}


def _auxiliary_model(name: str, auxiliary: AuxiliaryConfig, config: TrainConfig, folder: Path) -> HeldModel:
    """The client of a server that runs already, or a server that the run starts and ends."""
    if auxiliary.url is not None:
        return OpenAIModel(auxiliary.url, auxiliary.model, auxiliary.api_key_env)
    engine = auxiliary.engine
    [cores] = server_cores(sorted(os.sched_getaffinity(0)), engine, bool(trains_meanwhile(config.explorer)))
    return VLLMServerEngine(auxiliary.model, engine, cores=cores, gpus=engine.gpus, log=folder / f"{name}.log")


# -- threads of the trainer beside servers -----------------------------------------------------------------------------


def thread_share(config: TrainConfig) -> list[L.Callback]:
    """The callback that leaves threads to servers, if servers and trainer compute at the same time on CPUs."""
    if not trains_meanwhile(config.explorer) or torch.cuda.is_available():
        return []
    return [ThreadShare(config)]


class ThreadShare(L.Callback):
    """Leaves threads of this machine to servers that compute on its CPUs while the trainer does.

    If several processes train on this machine, they share the remaining threads. Without servers Lightning decides how
    they share.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._before: int | None = None  # number of threads before `setup`

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Take fewer threads if the run starts servers on this machine, for auxiliary models or the policy."""
        config, capabilities = self._config, capabilities_of(self._config.engine.name)
        engines = [model.engine for model in config.auxiliary_models.values() if model.url is None]
        if capabilities.is_vllm and capabilities.overlaps_training and not config.engine.urls:
            engines.append(config.engine)
        if engines and trainer.node_rank == 0:  # servers run on the machine of rank 0
            cores = sorted(os.sched_getaffinity(0))
            cores_of_servers = {
                core for engine in engines for share in server_cores(cores, engine, True) for core in share
            }
            self._before = torch.get_num_threads()
            torch.set_num_threads(max((len(cores) - len(cores_of_servers)) // trainer.num_devices, 1))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Take the threads back: another job of a sweep may follow in this process."""
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Take the threads back."""
        self.teardown(trainer, pl_module, "fit")


# -- dtypes ------------------------------------------------------------------------------------------------------------


def settle_dtypes(config: DictConfig, checkpoint: str | Path | None) -> None:
    """Set `model.dtype` and `engine.dtype` of a validated configuration where they are `auto`.

    This happens once, when a run starts; the dtypes are then recorded with its configuration. Weights get the dtype of
    the checkpoint that is resumed or evaluated, or without a checkpoint the dtype that is faster on this machine. The
    engine gets the trainer's compute dtype, which is bfloat16 under mixed precision. engine=transformers has no dtype
    of its own.
    """
    trainer = config.trainer or {}
    if config.model.dtype is WeightDtype.auto:
        if checkpoint is None:
            config.model.dtype = faster_dtype(trainer.get("accelerator", "auto"))
        else:
            config.model.dtype = dtype_of(checkpoint)
    if config.engine.dtype is EngineDtype.auto and not capabilities_of(config.engine.name).shares_weights:
        config.engine.dtype = compute_dtype(config.model.dtype, trainer.get("precision"))
