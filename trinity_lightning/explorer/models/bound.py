"""A model as one run of a task sees it: every call has the run's seed and the task's sampling settings."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.inference import Completion, InferenceModel
from trinity_lightning.common.messages import Conversation
from trinity_lightning.common.random_state import rollout_seed
from trinity_lightning.config.explorer import DEFAULT_TEMPERATURE, check_trained_sampling

if TYPE_CHECKING:
    from trinity_lightning.explorer.models.blocking import BlockingModel
    from trinity_lightning.explorer.models.openai_api import RecordedCalls


class BoundModel:
    """An InferenceModel that fills in what a run's calls have in common. Made for every run and every retry, so
    that a retry draws the same samples.

    Attributes:
        enable_history: calls through OpenAI's client are kept, always: `extract_experience_from_history`.
        max_model_len: longest prompt and response together, in tokens.

    Args:
        model: the model that generates.
        run_seed: seed of all rollouts.
        batch, task, run: which run this is; seeds follow from them and from the number of calls before.
        sampling: settings that a call does not give itself; None values leave the engine's default.
        trained: whether its samples are trained on, so that they must come from the policy's whole distribution.
        template_variables: what the chat template is given of every conversation, which may have others; None: of none,
            as the variables of a task's conversation are the policy's alone.
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
    ) -> None:
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

    @property
    def model_version(self) -> int:
        return self._model.model_version

    @property
    def used_version(self) -> int:
        """The oldest version at the start of any call, so that lag is never understated; before the first call, the
        present one.
        """
        return self.model_version if self._oldest_version is None else self._oldest_version

    @property
    def used_temperature(self) -> float | None:
        """The sampling temperature of all calls so far; None if they differ."""
        used = self._temperatures or {temperature_of(self._sampling)}
        return next(iter(used)) if len(used) == 1 else None

    async def generate(self, prompt: Sequence[int] | str, n: int = 1, **sampling: Any) -> list[Completion]:
        return await self._model.generate(prompt, n=n, **self._next_call(sampling))

    async def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, n: int = 1, **sampling: Any
    ) -> list[Completion]:
        return await self._model.chat(self._conversation(messages), tools=tools, n=n, **self._next_call(sampling))

    async def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, so_far: Sequence[int] = ()
    ) -> list[int]:
        return await self._model.render(self._conversation(messages), tools, so_far)

    def _conversation(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with the variables of the chat template that the run's conversations have."""
        conversation = Conversation.of(messages)
        if self._template_variables is None:
            return Conversation(conversation, conversation.tools)
        variables = {**self._template_variables, **conversation.template_variables}
        return Conversation(conversation, conversation.tools, variables)

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return await self._model.logprobs(token_ids)

    @property
    def _openai_calls(self) -> "RecordedCalls":
        if self._recorded is None:
            from trinity_lightning.explorer.models.openai_api import RecordedCalls  # few workflows ask for a client

            variables = self._template_variables or {}
            self._recorded = RecordedCalls(self, self._model, self._next_call, self._sampling, self._run, variables)
        return self._recorded

    def get_openai_async_client(self) -> Any:
        """An `openai.AsyncOpenAI` whose calls are this run's: with its seed and sampling settings, and kept.

        A workflow that returns no experiences of its own has those of these calls: `set_reward` says what they were
        worth. See `InferenceModel.get_openai_async_client`.
        """
        return self._openai_calls.client

    def get_openai_client(self) -> Any:
        """An `openai.OpenAI` for code that the workflow runs in threads (`asyncio.to_thread`); its calls are kept too.

        On the event loop itself its calls are refused: RuntimeError.
        """
        if self._blocking is None:
            from trinity_lightning.explorer.models.blocking import BlockingModel

            self._blocking = BlockingModel(self)
        return self._blocking.get_openai_client()

    async def openai_answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of the response to a request of OpenAI's API."""
        return await self._openai_calls.answer(path, body)

    def set_reward(self, reward: float, metrics: Mapping[str, float] | None = None) -> None:
        """What the calls through OpenAI's client that have no reward yet were worth.

        Args:
            reward: of each of them.
            metrics: numbers to be logged, of the last of them.
        """
        if self._recorded is not None:
            self._recorded.set_reward(reward, metrics or {})

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """The calls through OpenAI's client as experiences, for a workflow that changes them before it returns them."""
        return [] if self._recorded is None else self._recorded.experiences(clear_history)

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

    def _next_call(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        settings = {name: value for name, value in {**self._sampling, **sampling}.items() if value is not None}
        if self._trained:
            check_trained_sampling(settings)
        self._temperatures.add(temperature_of(settings))
        settings.setdefault("seed", rollout_seed(*self._identity, turn=self._turn, run=self._run))
        self._turn += 1
        self._oldest_version = min(self.used_version, self.model_version)
        return settings


def temperature_of(settings: Mapping[str, Any]) -> float:
    """The sampling temperature that these settings mean."""
    value = settings.get("temperature")
    return DEFAULT_TEMPERATURE if value is None else float(value)
