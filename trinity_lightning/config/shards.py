"""What does not go together with a policy in shards (trainer=fsdp2)."""

from typing import Any

from trinity_lightning.config.engines import capabilities_of
from trinity_lightning.config.schema import TrainConfig
from trinity_lightning.config.training import MIXED
from trinity_lightning.errors import ConfigError


def check_shards(run: TrainConfig, precision: Any) -> None:
    """Refuse what was not built for shards, for a Trainer of that precision; a ConfigError."""
    check_shards_of(precision, run.model.compile)
    if run.buffer.has_rollouts and capabilities_of(run.engine.name).shares_weights:
        raise ConfigError(
            f"engine={run.engine.name} generates with the training model itself, which trainer=fsdp2 holds in shards: "
            "choose engine=vllm or vllm_server, or trainer=ddp."
        )


def check_shards_of(precision: Any, compile_layers: bool) -> None:
    """Refuse mixed precision, and layers that are compiled; a ConfigError."""
    if precision in MIXED:
        raise ConfigError(
            f"trainer.precision is {precision}: trainer=fsdp2 computes in bfloat16 over float32 shards by "
            "model.dtype=bf16, set that."
        )
    if compile_layers:
        raise ConfigError("model.compile=true is not for layers in shards: leave it out, or choose trainer=ddp.")
