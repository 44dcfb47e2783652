"""Who drives the engines: coroutines live on a loop in a helper thread, in-process engines compute on the main one.

Engine and trainer share one thread on purpose: with two pools of OpenMP threads generation on a CPU loses a third of
its speed. While the main thread pumps the engines, the loop stays free for workflows, rewards and HTTP clients.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from trinity_lightning.explorer.models.in_process import InProcessEngine

logger = logging.getLogger(__name__)
T = TypeVar("T")

SIGNAL_CHECK_SECONDS = 0.5
CANCEL_SECONDS = 30.0


class Host:
    """Runs coroutines to their end while it pumps the in-process engines that they wait for.

    Args:
        engines: the in-process engines to drive; others need no driving.
        interrupted: asked between steps; an exception that it returns stops what runs (SIGTERM, say).
    """

    def __init__(
        self,
        engines: Sequence[InProcessEngine] = (),
        interrupted: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        self._engines = list(engines)
        self._interrupted = interrupted
        self._wake = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()
        for engine in self._engines:
            engine.attach(self._wake.set)

    def run(self, coroutine: Coroutine[Any, Any, T], interruptible: bool = True) -> T:
        """The coroutine's result. An exception of its own is raised here.

        Ctrl-C and `interrupted` cancel the coroutine, let it clean up (cancelled requests are aborted in their
        engines), and are raised then; where it came to its end all the same, `interrupted` waits for the next run.
        """
        return self.wait(self.start(coroutine), interruptible)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> "Job[T]":
        """Let the coroutine run while the main thread does something else: it must not need an in-process engine."""
        return Job(self._loop, coroutine, self._wake.set)

    def wait(self, job: "Job[T]", interruptible: bool = True, limit: float = math.inf) -> T:
        """The result of what `start` began; as `run`. TimeoutError, and it is cancelled, after `limit` seconds."""
        deadline = time.monotonic() + limit
        try:
            while not job.done:
                self._pump(job)
                if not job.done and time.monotonic() > deadline:
                    raise TimeoutError(f"not done within {limit:g} s")
                if interruptible and not job.done and (reason := self._interrupted()) is not None:
                    self.cancel(job)
                    if not job.succeeded:
                        raise reason
        except BaseException:
            self.cancel(job)
            raise
        finally:
            for engine in self._engines:
                engine.run_commands()  # aborts that were posted last
        return job.result()

    def close(self) -> None:
        """Cancel what still runs, stop the loop, and let the engines step themselves again; twice is allowed."""
        if not self._thread.is_alive():
            return
        self.run(_cancel_others(), interruptible=False)
        for engine in self._engines:
            engine.detach()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _pump(self, job: "Job[Any]") -> None:
        self._wake.clear()  # before looking: what happens from here on sets it again
        worked = [engine.pump() for engine in self._engines]
        if not any(worked) and not job.done:
            self._wake.wait(SIGNAL_CHECK_SECONDS)

    def cancel(self, job: "Job[Any]") -> None:
        """Cancel what `start` began, and wait for the end of its clean-up; nothing happens where it is done."""
        if job.done:
            return
        job.cancel()
        deadline = time.monotonic() + CANCEL_SECONDS
        while not job.done:
            self._pump(job)
            if time.monotonic() > deadline:
                logger.warning("a cancelled coroutine did not end within %g s and is left to itself.", CANCEL_SECONDS)
                return
        job.report()


class Job(Generic[T]):
    """A coroutine running on a loop in another thread; unlike a concurrent future it is done only once cleaned up."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], wake: Callable[[], None]):
        self.done = False
        self._loop = loop
        self._wake = wake
        self._task: asyncio.Task[T] | None = None
        loop.call_soon_threadsafe(self._start, coroutine)

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._finish)

    def _finish(self, _: asyncio.Task[T]) -> None:
        self.done = True
        self._wake()

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(lambda: self._task.cancel() if self._task else None)

    def result(self) -> T:
        if self._task is None:
            raise RuntimeError("the coroutine has not been started")
        return self._task.result()

    @property
    def succeeded(self) -> bool:
        """Whether there is a result, cancelled in time or not."""
        return self.done and self._task is not None and not self._task.cancelled() and self._task.exception() is None

    def report(self) -> None:
        """Log what a cancelled coroutine raised while it cleaned up: another exception is on its way to the caller."""
        if self._task is not None and not self._task.cancelled() and (error := self._task.exception()) is not None:
            logger.warning("a cancelled coroutine failed: %s: %s", type(error).__name__, error)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CANCEL_SECONDS)
