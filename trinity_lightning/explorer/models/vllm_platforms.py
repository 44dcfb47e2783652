"""What vLLM in this process needs on a CPU (packed weights, no experts, less to compile and to keep), and on a GPU."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.common.devices import forget
from trinity_lightning.config.engines import capabilities_of
from trinity_lightning.config.models import resolve_model
from trinity_lightning.config.schema import TrainConfig
from trinity_lightning.errors import ConfigError, WeightSyncError
from trinity_lightning.sync.stream import WeightStream, skeleton

# -- everywhere --------------------------------------------------------------------------------------------------------


@contextmanager
def quick_start() -> Iterator[None]:
    """Spare the start of vLLM a third of its time: collections of garbage, and copies of the tokenizer.

    vLLM collects garbage five times, each time among all objects that torch, Lightning and transformers have made, and
    then takes them from the collector for good. Here that is done once, before. And it copies the tokenizer for threads
    that would read requests at once; a copy is made when one is needed.
    """
    import vllm.renderers.hf

    renderer: Any = vllm.renderers.hf
    make_pool = renderer.maybe_make_thread_pool
    gc.collect()
    gc.freeze()
    renderer.maybe_make_thread_pool = partial(_without_copies, make_pool)
    try:
        yield
    finally:
        renderer.maybe_make_thread_pool = make_pool


def _without_copies(make_pool: Callable[..., Any], tokenizer: Any, copies: int = 0) -> Any:
    return make_pool(tokenizer, 0)


# -- on a CPU ----------------------------------------------------------------------------------------------------------


class PackedWeights:
    """Loads weights into a model of vLLM and packs each linear layer as soon as all of its weight is there.

    vLLM's own `reload_weights`, which is for models of every kind, comes to the same bits; but it prepares every module
    at every call, and loads each tensor twice, once to count its elements.

    Args:
        model: a model that `is_packable`.
    """

    def __init__(self, model: Any) -> None:
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        self._model = model
        self._loading: dict[Any, tuple[Tensor, int]] = {}  # weight of a layer, and how many elements it lacks
        for layer in model.modules():
            if isinstance(layer, LinearBase):
                self._expect(layer)
        embeddings: list[Any] = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
        # One of them is the head if the model has no other.
        self._heads = [layer for layer in embeddings if isinstance(layer, ParallelLMHead)] or embeddings
        for layer in embeddings:
            if layer not in self._heads:  # vLLM has packed it for nothing: a fifth of a small model's memory
                layer.cpu_linear = torch.nn.functional.linear

    def _expect(self, layer: Any) -> None:
        """Give a packed layer the parameter again that it was loaded through, but empty."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
        from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

        recorded = get_layerwise_info(layer).restore_metadata[0]["weight"]
        empty: Any = restore_layer_refs(materialize_meta_tensor(recorded), layer)
        empty.data = empty.new_empty(0)
        empty.weight_loader = partial(self._load, layer, recorded, empty.weight_loader)
        layer.weight = empty

    def _load(
        self, layer: Any, recorded: Tensor, load: Callable[..., None], empty: Any, part: Tensor, *shard: Any
    ) -> None:
        """In place of vLLM's loader of a weight: load a part of it and, if that was the last, pack the layer."""
        from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

        weight, missing = self._loading.pop(layer, None) or (materialize_meta_tensor(recorded), recorded.numel())
        load(weight, part, *shard)
        if missing > part.numel():
            self._loading[layer] = weight, missing - part.numel()
            return
        layer.weight = weight
        _pack(layer)
        if layer.weight is not weight:  # vLLM has packed it, and put an empty weight in its place
            layer.weight = empty

    @torch.no_grad()
    def take(self, stream: WeightStream) -> None:
        """Load all weights of the model; WeightSyncError: some layer did not get all of its weight."""
        self._loading.clear()
        self._model.load_weights(iter(stream))
        if self._loading:
            raise WeightSyncError(f"{len(self._loading)} layers did not get all of their weight")
        for head in self._heads:
            _pack(head)


def _pack(layer: Any) -> None:
    layer.cpu_linear = None  # frees the packed weights of before, whose memory the new ones take
    layer.quant_method.process_weights_after_loading(layer)


def is_packable(model: Any) -> bool:
    """Whether packing is the only thing that vLLM's CPU build does to this model's weights after loading them.

    Quantised layers, experts, convolutions, and attention with compressed keys are left to vLLM. So is a model with a
    linear layer that vLLM did not pack, because oneDNN is missing or does not support it: it computes with the weight
    itself.
    """
    from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    if hasattr(model, "process_weights_after_loading"):
        return False
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            return False
        if is_deferred_attention_layer(layer) and type(layer) is not Attention:
            return False
        if isinstance(layer, LinearBase):
            weight = get_layerwise_info(layer).restore_metadata[0].get("weight")
            if weight is None or weight.ndim != 2 or layer.get_parameter("weight").numel() > 0:
                return False
    return True


def forget_cache(worker: Any) -> None:
    """Give the memory of a worker's key-value cache, of which no block is in use, back to a CPU's system."""
    storages = {cache.untyped_storage().data_ptr(): cache for cache in worker.model_runner.kv_caches}
    for cache in storages.values():
        forget(cache)


def built_on_cpu(build: Callable[[], Any]) -> Any:
    """The engine that `build` makes, without two things that vLLM's CPU build would do to this process."""
    import vllm.v1.sample.sampler as sampler

    # One line that it would compile: 11 s, and a C++ compiler needed.
    sampler.batched_count_greater_than = lambda x, values: (x >= values).sum(-1)  # type: ignore[attr-defined]
    set_threads = torch.set_num_threads
    try:
        return build()
    finally:
        torch.set_num_threads = set_threads  # vLLM has one that does nothing; trainer and servers share cores by it


def check_experts(config: TrainConfig) -> None:
    """ConfigError if new weights of a mixture of experts would not arrive: vLLM packs them as it loads them.

    It takes new ones without a word and computes with something else: log-probabilities were off by 0.04 after the
    same weights, and by 8 after others.
    """
    engine = config.engine
    if not capabilities_of(engine.name).is_vllm or engine.urls or torch.cuda.is_available():
        return
    name = config.model.name
    # By the model's own names: checkpoints of some (GraniteMoe) do not call their experts so.
    if any(".experts." in parameter for parameter, _ in skeleton(str(resolve_model(name))).named_parameters()):
        raise ConfigError(
            f"model.name={name} is a mixture of experts, and vLLM without a GPU does not take new weights of experts: "
            "choose engine=transformers, or a machine with a GPU."
        )


# -- on a GPU ----------------------------------------------------------------------------------------------------------


FREE_SHARE = 0.95  # of the free memory is asked for, so that vLLM's check at its start passes


def args_of_gpu(kind: type[Any], arguments: dict[str, Any]) -> Any:
    """vLLM's EngineArgs, whose class is `kind`, of these arguments, for the present GPU."""
    if "kv_cache_memory_bytes" in arguments:
        # vLLM wants its share of the GPU free, 92% by default, even if the share says nothing of the cache's size.
        free, total = torch.cuda.mem_get_info()
        arguments = {"gpu_memory_utilization": round(FREE_SHARE * free / total, 4), **arguments}
    # On ranks other than 0 (engine.per_rank) this is not the first GPU.
    gpu = torch.cuda.current_device()
    return (_for_gpu(kind, gpu) if gpu else kind)(**arguments)


def _for_gpu(kind: type[Any], gpu: int) -> type[Any]:
    """vLLM's EngineArgs for that GPU: its own are always for the first one that this process sees."""

    class Args(kind):  # type: ignore[misc]
        def create_engine_config(self, *arguments: Any, **settings: Any) -> Any:
            config = super().create_engine_config(*arguments, **settings)
            config.device_config.device = torch.device("cuda", gpu)
            return config

    return Args
