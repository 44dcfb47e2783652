"""Runs blocking code next to an event loop, in threads."""

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

    The pool of `asyncio.to_thread` would not do: it has few threads, so that workflows waiting for a model would wait
    for each other, and it is joined at exit, where a thread that hangs would hang the program.
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
    """True for a coroutine function, and for an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def call(function: Callable[..., T | Awaitable[T]], *arguments: Any) -> T:
    """The function's result. A plain function runs in a thread; if it returns an awaitable, that is awaited here."""
    if is_async(function):
        return await function(*arguments)  # type: ignore[misc]
    result = await run_in_thread(lambda: function(*arguments))
    return await result if inspect.isawaitable(result) else result  # type: ignore[return-value]
