"""Generation with the training model itself, for machines where vLLM cannot be installed."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from trinity_lightning.common.inference import Completion
from trinity_lightning.common.pictures.positions import position_rule, positions_of
from trinity_lightning.common.pictures.processor import load_processor
from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.common.pictures.states import PICTURES, picture_inputs, with_states
from trinity_lightning.common.pictures.tensors import PictureTensors
from trinity_lightning.config.engines import CAPABILITIES, EngineConfig
from trinity_lightning.config.models import load_tokenizer
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.engine import InProcessEngine, response_text, written_text
from trinity_lightning.explorer.models.turns import end_tokens
from trinity_lightning.sync.stream import Shape, WeightStream, check_shapes, parameter_stream

# -- decoding a batch token by token; each sample has a random generator and limits of its own -------------------------


@dataclass
class Request:
    """A prompt and the settings by which its n samples are drawn; names as in vLLM's SamplingParams."""

    token_ids: list[int]
    n: int = 1
    temperature: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    stop: Sequence[str] = ()
    skip_special_tokens: bool = False
    include_stop_str_in_output: bool = True


@dataclass
class Sample:
    """A response while it grows; `finish_reason` is set once it has ended."""

    request: Request
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None

    def completion(self, tokenizer: Any) -> Completion:
        completion = Completion(
            self.request.token_ids, self.token_ids, self.logprobs, "", self.finish_reason, self.stop_reason
        )
        return replace(completion, text=written_text(tokenizer, completion, vars(self.request)))


class Decoding:
    """A batch of requests by id, decoded together by a model in evaluation mode, to the end of the longest response.

    `ends` are the token ids that end a response; None: the model's end tokens.
    """

    def __init__(
        self, model: Any, tokenizer: Any, requests: Mapping[str, Request], ends: Collection[int] | None = None
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens(tokenizer, model.generation_config) if ends is None else ends
        self._open = {
            key: [Sample(request, _generator(request, i, model.device)) for i in range(request.n)]
            for key, request in requests.items()
        }
        self._rows = [sample for samples in self._open.values() for sample in samples]  # in the order of tensor rows
        width = max(len(row.request.token_ids) for row in self._rows)
        padding = [width - len(row.request.token_ids) for row in self._rows]
        tokens = [[0] * pad + row.request.token_ids for pad, row in zip(padding, self._rows, strict=True)]
        self._tokens = torch.tensor(tokens, device=model.device)
        self._mask = (torch.arange(width) >= torch.tensor(padding)[:, None]).long().to(model.device)
        self._positions = (self._mask.cumsum(-1) - 1).clamp_min(0)
        prompts = [row.request.token_ids for row in self._rows]
        self._pictures = picture_arguments(model, prompts, padding, width)
        self._cache: Any = None

    def __bool__(self) -> bool:
        """True if a request is unfinished."""
        return bool(self._open)

    def abort(self, request_id: str) -> None:
        """Stop decoding the samples of a request."""
        for sample in self._open.pop(request_id, []):
            sample.finish_reason = "abort"

    def step(self) -> list[tuple[str, list[Completion]]]:
        """Draw one more token for every sample; returns the requests that are finished now."""
        tokens, logprobs = self._draw(self._forward())
        for row, token, logprob in zip(self._rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if row.finish_reason is None:
                self._extend(row, token, logprob)
        self._tokens = tokens[:, None]
        self._mask = torch.cat([self._mask, torch.ones_like(self._tokens)], dim=1)
        self._drop_ended_rows()
        finished = [key for key, samples in self._open.items() if all(s.finish_reason for s in samples)]
        return [(key, [sample.completion(self._tokenizer) for sample in self._open.pop(key)]) for key in finished]

    def _forward(self) -> Tensor:
        """Logits of the next token, float32, [rows, vocabulary]."""
        inputs = {"input_ids": self._tokens, "attention_mask": self._mask, "position_ids": self._positions}
        inputs |= self._pictures
        self._pictures = {}  # the cache has them
        self._positions = inputs["position_ids"].view(-1, *self._tokens.shape).amax((0, -1))[:, None] + 1
        arguments = with_states(self._model, inputs)
        output = self._model(**arguments, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = output.past_key_values
        return output.logits[:, -1].float()

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Drawn tokens and their log-probabilities, [rows]; argmax of log p - log(exponential noise) draws from p."""
        temperatures = torch.tensor([row.request.temperature or 1.0 for row in self._rows], device=logits.device)
        logprobs = (logits / temperatures[:, None]).log_softmax(-1)
        keys = logprobs.clone()
        for key, row in zip(keys, self._rows, strict=True):
            if row.request.temperature > 0 and row.finish_reason is None:
                key -= torch.empty_like(key).exponential_(generator=row.generator).log()
        tokens = keys.argmax(-1)
        return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)

    def _extend(self, row: Sample, token: int, logprob: float) -> None:
        """Append a token and decide whether the response ends with it: end token, stop string, or limit."""
        row.token_ids.append(token)
        row.logprobs.append(logprob)
        if token in self._end_tokens:
            row.finish_reason = "stop"
        elif len(row.token_ids) >= row.request.max_tokens:
            row.finish_reason = "length"
        if row.request.stop and token not in self._end_tokens:
            skip = row.request.skip_special_tokens
            text = response_text(self._tokenizer, row.request.token_ids, row.token_ids, skip_special_tokens=skip)
            if stops := [stop for stop in row.request.stop if stop in text]:
                row.finish_reason, row.stop_reason = "stop", min(stops, key=text.index)

    def _drop_ended_rows(self) -> None:
        """Drop ended rows once they are half of all; copying the cache at every end would cost more than it saves."""
        going_on = [index for index, row in enumerate(self._rows) if row.finish_reason is None]
        if 0 < len(going_on) <= len(self._rows) // 2:
            self._rows = [self._rows[index] for index in going_on]
            indices = torch.tensor(going_on, device=self._tokens.device)
            self._tokens, self._mask = self._tokens[indices], self._mask[indices]
            self._positions = self._positions[indices]
            self._cache.batch_select_indices(indices)


def picture_arguments(
    model: Any, prompts: Sequence[Sequence[int]], padding: Sequence[int], width: int
) -> dict[str, Any]:
    """Arguments of `with_states` for the pictures of prompts, padded on the left to one width; {} without pictures."""
    rows = [PictureTensors.of(prompt.inputs) if isinstance(prompt, PicturePrompt) else None for prompt in prompts]
    starts = torch.arange(len(rows)) * width + torch.tensor(padding)
    pictures = picture_inputs(rows, lambda rows, index: starts[rows] + index)
    if pictures is None:
        return {}
    arguments: dict[str, Any] = {PICTURES: pictures.to(model.device)}
    if (rule := position_rule(model)) is not None:
        positions = positions_of([torch.tensor(prompt) for prompt in prompts], rows, rule)
        padded = [pad(row, (left, 0)) for left, row in zip(padding, positions, strict=True)]
        arguments["position_ids"] = torch.stack(padded, 1).to(model.device)
    return arguments


def _generator(request: Request, sample: int, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device=device)
    if request.seed is None:
        generator.seed()
    else:
        generator.manual_seed(request.seed + sample)
    return generator


# -- the engine --------------------------------------------------------------------------------------------------------


SUPPORTED = ("temperature", "max_tokens", "seed", "stop", "skip_special_tokens", "include_stop_str_in_output")
MAX_ROWS = 64  # decoded at once, unless engine.max_num_seqs says otherwise


class TransformersEngine(InProcessEngine):
    """An `InferenceModel` that generates with the policy, in batches of the requests that wait.

    Nothing has to be synced: `bind` gives it the training model. Each sample draws from a generator of its own, seeded
    like vLLM's i-th sample of a request (seed + i). A batch is decoded to the end of its longest response before the
    next one begins.

    Args:
        model: name of the policy, for its tokenizer.
        config: the engine's knobs; keyword arguments override its fields.

    Raises:
        ConfigError: (by a request) a sampling setting that it does not know or cannot follow.
    """

    capabilities = CAPABILITIES["transformers"]

    def __init__(self, model: str, config: EngineConfig | None = None, **overrides: Any) -> None:
        config = replace(config or EngineConfig(), **overrides)
        super().__init__(config.max_model_len)
        self._model_name = model
        self.most_requests = self._max_rows = config.max_num_seqs or MAX_ROWS
        self._model: Any = None
        self._queue: dict[str, Request] = {}
        self._scoring: dict[str, list[int]] = {}
        self._decoding: Decoding | None = None

    def bind(self, model: Any) -> None:
        self._model = model

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return dict(parameter_stream(self._model).shapes)

    def _load(self) -> None:
        if self._model is None:
            raise ConfigError("the transformers engine generates with the training model: bind(model) it first.")
        self._tokenizer = load_tokenizer(self._model_name)
        self.generation_config = self._model.generation_config
        self.processor = load_processor(self._model_name, self.processor_args)

    def _add(self, request_id: str, token_ids: list[int], n: int, sampling: dict[str, Any]) -> None:
        if unknown := sorted(set(sampling) - set(SUPPORTED)):
            raise ConfigError(
                f"engine=transformers knows {', '.join(SUPPORTED)}, not {', '.join(unknown)}",
                key="engine",
                fix="use vLLM",
            )
        self._check_tokens(token_ids)
        request = Request(token_ids, n, **sampling)
        if n < 1 or request.max_tokens < 1 or not request.temperature >= 0:
            raise ConfigError(
                f"n = {n}, max_tokens = {request.max_tokens}, temperature = {request.temperature}: n and max_tokens "
                "must be 1 or more, the temperature 0 (greedy) or more.",
                key="sampling",
            )
        request.stop = [request.stop] if isinstance(request.stop, str) else list(request.stop)
        request.max_tokens = min(request.max_tokens, self.max_model_len - len(token_ids))
        self._queue[request_id] = request

    def _add_scoring(self, request_id: str, token_ids: list[int]) -> None:
        self._check_tokens(token_ids)
        self._scoring[request_id] = token_ids

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        """Refuse a prompt without tokens, or with unknown ones, because it would fail its whole batch: ValueError."""
        size = self._model.config.get_text_config().vocab_size
        if not token_ids:
            raise ValueError("the prompt is empty: give at least one token.")
        if not 0 <= min(token_ids) <= max(token_ids) < size:
            raise ValueError(f"token ids from {min(token_ids)} to {max(token_ids)}: the model knows 0 to {size - 1}.")

    def _abort(self, request_id: str) -> None:
        self._queue.pop(request_id, None)
        self._scoring.pop(request_id, None)
        if self._decoding is not None:
            self._decoding.abort(request_id)
            self._decoding = self._decoding or None

    def _abort_all(self) -> None:
        self._queue.clear()
        self._scoring.clear()
        self._decoding = None

    def _has_work(self) -> bool:
        return bool(self._queue or self._scoring or self._decoding)

    def _take_weights(self, stream: WeightStream) -> None:
        """Copy in the weights of a checkpoint; the trainer's weights are this engine's already."""
        weights, sent = dict(parameter_stream(self._model)), dict(stream)
        if sent and all(
            name in weights and tensor.data_ptr() == weights[name].data_ptr() for name, tensor in sent.items()
        ):
            return
        check_shapes(stream.shapes, self.weight_shapes)
        for name, tensor in sent.items():
            weights[name].copy_(tensor)

    def _free(self) -> None:
        """Free nothing: the model is the trainer's."""

    @torch.no_grad()
    def _step(self) -> Iterable[tuple[str, Any]]:
        """Score the waiting texts, then draw one more token for every sample of the batch under way."""
        with _evaluating(self._model):
            results: list[tuple[str, Any]] = [(key, self._score(tokens)) for key, tokens in self._scoring.items()]
            self._scoring.clear()
            if not self._decoding and self._queue:
                self._decoding = Decoding(self._model, self._tokenizer, self._next_batch(), self.end_tokens)
            if self._decoding:
                results += self._decoding.step()
                self._decoding = self._decoding or None  # free the cache of a finished batch: training needs the memory
        return results

    def _next_batch(self) -> dict[str, Request]:
        """Take as many of the waiting requests as there are rows for, in their order; at least one."""
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
        pictures = picture_arguments(self._model, [token_ids], [0], len(token_ids))
        arguments = with_states(self._model, {"input_ids": tokens} | pictures)
        logprobs = self._model(**arguments, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, tokens[0, 1:, None]).squeeze(-1).tolist()


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Put the trainer's model into evaluation mode, and restore its mode at the end.

    Compiled layers (`model.compile`) run uncompiled, because they would be compiled again for the cache of every layer.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was_training)
