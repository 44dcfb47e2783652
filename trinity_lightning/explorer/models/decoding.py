"""Token-by-token decoding of a batch with a Hugging Face model, each sample with a generator and limits of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.common.inference import Completion


@dataclass
class Request:
    """A prompt and how its n samples are drawn; names as in vLLM's SamplingParams."""

    token_ids: list[int]
    n: int = 1
    temperature: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    stop: Sequence[str] = ()


@dataclass
class Sample:
    """One response while it grows; it has a finish reason once it has ended."""

    request: Request
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | None = None

    def completion(self) -> Completion:
        """What its caller gets."""
        return Completion(
            self.request.token_ids, self.token_ids, self.logprobs, self.text, self.finish_reason, self.stop_reason
        )


class Decoding:
    """A batch of requests, decoded together from prompts to the end of the longest response.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: its tokenizer.
        requests: by id.
    """

    def __init__(self, model: Any, tokenizer: Any, requests: Mapping[str, Request]) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._end_ids = _end_ids(model, tokenizer)
        self._open = {
            key: [Sample(request, _generator(request, i, model.device)) for i in range(request.n)]
            for key, request in requests.items()
        }
        self._rows = [sample for samples in self._open.values() for sample in samples]  # of the tensors below
        width = max(len(row.request.token_ids) for row in self._rows)
        padding = [width - len(row.request.token_ids) for row in self._rows]
        tokens = [[0] * pad + row.request.token_ids for pad, row in zip(padding, self._rows, strict=True)]
        self._tokens = torch.tensor(tokens, device=model.device)
        self._mask = (torch.arange(width) >= torch.tensor(padding)[:, None]).long().to(model.device)
        self._cache: Any = None

    def __bool__(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._open)

    def abort(self, request_id: str) -> None:
        """Decode the samples of a request no further."""
        for sample in self._open.pop(request_id, []):
            sample.finish_reason = "abort"

    def step(self) -> list[tuple[str, list[Completion]]]:
        """One more token for every sample; the requests that are finished by it."""
        tokens, logprobs = self._draw(self._forward())
        for row, token, logprob in zip(self._rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if row.finish_reason is None:
                self._extend(row, token, logprob)
        self._tokens = tokens[:, None]
        self._mask = torch.cat([self._mask, torch.ones_like(self._tokens)], dim=1)
        self._drop_ended_rows()
        finished = [key for key, samples in self._open.items() if all(s.finish_reason for s in samples)]
        return [(key, [sample.completion() for sample in self._open.pop(key)]) for key in finished]

    def _forward(self) -> Tensor:
        """Logits of the next token, float32, [rows, vocabulary]."""
        positions = (self._mask.cumsum(-1) - 1).clamp_min(0)[:, -self._tokens.shape[1] :]
        output = self._model(
            input_ids=self._tokens,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = output.past_key_values
        return output.logits[:, -1].float()

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probabilities, [rows]: argmax of log p - log(exponential noise) is a draw from p."""
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
        if token in self._end_ids:
            row.finish_reason = "stop"
        elif len(row.token_ids) >= row.request.max_tokens:
            row.finish_reason = "length"
        if row.finish_reason or row.request.stop:
            row.text = self._tokenizer.decode(row.token_ids, skip_special_tokens=True)
        found = [stop for stop in row.request.stop if stop in row.text]
        if found and token not in self._end_ids:
            row.finish_reason, row.stop_reason = "stop", min(found, key=row.text.index)
            row.text = row.text[: row.text.index(row.stop_reason)]

    def _drop_ended_rows(self) -> None:
        """Once half of the rows have ended: copying the cache at every end would cost more than it saves."""
        going_on = [index for index, row in enumerate(self._rows) if row.finish_reason is None]
        if 0 < len(going_on) <= len(self._rows) // 2:
            self._rows = [self._rows[index] for index in going_on]
            indices = torch.tensor(going_on, device=self._tokens.device)
            self._tokens, self._mask = self._tokens[indices], self._mask[indices]
            self._cache.batch_select_indices(indices)


def _generator(request: Request, sample: int, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device=device)
    if request.seed is None:
        generator.seed()
    else:
        generator.manual_seed(request.seed + sample)
    return generator


def _end_ids(model: Any, tokenizer: Any) -> set[int]:
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends)
