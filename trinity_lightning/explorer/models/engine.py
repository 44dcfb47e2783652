"""What every engine of the policy does the same way: tokenizing, chat templates, limits, and checks of weights."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from trinity_lightning.common.inference import Completion
from trinity_lightning.common.weights import Shape, WeightStream, check_shapes
from trinity_lightning.errors import PromptTooLongError
from trinity_lightning.explorer.models.chat_template import render_chat
from trinity_lightning.explorer.models.openai_client import ChatCompletions, async_client

logger = logging.getLogger(__name__)


@runtime_checkable
class Sleeper(Protocol):
    """An engine that shares its device with the trainer, and can give its memory to it."""

    async def sleep(self) -> None:
        """Give the memory to the trainer until `wake_up`."""
        ...

    async def wake_up(self) -> None:
        """Take it again: with the weights as they were, and an empty cache."""
        ...


class Engine(ABC):
    """Base of the engines that hold the policy: an `InferenceModel` that takes weights.

    An engine implements `load`, `shutdown`, `_completions`, `_logprobs` and `_take`, and tells its tokenizer,
    dtype and weights.
    """

    # Whether the engine generates with the trainer's own weights, so that there is nothing to send.
    shares_weights = False
    # Whether it rounds the weights that it is sent further than to its dtype: engine.args.quantization.
    quantized = False

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._told_of_room = False
        self._model_version = 0

    # -- what workflows see -------------------------------------------------------------------------------------------

    @property
    def model_version(self) -> int:
        """The number of the weight sync that made the present weights; 0 before the first."""
        return self._model_version

    @property
    def max_model_len(self) -> int:
        """Longest prompt and response together, in tokens."""
        return self._max_model_len

    async def generate(self, prompt: Sequence[int] | str, n: int = 1, **sampling: Any) -> list[Completion]:
        """n completions of one prompt; see `InferenceModel.generate`."""
        await self.load()
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_length(token_ids)
        self._check_room(len(token_ids), sampling.get("max_tokens"))
        return await self._completions(token_ids, n, sampling)

    async def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        n: int = 1,
        **sampling: Any,
    ) -> list[Completion]:
        """n completions of a conversation; see `InferenceModel.chat`."""
        return await self.generate(await self.render(messages, tools), n, **sampling)

    async def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        so_far: Sequence[int] = (),
    ) -> list[int]:
        """Token ids of a conversation; see `InferenceModel.render`."""
        await self.load()
        return render_chat(self.tokenizer, messages, tools, so_far)

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Temperature-1 log-probability of every token but the first; see `InferenceModel.logprobs`."""
        await self.load()
        self._check_length(token_ids)
        return await self._logprobs(list(token_ids))

    def get_openai_async_client(self) -> Any:
        """An `openai.AsyncOpenAI` over this engine; see `InferenceModel.get_openai_async_client`."""
        return async_client(ChatCompletions(self).answer)

    async def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over the trainer's weights; see `InferenceModel.sync_weights`."""
        await self.load()
        stream = WeightStream.of(named_tensors)
        if not self.shares_weights:
            check_shapes(stream.shapes, self.weight_shapes)
        await self._take(stream, version)

    # -- what an engine implements ------------------------------------------------------------------------------------

    @abstractmethod
    async def load(self) -> None:
        """Load or start the engine, once; the first request does it otherwise."""

    @abstractmethod
    async def shutdown(self) -> None:
        """Free what the engine holds; calling it twice is allowed. Requests under way fail with RolloutError."""

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """What it computes in."""

    @property
    @abstractmethod
    def weight_shapes(self) -> dict[str, Shape]:
        """Names and shapes of the weights it wants to be sent."""

    @abstractmethod
    async def _completions(self, token_ids: list[int], n: int, sampling: dict[str, Any]) -> list[Completion]: ...

    @abstractmethod
    async def _logprobs(self, token_ids: list[int]) -> list[float]: ...

    @abstractmethod
    async def _take(self, stream: WeightStream, version: int) -> None:
        """Take over weights that fit; the engine's version changes together with them."""

    # -- limits -------------------------------------------------------------------------------------------------------

    def _check_length(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) >= self._max_model_len:
            raise PromptTooLongError(
                f"prompt_truncated: the prompt has {len(token_ids)} tokens, and the model's context of "
                f"{self._max_model_len} leaves no room for a response. Raise engine.max_model_len, or drop such tasks."
            )

    def _check_room(self, prompt: int, max_tokens: int | None) -> None:
        room = self._max_model_len - prompt
        if max_tokens is not None and max_tokens > room and not self._told_of_room:
            self._told_of_room = True
            logger.warning(
                "a prompt of %d tokens leaves room for %d of the %d response tokens asked for (said once): raise "
                "engine.max_model_len (%d), or lower max_tokens.",
                prompt,
                room,
                max_tokens,
                self._max_model_len,
            )
