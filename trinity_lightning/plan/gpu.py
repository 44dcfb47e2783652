"""The memory plan of a run on this machine's GPUs, and the run's configuration with the plan's values filled in."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from trinity_lightning.common.checkpoints import contents
from trinity_lightning.common.hardware import GIB, free_memory, is_before_ampere
from trinity_lightning.common.model_config import TowerSizes
from trinity_lightning.common.model_memory import FLOAT, SHORT_ROWS, ModelShape, Training
from trinity_lightning.common.pictures.kept import KEPT_BYTES, kept_states_of, picture_parts
from trinity_lightning.config.engines import TRAINER_GPU, EngineConfig, EngineDtype, EngineSleep, capabilities_of
from trinity_lightning.config.model import ADAM, OFFLOADED, WeightDtype, room_for
from trinity_lightning.config.models import reads_pictures, resolve_model
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.config.trainer import MIXED, SHARDS, processes_of, strategy_of
from trinity_lightning.config.values import AUTO, check_version
from trinity_lightning.errors import ConfigError
from trinity_lightning.plan.memory import BATCHED_TOKENS, MemoryPlan, Rollouts, auxiliary_server, beside_others, plan
from trinity_lightning.sync.stream import skeleton
from trinity_lightning.trainer.checkpoint import BUDGET
from trinity_lightning.trainer.frozen import trained_skeleton
from trinity_lightning.trainer.objective import Objective

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a machine, all alike; sizes in bytes.

    Attributes:
        count: number of GPUs.
        free: free memory of one GPU, once a process has its CUDA context there.
        total: all memory of one GPU.
        host: free memory of the machine itself.
        before_ampere: True for an architecture before Ampere.
    """

    count: int
    free: int
    total: int
    host: int
    before_ampere: bool = False


def with_memory_plan(
    config: TrainConfig, checkpoint: str | None = None, record: Path | None = None
) -> tuple[TrainConfig, MemoryPlan | None]:
    """The configuration with null and auto replaced by the memory plan's values, and the plan.

    The plan is None if the trainer has no GPU, and with engine=transformers, whose cache is not known.

    Args:
        config: the configuration, its dtypes settled.
        checkpoint: checkpoint to resume from. Under `auto`, it gives the tokens of a micro-batch.
        record: `config.yaml` of the run to resume. If its engine has the trainer's GPU, the recorded values of the
            plan are taken again, unless they no longer fit.

    Raises:
        ConfigError: as `planned`; or the checkpoint is of an earlier version.
    """
    if not trains_on_gpus(config):
        return config, None
    free, total = torch.cuda.mem_get_info(TRAINER_GPU)
    tokens = _tokens_of(config, checkpoint)
    if config.buffer.has_rollouts and not capabilities_of(config.engine.name).is_vllm:
        return with_auxiliary_shares(config, total)[0], None
    gpus = Gpus(torch.cuda.device_count(), free, total, free_memory(), is_before_ampere(TRAINER_GPU))
    shared = config.buffer.has_rollouts and _shares_the_gpu(config.engine)
    recorded = replace(config, engine=_as_recorded(config.engine, record)) if shared else config
    try:
        return planned(recorded, gpus, tokens)
    except ConfigError as error:
        if recorded == config:
            raise
        logger.warning("the memory plan that the run began with no longer fits; planning again: %s", error)
        return planned(config, gpus, tokens)


def follower_plan(config: TrainConfig, gpu: int, checkpoint: str | None = None) -> MemoryPlan | None:
    """The plan of a rank other than 0: for the trainer alone, or beside the rank's own engine (engine.per_rank).

    All ranks take the fewest tokens that any of them plans.

    Args:
        config: the configuration, its dtypes settled.
        gpu: the rank's GPU.
        checkpoint: as in `with_memory_plan`, which also says when there is no plan.

    Raises:
        ConfigError: it does not fit.
    """
    is_vllm, has_rollouts = capabilities_of(config.engine.name).is_vllm, config.buffer.has_rollouts
    if not trains_on_gpus(config) or (has_rollouts and not is_vllm):
        return None
    count, (free, _) = torch.cuda.device_count(), torch.cuda.mem_get_info(gpu)
    training = training_of(config, count, is_before_ampere(gpu))
    training = replace(training, tokens=training.tokens or _tokens_of(config, checkpoint))
    rollouts = rollouts_of(config, count) if has_rollouts and config.engine.per_rank else None
    return plan(ModelShape.of(skeleton(str(resolve_model(config.model.name)))), training, rollouts, free, free_memory())


def _tokens_of(config: TrainConfig, checkpoint: str | None) -> int | None:
    """The tokens of a micro-batch that a resumed run keeps under `auto`; None: they are planned, or configured."""
    is_auto = config.algorithm.max_tokens_per_micro_batch == AUTO
    return _resumed_budget(checkpoint) if checkpoint is not None and is_auto else None


def _resumed_budget(checkpoint: str | Path) -> int:
    """Tokens of a micro-batch that the checkpoint's run chose under `auto`."""
    state = contents(checkpoint).get("policy", {})
    check_version(state, (BUDGET,), "the policy")
    return state[BUDGET]


def planned(config: TrainConfig, gpus: Gpus, tokens: int | None = None) -> tuple[TrainConfig, MemoryPlan]:
    """The configuration with the plan's values, and the plan.

    The trainer has the first GPU, and shares it only with a vLLM that the run starts there.

    Args:
        config: the configuration, its dtypes settled.
        gpus: the GPUs of a machine.
        tokens: tokens of a micro-batch under `auto`; None: as many as are useful and fit.

    Raises:
        ConfigError: trainer and engine do not fit on the GPU together; or servers have that GPU and others.
    """
    has_rollouts, engine = config.buffer.has_rollouts, config.engine
    config, beside = with_auxiliary_shares(config, gpus.total) if has_rollouts else (config, 0)
    if has_rollouts and capabilities_of(engine.name).is_vllm:
        engine = replace(engine, max_num_seqs=rollouts_of(config, gpus.count).at_once)
        config = replace(config, engine=engine)
    shape = ModelShape.of(skeleton(str(resolve_model(config.model.name))))
    training = training_of(config, gpus.count, gpus.before_ampere)
    training = replace(training, tokens=training.tokens or tokens)
    if not has_rollouts or not _shares_the_gpu(engine):
        return config, beside_others(plan(shape, training, None, gpus.free - beside, gpus.host), beside)
    rollouts = replace(rollouts_of(config, gpus.count), beside=beside)
    together = plan(shape, training, rollouts, gpus.free, gpus.host)
    if together.offload and engine.per_rank:
        raise ConfigError(
            "engine.per_rank: beside vLLM there is room for masters and moments only if they wait in the host's memory "
            "while it generates, which those of rank 0 alone do",
            key="engine.per_rank",
            fix="leave the key out, or choose engine=vllm_server",
        )
    return replace(config, engine=planned_engine(engine, together, gpus.total)), together


def _as_recorded(engine: EngineConfig, record: Path | None) -> EngineConfig:
    """The engine with the cache and sleep of the record; values that are configured now take precedence."""
    if record is None or not record.is_file():
        return engine
    before = OmegaConf.select(OmegaConf.load(record), "engine", default={})
    sleep = EngineSleep(before.get("sleep", "auto")) if engine.sleep is EngineSleep.auto else engine.sleep
    return replace(engine, kv_cache_gb=engine.kv_cache_gb or before.get("kv_cache_gb"), sleep=sleep)


def with_auxiliary_shares(config: TrainConfig, total: int) -> tuple[TrainConfig, int]:
    """The configuration with a share of the trainer's GPU for each auxiliary server on it, and the bytes of all shares.

    A gpu_memory_utilization in `engine.args` takes precedence over the share, and its bytes are counted.

    Args:
        config: the configuration, its dtypes settled.
        total: bytes of the GPU.
    """
    bytes_of_servers, planned = 0, dict(config.auxiliary_models)
    for name, model in config.auxiliary_models.items():
        engine = model.engine
        if model.url is not None or not _on_the_trainers_gpu(f"auxiliary_models.{name}.engine", engine):
            continue
        shape = ModelShape.of(skeleton(str(resolve_model(model.model))))
        rollouts = _generating(engine, requests=0)
        cache, size = auxiliary_server(shape, rollouts)
        utilization = engine.args.get("gpu_memory_utilization")
        bytes_of_servers += size if utilization is None else int(utilization * total)
        engine = replace(engine, max_num_seqs=rollouts.at_once)
        planned[name] = replace(model, engine=_with_share(engine, cache, size / total))
    return replace(config, auxiliary_models=planned), bytes_of_servers


def _shares_the_gpu(engine: EngineConfig) -> bool:
    """True if the run starts a vLLM on the trainer's GPU."""
    capabilities = capabilities_of(engine.name)
    if not capabilities.is_vllm or engine.urls:
        return False
    return not capabilities.overlaps_training or _on_the_trainers_gpu("engine", engine)


def _on_the_trainers_gpu(key: str, engine: EngineConfig) -> bool:
    """True if a server has the trainer's GPU; a ConfigError if it has other GPUs too."""
    gpus = list(engine.gpus or [TRAINER_GPU])
    if TRAINER_GPU in gpus and len(gpus) > 1:
        raise ConfigError(
            f"{key}.gpus is {gpus}, and the trainer uses {TRAINER_GPU}: all servers have the same share of their "
            "GPUs, and on that one it would be less. Give them other GPUs, or that one alone.",
            key=f"{key}.gpus",
        )
    return TRAINER_GPU in gpus


def planned_engine(engine: EngineConfig, memory: MemoryPlan, total: int) -> EngineConfig:
    """The engine with the plan's values, for a device of `total` bytes; `engine.args` takes precedence."""
    sleep = EngineSleep.always if memory.sleep else EngineSleep.never
    return _with_share(replace(engine, sleep=sleep), memory.kv_cache, memory.engine / total)


def _with_share(engine: EngineConfig, cache: int, share: float) -> EngineConfig:
    """The engine with a cache of `cache` bytes and this share of the device's memory."""
    args = {"gpu_memory_utilization": round(share, 4), "max_num_batched_tokens": BATCHED_TOKENS}
    return replace(engine, kv_cache_gb=cache / GIB, args=args | engine.args)


# -- the planner's description of training and rollouts ----------------------------------------------------------------


def training_of(config: TrainConfig, gpus: int, before_ampere: bool = False) -> Training:
    """The planner's description of training, on machines with `gpus` GPUs. Mixed precision has float32 weights."""
    settings = config.trainer or {}
    adapters, adapter_width = adapters_of(config)
    trainers = processes_of(settings, gpus)
    objective, longest = Objective(config.algorithm), config.engine.max_model_len
    if config.buffer.storage == "dataset":
        longest = (2 if objective.pairs else 1) * (config.buffer.dataset.max_length or 0)
    return Training(
        width=4 if config.model.dtype is WeightDtype.fp32 or settings.get("precision") in MIXED else 2,
        longest_row=longest,
        tokens=int(budget) if (budget := config.algorithm.max_tokens_per_micro_batch) != AUTO else None,
        reference=objective.needs_reference and not adapters,  # with adapters, the policy without them is the reference
        checkpointing=config.model.gradient_checkpointing,
        eager=config.model.attn_implementation == "eager",
        repeats_keys=before_ampere and config.model.attn_implementation == "sdpa",
        shards=trainers_of(settings, gpus) if strategy_of(settings) == SHARDS else 1,
        adapters=adapters,
        adapter_width=adapter_width,
        **frozen_of(config),
        moments=2 if config.optimizer.name == "adamw_8bit" else 2 * FLOAT,  # other optimizers count like Adam
        value_model=None if (values := value_model_of(config)) is None else ModelShape.of(values),
        on_host=trainers if config.optimizer.name == OFFLOADED else 0,
        offloadable=trainers if config.optimizer.name in ADAM else 0,
    )


def tokens_on_a_cpu(config: TrainConfig) -> int | None:
    """Tokens of a micro-batch under `auto` on a CPU if all rows are short; None: the free memory decides.

    Neither a run's sums nor the memory that it takes then depend on what other programs leave free.
    """
    bounded = config.buffer.storage != "dataset"  # an example may be longer than the context of an engine
    return SHORT_ROWS if bounded and config.engine.max_model_len <= SHORT_ROWS else None


def trains_on_gpus(config: TrainConfig) -> bool:
    """True if the trainer has a GPU."""
    return (config.trainer or {}).get("accelerator", "auto") != "cpu" and torch.cuda.is_available()


def value_model_of(config: TrainConfig) -> Any:
    """The skeleton of the critic's value model; None if there is no critic or no value model of its own."""
    critic = config.algorithm.critic
    return None if critic is None or critic.model is None else skeleton(str(resolve_model(critic.model)))


def adapters_of(config: TrainConfig) -> tuple[int, int]:
    """Parameters of the policy's adapters, and the activations that they save for each token; 0 and 0 without adapters.

    Both are counts of numbers. For the backward pass, an adapter saves its low-rank activations; with dropout, it saves
    its input and the dropout mask too.
    """
    lora = config.model.lora
    if lora.r is None:
        return 0, 0
    model = trained_skeleton(config.model)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    down = [weight for name, weight in trained.items() if ".lora_A." in name]  # [rank, input]
    saved = sum(len(weight) + (2 * weight.shape[1] if lora.dropout else 0) for weight in down)
    return sum(weight.numel() for weight in trained.values()), saved


def frozen_of(config: TrainConfig) -> dict[str, Any]:
    """The planner's description of the parameters that are not trained, and of the states that are kept for it."""
    if not config.model.freeze and not reads_pictures(config.model.name):
        return {}
    model = trained_skeleton(config.model)
    sizes, adapted = TowerSizes.of(model.config), config.model.lora.r is not None
    frozen = 0 if adapted else sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
    if sizes is None or any(weight.requires_grad for weight in picture_parts(model).tower.values()):
        return {"frozen": frozen}
    if (kept := kept_states_of(model)) is None:
        return {"frozen": frozen, "frozen_tower": True}
    row = sizes.patches * sizes.hidden if kept.of_tower else model.config.get_text_config().hidden_size
    width = 4 if config.model.dtype is WeightDtype.fp32 else 2
    states = config.explorer.batch_size * config.engine.max_model_len * row * width  # if prompts were pictures alone
    return {"frozen": frozen, "frozen_tower": True, "kept_states": min(states, KEPT_BYTES)}


def trainers_of(settings: Mapping[str, Any], gpus: int) -> int:
    """Number of devices that train together, on machines with `gpus` GPUs. On a CPU each process is a device."""
    return processes_of(settings, gpus) * int(settings.get("num_nodes", 1))


def _generating(engine: EngineConfig, requests: int, **others: Any) -> Rollouts:
    """The planner's description of an engine that gets `requests` requests."""
    return Rollouts(
        width=4 if engine.dtype is EngineDtype.fp32 else 2,
        context=engine.max_model_len,
        requests=requests,
        max_num_seqs=engine.max_num_seqs,
        kv_cache=None if engine.kv_cache_gb is None else int(engine.kv_cache_gb * GIB),
        drafted=engine.speculative or 0,
        **others,
    )


def rollouts_of(config: TrainConfig, gpus: int) -> Rollouts:
    """The planner's description of rollouts, on machines with `gpus` GPUs."""
    engine = config.engine
    engines = processes_of(config.trainer or {}, gpus) if engine.per_rank else 1  # per_rank is for one machine
    sleeps = {EngineSleep.auto: None, EngineSleep.always: True, EngineSleep.never: False}
    return _generating(
        engine,
        requests=-(-config.explorer.batch_size // engines) * config.explorer.repeat_times,  # a step and engine
        sleep=sleeps[engine.sleep],
        servers=engine.servers if capabilities_of(engine.name).overlaps_training else 0,
        adapters=_adapters_in_vllm(config) if config.synchronizer.lora == "adapter" else 0,
        processes=engines,
    )


def _adapters_in_vllm(config: TrainConfig) -> int:
    """Number of parameters of the adapters at the rank for which vLLM allocates memory."""
    rank = config.model.lora.r or 0
    return adapters_of(config)[0] * room_for(rank) // rank
