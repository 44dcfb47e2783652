"""Generation with the training model itself, for places where vLLM cannot be installed."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from trinity_lightning.common.config import EngineConfig
from trinity_lightning.common.errors import ConfigError
from trinity_lightning.common.inference import Completion
from trinity_lightning.common.model_files import load_tokenizer
from trinity_lightning.common.weights import Shape, WeightStream
from trinity_lightning.explorer.models.in_process import InProcessEngine

SUPPORTED = ("temperature", "max_tokens", "seed", "stop")


@dataclass
class _Request:
    token_ids: list[int]
    n: int
    temperature: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    scoring: bool = False


@dataclass
class _Row:
    """One sample of a request while it is generated."""

    request_id: str
    request: _Request
    generator: torch.Generator
    logprobs: list[Tensor] = field(default_factory=list)


class TransformersEngine(InProcessEngine):
    """An `InferenceModel` that generates with the policy, in batches of whatever requests wait.

    Nothing has to be synced: `bind` gives it the training model. Each row samples from a generator of its own, seeded
    like vLLM's i-th sample of a request (seed + i).

    Args:
        model: name of the policy, for its tokenizer.
        config: the engine's knobs; keyword arguments override its fields.
    """

    shares_weights = True

    def __init__(self, model: str, config: EngineConfig | None = None, **overrides: Any) -> None:
        config = EngineConfig(**{**vars(config or EngineConfig()), **overrides})
        super().__init__(config.max_model_len)
        self._model_name = model
        self._max_rows = config.max_num_seqs
        self._model: Any = None
        self._requests_waiting: dict[str, _Request] = {}

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
        request = _Request(token_ids, n, **chosen)
        request.max_tokens = min(request.max_tokens, self.max_model_len - len(token_ids))
        self._requests_waiting[request_id] = request

    def _add_scoring(self, request_id: str, token_ids: list[int]) -> None:
        self._requests_waiting[request_id] = _Request(token_ids, n=1, scoring=True)

    def _abort(self, request_id: str) -> None:
        self._requests_waiting.pop(request_id, None)

    def _abort_all(self) -> None:
        self._requests_waiting.clear()

    def _has_work(self) -> bool:
        return bool(self._requests_waiting)

    def _take_weights(self, stream: WeightStream) -> None:
        """Nothing to take: the trainer's weights are this engine's."""

    def _free(self) -> None:
        self._requests_waiting.clear()

    @torch.no_grad()
    def _step(self) -> Iterable[tuple[str, Any]]:
        """One batch from start to end: as many of the waiting requests as there are rows for (at least one)."""
        batch: dict[str, _Request] = {}
        for request_id, request in self._requests_waiting.items():
            if batch and sum(r.n for r in batch.values()) + request.n > self._max_rows:
                break
            batch[request_id] = request
        was_training = self._model.training
        self._model.eval()
        try:
            results = [(key, self._score(request)) for key, request in batch.items() if request.scoring]
            results += self._generate({key: request for key, request in batch.items() if not request.scoring})
        finally:
            self._model.train(was_training)
        for request_id in batch:
            self._requests_waiting.pop(request_id, None)
        return results

    def _score(self, request: _Request) -> list[float]:
        tokens = torch.tensor([request.token_ids], device=self._model.device)
        logprobs = self._model(input_ids=tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, tokens[0, 1:, None]).squeeze(-1).tolist()

    def _generate(self, requests: dict[str, _Request]) -> list[tuple[str, list[Completion]]]:
        rows = [
            _Row(key, request, self._generator(request, i)) for key, request in requests.items() for i in range(request.n)
        ]
        if not rows:
            return []
        prompts = self._tokenizer.pad(
            {"input_ids": [row.request.token_ids for row in rows]}, padding_side="left", return_tensors="pt"
        ).to(self._model.device)
        width = prompts["input_ids"].shape[1]
        sampled = self._model.generate(
            **prompts,
            do_sample=False,  # the processor draws; the argmax of what it returns is the drawn token
            max_new_tokens=max(row.request.max_tokens for row in rows),
            logits_processor=LogitsProcessorList([_Sampler(rows)]),
            stopping_criteria=StoppingCriteriaList([_Stop(rows, width, self._tokenizer)]),
            pad_token_id=self._tokenizer.pad_token_id,
        )
        responses = sampled[:, width:].tolist()
        completions: dict[str, list[Completion]] = {key: [] for key in requests}
        for row, response in zip(rows, responses, strict=True):
            completions[row.request_id].append(self._completion(row, response))
        return list(completions.items())

    def _generator(self, request: _Request, sample: int) -> torch.Generator:
        generator = torch.Generator(device=self._model.device)
        if request.seed is None:
            generator.seed()
        else:
            generator.manual_seed(request.seed + sample)
        return generator

    def _completion(self, row: _Row, response: list[int]) -> Completion:
        """Cut a padded response at its end token, stop string or limit."""
        length, finish, stop_reason = _end(row.request, response, self._tokenizer, self._end_ids())
        text = self._tokenizer.decode(response[:length], skip_special_tokens=True)
        if isinstance(stop_reason, str):
            text = text[: text.index(stop_reason)]
        logprobs = [float(value) for value in row.logprobs[:length]]
        return Completion(row.request.token_ids, response[:length], logprobs, text, finish, stop_reason)

    def _end_ids(self) -> set[int]:
        ends = self._model.generation_config.eos_token_id
        return {ends} if isinstance(ends, int) else set(ends or [self._tokenizer.eos_token_id])


class _Sampler(LogitsProcessor):
    """Draws each row's token by the Gumbel-max trick from its own generator, and notes its log-probability."""

    def __init__(self, rows: list[_Row]) -> None:
        self._rows = rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = torch.full_like(scores, -torch.inf)
        for index, row in enumerate(self._rows):
            temperature = row.request.temperature
            logprobs = (scores[index].float() / (temperature or 1.0)).log_softmax(-1)
            keys = logprobs
            if temperature > 0:
                uniform = torch.rand(logprobs.shape, generator=row.generator, device=logprobs.device)
                keys = logprobs - torch.log(-torch.log(uniform.clamp_min(1e-20)))
            token = keys.argmax()
            row.logprobs.append(logprobs[token])
            chosen[index, token] = 0.0
        return chosen


class _Stop(StoppingCriteria):
    """Ends a row at its own token limit or stop string; end tokens are generate's own affair."""

    def __init__(self, rows: list[_Row], width: int, tokenizer: Any) -> None:
        self._rows, self._width, self._tokenizer = rows, width, tokenizer

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        made = input_ids.shape[1] - self._width
        done = [made >= row.request.max_tokens for row in self._rows]
        for index, row in enumerate(self._rows):
            if row.request.stop and not done[index]:
                text = self._tokenizer.decode(input_ids[index, self._width :], skip_special_tokens=True)
                done[index] = any(stop in text for stop in row.request.stop)
        return torch.tensor(done, device=input_ids.device)


def _end(
    request: _Request, response: list[int], tokenizer: Any, end_ids: set[int]
) -> tuple[int, str, str | None]:
    """Length of a response, why it ended, and the stop string that did it."""
    limit = min(len(response), request.max_tokens)
    for index, token in enumerate(response[:limit]):
        if token in end_ids:
            return index + 1, "stop", None
        if request.stop:
            text = tokenizer.decode(response[: index + 1], skip_special_tokens=True)
            found = next((stop for stop in request.stop if stop in text), None)
            if found is not None:
                return index + 1, "stop", found
    return limit, "length", None
