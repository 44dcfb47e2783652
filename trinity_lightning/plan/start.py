"""Rows of the table at a run's start: attention, graphs, requests, weight sync and micro-batches on a GPU."""

from trinity_lightning.common.hardware import AMPERE
from trinity_lightning.config.engines import EngineConfig, EngineDtype, capabilities_of
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.config.trainer import SHARDS, strategy_of
from trinity_lightning.config.values import AUTO
from trinity_lightning.explorer.models.vllm_engine import engine_args, graph_requests

HOPPER = (9, 0)  # its compute capability
SYNC_WAYS = {
    "memory": "within this process",
    "ipc": "within the GPU (ipc)",
    "nccl": "from GPU to GPU (nccl)",
    "checkpoint": "through a folder (checkpoint)",
}


def rows_on_a_gpu(
    run: TrainConfig, capability: tuple[int, int], planned: int | None, ranks: int, why_folder: str
) -> list[tuple[str, str]]:
    """The rows of a run whose trainer has a GPU.

    Args:
        run: the configuration, with the memory plan's values and the method of weight sync.
        capability: the GPU's compute capability, by which torch and vLLM choose kernels.
        planned: the memory plan's tokens of a micro-batch; None: there is no plan.
        ranks: number of processes that train.
        why_folder: the reason why synchronizer=auto took a folder; "" if there is none.
    """
    rows = [("attention", _attention(run, capability)), ("graphs", _graphs(run))]
    if run.buffer.has_rollouts and capabilities_of(run.engine.name).is_vllm and not run.engine.urls:
        rows.append(("requests", f"at most {engine_args('', run.engine, on_cpu=False)['max_num_seqs']:,} at once"))
    if run.buffer.has_rollouts and not capabilities_of(run.engine.name).shares_weights:
        method = run.synchronizer.method
        if method == AUTO:
            method = next(iter(capabilities_of(run.engine.name).sync_methods), AUTO)
        way = SYNC_WAYS.get(method, method)
        rows.append(("weight sync", f"{way}: {why_folder}" if why_folder else way))
    return [*rows, ("micro-batches", _micro_batches(run, planned, ranks))]


def _attention(run: TrainConfig, capability: tuple[int, int]) -> str:
    """The attention of the trainer and of vLLM, in words."""
    trainer = run.model.attn_implementation
    if trainer == "sdpa":
        rounded = run.model.dtype is not EngineDtype.fp32
        kernel = "flash" if rounded and capability >= AMPERE else "memory-efficient"
        trainer = f"sdpa ({kernel}), FlexAttention where rows share a prefix"
    is_vllm = run.buffer.has_rollouts and capabilities_of(run.engine.name).is_vllm
    return f"trainer {trainer}" + (f"; vLLM {vllm_attention(run.engine, capability)}" if is_vllm else "")


def vllm_attention(engine: EngineConfig, capability: tuple[int, int]) -> str:
    """The attention backend that vLLM 0.32 chooses for a plain model, in words; read from its source."""
    if chosen := engine.args.get("attention_backend"):
        return str(chosen)
    if engine.urls:
        return "as its servers were started"
    if engine.dtype is EngineDtype.fp32:
        return "TRITON_ATTN (FlashAttention has no float32)"
    if capability < AMPERE:
        return "TRITON_ATTN (FlashAttention needs compute capability 8.0)"
    return "FLASH_ATTN" if capability <= HOPPER else "of its own choice"


def _graphs(run: TrainConfig) -> str:
    """The CUDA graphs of vLLM, and how the trainer's layers are computed, in words."""
    layers = _layers(run)
    if not run.buffer.has_rollouts or not capabilities_of(run.engine.name).is_vllm or run.engine.urls:
        return f"trainer {layers}"
    requests = graph_requests(run.engine)
    graphs = f"graphs of steps of at most {requests} requests" if requests else "none (enforce_eager)"
    return f"trainer {layers}; vLLM {graphs}"


def _layers(run: TrainConfig) -> str:
    """The trainer's layers, compiled or not, in words."""
    if run.model.compile != AUTO:
        return "layers compiled" if run.model.compile else "kernel by kernel (model.compile=false)"
    if strategy_of(run.trainer or {}) == SHARDS:
        return "kernel by kernel (layers in shards)"
    return "layers compiled, where the model's architecture allows it (model.compile=auto)"


def _micro_batches(run: TrainConfig, planned: int | None, ranks: int) -> str:
    """The tokens of a micro-batch, in words."""
    configured = run.algorithm.max_tokens_per_micro_batch
    if configured != AUTO:
        return f"at most {configured:,} computed tokens, as configured"
    if planned is None:
        return "chosen by the free memory, once the model is loaded"
    least = "; all processes take the fewest that any of them plans" if ranks > 1 else ""
    return f"at most {planned:,} computed tokens, by the memory plan{least}"
