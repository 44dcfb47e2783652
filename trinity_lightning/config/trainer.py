"""Rules for the settings of Lightning's Trainer, and for training on several devices (trainer=ddp, fsdp2)."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hydra.types import RunMode
from omegaconf import DictConfig

from trinity_lightning.config.engines import capabilities_of, gpu_count
from trinity_lightning.config.model import WeightDtype
from trinity_lightning.config.values import AUTO, number, one_of, whole_number
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from trinity_lightning.config.run import TrainConfig

# Environment variable of a started process: the process that started it and the others of its machine.
STARTED_BY = "TRINITY_LIGHTNING_STARTED_BY"

# Precisions in which a policy trains, by Lightning's names.
FULL = (None, 32, "32", "32-true")
MIXED = ("bf16", "bf16-mixed")
# Precisions for which the policy has a dtype of its own, with float32 masters: the fix.
SET_DTYPE = {"bf16-true": "set model.dtype=bf16 instead"}
SET_DTYPE |= dict.fromkeys(("16", "16-mixed", "16-true"), "set model.dtype=fp16 instead")

# Strategies for several devices. Each device has the whole policy (REPLICAS), or a shard of it (SHARDS).
REPLICAS = "trinity_lightning.trainer.ddp.ReplicaStrategy"
SHARDS = "trinity_lightning.trainer.fsdp.ShardStrategy"


def trains_together(settings: Mapping[str, Any]) -> bool:
    """True if by these settings of `lightning.Trainer` several processes train one policy."""
    return strategy_of(settings) in (REPLICAS, SHARDS)


def strategy_of(settings: Mapping[str, Any]) -> str | None:
    """Dotted path of the strategy in these settings; None if they have no such path."""
    strategy = settings.get("strategy")
    return strategy.get("_target_") if isinstance(strategy, Mapping) else None


def _check_alone(settings: Mapping[str, Any]) -> None:
    """Refuse several devices without trainer=ddp or fsdp2, and other strategies; a ConfigError."""
    strategy = settings.get("strategy") or AUTO
    if strategy != AUTO:
        name = strategy.get("_target_") if isinstance(strategy, Mapping) else strategy
        raise ConfigError(
            f"trainer.strategy={name} is not supported",
            key="trainer.strategy",
            fix="leave it out, or choose trainer=ddp or fsdp2",
        )
    for key, single in (("num_nodes", 1), ("devices", "1")):
        if (value := settings.get(key, 1)) not in (1, single):
            raise ConfigError(
                f"trainer.{key} is {value}: for several devices choose trainer=ddp or trainer=fsdp2.",
                key=f"trainer.{key}",
            )


_CLIPPING = "the policy clips gradients, set algorithm.max_grad_norm"
# Settings of Lightning's Trainer that the policy replaces by its own: the values that change nothing, and the fix.
SET_INSTEAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "gradient_clip_val": ((None, 0), _CLIPPING),
    "gradient_clip_algorithm": ((None,), _CLIPPING),
    "accumulate_grad_batches": ((1,), "set algorithm.max_tokens_per_micro_batch, and algorithm.optimizer_steps"),
}


def check_trainer_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings of `lightning.Trainer` with which a policy cannot train, or which it does not follow.

    Raises:
        ConfigError: names the setting and the key to set instead.
    """
    for key, (allowed, fix) in SET_INSTEAD.items():
        if (value := settings.get(key, allowed[0])) not in allowed:
            raise ConfigError(f"trainer.{key} is {value}: {fix}.", key=f"trainer.{key}")
    if not trains_together(settings):
        _check_alone(settings)
    if (precision := settings.get("precision")) not in (*FULL, *MIXED):
        fix = SET_DTYPE.get(str(precision), "give 32-true or bf16-mixed")
        raise ConfigError(f"trainer.precision is {precision}", key="trainer.precision", fix=fix)


def check_half(dtype: WeightDtype, precision: object) -> None:
    """Refuse mixed precision over float16 weights, which it would compute in bfloat16; a ConfigError."""
    if dtype is WeightDtype.fp16 and precision in MIXED:
        raise ConfigError(
            f"trainer.precision is {precision}, and model.dtype=fp16 computes in float16 without it",
            key="trainer.precision",
            fix="leave it out",
        )


def compute_dtype(dtype: WeightDtype, precision: object) -> WeightDtype:
    """The dtype of a forward pass. Under mixed precision it is bfloat16, although the weights are float32."""
    return WeightDtype.bf16 if precision in MIXED else dtype


# -- the Trainer of a run ----------------------------------------------------------------------------------------------

_SET_BY_THE_RUN = "is set by the run itself: use the groups `callbacks` and `logger`"
_SHORTER = "would end or thin out the run's training, which `steps` counts: set steps, and leave it out"
_EVALUATION = "is about Lightning's validation, which a run has none of: set explorer.eval_interval and eval_tasksets"
# Settings of Lightning's Trainer that a run cannot have, with the reason. With some, it would silently train on less
# than it says.
NOT_OF_A_RUN = {
    **dict.fromkeys(("callbacks", "logger", "plugins", "enable_checkpointing", "barebones"), _SET_BY_THE_RUN),
    **dict.fromkeys(("max_steps", "min_steps", "min_epochs", "fast_dev_run"), _SHORTER),
    **dict.fromkeys(("limit_train_batches", "overfit_batches"), _SHORTER),
    "max_time": "would end the run within an explore step: stop it by SIGINT, as `timeout --signal=INT 8h COMMAND` "
    "does, and it saves what it has done",
    **dict.fromkeys(("val_check_interval", "check_val_every_n_epoch"), _EVALUATION),
    **dict.fromkeys(("limit_val_batches", "limit_test_batches", "limit_predict_batches"), _EVALUATION),
}


def check_trainer(run: "TrainConfig", settings: Mapping[str, Any], here: bool) -> None:
    """Refuse settings of `lightning.Trainer` that a run cannot have, or that contradict other settings.

    Args:
        run: the configuration.
        settings: the Trainer's arguments.
        here: True to refuse also devices that this machine lacks.

    Raises:
        ConfigError: names the key and the fix.
    """
    if not settings:
        raise ConfigError("trainer has been left out, and a run needs one", key="trainer", fix="choose trainer=auto")
    for key, reason in NOT_OF_A_RUN.items():
        if settings.get(key) is not None:
            raise ConfigError(f"trainer.{key} {reason}.", key=f"trainer.{key}")
    if (epochs := settings.get("max_epochs")) != run.steps:
        raise ConfigError(
            f"trainer.max_epochs is {epochs} and steps is {run.steps}, both the number of explore steps",
            key="trainer.max_epochs",
            fix="set steps alone",
        )
    one_of("trainer.accelerator", settings.get("accelerator", AUTO), (AUTO, "cpu", "gpu", "cuda"))
    devices = str(settings.get("devices", AUTO))
    if devices not in (AUTO, "-1") and not (devices.isdigit() and int(devices) > 0):
        raise ConfigError(
            f"trainer.devices is {devices}: give how many train, or auto; CUDA_VISIBLE_DEVICES chooses which they are.",
            key="trainer.devices",
        )
    whole_number("trainer.num_nodes", settings.get("num_nodes", 1), least=1)
    check_trainer_settings(settings)
    check_half(run.model.dtype, settings.get("precision"))
    if trains_together(settings):
        number("trainer.strategy.timeout", settings["strategy"].get("timeout", 1), above=0)
    if strategy_of(settings) == SHARDS:
        check_shards(run, settings)
    if run.engine.per_rank and run.buffer.has_rollouts:
        _check_engines_of_ranks(run, settings)
    if here and settings.get("accelerator") in ("gpu", "cuda") and not gpu_count():
        raise ConfigError(
            f"trainer.accelerator is {settings['accelerator']}, and this process sees no GPU",
            key="trainer.accelerator",
            fix="set trainer=cpu, or auto",
        )
    if here and trains_together(settings):
        check_processes_here(settings)


# -- several devices: the start of their processes ---------------------------------------------------------------------


# Environment variables. A process that torchrun, srun or a cluster's own launcher started has one of them.
LAUNCHED = ("TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "MASTER_ADDR")
# Without any of these, a process has rank 0: Lightning finds ranks by no others.
RANKED = (*LAUNCHED, "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
ALWAYS = 2  # processes that are allowed on any machine, to try training on several devices


def check_processes_here(trainer: Mapping[str, Any]) -> None:
    """Refuse more processes than a CPU has cores, and several machines without a launcher; a ConfigError."""
    devices, nodes = str(trainer.get("devices")), trainer.get("num_nodes", 1)
    if nodes > 1 and not any(name in os.environ for name in LAUNCHED):
        raise ConfigError(
            f"trainer.num_nodes is {nodes}, and no launcher started this process, which would wait for the others: on "
            f"every machine, run torchrun --nnodes {nodes} --node-rank NUMBER --nproc-per-node {devices} --master-addr "
            "HOST --master-port 29500 -m trinity_lightning.train with the same arguments, or use srun.",
            key="trainer.num_nodes",
        )
    if trainer.get("accelerator") != "cpu" and gpu_count():
        return
    if devices == "-1":
        raise ConfigError(
            "trainer.devices is -1, all GPUs, and this process sees none",
            key="trainer.devices",
            fix="give how many processes train",
        )
    cores = len(os.sched_getaffinity(0))
    if devices.isdigit() and int(devices) > max(cores, ALWAYS):
        raise ConfigError(
            f"trainer.devices is {devices}, each a process of its own, and this process may use {cores} CPU cores",
            key="trainer.devices",
            fix=f"give at most {max(cores, ALWAYS)}",
        )


def _by_srun() -> bool:
    """True if srun started this process, by Lightning's rule; False in an interactive shell of an allocation."""
    return "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def check_launched(trainer: Mapping[str, Any]) -> None:
    """Refuse other numbers of processes or machines than torchrun or srun has started; a ConfigError."""
    nodes: int = whole_number("trainer.num_nodes", trainer.get("num_nodes", 1), least=1)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher, names = "torchrun", ("WORLD_SIZE", "GROUP_WORLD_SIZE")
    elif _by_srun():
        launcher, names = "srun", ("SLURM_NTASKS", "SLURM_NNODES")
    else:
        return
    devices = processes_of(trainer)
    expected = (devices * nodes, nodes)
    processes, machines = (int(os.environ.get(name, default)) for name, default in zip(names, expected, strict=True))
    if (processes, machines) == expected:
        return
    per_machine, left = divmod(processes, machines)
    other = "" if left else f", or give trainer.devices={per_machine} +trainer.num_nodes={machines}"
    raise ConfigError(
        f"{launcher} has started {processes} of the processes (machines: {machines}), and trainer.devices={devices} "
        f"asks for {devices * nodes} (trainer.num_nodes={nodes})",
        key="trainer.devices",
        fix=f"start as many{other}",
    )


def processes_of(trainer: Mapping[str, Any], gpus: int | None = None) -> int:
    """The number of training processes on each machine, by Lightning's rule.

    `gpus` is the number of GPUs of such a machine; None: as many as this process sees.
    """
    devices = str(trainer.get("devices"))
    if devices.isdigit():
        return int(devices)
    if trainer.get("accelerator") == "cpu" or not trains_together(trainer):
        return 1
    return max(1, gpu_count() if gpus is None else gpus)


def _check_engines_of_ranks(run: "TrainConfig", trainer: Mapping[str, Any]) -> None:
    """Refuse engine.per_rank with one process, and with processes on several machines; a ConfigError."""
    if not trains_together(trainer):
        raise ConfigError(
            "engine.per_rank is for several devices",
            key="engine.per_rank",
            fix="choose trainer=ddp or fsdp2, or leave it out",
        )
    if trainer.get("num_nodes", 1) > 1:
        raise ConfigError(
            f"engine.per_rank is for processes on one machine, and trainer.num_nodes is {trainer['num_nodes']}",
            key="engine.per_rank",
            fix="choose engine=vllm_server, one on each machine, by engine.urls",
        )
    if run.synchronizer.lora == "adapter":
        raise ConfigError(
            "synchronizer.lora=adapter is not for engine.per_rank", key="synchronizer.lora", fix="leave it merged"
        )


def check_start(config: DictConfig, hydra: Any) -> None:
    """Refuse a sweep that each process would begin again, and processes of torchrun without a common folder.

    Evaluations are not checked: an evaluation is one process, even if the recipe trains on several devices.

    Raises:
        ConfigError: the command is refused, here or by `check_launched`.
    """
    check_launched(config.trainer)
    by_srun = _by_srun()
    if hydra.mode == RunMode.MULTIRUN and not by_srun:
        raise ConfigError(
            "trainer=ddp and trainer=fsdp2 start this command once more for every device, and each would begin the "
            "sweep again",
            key="trainer",
            fix="start its jobs one by one, without --multirun",
        )
    sweeper, launcher = (hydra.runtime.choices[f"hydra/{name}"] for name in ("sweeper", "launcher"))
    if hydra.mode == RunMode.MULTIRUN and sweeper != "basic" and launcher == "basic":
        raise ConfigError(
            f"hydra/sweeper={sweeper} chooses a job by the results of others, and each task of srun would run one of "
            "its own",
            key="hydra/sweeper",
            fix=(
                "start the command without srun, with hydra/launcher=submitit_slurm, or give the values to try, "
                "such as optimizer.lr=1e-5,1e-4"
            ),
        )
    overrides = (*hydra.overrides.hydra, *hydra.overrides.task)
    has_folder = any(override.lstrip("+").startswith(("hydra.run.dir=", "output_dir=")) for override in overrides)
    if "RANK" in os.environ and not has_folder and config.ckpt_path != "last":
        raise ConfigError(
            "processes that torchrun starts need one folder for the run",
            key="output_dir",
            fix=f"give it, such as output_dir={config.output_root}/{config.name}/first",
        )


# -- a policy in shards ------------------------------------------------------------------------------------------------


def check_shards(run: "TrainConfig", trainer: Mapping[str, Any]) -> None:
    """Refuse settings that do not work with a policy in shards; a ConfigError."""
    has_critic = run.algorithm.critic is not None
    check_shards_of(trainer.get("precision"), run.model.compile is True, run.optimizer.name, has_critic=has_critic)
    check_distributed_checkpoint(trainer["strategy"].get("save_distributed_checkpoint", AUTO))
    if run.synchronizer.lora == "adapter":
        raise ConfigError(
            "synchronizer.lora=adapter is not for a policy in shards (trainer=fsdp2)",
            key="synchronizer.lora",
            fix="leave it merged",
        )
    if run.buffer.has_rollouts and capabilities_of(run.engine.name).shares_weights:
        raise ConfigError(
            f"engine={run.engine.name} generates with the training model itself, which trainer=fsdp2 holds in shards",
            key="engine",
            fix="choose engine=vllm or vllm_server, or trainer=ddp",
        )


def check_distributed_checkpoint(value: Any) -> None:
    """Refuse anything but true, false and auto; a ConfigError."""
    if value != AUTO and not isinstance(value, bool):
        raise ConfigError(
            f"trainer.strategy.save_distributed_checkpoint is {value!r}",
            key="trainer.strategy.save_distributed_checkpoint",
            fix=f"give true, false or {AUTO}",
        )


def check_shards_of(precision: Any, compile_layers: bool, optimizer: str, *, has_critic: bool) -> None:
    """Refuse mixed precision, compiled layers, optimizers other than AdamW, and a critic; a ConfigError."""
    if has_critic:
        raise ConfigError(
            "algorithm.critic is not for a policy in shards (trainer=fsdp2)",
            key="algorithm.critic",
            fix="choose trainer=ddp, or set algorithm.critic=null",
        )
    if precision in MIXED:
        raise ConfigError(
            f"trainer.precision is {precision}: trainer=fsdp2 computes in bfloat16 over float32 shards by "
            "model.dtype=bf16, set that.",
            key="trainer.precision",
        )
    if compile_layers:
        raise ConfigError(
            "model.compile=true is not for layers in shards",
            key="model.compile",
            fix="leave it out, or choose trainer=ddp",
        )
    if optimizer != "adamw":
        raise ConfigError(
            f"optimizer.name={optimizer}: trainer=fsdp2 puts the state of adamw together for a checkpoint, choose that "
            "one, or trainer=ddp.",
            key="optimizer.name",
        )
