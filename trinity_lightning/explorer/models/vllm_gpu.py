"""vLLM in this process on a GPU: the memory that it is to find free there, and which GPU that is."""

from typing import Any

import torch

FREE_SHARE = 0.95  # of what is free on a GPU, for vLLM to find it free


def args_of_gpu(kind: type[Any], arguments: dict[str, Any]) -> Any:
    """vLLM's EngineArgs, whose class is `kind`, of these arguments, for the present GPU."""
    if "kv_cache_memory_bytes" in arguments:
        # vLLM wants its share of the GPU free, 92% by default, even if the share says nothing of the cache's size.
        free, total = torch.cuda.mem_get_info()
        arguments = {"gpu_memory_utilization": round(FREE_SHARE * free / total, 4), **arguments}
    # Of a rank other than 0 (engine.per_rank) it is another than the first.
    gpu = torch.cuda.current_device()
    return (_for_gpu(kind, gpu) if gpu else kind)(**arguments)


def _for_gpu(kind: type[Any], gpu: int) -> type[Any]:
    """vLLM's EngineArgs, but for that GPU; they are for the first that this process sees."""

    class Args(kind):  # type: ignore[misc]
        def create_engine_config(self, *arguments: Any, **settings: Any) -> Any:
            config = super().create_engine_config(*arguments, **settings)
            config.device_config.device = torch.device("cuda", gpu)
            return config

    return Args
