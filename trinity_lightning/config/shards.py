"""What does not go together with a policy in shards (trainer=fsdp2)."""

from collections.abc import Mapping
from typing import Any

from trinity_lightning.config.engines import capabilities_of
from trinity_lightning.config.schema import TrainConfig
from trinity_lightning.config.training import MIXED
from trinity_lightning.config.values import AUTO
from trinity_lightning.errors import ConfigError


def check_shards(run: TrainConfig, trainer: Mapping[str, Any]) -> None:
    """Refuse what was not built for shards, with these settings of the Trainer; a ConfigError."""
    has_critic = run.algorithm.critic is not None
    check_shards_of(trainer.get("precision"), run.model.compile, run.optimizer.name, has_critic=has_critic)
    in_shards = trainer["strategy"].get("save_distributed_checkpoint", AUTO)
    check_distributed_checkpoint(in_shards)
    if run.model.lora.r is not None and in_shards is True:
        raise ConfigError(
            "trainer.strategy.save_distributed_checkpoint is true, and checkpoints of adapters (model.lora) are small, "
            "each in a file: leave it out."
        )
    if run.synchronizer.lora == "adapter":
        raise ConfigError("synchronizer.lora=adapter is not for a policy in shards (trainer=fsdp2): leave it merged.")
    if run.buffer.has_rollouts and capabilities_of(run.engine.name).shares_weights:
        raise ConfigError(
            f"engine={run.engine.name} generates with the training model itself, which trainer=fsdp2 holds in shards: "
            "choose engine=vllm or vllm_server, or trainer=ddp."
        )


def check_distributed_checkpoint(given: Any) -> None:
    """Refuse anything but true, false and auto; a ConfigError."""
    if given != AUTO and not isinstance(given, bool):
        raise ConfigError(f"trainer.strategy.save_distributed_checkpoint is {given!r}: give true, false or {AUTO}.")


def check_shards_of(precision: Any, compile_layers: bool, optimizer: str, *, has_critic: bool) -> None:
    """Refuse mixed precision, layers that are compiled, optimizers but AdamW, and a critic; a ConfigError."""
    if has_critic:
        raise ConfigError(
            "algorithm.critic is not for a policy in shards (trainer=fsdp2): choose trainer=ddp, or set "
            "algorithm.critic=null."
        )
    if precision in MIXED:
        raise ConfigError(
            f"trainer.precision is {precision}: trainer=fsdp2 computes in bfloat16 over float32 shards by "
            "model.dtype=bf16, set that."
        )
    if compile_layers:
        raise ConfigError("model.compile=true is not for layers in shards: leave it out, or choose trainer=ddp.")
    if optimizer != "adamw":
        raise ConfigError(
            f"optimizer.name={optimizer}: trainer=fsdp2 puts the state of adamw together for a checkpoint, choose that "
            "one, or trainer=ddp."
        )
