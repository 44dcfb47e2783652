"""An engine of your own: a plain Hugging Face model that answers one request after the other.

To train with it: `engine.name=my_engine.PlainEngine`, in the folder of this file; its argument is
`+engine.args.attn_implementation=eager`.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from trinity_lightning.common.inference import Completion
from trinity_lightning.config.engines import EngineConfig
from trinity_lightning.config.models import load_tokenizer, resolve_model
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.sync.stream import Shape, WeightStream


class PlainEngine(Engine):
    """Holds weights of its own, in float32, and does one forward pass for each token."""

    def __init__(self, model: str, config: EngineConfig, attn_implementation: str = "sdpa") -> None:
        super().__init__(config.max_model_len)
        self._name = model
        self._settings = {"dtype": torch.float32, "attn_implementation": attn_implementation}
        self._held: Any = None

    async def load(self) -> None:
        if self._held is None:
            held: Any = AutoModelForCausalLM.from_pretrained(resolve_model(self._name), **self._settings)
            self._held = held.eval().requires_grad_(False)

    async def shutdown(self) -> None:
        self._held = None

    @property
    def tokenizer(self) -> Any:
        return load_tokenizer(self._name)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return {name: tuple(weight.shape) for name, weight in self._weights().items()}

    def _weights(self) -> dict[str, torch.Tensor]:
        return dict(self._held.named_parameters(remove_duplicate=False))

    def _scores(self, token_ids: list[int], temperature: float) -> torch.Tensor:
        """Log-probabilities of whatever may follow each token, [tokens, vocabulary]."""
        return (self._held(torch.tensor([token_ids])).logits[0] / temperature).log_softmax(-1)

    async def _completions(self, token_ids: list[int], n: int, sampling: dict[str, Any]) -> list[Completion]:
        if unknown := sampling.keys() - {"seed", "max_tokens", "temperature"}:
            raise ConfigError(f"engine=PlainEngine has no sampling.{min(unknown)}: leave it out.")
        return [self._sample(token_ids, sampling.get("seed", 0) + i, sampling) for i in range(n)]

    def _sample(self, prompt: list[int], seed: int, sampling: dict[str, Any]) -> Completion:
        generator = torch.Generator().manual_seed(seed)
        temperature = sampling.get("temperature", 1.0)  # 0: the likeliest token
        tokens, logprobs = list[int](), list[float]()
        end, limit = self.tokenizer.eos_token_id, min(sampling["max_tokens"], self.max_model_len - len(prompt))
        while len(tokens) < limit and end not in tokens:
            scores = self._scores([*prompt, *tokens], temperature or 1.0)[-1]
            drawn = torch.multinomial(scores.exp(), 1, generator=generator) if temperature else scores.argmax()
            tokens.append(int(drawn))
            logprobs.append(float(scores[tokens[-1]]))
        return Completion(prompt, tokens, logprobs, "", "stop" if end in tokens else "length")  # the text is made later

    async def _logprobs(self, token_ids: list[int]) -> list[float]:
        following = torch.tensor(token_ids[1:])[:, None]
        return self._scores(token_ids, 1.0)[:-1].gather(-1, following)[:, 0].tolist()

    async def _take(self, stream: WeightStream, version: int) -> None:
        held = self._weights()
        for name, weight in stream:
            held[name].copy_(weight)
        self._model_version = version
