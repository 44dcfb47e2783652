"""A run's model for code in threads: a plain `def run`, or calls that an `async def run` makes in threads."""

import asyncio
import concurrent.futures
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from trinity_lightning.errors import RolloutError
from trinity_lightning.explorer.models.openai_api import async_client, blocking_client

if TYPE_CHECKING:
    from trinity_lightning.explorer.models.bound import BoundModel

T = TypeVar("T")


class BlockingModel:
    """A `BoundModel` for code in a thread: its coroutines are methods here that block until they have their result.

    Make it on the event loop. `close()` cancels the calls under way, which aborts their requests, and refuses new ones.
    """

    def __init__(self, model: "BoundModel") -> None:
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._lock = threading.Lock()
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy.copy asks for such names before there is a model
            raise AttributeError(f"{type(self).__name__} has no {name}")
        attribute = getattr(self._model, name)
        if not inspect.iscoroutinefunction(attribute):
            return attribute

        @functools.wraps(attribute)
        def wait(*arguments: Any, **settings: Any) -> Any:
            return self._submit(attribute, *arguments, **settings).result()

        return wait

    def get_openai_client(self) -> Any:
        """An `openai.OpenAI` whose calls block, and are recorded; see `BoundModel.get_openai_async_client`."""
        return blocking_client(lambda path, body: self._submit(self._model.openai_answer, path, body).result())

    def get_openai_async_client(self) -> Any:
        """An `openai.AsyncOpenAI` for an event loop of the thread's own, whose calls are recorded."""

        async def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            return await asyncio.wrap_future(self._submit(self._model.openai_answer, path, body))

        return async_client(answer)

    def close(self) -> None:
        """End the use of the model: cancel the calls under way, and refuse new ones."""
        with self._lock:
            self._closed = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def _submit(
        self, call: Callable[..., Coroutine[Any, Any, T]], *arguments: Any, **settings: Any
    ) -> "concurrent.futures.Future[T]":
        """Start a coroutine on the event loop. RuntimeError: this thread runs it; RolloutError: the run is over."""
        if threading.get_ident() == self._loop_thread:
            raise RuntimeError(
                "the event loop would wait for itself: call the model in run(), not in the constructor, and in an "
                "`async def run` await it, or use asyncio.to_thread"
            )
        with self._lock:
            if self._closed:
                raise RolloutError("the run is over (cancelled, or timed out): the model takes no more calls from it")
            future = asyncio.run_coroutine_threadsafe(call(*arguments, **settings), self._loop)
            self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future
