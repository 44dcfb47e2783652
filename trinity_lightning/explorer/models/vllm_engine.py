"""vLLM in this process: one continuous batch that many awaiting workflows share."""

import dataclasses
import gc
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._inductor.config  # reads now with how many threads torch compiles: importing vLLM sets one
from torch import Tensor

from trinity_lightning.common.hardware import GIB, forget, trim_heap
from trinity_lightning.common.inference import Completion
from trinity_lightning.common.pictures.processor import load_processor
from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.common.random_state import random_state, restore_random_state
from trinity_lightning.config.engines import (
    CAPABILITIES,
    EngineConfig,
    EngineDtype,
    EngineSleep,
    capabilities_of,
    check_known,
    check_vllm_args,
    reason_of,
    require_vllm,
)
from trinity_lightning.config.models import load_generation_config, load_tokenizer, resolve_model
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.errors import ConfigError, ModelLoadError, RolloutError, WeightSyncError
from trinity_lightning.explorer.models.engine import InProcessEngine
from trinity_lightning.explorer.models.vllm_outputs import completion_of, token_logprobs, written_so_far
from trinity_lightning.explorer.models.vllm_pictures import VLLMPictures, picture_arguments
from trinity_lightning.sync.stream import WeightStream, parameter_shapes, skeleton

# -- vLLM's arguments, the same for the engine in this process and for servers -----------------------------------------


VLLM_DTYPES = {
    EngineDtype.bf16: "bfloat16",
    EngineDtype.fp16: "float16",
    EngineDtype.fp32: "float32",
    EngineDtype.auto: "auto",
}
CPU_REQUESTS, GPU_REQUESTS = 64, 256
LARGEST_GRAPH = 512  # requests; a step of more is launched kernel by kernel unless vLLM is asked for larger graphs
GRAPH_STEP = 16  # requests between two of vLLM's larger graphs
GRAPHS = ("cudagraph_capture_sizes", "compilation_config")  # of engine.args; vLLM refuses another largest graph beside
CPU_CACHE_GB = 0.5
CPU_BLOCK_TOKENS = 32  # tokens of a cache block: the fewest that vLLM's kernels for AMX take


def engine_args(path: str, config: EngineConfig, on_cpu: bool) -> dict[str, Any]:
    """vLLM's EngineArgs by name; the values of `config.args` win."""
    arguments: dict[str, Any] = {
        "model": path,
        "dtype": VLLM_DTYPES[EngineDtype(config.dtype)],
        "max_model_len": config.max_model_len,
        "max_num_seqs": requests_at_once(config, on_cpu),
        # Log-probabilities with the temperature applied, as the trainer computes them.
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # not the model's, whose top_k and penalties would cut the policy's distribution
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,  # every request brings its own
    }
    cache = CPU_CACHE_GB if on_cpu and config.kv_cache_gb is None else config.kv_cache_gb
    if cache is not None:
        arguments["kv_cache_memory_bytes"] = int(cache * GIB)
    if config.speculative:
        drafts = {"num_speculative_tokens": config.speculative, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        arguments["speculative_config"] = {"method": "ngram", **drafts}
    elif not on_cpu and arguments["max_num_seqs"] > LARGEST_GRAPH and not any(name in config.args for name in GRAPHS):
        arguments["max_cudagraph_capture_size"] = GRAPH_STEP * math.ceil(arguments["max_num_seqs"] / GRAPH_STEP)
    if EngineSleep(config.sleep) is EngineSleep.always:
        arguments["enable_sleep_mode"] = True
    if on_cpu:
        # Seeded requests cannot be prefilled in chunks, because the offset of a CPU generator cannot be set.
        arguments |= {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(config.max_model_len, 4096),
            # The rollouts of a group share the blocks that their prompt fills; few prompts fill vLLM's default of 128.
            "block_size": CPU_BLOCK_TOKENS,
        }
    return arguments | dict(config.args)


def requests_at_once(config: EngineConfig, on_cpu: bool | None = None) -> int:
    """The most requests that an engine decodes at once; `on_cpu`: None for this machine."""
    on_cpu = not torch.cuda.is_available() if on_cpu is None else on_cpu
    return config.max_num_seqs or (CPU_REQUESTS if on_cpu else GPU_REQUESTS)


def graph_requests(config: EngineConfig) -> int:
    """The most requests of a decoding step that a GPU computes as one graph; 0: none, as it is told to be eager."""
    arguments = engine_args("", config, on_cpu=False)
    default = min(2 * arguments["max_num_seqs"], LARGEST_GRAPH)
    largest = max(arguments.get("cudagraph_capture_sizes") or [default])
    return 0 if arguments.get("enforce_eager") else arguments.get("max_cudagraph_capture_size", largest)


def with_end_tokens(sampling: Mapping[str, Any], ends: Collection[int]) -> dict[str, Any]:
    """The settings with a model's end tokens as stop tokens: vLLM itself knows only those in the model's files."""
    if sampling.get("ignore_eos"):
        return dict(sampling)
    return {**sampling, "stop_token_ids": sorted({*ends, *(sampling.get("stop_token_ids") or ())})}


# -- the engine --------------------------------------------------------------------------------------------------------


class VLLMEngine(InProcessEngine):
    """An `InferenceModel` over vLLM's engine, stepped by the thread that drives it.

    Log-probabilities are taken in the distribution sampled from (temperature applied). A float32 engine's tokens depend
    on the request's seed alone; with 16 bits they also depend on the other requests in the batch.

    Args:
        model: `smollm2`, `tiny`, a folder, or a hub name.
        config: the engine's knobs; keyword arguments override its fields.

    Raises:
        ConfigError: vLLM is not installed; or `args` would spread the model over several devices, or make vLLM's CPU
            build decode speculatively.
        ModelLoadError: (at the first use) vLLM cannot load the model.
    """

    capabilities = CAPABILITIES["vllm"]

    def __init__(self, model: str, config: EngineConfig | None = None, **overrides: Any) -> None:
        require_vllm()
        self._config = dataclasses.replace(config or EngineConfig(), **overrides)
        check_vllm_args("engine", self._config, in_process=True)
        super().__init__(self._config.max_model_len)
        self.most_requests = requests_at_once(self._config)
        self._model = model
        self.quantized = self._config.quantizes
        self._engine: Any = None
        self._adapter: Any = None  # the LoRARequest that requests carry, if any (`VLLMAdapterEngine`)
        self._pictures: VLLMPictures | None = None
        self._random_states: list[torch.Tensor] = []  # the engine's own state for each of torch's generators
        self._threads: int | None = None  # the engine's own number of torch's threads; None: the trainer's
        self._sleeps, self._asleep = EngineSleep(self._config.sleep) is EngineSleep.always, False
        self._lacks_weights = False  # True from a sleep that gave them up until weights are sent

    async def sleep(self) -> None:
        """Give memory to the trainer until `wake_up`.

        With engine.sleep=always, the weights move to the host and the cache is given up. On a CPU the memory of the
        cache, and of vLLM's temporary tensors, is given back to the system; an empty cache takes none until it is
        written to. Requests under way stay, and go on after `wake_up`.
        """
        await self._on_driver(self._fall_asleep if self._sleeps else self._empty_cache)

    async def sleep_until_sync(self) -> bool:
        """Sleep without a copy of the weights on the host, if all of them will be sent; True if they were given up."""
        if not self._sleeps:
            await self.sleep()
            return False
        return await self._on_driver(lambda: self._fall_asleep(keeps_weights=not self._is_sent_everything()))

    def _is_sent_everything(self) -> bool:
        """True if a weight sync fills every weight of vLLM's: it has no draft model, adapters or parts for images."""
        others = any(self._config.args.get(name) for name in ("speculative_config", "enable_lora"))
        return self._loaded and not (self.quantized or others or self._engine.model_config.is_multimodal_model)

    async def wake_up(self) -> None:
        """Move weights and cache back to the device; on a CPU take over the memory that the trainer has freed."""
        if self._sleeps:
            await self._on_driver(self._awake)
        elif self._loaded and self._on_cpu:
            trim_heap()

    def _fall_asleep(self, keeps_weights: bool = True) -> bool:
        """Sleep, unless the engine does already; True if its weights are given up. Requests stay, without a cache."""
        if self._loaded and not self._asleep:
            self._count_cached()
            self._engine.sleep(level=1 if keeps_weights else 2, mode="keep")
            self._asleep, self._lacks_weights = True, self._lacks_weights or not keeps_weights
        return self._lacks_weights

    def _empty_cache(self) -> None:
        if self._loaded and self._on_cpu:
            self._forget_prefixes()
            self._engine.collective_rpc(forget_cache)
            trim_heap()

    def _awake(self) -> None:
        if self._asleep:
            self._engine.wake_up()
            self._asleep = False

    def _load(self) -> None:
        path = str(resolve_model(self._model))
        # One process, so that a weight sync is a plain call. The variables must be set before vLLM is imported.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # nothing about a run leaves the machine unasked
        before, threads = random_state(), torch.get_num_threads()
        self._owns_process_group = not torch.distributed.is_initialized()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # packages that vLLM imports warn of things that users cannot change
                self._weight_shapes = parameter_shapes(path)
                self._engine = self._build(path)
                self._tokenizer = self._engine.get_tokenizer()
                if self._tokenizer.chat_template is None:  # a processor may have it, at which vLLM does not look here
                    self._tokenizer = load_tokenizer(self._model)
                self._dtype = self._engine.model_config.dtype
                self.generation_config = load_generation_config(self._model)
                if (processor := load_processor(self._model, self.processor_args)) is not None:
                    self.processor = processor
                    self._pictures = VLLMPictures(self._engine.renderer, processor.args)
                self._packed = self._packed_weights() if self._on_cpu else None
        except ConfigError:
            raise
        except Exception as error:
            self._close()
            raise ModelLoadError(f"vLLM cannot load '{path}': {reason_of(error)}") from error
        finally:
            restore_random_state(before)  # vLLM seeds the whole process
            # On a GPU vLLM leaves this process one thread, with which AdamW on the host takes ten times as long.
            if (engines := torch.get_num_threads()) != threads:
                self._threads = engines
                torch.set_num_threads(threads)

    @property
    def _on_cpu(self) -> bool:
        return self._engine.vllm_config.device_config.device_type == "cpu"

    def _packed_weights(self) -> "PackedWeights | None":
        """The way of loading weights into vLLM's CPU build; None: vLLM's own way."""
        [model] = self._engine.collective_rpc(lambda worker: worker.model_runner.get_model())
        return PackedWeights(model) if is_packable(model) else None

    def _build(self, path: str) -> Any:
        from vllm import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        check_known(self._config.args, [field.name for field in dataclasses.fields(EngineArgs)])
        on_cpu = current_platform.is_cpu()
        arguments = engine_args(path, self._config, on_cpu)
        arguments |= picture_arguments(path, arguments, self.processor_args, self.most_pictures)
        with quick_start():
            if on_cpu:
                return built_on_cpu(lambda: LLMEngine.from_engine_args(EngineArgs(**arguments)))
            return LLMEngine.from_engine_args(args_of_gpu(EngineArgs, arguments))

    def _add(self, request_id: str, token_ids: list[int], n: int, sampling: dict[str, Any]) -> None:
        # vLLM would make text after every token, in the thread that drives the engine. Only stop strings need that.
        defaults = {"detokenize": bool(sampling.get("stop")), "skip_special_tokens": False}
        sampling = defaults | with_end_tokens(sampling, self.end_tokens)
        self._submit(request_id, token_ids, n=n, logprobs=0, **sampling)

    def _add_scoring(self, request_id: str, token_ids: list[int]) -> None:
        # vLLM samples at least one token; without a seed, on a GPU it would draw one from NumPy's generator.
        self._submit(request_id, token_ids, max_tokens=1, prompt_logprobs=0, detokenize=False, seed=0)

    def _submit(self, request_id: str, token_ids: list[int], **sampling: Any) -> None:
        if self._lacks_weights:
            raise RolloutError("vLLM gave up its weights while it slept, and none were sent since: sync_weights first.")
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY, **sampling)
        prompt = {"prompt_token_ids": token_ids}
        if isinstance(token_ids, PicturePrompt) and self._pictures is not None:
            prompt = self._pictures.input_of(token_ids)
        self._engine.add_request(request_id, prompt, params, lora_request=self._adapter)

    def _abort(self, request_id: str) -> None:
        self._engine.abort_request([request_id])

    def _abort_all(self) -> None:
        # A step that raised leaves its requests in vLLM's scheduler, which would try them again without end.
        self._engine.abort_request(list(self._engine.output_processor.request_states), internal=True)

    def _has_work(self) -> bool:
        return self._engine.has_unfinished_requests()

    def _step(self) -> Iterable[tuple[str, Any]]:
        self._engine.set_weight_version(str(self.model_version))  # vLLM notes it with the tokens that it samples
        with self._own_torch_state():
            return [(out.request_id, self._result(out)) for out in self._engine.step() if out.finished]

    def _result(self, output: Any) -> list[Completion] | list[float]:
        """A request's completions, or the prompt's log-probabilities if it asked for those."""
        if output.prompt_logprobs is not None:
            return token_logprobs(output.prompt_logprobs[1:])  # the first token has none
        samples = sorted(output.outputs, key=lambda sample: sample.index)
        return [completion_of(output.prompt_token_ids, sample, self.end_tokens) for sample in samples]

    def _written(self, request_id: str) -> list[Completion]:
        return written_so_far(self._engine.output_processor, request_id, self.end_tokens)

    @contextmanager
    def _own_torch_state(self) -> Iterator[None]:
        """Give torch the engine's random states and number of threads, and afterwards the trainer's again.

        Every step draws from torch's global generators, even for seeded requests. The number of steps depends on
        timing, and the trainer's random numbers must not. Layers that vLLM compiled hold for its number of threads.
        """
        generators = [torch.default_generator, *torch.cuda.default_generators]
        trainers = [generator.get_state() for generator in generators]
        if not self._random_states:
            fresh = [torch.Generator(generator.device).manual_seed(0) for generator in generators]
            self._random_states = [generator.get_state() for generator in fresh]
        _set_states(generators, self._random_states)
        threads = torch.get_num_threads()
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            if self._threads is not None:
                torch.set_num_threads(threads)
            self._random_states = [generator.get_state() for generator in generators]
            _set_states(generators, trainers)

    def _take_weights(self, stream: WeightStream) -> None:
        try:
            self._load_weights(stream)
            self._lacks_weights = False
            self._forget_prefixes()
            # States of pictures outlive their requests. Those of a frozen tower are right, but vLLM's reload drops
            # them in the worker, and its scheduler would not know of that.
            if self._pictures is not None:
                self._engine.reset_encoder_cache()
        except Exception as error:
            raise WeightSyncError(
                f"vLLM failed while it took over the weights ({type(error).__name__}: {error}); build another engine."
            ) from error

    def _forget_prefixes(self) -> None:
        """Empty the cache. Requests under way keep their tokens, whose keys and values are computed again."""
        self._count_cached()
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def _count_cached(self) -> None:
        """Add the tokens of running requests that are in the cache, which is about to be emptied, to be computed again.

        The tokens of a prompt that requests share are counted for each of them.
        """
        running = self._engine.engine_core.engine_core.scheduler.running
        self.reprefilled_tokens += sum(request.num_computed_tokens for request in running)

    def _load_weights(self, stream: WeightStream) -> None:
        if self._packed is not None:
            self._packed.take(stream)
        else:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(stream)})

    def _free(self) -> None:
        self._awake()  # first, because vLLM's allocator cannot free memory that sleeps
        self._close()

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.engine_core.shutdown()
        self._engine = self._packed = None
        # vLLM makes a process group even for a single process. If it stayed, Lightning would think of several ranks.
        if self._owns_process_group and torch.distributed.is_initialized():
            from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

            destroy_model_parallel()
            destroy_distributed_environment()
        gc.collect()


def _set_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


# -- the start of vLLM in this process: on any device, on a CPU, on a GPU ----------------------------------------------


@contextmanager
def quick_start() -> Iterator[None]:
    """Start vLLM in two thirds of the time: without repeated garbage collections and copies of the tokenizer.

    vLLM collects garbage five times, each time among all objects of torch, Lightning and transformers, and then exempts
    these objects from collection for good. Here they are exempted once, before. vLLM also copies the tokenizer for
    threads that read requests concurrently; here a copy is made when one is needed.
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


def built_on_cpu(build: Callable[[], Any]) -> Any:
    """The engine that `build` makes, without two side effects that vLLM's CPU build has on this process."""
    import vllm.v1.sample.sampler as sampler

    # vLLM would compile this line, which takes 11 s and a C++ compiler.
    sampler.batched_count_greater_than = lambda x, values: (x >= values).sum(-1)  # type: ignore[attr-defined]
    set_threads = torch.set_num_threads
    try:
        return build()
    finally:
        # vLLM replaces it by a function that does nothing; the trainer needs it to share cores with servers.
        torch.set_num_threads = set_threads


FREE_SHARE = 0.95  # share of the free memory that vLLM is asked for, so that its check at the start passes


def args_of_gpu(kind: type[Any], arguments: dict[str, Any]) -> Any:
    """vLLM's EngineArgs (the class `kind`) of these arguments, for the current GPU; errors as in `with_share`."""
    # This rank's GPU: not the first one on ranks other than 0 (engine.per_rank).
    gpu = torch.cuda.current_device()
    return (_for_gpu(kind, gpu) if gpu else kind)(**with_share(kind, arguments))


def with_share(kind: type[Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with a share of the GPU that is free if they have the cache's size.

    Raises:
        ConfigError: less is free than the share of the GPU that vLLM would take.
    """
    free, total = torch.cuda.mem_get_info()
    if "kv_cache_memory_bytes" in arguments:
        # vLLM refuses a GPU of which less than a share is free, 92% by default, even if the cache's size is given.
        return {"gpu_memory_utilization": round(FREE_SHARE * free / total, 4), **arguments}
    share = arguments.get("gpu_memory_utilization", kind.gpu_memory_utilization)
    if share * total > free:
        raise ConfigError(
            f"vLLM would take {share:.0%} of this GPU, {share * total / GIB:.1f} GiB, and {free / GIB:.1f} GiB are "
            "free: a policy in this process, or another program, has the rest",
            key="engine.kv_cache_gb",
            fix="give the size of vLLM's cache, such as kv_cache_gb=4, and it takes no more than it needs",
        )
    return arguments


def _for_gpu(kind: type[Any], gpu: int) -> type[Any]:
    """A class of EngineArgs for that GPU; vLLM's own is always for the first one that this process sees."""

    class Args(kind):  # type: ignore[misc]
        def create_engine_config(self, *arguments: Any, **settings: Any) -> Any:
            config = super().create_engine_config(*arguments, **settings)
            config.device_config.device = torch.device("cuda", gpu)
            return config

    return Args


# -- vLLM's CPU build: loading weights, and giving up the cache --------------------------------------------------------


class PackedWeights:
    """Loads weights into a model of vLLM, and packs each linear layer as soon as all of its weight is there.

    vLLM's `reload_weights` takes models of every kind and gives the same bits. But it prepares every module at every
    call, and loads each tensor twice, once of these to count its elements.

    Args:
        model: a model that `is_packable`.
    """

    def __init__(self, model: Any) -> None:
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        self._model = model
        self._loading: dict[Any, tuple[Tensor, int]] = {}  # by layer: its weight, and the number of missing elements
        for layer in model.modules():
            if isinstance(layer, LinearBase):
                self._expect(layer)
        embeddings: list[Any] = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
        # One of them is the head if the model has no other.
        self._heads = [layer for layer in embeddings if isinstance(layer, ParallelLMHead)] or embeddings
        for layer in embeddings:
            if layer not in self._heads:
                # Drops the packed copy that vLLM made in vain: a fifth of a small model's memory.
                layer.cpu_linear = torch.nn.functional.linear

    def _expect(self, layer: Any) -> None:
        """Give a packed layer an empty parameter with vLLM's loader, like the one through which it was loaded."""
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
        """Load a part of a weight, in place of vLLM's loader; if it was the last part, pack the layer."""
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
        """Load all weights of the model; WeightSyncError: a layer did not get all of its weight."""
        self._loading.clear()
        self._model.load_weights(iter(stream))
        if self._loading:
            raise WeightSyncError(f"{len(self._loading)} layers did not get all of their weight")
        for head in self._heads:
            _pack(head)


def _pack(layer: Any) -> None:
    layer.cpu_linear = None  # frees the old packed weights, so that the new ones take their memory
    layer.quant_method.process_weights_after_loading(layer)


def is_packable(model: Any) -> bool:
    """True if packing is all that vLLM's CPU build does to this model's weights after loading them.

    Models with quantised layers, experts, convolutions, or attention with compressed keys are left to vLLM. So is a
    model with a linear layer that vLLM did not pack, because oneDNN is missing or does not support it: that layer
    computes with the weight itself.
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


def check_experts(config: TrainConfig) -> None:
    """Refuse a mixture of experts on vLLM without a GPU, to which new weights do not arrive: ConfigError.

    Without a GPU, vLLM packs experts as it loads them. It accepts new weights, but then computes with wrong ones:
    log-probabilities were off by 0.04 after the same weights, and by 8 after others.
    """
    engine = config.engine
    if not capabilities_of(engine.name).is_vllm or engine.urls or torch.cuda.is_available():
        return
    name = config.model.name
    # Names of the model's parameters are looked at, because some checkpoints (GraniteMoe) name experts otherwise.
    if any(".experts." in parameter for parameter, _ in skeleton(str(resolve_model(name))).named_parameters()):
        raise ConfigError(
            f"model.name={name} is a mixture of experts, and vLLM without a GPU does not take new weights of experts",
            key="model.name",
            fix="choose engine=transformers, or a machine with a GPU",
        )


def forget_cache(worker: Any) -> None:
    """Give the memory of a CPU worker's key-value cache back to the system; no block of the cache may be in use."""
    storages = {cache.untyped_storage().data_ptr(): cache for cache in worker.model_runner.kv_caches}
    for cache in storages.values():
        forget(cache)
