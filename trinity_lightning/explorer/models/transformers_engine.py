"""Generation with the training model itself, for places where vLLM cannot be installed."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trinity_lightning.common.weights import Shape, WeightStream, check_shapes
from trinity_lightning.config.engines import EngineConfig
from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.decoding import Decoding, Request
from trinity_lightning.explorer.models.in_process import InProcessEngine

SUPPORTED = ("temperature", "max_tokens", "seed", "stop")
MAX_ROWS = 64  # decoded at once, unless engine.max_num_seqs says otherwise


class TransformersEngine(InProcessEngine):
    """An `InferenceModel` that generates with the policy, in batches of whatever requests wait.

    Nothing has to be synced: `bind` gives it the training model. Each sample draws from a generator of its own, seeded
    like vLLM's i-th sample of a request (seed + i). A batch is decoded to the end of its longest response before the
    next one begins.

    Args:
        model: name of the policy, for its tokenizer.
        config: the engine's knobs; keyword arguments override its fields.

    Raises:
        ConfigError: (by a request) a sampling setting it does not know or cannot follow.
    """

    shares_weights = True

    def __init__(self, model: str, config: EngineConfig | None = None, **overrides: Any) -> None:
        config = EngineConfig(**{**vars(config or EngineConfig()), **overrides})
        super().__init__(config.max_model_len)
        self._model_name = model
        self._max_rows = config.max_num_seqs or MAX_ROWS
        self._model: Any = None
        self._queue: dict[str, Request] = {}
        self._scoring: dict[str, list[int]] = {}
        self._decoding: Decoding | None = None

    def bind(self, model: Any) -> None:
        """Generate with this Hugging Face model from now on."""
        self._model = model

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        return self._tokenizer

    @property
    def dtype(self) -> torch.dtype:
        """The policy's."""
        return self._model.dtype

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        """The policy's own parameters."""
        return {name: tuple(p.shape) for name, p in self._model.named_parameters(remove_duplicate=False)}

    def _load(self) -> None:
        if self._model is None:
            raise ConfigError("the transformers engine generates with the training model: bind(model) it first.")
        self._tokenizer = load_tokenizer(self._model_name)

    def _add(self, request_id: str, token_ids: list[int], n: int, sampling: dict[str, Any]) -> None:
        chosen = {name: value for name, value in sampling.items() if value is not None}
        if unknown := sorted(set(chosen) - set(SUPPORTED)):
            raise ConfigError(f"engine=transformers knows {', '.join(SUPPORTED)}, not {', '.join(unknown)}: use vLLM.")
        self._check_tokens(token_ids)
        request = Request(token_ids, n, **chosen)
        if n < 1 or request.max_tokens < 1 or not request.temperature >= 0:
            raise ConfigError(
                f"n = {n}, max_tokens = {request.max_tokens}, temperature = {request.temperature}: n and max_tokens "
                "must be 1 or more, the temperature 0 (greedy) or more."
            )
        request.stop = [request.stop] if isinstance(request.stop, str) else list(request.stop)
        request.max_tokens = min(request.max_tokens, self.max_model_len - len(token_ids))
        self._queue[request_id] = request

    def _add_scoring(self, request_id: str, token_ids: list[int]) -> None:
        self._check_tokens(token_ids)
        self._scoring[request_id] = token_ids

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        """One bad token would fail the whole batch it is decoded with."""
        size = self._model.config.vocab_size
        if not token_ids:
            raise ValueError("the prompt is empty: give at least one token.")
        if not 0 <= min(token_ids) <= max(token_ids) < size:
            raise ValueError(f"token ids from {min(token_ids)} to {max(token_ids)}: the model knows 0 to {size - 1}.")

    def _abort(self, request_id: str) -> None:
        self._queue.pop(request_id, None)
        self._scoring.pop(request_id, None)
        if self._decoding is not None:
            self._decoding.abort(request_id)

    def _abort_all(self) -> None:
        self._queue.clear()
        self._scoring.clear()
        self._decoding = None

    def _has_work(self) -> bool:
        return bool(self._queue or self._scoring or self._decoding)

    def _take_weights(self, stream: WeightStream) -> None:
        """The trainer's weights are this engine's already; a checkpoint's are copied in."""
        own = {name: p.detach() for name, p in self._model.named_parameters(remove_duplicate=False)}
        sent = dict(stream)
        if all(name in own and tensor.data_ptr() == own[name].data_ptr() for name, tensor in sent.items()):
            return
        check_shapes(stream.shapes, self.weight_shapes)
        for name, tensor in sent.items():
            own[name].copy_(tensor)

    def _free(self) -> None:
        """Nothing to free: the model is the trainer's."""

    @torch.no_grad()
    def _step(self) -> Iterable[tuple[str, Any]]:
        """Score what waits for it, then one more token for every sample of the batch under way."""
        with _evaluating(self._model):
            results: list[tuple[str, Any]] = [(key, self._score(tokens)) for key, tokens in self._scoring.items()]
            self._scoring.clear()
            if not self._decoding and self._queue:
                self._decoding = Decoding(self._model, self._tokenizer, self._next_batch())
            if self._decoding:
                results += self._decoding.step()
        return results

    def _next_batch(self) -> dict[str, Request]:
        """As many of the waiting requests as there are rows for, in their order; at least one."""
        batch: dict[str, Request] = {}
        for request_id, request in self._queue.items():
            if batch and sum(other.n for other in batch.values()) + request.n > self._max_rows:
                break
            batch[request_id] = request
        for request_id in batch:
            del self._queue[request_id]
        return batch

    def _score(self, token_ids: list[int]) -> list[float]:
        tokens = torch.tensor([token_ids], device=self._model.device)
        logprobs = self._model(input_ids=tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, tokens[0, 1:, None]).squeeze(-1).tolist()


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """The trainer's model without dropout, and as it was afterwards.

    Not its compiled layers (`model.compile`): those would be compiled again for the cache of every layer.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was_training)
