"""Notices that something blocks the event loop of the rollouts, and says what."""

import asyncio
import logging
import math
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from trinity_lightning.errors import WorkflowBlockedError
from trinity_lightning.explorer.workflows.workflow import Workflow

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[1]
LIBRARIES = [PACKAGE, *(sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib"))]


class LoopWatch:
    """Asks a loop in another thread for a sign of life, again and again.

    Args:
        loop: which one.
        thread: where it runs.

    Attributes:
        warn_after: seconds without an answer after which the stack of its thread is logged, once.
        fail_after: seconds for which anything may block it.
        why: what sets that time, in words.
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
        """Seconds that the loop has owed an answer for; the next one is asked for as soon as it has answered."""
        if self._answered:
            self._asked, self._answered, self._warned = time.monotonic(), False, False
            self._loop.call_soon_threadsafe(self._answer)
        return time.monotonic() - self._asked

    def _answer(self) -> None:
        self._answered = True

    def check(self) -> None:
        """Log a loop that has been silent for long.

        Raises:
            WorkflowBlockedError: something blocks it, and has for too long.
        """
        silent = self.silent()
        if silent <= min(self.warn_after, self.fail_after):
            return
        blocker = self.blocker()
        if not self._warned and silent > self.warn_after:
            self._warned = True
            stack = "".join(traceback.format_stack(self._frame()))
            what = blocker or "something"
            logger.warning("%s blocks all rollouts, for %.1f s now. It stands at:\n%s", what, silent, stack)
        if blocker is not None and silent > self.fail_after:
            raise WorkflowBlockedError(
                f"{blocker} has blocked all rollouts for {silent:.3g} s ({self.why}): an `async def` calls "
                "something that waits without `await`. Call it by `await asyncio.to_thread(...)`; a workflow may be a "
                "`def run`, which runs in a thread."
            )

    def blocker(self) -> str | None:
        """The innermost line that the loop runs just now and that is no library's, with its workflow; None: nothing."""
        frames = list(self._running())
        own = [frame for frame in frames if not _of_a_library(frame)]
        place = next((_place(frame) for frame in own or frames), None)
        owners = (frame.f_locals.get("self") for frame in frames)
        workflow = next((f" (workflow '{type(each).__name__}')" for each in owners if isinstance(each, Workflow)), "")
        return None if place is None else place + workflow

    def _running(self) -> Iterator[FrameType]:
        """Frames of the callback that the loop is in, the innermost first; none while it waits for something to do."""
        frame, frames = self._frame(), []
        while frame is not None:
            if frame.f_code is asyncio.Handle._run.__code__:
                yield from frames
                return
            frames.append(frame)
            frame = frame.f_back

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread.ident or 0)


def _of_a_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith("<frozen") or any(Path(file).is_relative_to(folder) for folder in LIBRARIES)


def _place(frame: FrameType) -> str:
    return f"'{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}'"
