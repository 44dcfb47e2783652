"""The engines of a run, made from its configuration, and what each may use of the machine."""

import logging
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from omegaconf import DictConfig, OmegaConf

from trinity_lightning.common.inference import HeldModel
from trinity_lightning.common.memory_plan import (
    BATCHED_TOKENS,
    GIB,
    MemoryPlan,
    ModelShape,
    Rollouts,
    Training,
    auxiliary_server,
    plan,
    requests_at_once,
)
from trinity_lightning.common.process_memory import free_memory
from trinity_lightning.common.product_speed import faster_dtype
from trinity_lightning.config.engines import (
    TRAINER_GPU,
    AuxiliaryConfig,
    EngineConfig,
    EngineDtype,
    EngineSleep,
    auxiliary_configs,
    capabilities_of,
)
from trinity_lightning.config.models import resolve_model
from trinity_lightning.config.registry import PARTS, import_object
from trinity_lightning.config.schema import TrainConfig
from trinity_lightning.config.training import HALF, MIXED, WeightDtype, compute_dtype, weight_dtype
from trinity_lightning.config.values import AUTO
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.sync.stream import checkpoint_weights, parameter_shapes, skeleton
from trinity_lightning.trainer.objective import Objective
from trinity_lightning.trainer.policy import resumed_budget

logger = logging.getLogger(__name__)

# -- who gets how much of a GPU that trainer and vLLM share ------------------------------------------------------------


def with_memory_plan(
    config: TrainConfig, checkpoint: str | None = None, record: Path | None = None
) -> tuple[TrainConfig, MemoryPlan | None]:
    """The configuration with what its nulls and autos of a GPU stand for, and the plan that they come from.

    Without a GPU for the trainer, or if no engine of vLLM shares it, there is no plan.

    Args:
        config: of a run whose dtypes are settled.
        checkpoint: what the run resumes from, which says how many tokens its micro-batches have under `auto`.
        record: the configuration that the run to resume wrote: what was planned then is kept if it fits.

    Raises:
        ConfigError: trainer and engines do not fit on the GPU together; servers use it and others too; the
            checkpoint is of an earlier version.
    """
    accelerator = (config.trainer or {}).get("accelerator", "auto")
    if accelerator == "cpu" or not torch.cuda.is_available() or config.buffer.storage != "memory":
        return config, None
    free, total = torch.cuda.mem_get_info(TRAINER_GPU)
    config, beside = _with_auxiliary_shares(config, total)
    can = capabilities_of(config.engine.name)
    if not can.is_vllm:
        return config, None
    requests = config.explorer.batch_size * config.explorer.repeat_times
    engine = replace(config.engine, max_num_seqs=config.engine.max_num_seqs or requests_at_once(requests))
    config = replace(config, engine=engine)
    if engine.urls or (can.overlaps_training and not _on_the_trainers_gpu("engine", engine)):
        return config, None
    shape = ModelShape.of(skeleton(str(resolve_model(config.model.name))))
    training = training_of(config)
    if checkpoint is not None and training.tokens is None:
        training = replace(training, tokens=resumed_budget(checkpoint))

    def planned(engine: EngineConfig) -> MemoryPlan:
        rollouts = rollouts_of(replace(config, engine=engine))
        return plan(shape, training, replace(rollouts, beside=beside), free, free_memory())

    kept = _as_recorded(engine, record)
    try:
        found = planned(kept)
    except ConfigError as error:
        if kept == engine:
            raise
        logger.warning("what was planned when the run began does not fit any more, and is planned again: %s", error)
        found = planned(engine)
    return replace(config, engine=planned_engine(engine, found, total)), found


def _as_recorded(engine: EngineConfig, record: Path | None) -> EngineConfig:
    """The engine with the plan that a run's configuration recorded, as far as nothing is configured now."""
    if record is None or not record.is_file():
        return engine
    before = OmegaConf.select(OmegaConf.load(record), "engine", default={})
    sleep = EngineSleep(before.get("sleep", "auto")) if engine.sleep is EngineSleep.auto else engine.sleep
    return replace(engine, kv_cache_gb=engine.kv_cache_gb or before.get("kv_cache_gb"), sleep=sleep)


def _with_auxiliary_shares(config: TrainConfig, total: int) -> tuple[TrainConfig, int]:
    """The servers of auxiliary models on the trainer's GPU with a share of it, and the bytes that they take of it.

    What `engine.args` says itself holds: of a share that is given there, that many bytes are taken.
    """
    taken, planned = 0, dict(config.auxiliary_models)
    for name, model in auxiliary_configs(config.auxiliary_models).items():
        engine = model.engine
        if model.url is not None or not _on_the_trainers_gpu(f"auxiliary_models.{name}.engine", engine):
            continue
        shape = ModelShape.of(skeleton(str(resolve_model(model.model))))
        rollouts = Rollouts(
            width=4 if engine.dtype is EngineDtype.fp32 else 2,
            context=engine.max_model_len,
            requests=0,
            max_num_seqs=engine.max_num_seqs,
            kv_cache=None if engine.kv_cache_gb is None else int(engine.kv_cache_gb * GIB),
        )
        cache, size = auxiliary_server(shape, rollouts)
        args = {"gpu_memory_utilization": round(size / total, 4), "max_num_batched_tokens": BATCHED_TOKENS}
        given = engine.args.get("gpu_memory_utilization")
        taken += size if given is None else int(given * total)
        engine = replace(engine, kv_cache_gb=cache / GIB, max_num_seqs=rollouts.at_once, args=args | engine.args)
        planned[name] = asdict(replace(model, engine=engine))
    return replace(config, auxiliary_models=planned), taken


def _on_the_trainers_gpu(key: str, engine: EngineConfig) -> bool:
    """Whether the trainer's GPU is one of a server's, which would then be the only one."""
    gpus = list(engine.gpus or [TRAINER_GPU])
    if TRAINER_GPU in gpus and len(gpus) > 1:
        raise ConfigError(
            f"{key}.gpus is {gpus}, and the trainer uses {TRAINER_GPU}: all servers have the same share of their "
            "GPUs, and on that one it would be less. Give them other GPUs, or that one alone."
        )
    return TRAINER_GPU in gpus


def training_of(config: TrainConfig) -> Training:
    """What the plan has to know of training; under mixed precision weights are float32."""
    mixed = (config.trainer or {}).get("precision") in MIXED
    return Training(
        width=4 if config.model.dtype is WeightDtype.fp32 or mixed else 2,
        longest_row=config.engine.max_model_len,
        tokens=int(budget) if (budget := config.algorithm.max_tokens_per_micro_batch) != AUTO else None,
        reference=Objective(config.algorithm).needs_reference,
        checkpointing=config.model.gradient_checkpointing,
        eager=config.model.attn_implementation == "eager",
    )


def rollouts_of(config: TrainConfig) -> Rollouts:
    """What the plan has to know of rollouts."""
    engine = config.engine
    sleeps = {EngineSleep.auto: None, EngineSleep.always: True, EngineSleep.never: False}
    return Rollouts(
        width=4 if engine.dtype is EngineDtype.fp32 else 2,
        context=engine.max_model_len,
        requests=config.explorer.batch_size * config.explorer.repeat_times,
        max_num_seqs=engine.max_num_seqs,
        kv_cache=None if engine.kv_cache_gb is None else int(engine.kv_cache_gb * GIB),
        sleep=sleeps[engine.sleep],
        servers=engine.servers if capabilities_of(engine.name).overlaps_training else 0,
    )


def planned_engine(engine: EngineConfig, found: MemoryPlan, total: int) -> EngineConfig:
    """The engine's knobs by the plan; what `engine.args` says itself holds.

    Args:
        engine: as configured.
        found: the plan.
        total: bytes of the whole device, of which vLLM counts its share.
    """
    share = {"gpu_memory_utilization": round(found.engine / total, 4), "max_num_batched_tokens": BATCHED_TOKENS}
    return replace(
        engine,
        max_num_seqs=found.max_num_seqs,
        kv_cache_gb=found.kv_cache / GIB,
        sleep=EngineSleep.always if found.sleep else EngineSleep.never,
        args=share | engine.args,
    )


# -- the engines -------------------------------------------------------------------------------------------------------


def engines_of(config: TrainConfig, folder: Path) -> list[Engine]:
    """The engines that generate.

    Raises:
        ValueError: there is no such engine.
    """
    engine: Any = import_object(PARTS["engine"].get(config.engine.name, config.engine.name))
    return list(engine.of_run(config, folder))


def check_experts(config: TrainConfig) -> None:
    """Refuse a mixture of experts where its weights would not arrive: vLLM's CPU build packs experts as it loads them.

    It takes new ones without a word and computes with something else: log-probabilities were off by 0.04 after the
    same weights, and by 8 after others.

    Raises:
        ConfigError: such a model, and an engine of vLLM that would run on this machine's CPU.
    """
    engine = config.engine
    if not capabilities_of(engine.name).is_vllm or engine.urls or torch.cuda.is_available():
        return
    name = config.model.name
    if any(".experts." in parameter for parameter in parameter_shapes(str(resolve_model(name)))):
        raise ConfigError(
            f"model.name={name} is a mixture of experts, and vLLM without a GPU does not take new weights of experts: "
            "choose engine=transformers, or a machine with a GPU."
        )


def check_room(config: TrainConfig) -> None:
    """Refuse a context beyond the model's own, and a cache beyond a CPU's memory, which vLLM does after it has loaded.

    Raises:
        ConfigError: names the key and what there is.
    """
    engine, can = config.engine, capabilities_of(config.engine.name)
    if not can.is_vllm or engine.urls:
        return
    from transformers import AutoConfig

    model = AutoConfig.from_pretrained(str(resolve_model(config.model.name))).get_text_config()
    longest = getattr(model, "max_position_embeddings", None)
    stretched = "hf_overrides" in engine.args or "factor" in (getattr(model, "rope_parameters", None) or {})
    if longest is not None and engine.max_model_len > longest and not stretched:
        raise ConfigError(
            f"engine.max_model_len is {engine.max_model_len}, and the context of model '{config.model.name}' is "
            f"{longest} tokens: give that, or less."
        )
    needed = (engine.kv_cache_gb or 0) * (engine.servers if can.overlaps_training else 1)
    if not torch.cuda.is_available() and needed * GIB > (free := free_memory()):
        raise ConfigError(
            f"engine.kv_cache_gb asks for {needed:g} GiB, and {free / GIB:.1f} GiB of memory are free: give less, or "
            "null."
        )


def auxiliary_models_of(config: TrainConfig, folder: Path) -> dict[str, HeldModel]:
    """The models beside the policy, by name; what they are made of is imported if there are any."""
    return {
        name: _auxiliary(name, auxiliary, config, folder)
        for name, auxiliary in auxiliary_configs(config.auxiliary_models).items()
    }


def _auxiliary(name: str, auxiliary: AuxiliaryConfig, config: TrainConfig, folder: Path) -> HeldModel:
    from trinity_lightning.explorer.models.openai_api import OpenAIModel
    from trinity_lightning.explorer.models.vllm_server import VLLMServerEngine, server_cores

    if auxiliary.url is not None:
        return OpenAIModel(auxiliary.url, auxiliary.model, auxiliary.api_key_env)
    engine = auxiliary.engine
    [cores] = server_cores(sorted(os.sched_getaffinity(0)), engine, overlaps=config.explorer.sync_offset > 0)
    return VLLMServerEngine(auxiliary.model, engine, cores=cores, gpus=engine.gpus, log=folder / f"{name}.log")


class ThreadShare(L.Callback):
    """Train with the threads that servers of this machine leave, where both compute at the same time on CPUs."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._before: int | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Take fewer threads, where that is needed."""
        engines = _servers_here(self._config) if self._config.explorer.sync_offset > 0 else []
        if engines and not torch.cuda.is_available():
            from trinity_lightning.explorer.models.vllm_server import server_cores

            cores = sorted(os.sched_getaffinity(0))
            shares = [share for engine in engines for share in server_cores(cores, engine, overlaps=True)]
            taken = set().union(*shares)
            self._before = torch.get_num_threads()
            torch.set_num_threads(max(len(cores) - len(taken), 1))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give them back: another job of a sweep may follow in this process."""
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """The same where training ends with an error."""
        self.teardown(trainer, pl_module, "fit")


def _servers_here(config: TrainConfig) -> list[EngineConfig]:
    """What is configured of the servers that are started on this machine, the policy's and those beside it."""
    beside = [model.engine for model in auxiliary_configs(config.auxiliary_models).values() if model.url is None]
    can = capabilities_of(config.engine.name)
    here = can.is_vllm and can.overlaps_training and not config.engine.urls
    return [config.engine, *beside] if here else beside


# -- dtypes: what `auto` stands for, settled once at a run's start and recorded with its configuration ----------------


def settle_dtypes(config: DictConfig, checkpoint: str | Path | None) -> None:
    """Set `model.dtype` and `engine.dtype` where they are `auto`.

    Weights are held as the checkpoint has them; without one, in the dtype that is faster here. The engine computes in
    what the trainer computes in, which is bfloat16 under mixed precision too; engine=transformers has no dtype of its
    own.

    Args:
        config: a validated configuration, which is changed.
        checkpoint: what the run resumes from, or what is evaluated.
    """
    trainer = config.trainer or {}
    precision = trainer.get("precision")
    if config.model.dtype is WeightDtype.auto:
        config.model.dtype = _dtype_of(checkpoint) if checkpoint else faster_dtype(trainer.get("accelerator", "auto"))
    config.model.dtype = weight_dtype(config.model.dtype, precision)
    if config.engine.dtype is EngineDtype.auto and not capabilities_of(config.engine.name).shares_weights:
        config.engine.dtype = EngineDtype(compute_dtype(config.model.dtype, precision).value)


def check_resumed_dtype(config: DictConfig, checkpoint: str | Path) -> None:
    """Refuse to go on with weights in another dtype than the checkpoint's: its optimizer state belongs to that.

    Args:
        config: a configuration whose dtypes are settled.
        checkpoint: what the run resumes from.

    Raises:
        ConfigError: another dtype.
    """
    asked, held = config.model.dtype.value, _dtype_of(checkpoint).value
    if asked != held:
        raise ConfigError(
            f"model.dtype is {asked} (trainer.precision={HALF} means bf16), and the weights of the checkpoint "
            f"'{checkpoint}' are {held}: a resumed run keeps its own, so leave model.dtype and that precision out."
        )


def _dtype_of(checkpoint: str | Path) -> WeightDtype:
    """How the run that wrote a checkpoint held its weights; of bfloat16 models some layers stay in float32."""
    _, weights = checkpoint_weights(checkpoint)
    rounded = any(tensor.dtype == torch.bfloat16 for _, tensor in weights)
    return WeightDtype.bf16 if rounded else WeightDtype.fp32
