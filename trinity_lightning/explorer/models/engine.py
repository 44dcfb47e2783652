"""What an engine of the policy is, and what engines that compute in this process have in common."""

import asyncio
import logging
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from trinity_lightning.common.inference import Completion
from trinity_lightning.common.thoughts import Markers, Response, markers_of, opens_thoughts
from trinity_lightning.config.engine import ENGINE_ARGS, Capabilities, engine_arguments
from trinity_lightning.config.run import TrainConfig
from trinity_lightning.config.signatures import made_at_start
from trinity_lightning.errors import PromptTooLongError, RolloutError
from trinity_lightning.explorer.models.chat import render_chat
from trinity_lightning.explorer.models.turns import encode_text, end_tokens
from trinity_lightning.sync.stream import Shape, WeightStream, check_shapes

logger = logging.getLogger(__name__)


class Engine(ABC):
    """Base of the engines that hold the policy: an `InferenceModel` that takes weights.

    One of your own is a subclass in a module that Python finds, chosen by engine.name=my_module.MyEngine. It is made
    as `MyEngine(model, config)`, of the policy's name and the run's `EngineConfig`. What its constructor takes beside
    these are arguments of its own, `engine.args`; if it takes none, it may read them in `config.args`. What is heavy
    waits for `load`. It implements

    - `load` and `shutdown`, and has a `tokenizer` and a `dtype`;
    - `_completions`: n responses with their exact tokens, each token with its log-probability in the distribution that
      it was drawn from (temperature applied), and why it ended; their text is made of the tokens by `generate`, in
      place of any that they have. `sampling` has names of vLLM's SamplingParams, and no None. Of a run's
      rollouts it always has `seed`, `temperature` and `max_tokens`, and the others that `sampling` of the configuration
      sets; a call of `generate` by hand may leave out any. Sample i is drawn with `seed` + i, independently of other
      requests. A response ends with the first of `end_tokens` (unless `ignore_eos` is set), which is its last token;
    - `_logprobs`: of every token but the first, given those before it, at temperature 1;
    - `weight_shapes` and `_take`: the weights that it wants, by their names in a Hugging Face checkpoint, a tied head
      as a tensor of its own, and taking them. What the old ones have computed is forgotten, and `_model_version` is
      set together with the new ones. With `shares_weights` nothing is sent: `bind` gives the engine the model that is
      trained, `_take` has the version to set, and `weight_shapes` is not read, but has to be there ({}, say).

    The coroutines run on one event loop, in a thread of its own, on which many requests wait at once: long computations
    belong in a thread, or in an `InProcessEngine`. `bind`, `attach`, `detach`, `pump` and `run_commands` are called by
    the main thread, which also trains, but never while it pumps. The caller does not switch modes: the bound model is
    in training mode, with gradients enabled. An engine that computes with it sets evaluation mode and `torch.no_grad`
    itself, and puts back what it found.

    Whether weights arrive is proven with `logprobs` of a fixed text. The drill, once a run, sends perturbed weights;
    the probe, after the first sync and every synchronizer.check_interval syncs, follows the trainer's own. Each time
    they must be the trainer's log-probabilities within the rounding of `dtype`: an engine that gives constants, or
    keeps its first weights, stops the run. With `shares_weights` there is a probe and no drill.
    """

    # What else it can do; see `Capabilities`.
    capabilities = Capabilities()
    # Whether it rounds the weights that it is sent further than to its dtype: engine.args.quantization.
    quantized = False
    # The model's settings of generation, set by `load`: its end tokens count beside the tokenizer's and the template's.
    generation_config: Any = None
    # How often it died and was started again; None: it cannot die alone.
    restarts: int | None = None
    # What opens and closes the model's thoughts (`model.thoughts`); None: the field's, and what its tokenizer has.
    thoughts: Markers | None = None

    @classmethod
    def of_run(cls, config: TrainConfig, folder: Path) -> "Sequence[Engine]":
        """The engines of a run: one, unless several processes of it generate.

        Args:
            config: the run's.
            folder: the run's.
        """
        given, args = engine_arguments(cls, config.model.name, config.engine)
        engine = made_at_start(f"engine '{config.engine.name}'", cls, args, ENGINE_ARGS, given)
        if not hasattr(engine, "_max_model_len"):  # it does not call `Engine.__init__`, as a dataclass does not
            engine._max_model_len = config.engine.max_model_len
        return [engine]

    _max_model_len: int
    _warned_of_room = False
    _model_version = 0

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len

    # -- what workflows see, of which `InferenceModel` says more -------------------------------------------------------

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
        """Tokens that end a response, the same for every engine and for training; see `turns.TurnEnd`."""
        return end_tokens(self.tokenizer, self.generation_config)

    async def generate(self, prompt: Sequence[int] | str, n: int = 1, **sampling: Any) -> list[Completion]:
        await self.load()
        token_ids = encode_text(self.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
        self._check_room(len(token_ids), sampling.get("max_tokens"))
        chosen = {name: value for name, value in sampling.items() if value is not None}
        completions = await self._completions(token_ids, n, chosen)
        tokenizer = self.tokenizer
        markers = markers_of(tokenizer) if self.thoughts is None else (self.thoughts,)
        return [replace(one, text=written_text(tokenizer, one, chosen, markers)) for one in completions]

    async def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, n: int = 1, **sampling: Any
    ) -> list[Completion]:
        return await self.generate(await self.render(messages, tools), n, **sampling)

    async def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, so_far: Sequence[int] = ()
    ) -> list[int]:
        await self.load()
        return render_chat(self.tokenizer, messages, tools, so_far, self.generation_config)

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Temperature-1 log-probability of every token but the first; see `InferenceModel.logprobs`."""
        await self.load()
        self._check_room(len(token_ids))
        return await self._logprobs(list(token_ids))

    def get_openai_async_client(self) -> Any:
        from trinity_lightning.explorer.models.openai_api import ChatCompletions, async_client

        return async_client(ChatCompletions(self).answer)

    async def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        await self.load()
        stream = WeightStream.of(named_tensors)
        if not self.capabilities.shares_weights:
            check_shapes(stream.shapes, self.weight_shapes)
        await self._take(stream, version)

    # -- what some engines do: nothing by default ---------------------------------------------------------------------

    def bind(self, model: Any) -> None:  # noqa: B027
        """Called before `load` with the Hugging Face model that is trained: for engines that generate with it."""

    async def sleep(self) -> None:  # noqa: B027
        """Give the memory that is shared with the trainer to it, until `wake_up`."""

    async def wake_up(self) -> None:  # noqa: B027
        """Take it again: with the weights as they were, and an empty cache."""

    def attach(self, wake: Callable[[], None]) -> None:  # noqa: B027
        """From now on `pump` is called; `wake`, from any thread, says that there is something to do."""

    def detach(self) -> None:  # noqa: B027
        """From now on `pump` is not called."""

    def pump(self) -> bool:
        """Do a piece of what has to be done on the thread that drives the engines; whether there was any."""
        return self.run_commands()

    def run_commands(self) -> bool:
        """Of that, what takes no time: start, abort, take weights; whether there was any."""
        return False

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

    def _check_room(self, prompt: int, max_tokens: int | None = None) -> None:
        """PromptTooLongError if there is no room for one token; a warning, once, if there is less than asked for."""
        room = self.max_model_len - prompt
        if room >= max(max_tokens or 1, 1):
            return
        if room <= 0:
            raise PromptTooLongError(
                f"the prompt has {prompt} tokens, and the model's context of {self.max_model_len} leaves no room for a "
                "response. Raise engine.max_model_len, or drop such tasks."
            )
        if not self._warned_of_room:
            logger.warning(
                "a prompt of %d tokens leaves room for %d of the %d response tokens asked for (said once): raise "
                "engine.max_model_len (%d), or lower max_tokens.",
                *(prompt, room, max_tokens, self.max_model_len),
            )
        self._warned_of_room = True


class LoadedEngine(Engine):
    """Base of the built-in engines: `load` sets what workflows and weight syncs ask for."""

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


_CONTEXT = 32  # tokens of the prompt that a response is decoded behind


def response_text(
    tokenizer: Any,
    prompt: Sequence[int],
    written: Sequence[int],
    *,
    skip_special_tokens: bool = False,
    markers: Sequence[Markers] | None = None,
) -> Response:
    """The text of a response as it follows its prompt: SentencePiece decodes a first word without its space.

    The model's own markers, such as those of thoughts and tool calls, are in it. End tokens, padding and the token that
    begins texts are not.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt, written: token ids.
        skip_special_tokens: leave all special tokens out.
        markers: of the model's thoughts; None: the field's, and what the tokenizer has.
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
    """The text of a completion that rewards, environments and tool parsers judge: what the policy wrote.

    It ends with the stop string (or the stop token of `sampling.stop_token_ids`) that ended it, if one did.

    Args:
        tokenizer, markers: as for `response_text`.
        completion: its tokens, and why it ended.
        sampling: its settings. `skip_special_tokens=True` leaves the model's markers out, and
            `include_stop_str_in_output=False` what stopped it.
    """
    skip = bool(sampling.get("skip_special_tokens"))
    read = partial(response_text, tokenizer, completion.prompt_token_ids, skip_special_tokens=skip, markers=markers)
    written, stop = completion.token_ids, completion.stop_reason
    shows_stop = sampling.get("include_stop_str_in_output") is not False
    if isinstance(stop, str):
        text = read(written)
        begin = text.find(stop, max(len(read(written[:-1])) - len(stop) + 1, 0))  # the last token completed it
        begin = text.rfind(stop) if begin < 0 else begin  # or one before, of several that speculation gave at once
        return text if begin < 0 else text.with_text(text[: begin + shows_stop * len(stop)])
    ended = completion.finish_reason == "stop"
    asked_for = stop is not None and stop in (sampling.get("stop_token_ids") or ())
    return read(written[:-1] if ended and not (asked_for and shows_stop) else written)


# -- engines that compute in this process ------------------------------------------------------------------------------


T = TypeVar("T")


class InProcessEngine(LoadedEngine):
    """Base of the in-process engines: queueing, waiting, cancelling, and failing without a hang.

    An engine implements `_load`, which sets what a `LoadedEngine` holds, `_add`, `_add_scoring`, `_abort`,
    `_abort_all`, `_has_work`, `_step`, `_take_weights`, `_free`: all are called by one thread, never two at once. That
    is the main thread of a run; without a `Driver` that of the event loop, on which the coroutines that wait call
    `pump` themselves.
    """

    def __init__(self, max_model_len: int) -> None:
        super().__init__(max_model_len)
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._waiting: dict[str, Future[Any]] = {}
        self._requests = 0
        self._loaded = False
        self._wake: Callable[[], None] | None = None

    # -- what coroutines wait for -------------------------------------------------------------------------------------

    async def _completions(self, token_ids: list[int], n: int, sampling: dict[str, Any]) -> list[Completion]:
        return await self._request(lambda request_id: self._add(request_id, token_ids, n, sampling))

    async def _logprobs(self, token_ids: list[int]) -> list[float]:
        return await self._request(lambda request_id: self._add_scoring(request_id, token_ids))

    async def _take(self, stream: WeightStream, version: int) -> None:
        def take() -> None:
            self._take_weights(stream)
            self._model_version = version  # in the same command: no request can come in between

        await self._on_driver(take)

    async def load(self) -> None:
        if not self._loaded:
            await self._on_driver(self._load_once)

    async def shutdown(self) -> None:
        await self._on_driver(self._free_once)

    # -- what the driver calls ----------------------------------------------------------------------------------------

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
                raise  # Ctrl-C is the driver's to handle
        return True

    def run_commands(self) -> bool:
        worked = False
        while not self._commands.empty():
            self._commands.get_nowait()()
            worked = True
        return worked

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
        self._post(lambda: self._start(request_id, add, reply))
        try:
            return await self._wait(reply)
        except asyncio.CancelledError:
            self._post(lambda: self._cancel(request_id))
            raise

    def _start(self, request_id: str, add: Callable[[str], None], reply: Future[Any]) -> None:
        if not reply.set_running_or_notify_cancel():
            return
        self._waiting[request_id] = reply
        try:
            add(request_id)
        except Exception as error:  # a refused request is its caller's, the engine goes on
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
        """The function's result, called on the driving thread."""
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
            await asyncio.sleep(0)  # first, for the others' requests to be posted: one step serves them all
            if reply.done():
                break
            self.pump()
        return await asyncio.wrap_future(reply)
