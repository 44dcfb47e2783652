"""A model without weights, whose latencies and failures a test controls, and a workflow that does what a test says."""

import asyncio
import selectors
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.inference import Completion
from trinity_lightning.common.pictures.parts import text_of
from trinity_lightning.config.engines import Capabilities
from trinity_lightning.errors import PromptTooLongError
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.explorer.models.openai_api import ChatCompletions, async_client
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflows import Workflow


class FakeModel(Engine):
    """Answers `answer(seed)` after `latency` seconds; keeps every call's settings and counts aborted requests."""

    capabilities = Capabilities(overlaps_training=True, picklable=True)
    tokenizer: Any = None  # pyright: ignore
    dtype = torch.float32  # pyright: ignore
    weight_shapes = {}  # pyright: ignore  # noqa: RUF012
    max_model_len: Any = 100  # pyright: ignore
    model_version: Any = 0  # pyright: ignore

    def __init__(self, answer: Callable[[int], str] = str, latency: float = 0.0, max_model_len: int = 100) -> None:
        super().__init__(max_model_len)
        self.answer = answer
        self.latency = latency
        self.max_model_len = max_model_len
        self.calls: list[dict[str, Any]] = []
        self.aborted = 0
        self.finish_reason = "stop"

    async def generate(self, prompt: Sequence[int] | str, n: int = 1, **sampling: Any) -> list[Completion]:
        self.calls.append({"prompt": prompt, "n": n, **sampling})
        tokens = [ord(c) for c in prompt] if isinstance(prompt, str) else list(prompt)
        if len(tokens) >= self.max_model_len:
            raise PromptTooLongError(f"the prompt has {len(tokens)} tokens, the context {self.max_model_len}")
        try:
            await asyncio.sleep(self.latency)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        return [self._completion(tokens, self.answer(sampling["seed"] + i)) for i in range(n)]

    async def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        n: int = 1,
        images: Sequence[Any] = (),
        **sampling: Any,
    ) -> list[Completion]:
        assert not images, "this model reads text alone"
        return await self.generate("\n".join(text_of(message["content"]) for message in messages), n, **sampling)

    async def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, so_far: Sequence[int] = ()
    ) -> list[int]:
        text = "\n".join(message["content"] for message in messages)
        return [*so_far, *(ord(c) for c in ("\n" if so_far else "") + text)]

    def get_openai_async_client(self) -> Any:
        return async_client(ChatCompletions(self).answer)

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    async def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.model_version = version

    async def load(self) -> None: ...

    async def shutdown(self) -> None:
        self.calls.clear()

    async def _completions(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    _logprobs = _take = _completions  # pyright: ignore

    def _completion(self, prompt: list[int], text: str) -> Completion:
        tokens = [ord(c) for c in text]
        return Completion(prompt, tokens, [-0.5] * len(tokens), text, self.finish_reason)


class Scripted(Workflow):
    """Does what `workflow_args["body"]`, an async function of the workflow, says."""

    async def run(self) -> list[Experience]:
        return await self.task.workflow_args["body"](self)


class ScriptedRepeatable(Scripted):
    """The same, for all runs at once."""

    repeatable = True


def an_experience(run: int = 0, **fields: Any) -> Experience:
    return Experience(eid=EID(run=run), tokens=[1, 2, 3], prompt_length=1, **fields)


def scripted(body: Callable[[Any], Any], workflow: type[Workflow] = Scripted, **fields: Any) -> Task:
    return Task(workflow, workflow_args={"body": body}, **fields)


async def succeed(workflow: Workflow) -> list[Experience]:
    return [an_experience()]


async def hang(workflow: Workflow) -> list[Experience]:
    await asyncio.sleep(100)
    return []


class _LeapingSelector(selectors.DefaultSelector):
    leapt = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if not timeout:
            return super().select(timeout)
        self.leapt += timeout
        return super().select(0)


class LeapingLoop(asyncio.SelectorEventLoop):
    """A loop that waits for nothing: where it would sleep, its clock leaps ahead. Without threads, that is."""

    def __init__(self) -> None:
        self._leaping = _LeapingSelector()
        super().__init__(self._leaping)

    def time(self) -> float:
        return self._leaping.leapt
