"""vLLM in this process: one continuous batch that many awaiting workflows share."""

import gc
import importlib.util
import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from trinity_lightning.common.config import EngineConfig, EngineDtype
from trinity_lightning.common.errors import ConfigError, ModelLoadError, WeightSyncError
from trinity_lightning.common.inference import Completion
from trinity_lightning.common.model_files import resolve_model
from trinity_lightning.common.weights import Shape, WeightStream, parameter_shapes
from trinity_lightning.explorer.models.in_process import InProcessEngine

VLLM_DTYPES = {EngineDtype.bf16: "bfloat16", EngineDtype.fp32: "float32", EngineDtype.auto: "auto"}
GIB = 1 << 30


def require_vllm() -> None:
    """Raise ConfigError, with what to install, where vLLM is not."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed. Install it with `pip install 'trinity-lightning[cpu]'` (no GPU) or "
            "`pip install 'trinity-lightning[vllm]'` (NVIDIA GPU), or choose engine=transformers."
        )


class VLLMEngine(InProcessEngine):
    """An `InferenceModel` over vLLM's engine, stepped by whoever drives it.

    Log-probabilities are those of the distribution sampled from (temperature applied). A request's tokens depend on its
    seed alone with a float32 engine; with bfloat16 they also depend on what else is in the batch.

    Args:
        model: `smollm2`, `tiny`, a folder, or a hub name.
        config: the engine's knobs; keyword arguments override its fields.

    Raises:
        ConfigError: vLLM is not installed.
        ModelLoadError: (at the first use) vLLM cannot load the model.
    """

    def __init__(self, model: str, config: EngineConfig | None = None, **overrides: Any) -> None:
        require_vllm()
        self._config = EngineConfig(**{**vars(config or EngineConfig()), **overrides})
        super().__init__(self._config.max_model_len)
        self._model = model

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self._tokenizer

    @property
    def dtype(self) -> torch.dtype:
        """What vLLM computes in."""
        return self._engine.model_config.dtype

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        """Every parameter of the Hugging Face model; a tied head counts as a tensor of its own."""
        return self._weight_shapes

    def _load(self) -> None:
        path = str(resolve_model(self._model))
        # One process: weight sync is then a plain call. Both must be set before vLLM is imported.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM's imports warn of its dependencies' affairs
            from vllm import EngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.llm_engine import LLMEngine

            arguments = self._engine_args(path, on_cpu=current_platform.is_cpu())
            try:
                self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
            except Exception as error:
                raise ModelLoadError(f"vLLM cannot load '{path}': {type(error).__name__}: {error}") from error
        self._tokenizer = self._engine.get_tokenizer()
        self._weight_shapes = parameter_shapes(path)

    def _engine_args(self, path: str, on_cpu: bool) -> dict[str, Any]:
        config = self._config
        arguments: dict[str, Any] = {
            "model": path,
            "dtype": VLLM_DTYPES[config.dtype],
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "seed": 0,  # every request brings its own
        }
        if config.kv_cache_gb is not None:
            arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gb * GIB)
        if on_cpu:
            _avoid_compiled_sampler()
            # Seeded requests cannot be prefilled in chunks: a CPU generator has no offset to set.
            arguments |= {
                "enforce_eager": True,
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(config.max_model_len, 4096),
            }
        return arguments | dict(config.args)

    def _add(self, request_id: str, token_ids: list[int], n: int, sampling: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        chosen = {name: value for name, value in sampling.items() if value is not None}
        params = SamplingParams(
            n=n, logprobs=0, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY, **chosen
        )
        self._engine.add_request(request_id, {"prompt_token_ids": token_ids}, params)

    def _add_scoring(self, request_id: str, token_ids: list[int]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        self._engine.add_request(request_id, {"prompt_token_ids": token_ids}, params)

    def _abort(self, request_id: str) -> None:
        self._engine.abort_request([request_id])

    def _abort_all(self) -> None:
        # A step that raised leaves its requests in the scheduler, where they would be tried again for ever.
        self._engine.abort_request(list(self._engine.output_processor.request_states), internal=True)

    def _has_work(self) -> bool:
        return self._engine.has_unfinished_requests()

    def _step(self) -> Iterable[tuple[str, Any]]:
        return [(out.request_id, _result(out)) for out in self._engine.step() if out.finished]

    def _take_weights(self, stream: WeightStream) -> None:
        try:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(stream)})
        except Exception as error:
            raise WeightSyncError(
                f"vLLM failed while it took over the weights ({type(error).__name__}: {error}); it must be built anew."
            ) from error
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def _free(self) -> None:
        self._engine.engine_core.shutdown()
        del self._engine
        gc.collect()


def _result(output: Any) -> list[Completion] | list[float]:
    """Completions of a request, or the prompt's log-probabilities where those were asked for."""
    if output.prompt_logprobs is not None:
        return _aligned(output.prompt_logprobs, len(output.prompt_token_ids))[1:]  # the first token has none
    return [
        Completion(
            prompt_token_ids=output.prompt_token_ids,
            token_ids=list(sample.token_ids),
            logprobs=_aligned(sample.logprobs, len(sample.token_ids)),
            text=sample.text,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )
        for sample in sorted(output.outputs, key=lambda sample: sample.index)
    ]


def _aligned(flat: Any, length: int) -> list[float]:
    """The log-probability of each token itself: the first entry at each position of vLLM's flat container."""
    positions = zip(flat.start_indices[:length], flat.end_indices[:length], strict=True)
    return [flat.logprobs[start] if start < end else float("nan") for start, end in positions]


def _avoid_compiled_sampler() -> None:
    """Replace a helper that vLLM compiles (11 s, and a C++ compiler needed) by the same one line uncompiled."""
    import vllm.v1.sample.sampler as sampler

    sampler.batched_count_greater_than = lambda x, values: (x >= values).sum(-1)
