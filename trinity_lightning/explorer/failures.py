"""What is said of rollouts that fail, of a step without experiences, and of an event loop that is blocked."""

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Never

from trinity_lightning.common.failures import listed
from trinity_lightning.config.own_code import of_a_library
from trinity_lightning.errors import RewardError, RolloutError, WorkflowBlockedError
from trinity_lightning.explorer.runner import (
    ENOUGH_FAILURES,
    Attempt,
    Outcomes,
    Status,
    describe,
    fails_by_reward,
    kind_of,
)
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflows.workflow import Workflow

logger = logging.getLogger(__name__)

REMEMBERED = 1000  # messages
NAMED_TASKS = 50  # of those that failed alike
_FEW = 3  # different errors of reward functions that a message shows


def report_tasks(what: str, statuses: Sequence[Status], tasks: int, nothing: bool, cure: str = "") -> None:
    """Log which tasks of a step failed, those together that failed alike, and why.

    If they gave no experience, raise RewardError if all failed in their reward functions, with the `cure` for that, and
    else RolloutError.
    """
    kinds: dict[object, list[Status]] = {}
    for status in statuses:
        if not status.ok:
            kinds.setdefault(status.kind, []).append(status)
    for alike in kinds.values():
        names = listed([status.task_id for status in alike], NAMED_TASKS)
        logger.warning("%s: %d of %d tasks failed (%s): %s", what, len(alike), tasks, names, alike[0].message)
    if nothing:
        _refuse_nothing(what, statuses, tasks, cure)


def _refuse_nothing(what: str, statuses: Sequence[Status], tasks: int, cure: str) -> Never:
    nothing = f"{what}: none of its {tasks} tasks gave an experience"
    if statuses and all(map(fails_by_reward, statuses)):
        errors = list(dict.fromkeys(error.partition(": ")[2] for status in statuses for error in status.errors))
        more = f"; and {len(errors) - _FEW} other errors" if len(errors) > _FEW else ""
        raise RewardError(f"{nothing}: {'; '.join(errors[:_FEW])}{more}{cure and f'. {cure}'}")
    reasons = dict.fromkeys(str(status.message) for status in statuses) or [
        "They were given up: see the errors above in the log"
    ]
    raise RolloutError(f"{nothing}. {'; '.join(reasons)}")


def failure_message(errors: Sequence[str], num_runs: int) -> str:
    """How many of how many runs of a task failed, and why."""
    kinds: dict[str, list[str]] = {}
    for text in errors:
        kinds.setdefault(kind_of(text), []).append(text)
    return f"{len(errors)} of {num_runs} runs failed: {'; '.join(map(_cause, kinds.values()))}"


def _cause(texts: Sequence[str]) -> str:
    count = f"{len(texts)} x " if len(texts) > 1 else ""
    return f"{count}{texts[0]}{', and the like' if len(set(texts)) > 1 else ''}"


def note(task: Task, number: int, attempt: Attempt, outcomes: Outcomes) -> bool:
    """Log what is new of why an attempt at a task failed, with the traceback of the user's own code.

    Returns:
        whether others will fail so, too: a reward function has raised the same at every answer, to several tasks.
    """
    name = f"{task.batch_id}/{task.task_id}"
    for run, error in attempt.errors.items():
        [text] = describe({run: error})
        if not outcomes.succeeded:
            comes_again = isinstance(error, RewardError) and not error.may_pass
            outcomes.failed[name, run] = kind_of(text) if comes_again else None
        own_traceback = "\n".join(getattr(error, "__notes__", []))
        if is_new(outcomes, own_traceback or kind_of(text)):
            level, where = (logging.WARNING, ". It was raised at\n") if own_traceback else (logging.INFO, "")
            logger.log(level, "task %s, attempt %d: %s%s%s", name, number, text, where, own_traceback)
    if outcomes.succeeded or len(outcomes.failed) < ENOUGH_FAILURES:
        return False
    tasks, reasons = {each for each, _ in outcomes.failed}, set(outcomes.failed.values())
    return len(tasks) > 1 and len(reasons) == 1 and None not in reasons


def report(task: Task, status: Status, outcomes: Outcomes) -> None:
    """Log how a task failed: of several of a batch that failed alike, that of the first."""
    if is_new(outcomes, (task.batch_id, status.kind)):
        logger.warning("task %s/%s: %s", task.batch_id, task.task_id, status.message)


def is_new(outcomes: Outcomes, message: object) -> bool:
    """Whether the log has not had it lately; it is then noted as said."""
    if len(outcomes.said) >= REMEMBERED:  # errors that name a time or an address are different each time
        outcomes.said.clear()
    before = len(outcomes.said)
    outcomes.said.add(message)
    return len(outcomes.said) > before


# -- an event loop that runs in another thread -------------------------------------------------------------------------


def blocker_of(thread: threading.Thread) -> str | None:
    """The innermost line that the thread's loop is in and no library has, with its workflow; None while it waits."""
    frames = list(_running(thread))
    own = [frame for frame in frames if not of_a_library(frame.f_code.co_filename)]
    line = next((_line(frame) for frame in own or frames), None)
    owners = (frame.f_locals.get("self") for frame in frames)
    workflow = next((f" (workflow '{type(each).__name__}')" for each in owners if isinstance(each, Workflow)), "")
    return None if line is None else line + workflow


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


def _line(frame: FrameType) -> str:
    return f"'{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}'"
