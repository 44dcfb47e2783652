"""What blocks an event loop that runs in another thread, and what is said of it."""

import asyncio
import logging
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from trinity_lightning.errors import WorkflowBlockedError
from trinity_lightning.explorer.workflows.workflow import Workflow

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[1]
LIBRARIES = [PACKAGE, *(sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib"))]


def blocker_of(thread: threading.Thread) -> str | None:
    """The innermost line that the thread's loop is in and no library has, with its workflow; None while it waits."""
    frames = list(_running(thread))
    own = [frame for frame in frames if not _of_a_library(frame)]
    place = next((_place(frame) for frame in own or frames), None)
    owners = (frame.f_locals.get("self") for frame in frames)
    workflow = next((f" (workflow '{type(each).__name__}')" for each in owners if isinstance(each, Workflow)), "")
    return None if place is None else place + workflow


def log_block(thread: threading.Thread, seconds: float) -> None:
    """Log what blocks the thread's loop for so long, and where the thread stands."""
    what, stack = blocker_of(thread) or "something", "".join(traceback.format_stack(_frame_of(thread)))
    logger.warning("%s blocks all rollouts, for %.1f s now. It stands at:\n%s", what, seconds, stack)


def refuse_block(thread: threading.Thread, seconds: float, why: str) -> None:
    """WorkflowBlockedError if anything blocks the loop of the thread, after so long; `why`: what sets that time."""
    if (blocker := blocker_of(thread)) is not None:
        raise WorkflowBlockedError(
            f"{blocker} has blocked all rollouts for {seconds:.3g} s ({why}): an `async def` calls "
            "something that waits without `await`. Call it by `await asyncio.to_thread(...)`; a workflow may be a "
            "`def run`, which runs in a thread."
        )


def _running(thread: threading.Thread) -> Iterator[FrameType]:
    """Frames of the callback that the loop is in, the innermost first; none while it waits for something to do."""
    frame, frames = _frame_of(thread), []
    while frame is not None:
        if frame.f_code is asyncio.Handle._run.__code__:
            yield from frames
            return
        frames.append(frame)
        frame = frame.f_back


def _frame_of(thread: threading.Thread) -> FrameType | None:
    return sys._current_frames().get(thread.ident or 0)


def _of_a_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith("<frozen") or any(Path(file).is_relative_to(folder) for folder in LIBRARIES)


def _place(frame: FrameType) -> str:
    return f"'{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}'"
