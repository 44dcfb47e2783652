"""Engines that compute in this process, on whichever thread drives them.

Coroutines post commands and await futures; the driver calls `pump()`. Where no driver is attached (a notebook, a
plain `asyncio.run`), a waiting coroutine pumps the engine itself.
"""

import asyncio
import queue
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from trinity_lightning.common.inference import Completion
from trinity_lightning.common.weights import WeightStream
from trinity_lightning.errors import RolloutError
from trinity_lightning.explorer.models.engine import Engine

T = TypeVar("T")


class InProcessEngine(Engine):
    """Base of the in-process engines: queueing, waiting, cancelling, and failing without a hang.

    An engine implements `_load`, `_add`, `_add_scoring`, `_abort`, `_abort_all`, `_has_work`, `_step`,
    `_take_weights`, `_free`: all are called on the driving thread, never at the same time.
    """

    def __init__(self, max_model_len: int) -> None:
        super().__init__(max_model_len)
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._waiting: dict[str, _Reply[Any]] = {}
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
        """Load model and tokenizer, once; the first request does it otherwise."""
        if not self._loaded:
            await self._on_driver(self._load_once)

    async def shutdown(self) -> None:
        """Free what the engine holds; calling it twice is allowed. Requests under way fail with RolloutError."""
        await self._on_driver(self._free_once)

    # -- what the driver calls ----------------------------------------------------------------------------------------

    def attach(self, wake: Callable[[], None]) -> None:
        """From now on somebody else pumps; `wake` is called (from any thread) whenever there is something to do."""
        self._wake = wake

    def detach(self) -> None:
        """From now on waiting coroutines pump."""
        self._wake = None

    def pump(self) -> bool:
        """Run the commands that wait, then one step if any request is unfinished; whether anything was done."""
        worked = self.run_commands()
        if not (self._loaded and self._has_work()):
            return worked
        try:
            for request_id, result in self._step():
                if reply := self._waiting.pop(request_id, None):
                    reply.resolve(result)
        except BaseException as error:
            self._fail_all(f"the engine failed while generating: {type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise  # Ctrl-C is the driver's to handle
        return True

    def run_commands(self) -> bool:
        """Start requests, abort requests, take weights: whatever was posted; whether anything was."""
        worked = False
        while not self._commands.empty():
            self._commands.get_nowait()()
            worked = True
        return worked

    # -- what an engine implements ------------------------------------------------------------------------------------

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

    # -- in between ---------------------------------------------------------------------------------------------------

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
        reply: _Reply[Any] = _Reply()
        self._post(lambda: self._start(request_id, add, reply))
        try:
            return await self._wait(reply)
        except asyncio.CancelledError:
            self._post(lambda: self._cancel(request_id))
            raise

    def _start(self, request_id: str, add: Callable[[str], None], reply: "_Reply[Any]") -> None:
        if reply.abandoned:
            return
        self._waiting[request_id] = reply
        try:
            add(request_id)
        except Exception as error:  # a refused request is its caller's, the engine goes on
            del self._waiting[request_id]
            reply.fail(error)

    def _cancel(self, request_id: str) -> None:
        if self._waiting.pop(request_id, None):
            self._abort(request_id)

    def _fail_all(self, reason: str) -> None:
        failed, self._waiting = self._waiting, {}
        for reply in failed.values():
            reply.fail(RolloutError(reason))
        self._abort_all()

    def _post(self, command: Callable[[], object]) -> None:
        self._commands.put(command)
        if self._wake is not None:
            self._wake()

    async def _on_driver(self, function: Callable[[], T]) -> T:
        reply: _Reply[T] = _Reply()
        self._post(lambda: reply.run(function))
        return await self._wait(reply)

    async def _wait(self, reply: "_Reply[T]") -> T:
        while self._wake is None:
            await asyncio.sleep(0)  # first, for the others' requests to be posted: one step serves them all
            if reply.future.done():
                break
            self.pump()
        return await reply.future


class _Reply(Generic[T]):
    """A future of the awaiting loop that the driving thread fills."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()

    @property
    def abandoned(self) -> bool:
        return self.future.cancelled()

    def run(self, function: Callable[[], T]) -> None:
        try:
            self.resolve(function())
        except Exception as error:
            self.fail(error)

    def resolve(self, value: T) -> None:
        self._loop.call_soon_threadsafe(lambda: self.future.done() or self.future.set_result(value))

    def fail(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(lambda: self.future.done() or self.future.set_exception(error))
