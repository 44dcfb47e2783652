"""A model as one run of a task sees it: every call has the run's seed and the task's sampling settings."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.inference import Completion, InferenceModel
from trinity_lightning.common.seeds import rollout_seed
from trinity_lightning.config.schema import DEFAULT_TEMPERATURE, check_trained_sampling
from trinity_lightning.errors import RolloutError
from trinity_lightning.explorer.models.openai_api import ChatCompletions, OpenAIModel, async_client, blocking_client
from trinity_lightning.explorer.tasks.task import prompt_text_of

# -- calls through OpenAI's client, as experiences ---------------------------------------------------------------------


class History:
    """An Experience a response, in the order in which the calls ended, with the engine's own tokens.

    Call i has `eid.step` i; its n responses are runs `run`, `run + 1`, ..., as they would be had each been asked for
    alone.

    Args:
        run: of the first response of a call.
    """

    def __init__(self, run: int) -> None:
        self._run = run
        self._calls = 0
        self._experiences: list[Experience] = []

    def record(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        temperature: float,
        completions: Sequence[Completion],
    ) -> None:
        """Keep what came of a call."""
        for i, completion in enumerate(completions):
            self._experiences.append(
                Experience(
                    eid=EID(run=self._run + i, step=self._calls),
                    tokens=[*completion.prompt_token_ids, *completion.token_ids],
                    prompt_length=len(completion.prompt_token_ids),
                    logprobs=list(completion.logprobs),
                    truncate_status="response_truncated" if completion.finish_reason == "length" else None,
                    info={"finish_reason": completion.finish_reason, "temperature": temperature},
                    prompt_text=prompt_text_of(messages),
                    response_text=completion.text,
                    messages=messages,
                    tools=tools,
                )
            )
        self._calls += 1

    def set_reward(self, reward: float, metrics: Mapping[str, float] | None = None) -> None:
        """What the run was worth: the reward of every call kept that has none yet, and metrics of the last of them."""
        unrewarded = [experience for experience in self._experiences if experience.reward is None]
        for experience in unrewarded:
            experience.reward = float(reward)
        if unrewarded and metrics:
            unrewarded[-1].metrics |= metrics

    def extract(self, clear: bool = True) -> list[Experience]:
        """The experiences kept; they are forgotten unless `clear` is false."""
        kept = list(self._experiences)
        if clear:
            self._experiences.clear()
        return kept


# -- the model ---------------------------------------------------------------------------------------------------------


T = TypeVar("T")


class BoundModel:
    """An InferenceModel that fills in what a run's calls have in common. Made for every run and every retry, so
    that a retry draws the same samples.

    Attributes:
        enable_history: calls through OpenAI's client are kept, always: `extract_experience_from_history`.

    Args:
        model: the model that generates.
        run_seed: seed of all rollouts.
        batch, task, run: which run this is; seeds follow from them and from the number of calls before.
        sampling: settings that a call does not give itself; None values leave the engine's default.
        trained: whether its samples are trained on, so that they must come from the policy's whole distribution.
    """

    enable_history = True

    def __init__(
        self,
        model: InferenceModel,
        *,
        run_seed: int,
        batch: int | str,
        task: int | str,
        run: int,
        sampling: Mapping[str, Any] | None = None,
        trained: bool = False,
    ) -> None:
        self._model = model
        self._trained = trained
        self._temperatures: set[float] = set()
        self._identity = (run_seed, batch, task)
        self._run = run
        self._sampling = dict(sampling or {})
        self._turn = 0
        self._oldest_version: int | None = None
        self._client: Any = None
        self._blocking: BlockingModel | None = None
        self._history = History(run)
        self._completions = ChatCompletions(self, self._sampling, self._keep)

    @property
    def model_version(self) -> int:
        """The version of the present weights."""
        return self._model.model_version

    @property
    def used_version(self) -> int:
        """The oldest version that a call was begun with, so that a lag is never understated; the present one before."""
        return self.model_version if self._oldest_version is None else self._oldest_version

    @property
    def used_temperature(self) -> float | None:
        """The sampling temperature of all calls so far; None where they differ."""
        used = self._temperatures or {_temperature(self._sampling)}
        return next(iter(used)) if len(used) == 1 else None

    @property
    def max_model_len(self) -> int:
        """Longest prompt and response together, in tokens."""
        return self._model.max_model_len

    async def generate(self, prompt: Sequence[int] | str, n: int = 1, **sampling: Any) -> list[Completion]:
        """n completions of one prompt; see `InferenceModel.generate`."""
        return await self._model.generate(prompt, n=n, **self._next_call(sampling))

    async def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        n: int = 1,
        **sampling: Any,
    ) -> list[Completion]:
        """n completions of a conversation; see `InferenceModel.chat`."""
        return await self._model.chat(messages, tools=tools, n=n, **self._next_call(sampling))

    async def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        so_far: Sequence[int] = (),
    ) -> list[int]:
        """Token ids of a conversation; see `InferenceModel.render`."""
        return await self._model.render(messages, tools, so_far)

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every token but the first; see `InferenceModel.logprobs`."""
        return await self._model.logprobs(token_ids)

    def get_openai_async_client(self) -> Any:
        """An `openai.AsyncOpenAI` whose calls are this run's: with its seed and sampling settings, and kept.

        A workflow that returns no experiences of its own has those of these calls: `set_reward` says what they were
        worth. See `InferenceModel.get_openai_async_client`.
        """
        if self._client is None:
            self._client = async_client(self.openai_answer)
        return self._client

    def get_openai_client(self) -> Any:
        """An `openai.OpenAI` for code that the workflow runs in threads (`asyncio.to_thread`); its calls are kept too.

        On the event loop itself its calls are refused: RuntimeError.
        """
        if self._blocking is None:
            self._blocking = BlockingModel(self)
        return self._blocking.get_openai_client()

    async def openai_answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of the response to a request of OpenAI's API."""
        if isinstance(self._model, OpenAIModel):  # it tells no tokens to keep
            return await self._model.answer(path, self._next_call(body) if body else body)
        return await self._completions.answer(path, body)

    def set_reward(self, reward: float, metrics: Mapping[str, float] | None = None) -> None:
        """What the calls through OpenAI's client were worth: each of those made so far that has no reward gets this.

        Args:
            reward: of the run, or of what was done since the last reward.
            metrics: numbers to be logged.
        """
        self._history.set_reward(reward, metrics)

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """The calls through OpenAI's client as experiences, for a workflow that changes them before it returns them.

        Args:
            clear_history: forget them here.
        """
        return self._history.extract(clear_history)

    async def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Refused: RuntimeError. A run must not change the model that others generate with."""
        raise RuntimeError("a workflow must not change the model's weights: the explorer syncs them between steps")

    async def shutdown(self) -> None:
        """Refused: RuntimeError. The model belongs to the explorer."""
        raise RuntimeError("a workflow must not shut the model down: other runs generate with it")

    def close(self) -> None:
        """The run is over: cancel the calls that its threads wait for, and refuse new ones."""
        if self._blocking is not None:
            self._blocking.close()

    def _keep(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        settings: dict[str, Any],
        completions: list[Completion],
    ) -> None:
        temperature = _temperature({**self._sampling, **settings})
        self._history.record(messages, tools, temperature, completions)

    def _next_call(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        settings = {name: value for name, value in {**self._sampling, **sampling}.items() if value is not None}
        if self._trained:
            check_trained_sampling(settings)
        self._temperatures.add(_temperature(settings))
        settings.setdefault("seed", rollout_seed(*self._identity, turn=self._turn, run=self._run))
        self._turn += 1
        self._oldest_version = min(self.used_version, self.model_version)
        return settings


def _temperature(settings: Mapping[str, Any]) -> float:
    value = settings.get("temperature")
    return DEFAULT_TEMPERATURE if value is None else float(value)


class BlockingModel:
    """The same model for code that runs in a thread: methods block until the event loop has the result.

    Made on the event loop. `close()` cancels the calls in flight, which aborts their requests, and refuses new ones.

    Attributes:
        enable_history: see `BoundModel`.
    """

    enable_history = True

    def __init__(self, model: BoundModel) -> None:
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._lock = threading.Lock()
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._closed = False

    @property
    def model_version(self) -> int:
        """The version of the present weights."""
        return self._model.model_version

    @property
    def max_model_len(self) -> int:
        """Longest prompt and response together, in tokens."""
        return self._model.max_model_len

    def generate(self, prompt: Sequence[int] | str, n: int = 1, **sampling: Any) -> list[Completion]:
        """n completions of one prompt; see `InferenceModel.generate`."""
        return self._wait(lambda: self._model.generate(prompt, n, **sampling))

    def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        n: int = 1,
        **sampling: Any,
    ) -> list[Completion]:
        """n completions of a conversation; see `InferenceModel.chat`."""
        return self._wait(lambda: self._model.chat(messages, tools, n, **sampling))

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every token but the first; see `InferenceModel.logprobs`."""
        return self._wait(lambda: self._model.logprobs(token_ids))

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        so_far: Sequence[int] = (),
    ) -> list[int]:
        """Token ids of a conversation; see `InferenceModel.render`."""
        return self._wait(lambda: self._model.render(messages, tools, so_far))

    def get_openai_client(self) -> Any:
        """An `openai.OpenAI` whose calls block, and are kept; see `BoundModel.get_openai_async_client`."""
        return blocking_client(lambda path, body: self._wait(lambda: self._model.openai_answer(path, body)))

    def get_openai_async_client(self) -> Any:
        """An `openai.AsyncOpenAI` for an event loop of the thread's own, whose calls are kept."""

        async def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            future = self._submit(lambda: self._model.openai_answer(path, body))
            try:
                return await asyncio.wrap_future(future)
            finally:
                self._forget(future)

        return async_client(answer)

    def set_reward(self, reward: float, metrics: Mapping[str, float] | None = None) -> None:
        """What the calls through OpenAI's client were worth; see `BoundModel.set_reward`."""
        self._model.set_reward(reward, metrics)

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """The calls through OpenAI's client; see `BoundModel.extract_experience_from_history`."""
        return self._model.extract_experience_from_history(clear_history)

    def close(self) -> None:
        """The run is over: cancel the calls in flight and refuse new ones."""
        with self._lock:
            self._closed = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def _wait(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        future = self._submit(call)
        try:
            return future.result()
        finally:
            self._forget(future)

    def _submit(self, call: Callable[[], Coroutine[Any, Any, T]]) -> "concurrent.futures.Future[T]":
        if threading.get_ident() == self._loop_thread:
            raise RuntimeError(
                "the event loop would wait for itself: call the model in run(), not in the constructor, and in an "
                "`async def run` await it, or use asyncio.to_thread"
            )
        with self._lock:
            if self._closed:
                raise RolloutError("the run is over (cancelled, or timed out): the model takes no more calls from it")
            future = asyncio.run_coroutine_threadsafe(call(), self._loop)
            self._calls.add(future)
        return future

    def _forget(self, future: "concurrent.futures.Future[Any]") -> None:
        with self._lock:
            self._calls.discard(future)
