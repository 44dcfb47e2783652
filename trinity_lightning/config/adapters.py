"""What synchronizer.lora=adapter, adapters that vLLM computes with itself, does not go together with."""

from trinity_lightning.config.engines import SENT
from trinity_lightning.config.schema import TrainConfig
from trinity_lightning.errors import ConfigError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM makes room
SET = ("enable_lora", "max_lora_rank", "lora_target_modules")  # of vLLM's arguments
MERGE = "leave synchronizer.lora merged"


def check_adapters(run: TrainConfig) -> None:
    """Refuse synchronizer.lora=adapter without adapters, or with an engine that does not take them; a ConfigError."""
    engine, rank = run.engine, run.model.lora.r
    if rank is None:
        raise ConfigError(f"synchronizer.lora=adapter, and there is none: set model.lora.r=16, say, or {MERGE}.")
    if engine.name not in ("vllm", "vllm_server"):
        raise ConfigError(
            f"synchronizer.lora=adapter is of engine=vllm and vllm_server, not of engine={engine.name}: {MERGE}."
        )
    if engine.urls:
        raise ConfigError(
            f"synchronizer.lora=adapter is for servers that are started here, and engine.urls names others: {MERGE}."
        )
    if run.synchronizer.method in SENT:
        raise ConfigError(
            f"synchronizer.lora=adapter gives servers a folder, and synchronizer={run.synchronizer.method} sends none: "
            f"take synchronizer=checkpoint, or {MERGE}."
        )
    if engine.args.get("quantization") is not None:
        raise ConfigError(
            "synchronizer.lora=adapter, and engine.args.quantization rounds the weights that the adapters are trained "
            f"for: {MERGE}, or leave the quantization out."
        )
    if rank > RANKS[-1]:
        raise ConfigError(f"model.lora.r is {rank}, and vLLM takes adapters up to rank {RANKS[-1]}: {MERGE}.")
    for name in SET:
        if name in engine.args:
            raise ConfigError(f"synchronizer.lora=adapter sets {name} of vLLM itself: leave it out of engine.args.")
