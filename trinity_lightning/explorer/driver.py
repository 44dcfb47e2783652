"""Drives rollouts: coroutines run on a loop in a helper thread, engines of this process compute on the main thread.

Engine and trainer share one thread on purpose: with two pools of OpenMP threads generation on a CPU loses a third of
its speed. While the main thread pumps the engines, the loop stays free for workflows, rewards and HTTP clients.
"""

import asyncio
import logging
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import FrameType
from typing import Any, Generic, TypeVar

from trinity_lightning.common.hardware import compute_on_one_thread
from trinity_lightning.config.own_code import of_a_library
from trinity_lightning.errors import WorkflowBlockedError
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.explorer.workflows.workflow import Workflow

logger = logging.getLogger(__name__)
T = TypeVar("T")

SIGNAL_CHECK_SECONDS = 0.5
CANCEL_SECONDS = 30.0  # limit for the clean-up of a cancelled coroutine
END_SECONDS = 30.0  # limit for the end of runners and engines
BLOCKED_SECONDS = 5.0  # at the end of a run, a loop that is silent for longer is left to itself
WARN_SECONDS = 10.0  # a loop that is silent for longer is logged
QUIET_TURNS = 3  # turns of the loop without a new request, after which none is about to come
TURN_SECONDS = 0.01  # limit of the wait for one turn
# Longest time that a thread keeps the interpreter while another thread waits for it; Python's default is 5 ms. The main
# thread asks for the interpreter at every operation of torch. While a reward computed in Python, the main thread waited
# 5 ms each time: a training step of 0.95 s took 8.9 s. With 0.1 ms it takes 3.3 s. The reward is no slower, and a run
# whose rewards do not compute is as fast as before.
SWITCH_SECONDS = 1e-4


class Driver:
    """Runs coroutines to their end while it pumps the in-process engines that they wait for.

    Only the main thread uses it; other threads may use `call_later`.

    Args:
        engines: the engines to drive.
        interrupted: asked between steps; an exception that it returns (for SIGTERM, say) stops the coroutine.

    Attributes:
        suspended: True while engines run commands, and do not generate: their requests rest.
    """

    def __init__(
        self, engines: Sequence[Engine] = (), interrupted: Callable[[], BaseException | None] = lambda: None
    ) -> None:
        self.suspended = False
        self._engines = list(engines)
        self._interrupted = interrupted
        self._wake = threading.Event()
        self._later: deque[Callable[[], None]] = deque()  # both ends of a deque are safe in threads
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="rollouts", daemon=True)
        self._thread.start()
        self._watch = LoopWatch(self._loop, self._thread)
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_interval, SWITCH_SECONDS))
        for engine in self._engines:
            engine.attach(self._wake.set)

    def limit_blocking(self, seconds: float, warn_after: float = WARN_SECONDS) -> None:
        """Log a loop that is blocked for `warn_after` seconds, and let `wait` raise after `seconds`."""
        self._watch.fail_after, self._watch.warn_after = seconds, warn_after

    def hurry(self) -> None:
        """Shorten the wait for a blocked loop, because the run is ending."""
        if self._watch.fail_after > BLOCKED_SECONDS:
            self._watch.why = "the run is ending"
            self.limit_blocking(BLOCKED_SECONDS)

    def call_later(self, function: Callable[[], None]) -> None:
        """Have the main thread call a function after its present or next successful wait; any thread may ask for it.

        `close` makes the remaining calls. No call is made while an error is raised, so that a call cannot hide it.
        """
        self._later.append(function)

    def run(self, coroutine: Coroutine[Any, Any, T], interruptible: bool = True, resting: bool = False) -> T:
        """Run a coroutine and return its result; its exception is raised here.

        Ctrl-C, or an exception of `interrupted`, cancels the coroutine, lets it clean up (its requests are aborted in
        their engines), and is then raised. If the coroutine finished all the same, the next run raises that exception.

        Args:
            coroutine: the coroutine.
            interruptible: False: neither of them ends it.
            resting: True: engines run commands alone meanwhile, as while they are suspended.
        """
        before, self.suspended = self.suspended, self.suspended or resting
        try:
            return self.wait(self.start(coroutine), interruptible)
        finally:
            self.suspended = before

    def start(self, coroutine: Coroutine[Any, Any, T]) -> "LoopTask[T]":
        """Start a coroutine that runs beside the main thread's own work; it must not need an in-process engine."""
        return LoopTask(self._loop, coroutine, self._wake.set)

    def wait(self, task: "LoopTask[T]", interruptible: bool = True, limit: float = math.inf) -> T:
        """Wait for a task that `start` began, and return its result; Ctrl-C and `interrupted` act as in `run`.

        Raises:
            TimeoutError: not done within `limit` seconds; the task is cancelled.
            WorkflowBlockedError: a workflow, or anything else that runs on the loop, blocks it.
        """
        deadline = time.monotonic() + limit
        reason: BaseException | None = None
        try:
            while not task.done and reason is None:
                self.pump(SIGNAL_CHECK_SECONDS, task)
                if not task.done:
                    self._watch.check()
                if not task.done and time.monotonic() > deadline:
                    raise TimeoutError(f"not done within {limit:g} s")
                if interruptible and not task.done:
                    reason = self._interrupted()
            if reason is not None:
                self.cancel(task)
        except BaseException:
            self.cancel(task)
            raise
        finally:
            self._run_commands()
        if reason is not None and not task.succeeded:
            raise reason
        result = task.result()
        self._make_calls()
        return result

    def cancel(self, task: "LoopTask[T]") -> None:
        """Cancel a task that `start` began, and wait for the end of its clean-up; its error, if any, is logged."""
        if not task.done:
            task.cancel()
            deadline = time.monotonic() + CANCEL_SECONDS
            if not self._pump_until(task, deadline):
                waited = time.monotonic() - deadline + CANCEL_SECONDS
                logger.warning("a cancelled coroutine did not end within %g s and is left to itself.", round(waited, 1))
                return
        task.report()

    def end(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine that cleans up, for at most `END_SECONDS`; give it up at once if the loop is blocked."""
        task = self.start(coroutine)
        if self._pump_until(task, time.monotonic() + END_SECONDS):
            self._run_commands()
            task.result()
        elif self._is_stuck():
            logger.warning("the event loop is blocked: what runs on it ends with the process.")
        else:
            logger.warning("the clean-up of the run did not end within %g s, and is cancelled.", END_SECONDS)
            self.cancel(task)

    def close(self) -> None:
        """Cancel all tasks, stop the loop, and let the engines step themselves again; calling it twice is allowed.

        A blocked loop is left to itself: its thread ends with the process, or once it is free.
        """
        if not self._thread.is_alive() or self._loop.is_closed():
            return
        self.end(_cancel_others())
        for engine in self._engines:
            engine.detach()
        patience = 0.0 if self._is_stuck() else CANCEL_SECONDS
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(patience)
        sys.setswitchinterval(self._switch_interval)
        self._make_calls()

    def _serve(self) -> None:
        """Run the loop until `close`, and close it on this thread, which a workflow may hold beyond `close`."""
        compute_on_one_thread()
        try:
            self._loop.run_forever()
            late_tasks = asyncio.all_tasks(self._loop)  # begun while the loop was blocked
            for task in late_tasks:
                task.cancel()
            if late_tasks:
                self._loop.run_until_complete(asyncio.wait(late_tasks, timeout=CANCEL_SECONDS))
        finally:
            self._loop.close()

    def pump(self, seconds: float, task: "LoopTask[Any] | None" = None) -> None:
        """Do a piece of each engine's work; if there is none, wait up to `seconds` for work or for the task to end."""
        self._wake.clear()  # before looking: what happens from here on sets it again
        self._collect()
        worked = [engine.run_commands() if self.suspended else engine.pump() for engine in self._engines]
        if not any(worked) and not (task is not None and task.done):
            self._wake.wait(seconds)

    def _collect(self) -> None:
        """Take in posted requests; after the first one, wait for all others that the loop is about to make.

        An engine computes the requests of one step together, and their rounding depends on one another. So the set must
        not depend on which thread is quicker: the same seed has to give the same bits.
        """
        quiet = 0 if self._run_commands() else QUIET_TURNS
        while quiet < QUIET_TURNS and self._turn():
            quiet = 0 if self._run_commands() else quiet + 1

    def _turn(self) -> bool:
        """Let the loop make one turn; False if the turn takes long, as in a reward: engines do not wait for it."""
        turned = threading.Event()
        self._loop.call_soon_threadsafe(turned.set)
        return turned.wait(TURN_SECONDS)

    def _pump_until(self, task: "LoopTask[Any]", deadline: float) -> bool:
        """Pump until the task is done; False if it is not done at the deadline, or if the loop is blocked."""
        while not task.done:
            self.pump(SIGNAL_CHECK_SECONDS, task)
            if not task.done and (time.monotonic() > deadline or self._is_stuck()):
                return False
        return True

    def _run_commands(self) -> bool:
        """Run posted commands (start, abort, take weights); True if there were any."""
        worked = [engine.run_commands() for engine in self._engines]
        return any(worked)

    def _make_calls(self) -> None:
        while self._later:
            self._later.popleft()()

    def _is_stuck(self) -> bool:
        """True if there is no point in waiting for the loop."""
        silent = self._watch.silent()
        return silent > CANCEL_SECONDS or (silent > BLOCKED_SECONDS and blocker_of(self._thread) is not None)


class LoopTask(Generic[T]):
    """An asyncio task on a loop in another thread. Unlike a concurrent future, it is done only after its clean-up."""

    _task: asyncio.Task[T]  # from the loop's next turn on

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], wake: Callable[[], None]):
        self.done = False
        self._loop = loop
        self._wake = wake
        loop.call_soon_threadsafe(self._start, coroutine)

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._finish)

    def _finish(self, _: asyncio.Task[T]) -> None:
        self.done = True
        self._wake()

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(lambda: self._task.cancel())

    def result(self) -> T:
        return self._task.result()

    @property
    def succeeded(self) -> bool:
        """True if there is a result, even if `cancel` was called."""
        return self.done and not self._task.cancelled() and self._task.exception() is None

    def report(self) -> None:
        """Log the coroutine's error, if any: the caller gets another exception, so that nobody waits for this one."""
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            logger.warning("a coroutine that was given up failed: %s: %s", type(error).__name__, error)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CANCEL_SECONDS)


class LoopWatch:
    """Checks that a loop in another thread still answers.

    Attributes:
        warn_after: seconds without an answer after which the stack of the loop's thread is logged, once.
        fail_after: seconds for which a callback may block the loop.
        why: the origin of `fail_after`, in words.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        self._loop = loop
        self._thread = thread
        self.warn_after = self.fail_after = math.inf
        self.why = "explorer.max_timeout"
        self._asked = 0.0
        self._answered = True
        self._warned = False

    def silent(self) -> float:
        """Seconds since the loop was asked and has not answered. If it has answered, it is asked anew."""
        if self._answered:
            self._asked, self._answered, self._warned = time.monotonic(), False, False
            self._loop.call_soon_threadsafe(setattr, self, "_answered", True)
        return time.monotonic() - self._asked

    def check(self) -> None:
        """Log a loop after `warn_after` silent seconds; WorkflowBlockedError: it was blocked for `fail_after`."""
        silent = self.silent()
        if not self._warned and silent > self.warn_after:
            self._warned = True
            log_block(self._thread, silent)
        if silent > self.fail_after:
            refuse_block(self._thread, silent, self.why)


def blocker_of(thread: threading.Thread) -> str | None:
    """The innermost line of the user's code that the thread's loop runs, and its workflow; None while the loop waits.

    If no code of the user is running, the innermost line of a library.
    """
    frames = list(_running(thread))
    users = [frame for frame in frames if not of_a_library(frame.f_code.co_filename)]
    line = next((_line(frame) for frame in users or frames), None)
    owners = (frame.f_locals.get("self") for frame in frames)  # of the methods that run
    workflow = next((f" (workflow '{type(owner).__name__}')" for owner in owners if isinstance(owner, Workflow)), "")
    return None if line is None else line + workflow


def log_block(thread: threading.Thread, seconds: float) -> None:
    """Log the line that has blocked the thread's loop for so many seconds, and the thread's stack."""
    blocker, stack = blocker_of(thread) or "something", "".join(traceback.format_stack(_frame_of(thread)))
    logger.warning("%s blocks all rollouts, for %.1f s now. It stands at:\n%s", blocker, seconds, stack)


def refuse_block(thread: threading.Thread, seconds: float, why: str) -> None:
    """Raise a WorkflowBlockedError, unless the thread's loop only waits for something to do.

    Args:
        thread: the loop's thread.
        seconds: seconds for which the loop has been silent.
        why: the origin of the limit that is exceeded, in words.
    """
    if (blocker := blocker_of(thread)) is not None:
        raise WorkflowBlockedError(
            f"{blocker} has blocked all rollouts for {seconds:.3g} s ({why}): an `async def` calls "
            "something that waits without `await`. Call it by `await asyncio.to_thread(...)`; a workflow may be a "
            "`def run`, which runs in a thread."
        )


def _running(thread: threading.Thread) -> Iterator[FrameType]:
    """Frames of the callback that the loop runs, the innermost first; none while it waits for something to do."""
    frame, frames = _frame_of(thread), []
    while frame is not None:
        if frame.f_code is asyncio.Handle._run.__code__:
            yield from frames
            return
        frames.append(frame)
        frame = frame.f_back


def _frame_of(thread: threading.Thread) -> FrameType | None:
    return sys._current_frames().get(thread.ident or 0)


def _line(frame: FrameType) -> str:
    return f"'{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}'"
