"""vLLM in this process: one continuous batch that many awaiting workflows share."""

import dataclasses
import gc
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from trinity_lightning.common.hardware import GIB, trim_heap
from trinity_lightning.common.inference import Completion
from trinity_lightning.common.random_state import random_state, restore_random_state
from trinity_lightning.config.engines import CAPABILITIES, EngineConfig, EngineDtype, EngineSleep, require_vllm
from trinity_lightning.config.models import load_generation_config, resolve_model
from trinity_lightning.errors import ConfigError, ModelLoadError, WeightSyncError
from trinity_lightning.explorer.models.engine import InProcessEngine
from trinity_lightning.sync.stream import WeightStream, parameter_shapes

if TYPE_CHECKING:
    from trinity_lightning.explorer.models.vllm_platforms import PackedWeights

# -- how vLLM is started: the same arguments for the engine in this process and for a server's -------------------------


VLLM_DTYPES = {EngineDtype.bf16: "bfloat16", EngineDtype.fp32: "float32", EngineDtype.auto: "auto"}
CPU_REQUESTS, GPU_REQUESTS = 64, 256
CPU_CACHE_GB = 0.5
CPU_BLOCK_TOKENS = 32  # the fewest that its kernels for AMX take


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
    if config.speculative:
        drafts = {"num_speculative_tokens": config.speculative, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        arguments["speculative_config"] = {"method": "ngram", **drafts}
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


# -- where a response ends ---------------------------------------------------------------------------------------------


def with_end_tokens(sampling: Mapping[str, Any], ends: Collection[int]) -> dict[str, Any]:
    """The settings with a model's end tokens as vLLM's stop tokens: it knows those of the model's files alone."""
    if sampling.get("ignore_eos"):
        return dict(sampling)
    return {**sampling, "stop_token_ids": sorted({*ends, *(sampling.get("stop_token_ids") or ())})}


# -- the engine --------------------------------------------------------------------------------------------------------


class VLLMEngine(InProcessEngine):
    """An `InferenceModel` over vLLM's engine, stepped by the thread that drives it.

    Log-probabilities are those of the distribution sampled from (temperature applied). A request's tokens depend on its
    seed alone with a float32 engine; with bfloat16 they also depend on what else is in the batch.

    Args:
        model: `smollm2`, `tiny`, a folder, or a hub name.
        config: the engine's knobs; keyword arguments override its fields.

    Raises:
        ConfigError: vLLM is not installed, or `args` would spread the model over several devices, or have vLLM's CPU
            build decode speculatively.
        ModelLoadError: (at the first use) vLLM cannot load the model.
    """

    capabilities = CAPABILITIES["vllm"]

    def __init__(self, model: str, config: EngineConfig | None = None, **overrides: Any) -> None:
        require_vllm()
        self._config = dataclasses.replace(config or EngineConfig(), **overrides)
        if self._config.args or self._config.speculative:
            from trinity_lightning.config.servers import check_vllm_args

            check_vllm_args("engine", self._config, in_process=True)
        super().__init__(self._config.max_model_len)
        self._model = model
        self.quantized = self._config.quantizes
        self._engine: Any = None
        self._adapter: Any = None  # a LoRARequest (`VLLMAdapterEngine`)
        self._random_streams: list[torch.Tensor] = []  # the engine's own, of each of torch's generators
        self._sleeps, self._asleep = EngineSleep(self._config.sleep) is EngineSleep.always, False

    async def sleep(self) -> None:
        """With engine.sleep=always, move the weights to the host and give up the cache, until `wake_up`.

        They are kept, although a sync usually follows: after a step that trained nothing none does. On a CPU the cache
        is emptied, and takes no memory until it is written to; nor does what vLLM computed with.
        """
        await self._on_driver(self._fall_asleep if self._sleeps else self._empty_cache)

    async def wake_up(self) -> None:
        """Take weights and cache back to the device; on a CPU take the memory that the trainer has freed."""
        if self._sleeps:
            await self._on_driver(self._awake)
        elif self._loaded and self._on_cpu:
            trim_heap()

    def _fall_asleep(self) -> None:
        if self._loaded and not self._asleep:
            self._engine.sleep(level=1)
            self._asleep = True

    def _empty_cache(self) -> None:
        if self._loaded and self._on_cpu and not self._has_work() and self._engine.reset_prefix_cache():
            from trinity_lightning.explorer.models.vllm_platforms import forget_cache

            self._engine.collective_rpc(forget_cache)
            trim_heap()

    def _awake(self) -> None:
        if self._asleep:
            self._engine.wake_up()
            self._asleep = False

    def _load(self) -> None:
        path = str(resolve_model(self._model))
        # One process: weight sync is then a plain call. Both must be set before vLLM is imported.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        before = random_state()
        self._owns_process_group = not torch.distributed.is_initialized()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what vLLM imports warns of things that are not the user's
                self._weight_shapes = parameter_shapes(path)
                self._engine = self._build(path)
                self._tokenizer, self._dtype = self._engine.get_tokenizer(), self._engine.model_config.dtype
                self.generation_config = load_generation_config(self._model)
                self._packed = self._packed_weights() if self._on_cpu else None
        except ConfigError:
            raise
        except Exception as error:
            from trinity_lightning.config.servers import reason_of

            self._close()
            raise ModelLoadError(f"vLLM cannot load '{path}': {reason_of(error)}") from error
        finally:
            restore_random_state(before)  # vLLM seeds the whole process

    @property
    def _on_cpu(self) -> bool:
        return self._engine.vllm_config.device_config.device_type == "cpu"

    def _packed_weights(self) -> "PackedWeights | None":
        from trinity_lightning.explorer.models.vllm_platforms import PackedWeights, is_packable

        [model] = self._engine.collective_rpc(lambda worker: worker.model_runner.get_model())
        return PackedWeights(model) if is_packable(model) else None

    def _build(self, path: str) -> Any:
        from vllm import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        if self._config.args:
            from trinity_lightning.config.servers import check_known

            check_known(self._config.args, [field.name for field in dataclasses.fields(EngineArgs)])
        on_cpu = current_platform.is_cpu()
        arguments = engine_args(path, self._config, on_cpu)
        from trinity_lightning.explorer.models.vllm_platforms import args_of_gpu, built_on_cpu, quick_start

        with quick_start():
            if on_cpu:
                return built_on_cpu(lambda: LLMEngine.from_engine_args(EngineArgs(**arguments)))
            return LLMEngine.from_engine_args(args_of_gpu(EngineArgs, arguments))

    def _add(self, request_id: str, token_ids: list[int], n: int, sampling: dict[str, Any]) -> None:
        # vLLM makes text, after every token in the thread that drives the engine, only to look for stop strings in it.
        usual = {"detokenize": bool(sampling.get("stop")), "skip_special_tokens": False}
        sampling = usual | with_end_tokens(sampling, self.end_tokens)
        self._submit(request_id, token_ids, n=n, logprobs=0, **sampling)

    def _add_scoring(self, request_id: str, token_ids: list[int]) -> None:
        # vLLM samples at least one token; on a GPU it would draw a seed from NumPy's generator.
        self._submit(request_id, token_ids, max_tokens=1, prompt_logprobs=0, detokenize=False, seed=0)

    def _submit(self, request_id: str, token_ids: list[int], **sampling: Any) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY, **sampling)
        self._engine.add_request(request_id, {"prompt_token_ids": token_ids}, params, lora_request=self._adapter)

    def _abort(self, request_id: str) -> None:
        self._engine.abort_request([request_id])

    def _abort_all(self) -> None:
        # A step that raised leaves its requests in the scheduler, where they would be tried again without end.
        self._engine.abort_request(list(self._engine.output_processor.request_states), internal=True)

    def _has_work(self) -> bool:
        return self._engine.has_unfinished_requests()

    def _step(self) -> Iterable[tuple[str, Any]]:
        with self._own_random_stream():
            return [(out.request_id, self._result(out)) for out in self._engine.step() if out.finished]

    def _result(self, output: Any) -> list[Completion] | list[float]:
        """Completions of a request, or the prompt's log-probabilities if those were asked for."""
        if output.prompt_logprobs is not None:
            return _own_logprobs(output.prompt_logprobs[1:])  # the first token has none
        return [
            Completion(
                prompt_token_ids=output.prompt_token_ids,
                token_ids=list(sample.token_ids),
                logprobs=_own_logprobs(sample.logprobs),
                text="",  # `generate` makes it
                finish_reason=sample.finish_reason,
                stop_reason=None if sample.stop_reason in self.end_tokens else sample.stop_reason,
            )
            for sample in sorted(output.outputs, key=lambda sample: sample.index)
        ]

    @contextmanager
    def _own_random_stream(self) -> Iterator[None]:
        """Every step draws from torch's global generators, seeded requests or not: keep the trainer's out of it.

        How many steps there are is a matter of timing, and a run must not depend on it.
        """
        generators = [torch.default_generator, *torch.cuda.default_generators]
        trainers = [each.get_state() for each in generators]
        own = self._random_streams or [torch.Generator(each.device).manual_seed(0).get_state() for each in generators]
        _set_states(generators, own)
        try:
            yield
        finally:
            self._random_streams = [each.get_state() for each in generators]
            _set_states(generators, trainers)

    def _take_weights(self, stream: WeightStream) -> None:
        try:
            self._load_weights(stream)
        except Exception as error:
            raise WeightSyncError(
                f"vLLM failed while it took over the weights ({type(error).__name__}: {error}); build another engine."
            ) from error
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def _load_weights(self, stream: WeightStream) -> None:
        if self._packed is not None:
            self._packed.take(stream)
        else:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(stream)})

    def _free(self) -> None:
        self._awake()  # its allocator cannot free what is not there
        self._close()

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.engine_core.shutdown()
        self._engine = self._packed = None
        # vLLM makes a process group even for itself alone; left behind, Lightning would take it for several ranks.
        if self._owns_process_group and torch.distributed.is_initialized():
            from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

            destroy_model_parallel()
            destroy_distributed_environment()
        gc.collect()


def _set_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _own_logprobs(flat: Any) -> list[float]:
    """The log-probability of each token itself: the first entry at each position of vLLM's flat container."""
    return [flat.logprobs[start] for start in flat.start_indices]
