"""Who gets how much of a GPU that trainer and vLLM share, filled into a run's configuration."""

from dataclasses import replace

import torch

from trinity_lightning.common.free_memory import free_memory
from trinity_lightning.common.memory_plan import (
    BATCHED_TOKENS,
    GIB,
    MemoryPlan,
    ModelShape,
    Rollouts,
    Training,
    plan,
    requests_at_once,
)
from trinity_lightning.common.weights import skeleton
from trinity_lightning.config.engines import TRAINER_GPU, EngineConfig, EngineDtype, EngineKind, EngineSleep
from trinity_lightning.config.models import resolve_model
from trinity_lightning.config.schema import TrainConfig
from trinity_lightning.config.training import MIXED, WeightDtype
from trinity_lightning.config.values import AUTO
from trinity_lightning.errors import ConfigError
from trinity_lightning.trainer.objective import Objective
from trinity_lightning.trainer.policy import resumed_budget


def with_memory_plan(config: TrainConfig, checkpoint: str | None = None) -> tuple[TrainConfig, MemoryPlan | None]:
    """The configuration with what its nulls and autos of a GPU stand for, and the plan that they come from.

    Without a GPU for the trainer, or where no engine of vLLM shares it, there is no plan.

    Args:
        config: of a run whose dtypes are settled.
        checkpoint: what the run resumes from, which says how many tokens its micro-batches have under `auto`.

    Raises:
        ConfigError: trainer and engines do not fit on the GPU together; servers use it and others too; the
            checkpoint is of an earlier version.
    """
    accelerator = (config.trainer or {}).get("accelerator", "auto")
    if accelerator == "cpu" or not torch.cuda.is_available() or config.buffer.storage != "memory":
        return config, None
    if config.engine.kind is EngineKind.transformers:
        return config, None
    requests = config.explorer.batch_size * config.explorer.repeat_times
    engine = replace(config.engine, max_num_seqs=config.engine.max_num_seqs or requests_at_once(requests))
    config = replace(config, engine=engine)
    if not _shares_the_gpu(engine):
        return config, None
    free, total = torch.cuda.mem_get_info(TRAINER_GPU)
    shape = ModelShape.of(skeleton(str(resolve_model(config.model.name))))
    training = training_of(config)
    if checkpoint is not None and training.tokens is None:
        training = replace(training, tokens=resumed_budget(checkpoint))
    found = plan(shape, training, rollouts_of(config), free, free_memory())
    return replace(config, engine=planned_engine(engine, found, total)), found


def _shares_the_gpu(engine: EngineConfig) -> bool:
    """Whether the trainer's GPU is an engine's of vLLM, too."""
    if engine.kind is EngineKind.vllm_server:
        gpus = list(engine.gpus or [TRAINER_GPU])
        if not engine.urls and TRAINER_GPU in gpus and len(gpus) > 1:
            raise ConfigError(
                f"engine.gpus is {gpus}, and the trainer uses {TRAINER_GPU}: all servers have the same share of their "
                "GPUs, and on that one it would be less. Give them other GPUs, or that one alone."
            )
        return not engine.urls and TRAINER_GPU in gpus
    return True


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
        servers=engine.servers if engine.kind is EngineKind.vllm_server else 0,
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
