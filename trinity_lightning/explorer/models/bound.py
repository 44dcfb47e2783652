"""A model for one run of a task: every call has the run's seed and the task's sampling settings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.inference import Completion, InferenceModel
from trinity_lightning.common.messages import Conversation
from trinity_lightning.common.pictures.processor import PictureProcessor
from trinity_lightning.common.random_state import rollout_seed
from trinity_lightning.config.explorer import DEFAULT_TEMPERATURE, check_trained_sampling
from trinity_lightning.explorer.models.blocking import BlockingModel
from trinity_lightning.explorer.models.openai_api import ChatCompletions, OpenAIModel, async_client
from trinity_lightning.explorer.models.record import RunRecord
from trinity_lightning.explorer.workflows.workflow import experience_of


class BoundModel:
    """An `InferenceModel` that fills in the settings that all calls of a run share.

    Every run and every retry has its own `BoundModel`, so that a retry draws the same samples.

    Attributes:
        enable_history: True: calls through OpenAI's client are always recorded; see `extract_experience_from_history`.
        max_model_len: longest prompt and response together, in tokens.

    Args:
        model: the model that generates.
        run_seed: seed of all rollouts.
        batch, task, run: identify this run; seeds follow from them and from the number of calls before.
        sampling: settings for calls that do not set them; None values leave the engine's default.
        trained: True if the samples are trained on, and so must come from the policy's whole distribution.
        template_variables: variables of the chat template for every conversation; a conversation's own variables win.
            None: conversations are rendered without variables, because a task's variables are for the policy alone.
        record: keeps the calls, and answers those that an earlier process made; None: every call goes to the model.
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
        template_variables: Mapping[str, Any] | None = None,
        record: RunRecord | None = None,
    ) -> None:
        self._record = record
        self._model, self.max_model_len = model, model.max_model_len
        self._trained = trained
        self._template_variables = template_variables
        self._temperatures: set[float] = set()
        self._identity = (run_seed, batch, task)
        self._run = run
        self._sampling = dict(sampling or {})
        self._turn = 0
        self._oldest_version: int | None = None
        self._blocking: BlockingModel | None = None
        self._recorded: RecordedCalls | None = None

    # -- InferenceModel ------------------------------------------------------------------------------------------------

    @property
    def model_version(self) -> int:
        return self._model.model_version

    def check_pictures(self, experience: Experience) -> None:
        """Refuse an experience whose pictures have not as many places as states; an ExperienceError."""
        processor: PictureProcessor | None = getattr(self._model, "processor", None)  # Ray's engines are elsewhere
        if processor is not None and experience.multi_modal_inputs:
            processor.check(experience.multi_modal_inputs)

    async def generate(self, prompt: Sequence[int] | str, n: int = 1, **sampling: Any) -> list[Completion]:
        turn, settings = self._turn, self._next_call(sampling)
        if self._record is None:
            return await self._model.generate(prompt, n=n, **settings)
        return await self._recorded_answer(self._record, turn, prompt, n, settings)

    async def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        n: int = 1,
        images: Sequence[Any] = (),
        **sampling: Any,
    ) -> list[Completion]:
        conversation = self._conversation(messages)
        if images:
            conversation = conversation.with_pictures(images)
        turn, settings = self._turn, self._next_call(sampling)
        if self._record is None:
            return await self._model.chat(conversation, tools=tools, n=n, **settings)
        prompt = await self._model.render(conversation, tools)
        return await self._recorded_answer(self._record, turn, prompt, n, settings)

    async def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, so_far: Sequence[int] = ()
    ) -> list[int]:
        return await self._model.render(self._conversation(messages), tools, so_far)

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return await self._model.logprobs(token_ids)

    async def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Refuse the call with a RuntimeError: a run must not change the model that other runs generate with."""
        raise RuntimeError("a workflow must not change the model's weights: the explorer syncs them between steps")

    async def shutdown(self) -> None:
        """Refuse the call with a RuntimeError: the model belongs to the explorer."""
        raise RuntimeError("a workflow must not shut the model down: other runs generate with it")

    async def _recorded_answer(
        self, record: RunRecord, turn: int, prompt: Sequence[int] | str, n: int, settings: dict[str, Any]
    ) -> list[Completion]:
        completions = await record.answer(turn, self._model, prompt, n, settings)
        versions = [version for completion in completions for _, version in completion.versions]
        self._oldest_version = min([self.used_version, *versions])
        return completions

    def _conversation(self, messages: list[dict[str, Any]]) -> Conversation:
        """The messages with the chat template's variables of this run."""
        conversation = Conversation.of(messages)
        variables: dict[str, Any] = {}
        if self._template_variables is not None:
            variables = {**self._template_variables, **conversation.template_variables}
        return Conversation(conversation, conversation.tools, variables)

    def _next_call(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of the next call, its seed among them."""
        settings = {name: value for name, value in {**self._sampling, **sampling}.items() if value is not None}
        if self._trained:
            check_trained_sampling(settings)
        self._temperatures.add(temperature_of(settings))
        settings.setdefault("seed", rollout_seed(*self._identity, turn=self._turn, run=self._run))
        self._turn += 1
        self._oldest_version = min(self.used_version, self.model_version)
        return settings

    # -- OpenAI's client -----------------------------------------------------------------------------------------------

    def get_openai_async_client(self) -> Any:
        """An `openai.AsyncOpenAI` whose calls have the run's seed and sampling settings, and are recorded.

        A workflow that returns no experiences of its own returns these calls as experiences: `set_reward` gives them
        their reward. See `InferenceModel.get_openai_async_client`.
        """
        return self._openai_calls.client

    def get_openai_client(self) -> Any:
        """An `openai.OpenAI` for code that the workflow runs in threads (`asyncio.to_thread`); its calls are recorded.

        On the event loop itself its calls are refused: RuntimeError.
        """
        if self._blocking is None:
            self._blocking = BlockingModel(self)
        return self._blocking.get_openai_client()

    async def openai_answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of the response to a request of OpenAI's API."""
        return await self._openai_calls.answer(path, body)

    def set_reward(self, reward: float, metrics: Mapping[str, float] | None = None) -> None:
        """Reward the calls through OpenAI's client that have no reward yet.

        Args:
            reward: the reward of each such call.
            metrics: numbers to be logged with the last such call.
        """
        if self._recorded is not None:
            self._recorded.set_reward(reward, metrics or {})

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """The calls through OpenAI's client as experiences, for workflows that change and return them."""
        return [] if self._recorded is None else self._recorded.experiences(clear_history)

    @property
    def _openai_calls(self) -> "RecordedCalls":
        if self._recorded is None:
            variables = self._template_variables or {}
            self._recorded = RecordedCalls(self, self._model, self._next_call, self._sampling, self._run, variables)
        return self._recorded

    # -- for the runner ------------------------------------------------------------------------------------------------

    @property
    def used_version(self) -> int:
        """The oldest model version at the start of any call, so that lag is never understated.

        Before the first call, the present version. The versions of an answer from a record are older.
        """
        return self.model_version if self._oldest_version is None else self._oldest_version

    @property
    def used_temperature(self) -> float | None:
        """The sampling temperature of all calls so far; None if they differ."""
        temperatures = self._temperatures or {temperature_of(self._sampling)}
        return next(iter(temperatures)) if len(temperatures) == 1 else None

    def close(self) -> None:
        """Cancel the calls that threads of the run wait for, and refuse new ones."""
        if self._blocking is not None:
            self._blocking.close()


def temperature_of(settings: Mapping[str, Any]) -> float:
    """The sampling temperature that these settings mean."""
    value = settings.get("temperature")
    return DEFAULT_TEMPERATURE if value is None else float(value)


# -- the calls of a run through OpenAI's client, as experiences --------------------------------------------------------


class RecordedCalls(ChatCompletions):
    """Answers a run's requests of OpenAI's API, and keeps an Experience of each response, in the order of their ends.

    Call i has `eid.step` i. Its n responses are runs `run`, `run + 1`, ..., as if each had been asked for alone.
    Requests to an endpoint are passed on, and no experiences are kept, because an endpoint gives no tokens.

    Args:
        bound: the run's view of the model.
        model: the model itself.
        next_call: completes a call's settings by the run's.
        sampling: the run's settings.
        run: number of a call's first response.
        template_variables: variables of the chat template for every conversation; a call's own variables win.
    """

    def __init__(
        self,
        bound: InferenceModel,
        model: InferenceModel,
        next_call: Callable[[Mapping[str, Any]], dict[str, Any]],
        sampling: Mapping[str, Any],
        run: int,
        template_variables: Mapping[str, Any],
    ) -> None:
        super().__init__(bound, sampling)
        self._unbound, self._template_variables = model, template_variables
        self._endpoint = model if isinstance(model, OpenAIModel) else None
        self._next_call = next_call
        self._run = run
        self._experiences: list[Experience] = []
        self._calls = 0

    @cached_property
    def client(self) -> Any:
        """An `openai.AsyncOpenAI` whose requests come here."""
        return async_client(self.answer)

    async def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self._endpoint is not None:
            # Other requests, such as for embeddings, take no seed, and an endpoint may refuse one.
            samples = path.endswith("/completions")
            return await self._endpoint.answer(path, self._next_call(body) if samples else body)
        return await super().answer(path, body)

    async def _render(self, conversation: Conversation) -> list[int]:
        # Rendered by the model itself: the run's view would drop a call's variables for an auxiliary model.
        variables = {**self._template_variables, **conversation.template_variables}
        tools = conversation.tools or None
        return await self._unbound.render(Conversation(conversation, tools, variables), tools)

    def set_reward(self, reward: float, metrics: Mapping[str, float]) -> None:
        """Reward the experiences that have no reward yet; the metrics go to the last of them."""
        unrewarded = [experience for experience in self._experiences if experience.reward is None]
        for experience in unrewarded:
            experience.reward = float(reward)
        if unrewarded:
            unrewarded[-1].metrics |= metrics

    def experiences(self, clear: bool) -> list[Experience]:
        """The experiences so far; if `clear`, they are forgotten here."""
        experiences = list(self._experiences)
        if clear:
            self._experiences.clear()
        return experiences

    def _record(self, messages: Any, tools: Any, settings: Mapping[str, Any], completions: list[Completion]) -> None:
        info = {"temperature": temperature_of({**self._sampling, **settings})}
        for i, completion in enumerate(completions):
            eid = EID(run=self._run + i, step=self._calls)
            self._experiences.append(experience_of(completion, messages, info, eid=eid, messages=messages, tools=tools))
        self._calls += 1
