"""Rules of adapters (model.lora), and of those that vLLM computes with itself (synchronizer.lora=adapter)."""

import importlib.util
from typing import TYPE_CHECKING

from trinity_lightning.config.training import ALL_LINEAR, LoRAConfig
from trinity_lightning.errors import ConfigError

if TYPE_CHECKING:
    from trinity_lightning.config.schema import TrainConfig

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM makes room
SET = ("enable_lora", "max_lora_rank", "lora_target_modules")  # of vLLM's arguments
MERGE = "leave synchronizer.lora merged"


def check_lora(lora: LoRAConfig) -> None:
    """Refuse targets that are no names of layers, and adapters without peft; a ConfigError."""
    named = isinstance(lora.targets, list) and lora.targets and all(isinstance(each, str) for each in lora.targets)
    if lora.targets != ALL_LINEAR and not named:
        raise ConfigError(f"model.lora.targets is {lora.targets!r}; give {ALL_LINEAR}, or [q_proj,v_proj], say.")
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("model.lora needs peft: pip install 'trinity-lightning[lora]'.")


def settled_alpha(lora: LoRAConfig) -> int:
    """Alpha, or what null stands for."""
    return 2 * (lora.r or 0) if lora.alpha is None else lora.alpha


def room_for(rank: int) -> int:
    """The rank that vLLM makes room for to hold adapters of this one."""
    return next(each for each in RANKS if each >= rank)


def check_adapters(run: "TrainConfig") -> None:
    """Refuse synchronizer.lora=adapter without adapters, or with an engine that does not take them; a ConfigError."""
    from trinity_lightning.config.engines import SENT

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
    if engine.quantizes:
        raise ConfigError(
            "synchronizer.lora=adapter, and engine.args quantises the weights that the adapters are trained for: "
            f"{MERGE}, or leave the quantization out."
        )
    if rank > RANKS[-1]:
        raise ConfigError(f"model.lora.r is {rank}, and vLLM takes adapters up to rank {RANKS[-1]}: {MERGE}.")
    for name in SET:
        if name in engine.args:
            raise ConfigError(f"synchronizer.lora=adapter sets {name} of vLLM itself: leave it out of engine.args.")
