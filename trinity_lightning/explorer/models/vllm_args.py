"""How vLLM is started: the same arguments for the engine in this process and for a server's."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trinity_lightning.common.memory_plan import GIB
from trinity_lightning.config.engines import PARALLEL, EngineConfig, EngineDtype, EngineSleep

VLLM_DTYPES = {EngineDtype.bf16: "bfloat16", EngineDtype.fp32: "float32", EngineDtype.auto: "auto"}
CPU_REQUESTS, GPU_REQUESTS = 64, 256
CPU_CACHE_GB = 0.5
CPU_BLOCK_TOKENS = 32  # the fewest that its kernels for AMX take
TCP_EXTENSION = "trinity_lightning.explorer.models.tcp_transfer.Registered"


def engine_args(path: str, config: EngineConfig, on_cpu: bool) -> dict[str, Any]:
    """vLLM's EngineArgs by name; those of `config.args` come last."""
    arguments: dict[str, Any] = {
        "model": path,
        "dtype": VLLM_DTYPES[EngineDtype(config.dtype)],
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs or (CPU_REQUESTS if on_cpu else GPU_REQUESTS),
        # Those of the distribution sampled from, temperature applied: what the trainer compares its own with.
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # not the model's: its top_k and penalties would cut the policy's distribution
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,  # every request brings its own
    }
    cache = CPU_CACHE_GB if on_cpu and config.kv_cache_gb is None else config.kv_cache_gb
    if cache is not None:
        arguments["kv_cache_memory_bytes"] = int(cache * GIB)
    if EngineSleep(config.sleep) is EngineSleep.always:
        arguments["enable_sleep_mode"] = True
    if on_cpu:
        # Seeded requests cannot be prefilled in chunks: a CPU generator has no offset to set.
        arguments |= {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(config.max_model_len, 4096),
            # The rollouts of a group share the blocks that their prompt fills: vLLM's own 128 tokens few prompts fill.
            "block_size": CPU_BLOCK_TOKENS,
        }
    return arguments | dict(config.args)


def parallel_args(gpus: Sequence[int] | None, config: EngineConfig) -> dict[str, Any]:
    """The model is split over all GPUs of a server, unless `config.args` says how to spread it."""
    return {"tensor_parallel_size": len(gpus)} if gpus and not set(PARALLEL) & set(config.args) else {}


def is_quantized(config: EngineConfig) -> bool:
    """Whether vLLM is asked to quantise the weights that it loads."""
    return config.args.get("quantization") is not None


def transfer_args(transfer: str | None) -> dict[str, Any]:
    """What a server needs to be sent weights: `nccl` is a backend of vLLM's own, `tcp` one of this package."""
    if transfer is None:
        return {}
    arguments: dict[str, Any] = {"weight_transfer_config": {"backend": transfer}}
    return arguments | ({"worker_extension_cls": TCP_EXTENSION} if transfer == "tcp" else {})


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """The same arguments as flags of vLLM's server: `--max-model-len 256`, `--enforce-eager`, `--no-...`."""
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = json.dumps(value) if isinstance(value, Mapping | list) else str(value)
            flags += [f"--{flag}", text]
    return flags
