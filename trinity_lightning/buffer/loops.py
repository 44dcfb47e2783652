"""Awaiting from ordinary code, on a loop in another thread or on none."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

WAIT_SECONDS = 60.0


def run_on_loop(
    function: Callable[[], Coroutine[Any, Any, T]], loop: asyncio.AbstractEventLoop | None, wait: float = WAIT_SECONDS
) -> T:
    """What the coroutine function returns: run on `loop` where that runs in another thread, else on a loop of its own.

    Raises:
        TimeoutError: it took longer than `wait` seconds on a loop in another thread.
    """
    if loop is not None and loop.is_running() and loop is not _own_loop():
        return asyncio.run_coroutine_threadsafe(function(), loop).result(wait)
    # In a thread, as the present one may have a running loop: a notebook's has.
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(lambda: asyncio.run(function())).result()


def _own_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
