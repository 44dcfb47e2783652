"""Blocking code next to an event loop."""

import asyncio
import concurrent.futures
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_in_thread(function: Callable[[], T]) -> T:
    """The function's result, from a daemon thread of its own.

    Unlike `asyncio.to_thread`: that pool has few threads, so that workflows waiting for a model would wait for each
    other, and is joined at exit, where one that hangs would hang the program.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            outcome.set_result(function())
        except StopIteration as error:  # a future refuses to carry it
            outcome.set_exception(RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True).start()
    return await asyncio.wrap_future(outcome)


def is_async(function: Any) -> bool:
    """Whether it is a coroutine function, or an object whose call is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def call(function: Callable[..., T | Awaitable[T]], *arguments: Any) -> T:
    """The function's result: a plain one runs in a thread, and what it returns may have to be awaited."""
    if is_async(function):
        return await function(*arguments)  # type: ignore[misc]
    result = await run_in_thread(lambda: function(*arguments))
    return await result if inspect.isawaitable(result) else result  # type: ignore[return-value]
