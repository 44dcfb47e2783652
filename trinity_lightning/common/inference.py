"""The protocol of a model that generates for the explorer, and its answer, a `Completion`."""

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from trinity_lightning.config.engines import Capabilities
from trinity_lightning.errors import ReadOnlyError

# Versions of the weights that sampled a response: spans (start, version) in the order of their starts.
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled response, with its exact token ids: training uses them, never a text that is tokenized again.

    Attributes:
        prompt_token_ids: the prompt as the engine saw it, [prompt].
        token_ids: sampled tokens, end-of-sequence token included, [response].
        logprobs: natural log-probability of each sampled token under the distribution it was sampled from, [response].
        text: the response as it was written, for rewards to judge. It includes the model's own markers, and the stop
            string if one ended it, but no end tokens. `sampling.skip_special_tokens=True` leaves the markers out, and
            `sampling.include_stop_str_in_output=False` the stop string. Engines return a `Response` here: see
            `common.thoughts`.
        finish_reason: "stop" (end token or stop string), "length" (token limit), or "abort".
        stop_reason: the stop string or stop token id that ended it, if one did.
        versions: versions of the weights that sampled it, as spans (start in the response, version). The first start
            is 0, starts ascend, and no two spans in a row have the same version. Empty if nobody says them.
    """

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    finish_reason: str | None
    stop_reason: str | int | None = None
    versions: Spans = ()


def _refuse_writing(completion: Completion, name: str, value: object = None) -> None:
    """Raise a ReadOnlyError that says what to do, which the dataclass's own error does not."""
    fix = "what is known of a rollout goes into the Experience that the workflow makes of it, such as reward and info"
    if name in Completion.__dataclass_fields__:
        fix = f"dataclasses.replace(completion, {name}=...) makes another one"
    raise ReadOnlyError(f"'{name}' of a Completion cannot be set, it is what the model said: {fix}.")


Completion.__setattr__ = Completion.__delattr__ = _refuse_writing  # type: ignore[method-assign,assignment]


def joined_spans(parts: Iterable[tuple[int, Spans]]) -> Spans:
    """Spans of a response that has several parts, in their order; () if nobody says the versions of a part.

    Args:
        parts: for each part, the place of its first token in the response, and its own spans.
    """
    joined: list[tuple[int, int]] = []
    for offset, spans in parts:
        if not spans:
            return ()
        for start, version in spans:
            if joined and joined[-1][0] == offset + start:  # the part before has no tokens
                joined.pop()
            if not joined or joined[-1][1] != version:
                joined.append((offset + start, version))
    return tuple(joined)


@dataclass
class Progress:
    """A view of a call of `generate` under way, for who made it. An engine that gives none leaves it as it is made.

    Attributes:
        written: returns the samples so far, without their text; those that go on have no finish_reason. [] if nothing
            is known. Called on the thread that drives the engines.
    """

    written: Callable[[], list[Completion]] = list


# The view that the caller of `generate` wants to have of its call.
PROGRESS: ContextVar[Progress | None] = ContextVar("PROGRESS", default=None)


@runtime_checkable
class InferenceModel(Protocol):
    """A model that generates. Workflows never see which engine it is.

    `sampling` keywords have the names of vLLM's SamplingParams: temperature, max_tokens, stop, seed, top_p, ...
    Cancelling an awaiting call aborts its request in the engine.
    """

    @property
    def model_version(self) -> int:
        """Number of the weight sync that the present weights came with; 0 before the first."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens that a prompt and its response may have together."""
        ...

    async def generate(self, prompt: Sequence[int] | str, n: int = 1, **sampling: Any) -> list[Completion]:
        """n completions of one prompt (token ids, or text to tokenize).

        Raises:
            PromptTooLongError: the prompt leaves no room for one token.
        """
        ...

    async def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, n: int = 1, **sampling: Any
    ) -> list[Completion]:
        """n completions of a conversation rendered with the model's chat template; errors as in `generate`.

        The model that a workflow is given, and the built-in engines, also take `images`: pictures that `read_picture`
        reads, each of which has a place in the messages or comes before the first user's text.
        """
        ...

    async def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, so_far: Sequence[int] = ()
    ) -> list[int]:
        """Token ids of a conversation up to the model's next answer: a prompt for `generate`.

        Args:
            messages: the conversation; with `so_far`, only what follows it.
            tools: functions on offer, as OpenAI's API describes them.
            so_far: exact token ids of the conversation up to the end of the model's last response. The result begins
                with them: the model's own text is never tokenized again.

        Raises:
            ConfigError: the chat template refuses the messages.
        """
        ...

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability, at temperature 1, of each token given those before it; the first has none: [len - 1]."""
        ...

    async def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over the trainer's weights, under Hugging Face checkpoint names; then `model_version == version`.

        Raises:
            WeightSyncError: a name is missing, unknown, or has the wrong shape; the engine was not touched.
        """
        ...

    def get_openai_async_client(self) -> Any:
        """An `openai.AsyncOpenAI` whose chat completions come from this model.

        Raises:
            ConfigError: the package openai is not installed.
        """
        ...

    async def shutdown(self) -> None:
        """Free the engine's memory and processes; calling it twice is allowed."""
        ...


@runtime_checkable
class HeldModel(InferenceModel, Protocol):
    """An `InferenceModel` that the run itself starts: an engine of the policy, or an auxiliary model.

    Attributes:
        capabilities: abilities that a run may ask for.
    """

    capabilities: Capabilities

    @property
    def restarts(self) -> int | None:
        """Number of times that it died and was started again; None if it cannot die alone."""
        ...

    async def load(self) -> None:
        """Load or start the model, once; otherwise the first request does."""
        ...
