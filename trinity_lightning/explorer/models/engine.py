"""The base of the policy's engines, the text of a response, and the base of engines that compute in this process."""

import asyncio
import logging
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from trinity_lightning.common.inference import PROGRESS, Completion
from trinity_lightning.common.messages import Conversation
from trinity_lightning.common.pictures.processor import PictureProcessor, marked_as_text
from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.common.thoughts import Markers, Response, markers_of, opens_thoughts
from trinity_lightning.config.engines import ENGINE_ARGS, Capabilities, engine_arguments
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.config.signatures import made_at_start
from trinity_lightning.errors import PromptTooLongError, RolloutError, configured_at
from trinity_lightning.explorer.models.chat import check_shown, render_chat, render_text
from trinity_lightning.explorer.models.openai_api import ChatCompletions, async_client
from trinity_lightning.explorer.models.turns import encode_text, end_tokens
from trinity_lightning.sync.stream import Shape, WeightStream, check_shapes

logger = logging.getLogger(__name__)


class Engine(ABC):
    """Base of the engines that hold the policy: an `InferenceModel` that takes weights.

    To write your own, subclass it in a module that Python finds, and choose it by engine.name=my_module.MyEngine. It is
    made as `MyEngine(model, config)`, with the policy's name and the run's `EngineConfig`. Further arguments of its
    constructor are set by `engine.args`; if it has none, it may read `config.args` itself. Heavy work waits for `load`.
    It implements

    - `load` and `shutdown`, and the properties `tokenizer` and `dtype`;
    - `_completions`: n responses with their exact tokens, each token with its log-probability in the distribution that
      it was drawn from (temperature applied), and the reason why the response ended. Their text is made from the tokens
      by `generate`, which ignores any text that they have. Without `versions` they are of the weights that the engine
      had when they were asked for: an engine that goes on with them under new weights has to say their spans.
      `sampling` has names of vLLM's SamplingParams, and no None. In rollouts of a run it always has `seed`,
      `temperature` and `max_tokens`, and all else that `sampling` of the configuration sets; a call of `generate` by
      hand may leave out any. Sample i is drawn with `seed` + i, independently of other requests. A response ends with
      the first of `end_tokens` (unless `ignore_eos` is set), which is its last token;
    - `_logprobs`: the log-probability at temperature 1 of every token but the first, given the tokens before it;
    - `weight_shapes`: the shapes of the weights that it wants, by their names in a Hugging Face checkpoint, with a tied
      head as a tensor of its own;
    - `_take`: takes over new weights, forgets what the old ones computed, and sets `_model_version` together with the
      new ones. With `shares_weights` nothing is sent: `bind` gives the engine the model that is trained, `_take` sets
      the version, and `weight_shapes` is not read, but must exist ({}, say).

    The coroutines run on one event loop, in a thread of its own, on which many requests wait at once: a long
    computation belongs in a thread, or in an `InProcessEngine`. `bind`, `attach`, `detach`, `pump` and `run_commands`
    are called by the main thread, which also trains, but never while it pumps. The caller does not switch modes: the
    bound model is in training mode, with gradients enabled. An engine that computes with it sets evaluation mode and
    `torch.no_grad` itself, and restores both.

    A run proves with `logprobs` of a fixed text that weights arrive. The drill, once a run, sends perturbed weights.
    The probe checks the trainer's own weights, after the first sync and then every synchronizer.check_interval syncs.
    Each time the engine's log-probabilities must equal the trainer's within the rounding of `dtype`: an engine that
    returns constants, or keeps its first weights, stops the run. With `shares_weights` there is a probe and no drill.
    """

    # Abilities beyond generating; see `Capabilities`.
    capabilities = Capabilities()
    # True if it rounds new weights further than to its dtype (engine.args.quantization).
    quantized = False
    # The model's generation settings, set by `load`: their end tokens count beside the tokenizer's and the template's.
    generation_config: Any = None
    # Most requests that it decodes at once; None: it does not say.
    most_requests: int | None = None
    # Number of times that it died and was started again; None for an engine that dies only with the run.
    restarts: int | None = None
    # Number of tokens so far that it had to compute again, because weights came while their requests were under way.
    reprefilled_tokens = 0
    # Seconds for which the last weight sync paused its requests under way; None: it does not pause them.
    pause_seconds: float | None = None
    # Processor of a model that takes pictures, set by `load`; None: the model, or this engine, takes none.
    processor: PictureProcessor | None = None
    # Arguments of that processor (`model.processor_args`), set before `load`.
    processor_args: Mapping[str, Any] = MappingProxyType({})
    # Largest number of pictures of a prompt, set before `load`; None: it is not known.
    most_pictures: int | None = None
    # Markers around the model's thoughts (`model.thoughts`); None: the common ones, and those of its tokenizer.
    thoughts: Markers | None = None

    @classmethod
    def of_run(cls, config: TrainConfig, folder: Path) -> "Sequence[Engine]":
        """The engines of a run: one, unless several processes generate.

        Args:
            config: the run's configuration.
            folder: the run's folder.
        """
        model_and_config, args = engine_arguments(cls, config.model.name, config.engine)
        with configured_at("engine.name"):
            engine = made_at_start(f"engine '{config.engine.name}'", cls, args, ENGINE_ARGS, model_and_config)
        if not hasattr(engine, "_max_model_len"):  # its class (a dataclass, say) does not call `Engine.__init__`
            engine._max_model_len = config.engine.max_model_len
        return [engine]

    _max_model_len: int
    _warned_of_room = False
    _model_version = 0

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len

    # -- the InferenceModel that workflows see -------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Longest prompt and response together, in tokens."""
        return self._max_model_len

    @property
    def model_version(self) -> int:
        """The number of the weight sync that made the present weights; 0 before the first."""
        return self._model_version

    @property
    def end_tokens(self) -> frozenset[int]:
        """Token ids that end a response, the same for every engine and for training; see `turns.TurnEnd`."""
        return end_tokens(self.tokenizer, self.generation_config)

    async def generate(self, prompt: Sequence[int] | str, n: int = 1, **sampling: Any) -> list[Completion]:
        await self.load()
        token_ids = encode_text(self.tokenizer, prompt) if isinstance(prompt, str) else self._tokens_of(prompt)
        self._check_room(token_ids, sampling.get("max_tokens"))
        chosen = {name: value for name, value in sampling.items() if value is not None}
        present = ((0, self.model_version),)
        as_asked = {"prompt_token_ids": token_ids} if isinstance(token_ids, PicturePrompt) else {}
        return [
            self.with_text(replace(completion, versions=completion.versions or present, **as_asked), chosen)
            for completion in await self._completions(token_ids, n, chosen)
        ]

    def with_text(self, completion: Completion, sampling: Mapping[str, Any]) -> Completion:
        """The completion with the text that its tokens are, if it was drawn with these settings."""
        markers = markers_of(self.tokenizer) if self.thoughts is None else (self.thoughts,)
        return replace(completion, text=written_text(self.tokenizer, completion, sampling, markers))

    async def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        n: int = 1,
        images: Sequence[Any] = (),
        **sampling: Any,
    ) -> list[Completion]:
        if images:
            messages = Conversation.of(messages).with_pictures(images)
        return await self.generate(await self.render(messages, tools), n, **sampling)

    async def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, so_far: Sequence[int] = ()
    ) -> list[int]:
        await self.load()
        conversation = Conversation.of(messages, tools)
        pictures = conversation.pictures
        if not pictures and not isinstance(so_far, PicturePrompt):
            return render_chat(self.tokenizer, messages, tools, so_far, self.generation_config)
        render = partial(render_text, self.tokenizer, so_far=so_far, generation_config=self.generation_config)
        if pictures:
            processor = self._check_pictures()
            values = (conversation, conversation.tools, conversation.template_variables)
            rendered = render(Conversation(*(marked_as_text(value, processor.token) for value in values)))
            text = rendered.unwritten(self.tokenizer)  # which has the token of pictures in their places alone
            check_shown(text, processor.token, conversation)
            tail = await processor.pieces_of(text, pictures)
        else:
            rendered = render(conversation)
            tail = [self.tokenizer.encode(rendered.unwritten(self.tokenizer), add_special_tokens=False)]
        return PicturePrompt.joined(so_far, rendered.so_far[len(so_far) :], *tail)

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Temperature-1 log-probability of every token but the first; see `InferenceModel.logprobs`."""
        await self.load()
        self._check_room(token_ids)
        return await self._logprobs(self._tokens_of(token_ids))

    def get_openai_async_client(self) -> Any:
        return async_client(ChatCompletions(self).answer)

    async def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        await self.load()
        stream = WeightStream.of(named_tensors)
        if not self.capabilities.shares_weights:
            check_shapes(stream.all_shapes, self.weight_shapes)
        await self._take(stream, version)

    # -- hooks of some engines, which do nothing by default ------------------------------------------------------------

    def bind(self, model: Any) -> None:  # noqa: B027
        """Receive the Hugging Face model that is trained, before `load`: for engines that generate with it."""

    async def sleep(self) -> None:  # noqa: B027
        """Give the memory that is shared with the trainer to the trainer, until `wake_up`."""

    async def sleep_until_sync(self) -> bool:
        """Sleep as `sleep` does. Weights are sent before the next request: they may be given up. True if they were."""
        await self.sleep()
        return False

    async def wake_up(self) -> None:  # noqa: B027
        """Take the memory back, with an empty cache, and the weights as they were unless they were given up."""

    def attach(self, wake: Callable[[], None]) -> None:  # noqa: B027
        """Begin to be driven: `pump` is called from now on. Call `wake`, from any thread, when there is work to do."""

    def detach(self) -> None:  # noqa: B027
        """Stop being driven: `pump` is not called any more."""

    def pump(self) -> bool:
        """Do a piece of the work of the driving thread; True if there was any."""
        return self.run_commands()

    def run_commands(self) -> bool:
        """Run posted commands, which take no time (start, abort, take weights); True if there were any."""
        return False

    # -- to be implemented by an engine --------------------------------------------------------------------------------

    @abstractmethod
    async def load(self) -> None:
        """Load or start the engine, once; otherwise the first request does it."""

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
        """The dtype that it computes in."""

    @property
    @abstractmethod
    def weight_shapes(self) -> dict[str, Shape]:
        """Names and shapes of the weights that it wants to be sent."""

    @abstractmethod
    async def _completions(self, token_ids: list[int], n: int, sampling: dict[str, Any]) -> list[Completion]: ...

    @abstractmethod
    async def _logprobs(self, token_ids: list[int]) -> list[float]: ...

    @abstractmethod
    async def _take(self, stream: WeightStream, version: int) -> None:
        """Take over weights that fit, and set the engine's version together with them."""

    # -- pictures ------------------------------------------------------------------------------------------------------

    def _tokens_of(self, prompt: Sequence[int]) -> list[int]:
        """The token ids of a prompt, with its pictures if it has any; a RolloutError if none can be taken."""
        if not isinstance(prompt, PicturePrompt):
            return list(prompt)
        self._check_pictures()
        return prompt

    def _check_pictures(self) -> PictureProcessor:
        if self.processor is None:
            raise RolloutError(f"{type(self).__name__}: a prompt has pictures, and the engine or its model takes none.")
        return self.processor

    # -- limits -------------------------------------------------------------------------------------------------------

    def _check_room(self, token_ids: Sequence[int], max_tokens: int | None = None) -> None:
        """Refuse a prompt that leaves no room for one token: PromptTooLongError. Warn once of less room than asked."""
        prompt = len(token_ids)
        room = self.max_model_len - prompt
        if room >= max(max_tokens or 1, 1):
            return
        if room <= 0:
            has_pictures = isinstance(token_ids, PicturePrompt)
            fewer = "have pictures of fewer tokens (model.processor_args), " if has_pictures else ""
            raise PromptTooLongError(
                f"the prompt has {prompt} tokens, and the model's context of {self.max_model_len} leaves no room for a "
                f"response. Raise engine.max_model_len, {fewer}or drop such tasks."
            )
        if not self._warned_of_room:
            logger.warning(
                "a prompt of %d tokens leaves room for %d of the %d response tokens asked for (said once): raise "
                "engine.max_model_len (%d), or lower max_tokens.",
                *(prompt, room, max_tokens, self.max_model_len),
            )
        self._warned_of_room = True


class LoadedEngine(Engine):
    """Base of the built-in engines, whose `load` sets the values of these properties."""

    _tokenizer: Any
    _dtype: torch.dtype
    _weight_shapes: dict[str, Shape]

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return self._weight_shapes


# -- the text of a response -------------------------------------------------------------------------------------------


_CONTEXT = 32  # number of the prompt's last tokens that are decoded together with a response


def response_text(
    tokenizer: Any,
    prompt: Sequence[int],
    written: Sequence[int],
    *,
    skip_special_tokens: bool = False,
    markers: Sequence[Markers] | None = None,
) -> Response:
    """The text of a response, decoded behind its prompt, because SentencePiece drops the space before a first word.

    The model's markers stay in the text, such as those around thoughts and tool calls. End tokens, padding and BOS are
    left out.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt: its token ids.
        written: the response's token ids.
        skip_special_tokens: leave out all special tokens.
        markers: markers around the model's thoughts; None: the common ones, and those of the tokenizer.
    """
    before = list(prompt[-_CONTEXT:])
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    context = decode(before, skip_special_tokens=False)
    hidden = {*end_tokens(tokenizer), tokenizer.pad_token_id, tokenizer.bos_token_id}
    whole = decode(
        [*before, *(token for token in written if token not in hidden)], skip_special_tokens=skip_special_tokens
    )
    shown = decode(before, skip_special_tokens=True) if skip_special_tokens else context
    markers = markers_of(tokenizer) if markers is None else markers
    return Response(whole[len(shown) :], markers, opens_thoughts(context, markers))


def written_text(
    tokenizer: Any, completion: Completion, sampling: Mapping[str, Any], markers: Sequence[Markers] | None = None
) -> Response:
    """The text of a completion, which rewards, environments and tool parsers read.

    If a stop string or a token of `sampling.stop_token_ids` ended the completion, the text ends with it.

    Args:
        tokenizer, markers: as for `response_text`.
        completion: the completion; its own text is not read.
        sampling: the settings that it was drawn with. `skip_special_tokens=True` leaves out the model's markers, and
            `include_stop_str_in_output=False` the stop string or stop token.
    """
    skip = bool(sampling.get("skip_special_tokens"))
    decode = partial(response_text, tokenizer, completion.prompt_token_ids, skip_special_tokens=skip, markers=markers)
    token_ids, stop = completion.token_ids, completion.stop_reason
    shows_stop = sampling.get("include_stop_str_in_output") is not False
    if isinstance(stop, str):
        text = decode(token_ids)
        # The last token completed the stop string; or an earlier one, because speculation gives several tokens at once.
        begin = text.find(stop, max(len(decode(token_ids[:-1])) - len(stop) + 1, 0))
        begin = text.rfind(stop) if begin < 0 else begin
        return text if begin < 0 else text.with_text(text[: begin + shows_stop * len(stop)])
    ended = completion.finish_reason == "stop"
    asked_for = stop is not None and stop in (sampling.get("stop_token_ids") or ())
    return decode(token_ids[:-1] if ended and not (asked_for and shows_stop) else token_ids)


# -- engines that compute in this process ------------------------------------------------------------------------------


T = TypeVar("T")


class InProcessEngine(LoadedEngine):
    """Base of the in-process engines: queues requests, waits for results, cancels, and fails without a hang.

    An engine implements `_load`, which sets the values of a `LoadedEngine`, and `_add`, `_add_scoring`, `_abort`,
    `_abort_all`, `_has_work`, `_step`, `_take_weights` and `_free`. A single thread calls all of them: the main thread
    of a run. Without a `Driver` it is the event loop's thread, where the waiting coroutines call `pump` themselves.
    """

    def __init__(self, max_model_len: int) -> None:
        super().__init__(max_model_len)
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._waiting: dict[str, Future[Any]] = {}
        self._requests = 0
        self._loaded = False
        self._wake: Callable[[], None] | None = None

    # -- coroutines of the event loop ----------------------------------------------------------------------------------

    async def _completions(self, token_ids: list[int], n: int, sampling: dict[str, Any]) -> list[Completion]:
        return await self._request(lambda request_id: self._add(request_id, token_ids, n, sampling))

    async def _logprobs(self, token_ids: list[int]) -> list[float]:
        return await self._request(lambda request_id: self._add_scoring(request_id, token_ids))

    async def _take(self, stream: WeightStream, version: int) -> None:
        def take() -> None:
            self._take_weights(stream)
            self._model_version = version  # in the same command, so that no request comes in between

        await self._on_driver(take)

    async def load(self) -> None:
        if not self._loaded:
            await self._on_driver(self._load_once)

    async def shutdown(self) -> None:
        await self._on_driver(self._free_once)

    # -- calls of the driver -------------------------------------------------------------------------------------------

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def detach(self) -> None:
        self._wake = None

    def pump(self) -> bool:
        worked = self.run_commands()
        if not (self._loaded and self._has_work()):
            return worked
        try:
            for request_id, result in self._step():
                if reply := self._waiting.pop(request_id, None):
                    reply.set_result(result)
        except BaseException as error:
            self._fail_all(f"the engine failed while generating: {type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise  # the driver handles Ctrl-C
        return True

    def run_commands(self) -> bool:
        worked = False
        while not self._commands.empty():
            self._commands.get_nowait()()
            worked = True
        return worked

    # -- to be implemented by an engine, and called on the driving thread ----------------------------------------------

    @abstractmethod
    def _load(self) -> None: ...

    @abstractmethod
    def _add(self, request_id: str, token_ids: list[int], n: int, sampling: dict[str, Any]) -> None: ...

    @abstractmethod
    def _add_scoring(self, request_id: str, token_ids: list[int]) -> None: ...

    @abstractmethod
    def _abort(self, request_id: str) -> None: ...

    @abstractmethod
    def _abort_all(self) -> None: ...

    @abstractmethod
    def _has_work(self) -> bool: ...

    @abstractmethod
    def _step(self) -> Iterable[tuple[str, Any]]: ...

    @abstractmethod
    def _take_weights(self, stream: WeightStream) -> None: ...

    @abstractmethod
    def _free(self) -> None: ...

    def _written(self, request_id: str) -> list[Completion]:
        """The samples so far of a request under way, as in `Progress`; an engine need not know them."""
        return []

    # -- requests and replies -----------------------------------------------------------------------------------------

    def _load_once(self) -> None:
        if not self._loaded:
            self._load()
            self._loaded = True

    def _free_once(self) -> None:
        if self._loaded:
            self._fail_all("the engine was shut down")
            self._loaded = False
            self._free()

    async def _request(self, add: Callable[[str], None]) -> Any:
        self._requests += 1
        request_id = str(self._requests)
        reply: Future[Any] = Future()
        if (progress := PROGRESS.get()) is not None:
            progress.written = lambda: self._so_far(request_id, reply)
        self._post(lambda: self._start(request_id, add, reply))
        try:
            return await self._wait(reply)
        except asyncio.CancelledError:
            self._post(lambda: self._cancel(request_id))
            raise

    def _so_far(self, request_id: str, reply: Future[Any]) -> list[Completion]:
        if reply.done():
            return [] if reply.cancelled() or reply.exception() else reply.result()
        return self._written(request_id) if self._loaded else []

    def _start(self, request_id: str, add: Callable[[str], None], reply: Future[Any]) -> None:
        if not reply.set_running_or_notify_cancel():
            return
        self._waiting[request_id] = reply
        try:
            add(request_id)
        except Exception as error:  # the request is refused, and the engine goes on
            del self._waiting[request_id]
            reply.set_exception(error)

    def _cancel(self, request_id: str) -> None:
        if self._waiting.pop(request_id, None):
            self._abort(request_id)

    def _fail_all(self, reason: str) -> None:
        failed, self._waiting = self._waiting, {}
        for reply in failed.values():
            reply.set_exception(RolloutError(reason))
        self._abort_all()

    def _post(self, command: Callable[[], object]) -> None:
        self._commands.put(command)
        if self._wake is not None:
            self._wake()

    async def _on_driver(self, function: Callable[[], T]) -> T:
        """The function's result, computed on the driving thread."""
        reply: Future[T] = Future()

        def call() -> None:
            if reply.set_running_or_notify_cancel():
                try:
                    reply.set_result(function())
                except Exception as error:
                    reply.set_exception(error)

        self._post(call)
        return await self._wait(reply)

    async def _wait(self, reply: Future[T]) -> T:
        while self._wake is None:
            await asyncio.sleep(0)  # other coroutines post their requests first, so that one step serves all
            if reply.done():
                break
            self.pump()
        return await asyncio.wrap_future(reply)
