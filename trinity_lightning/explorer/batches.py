"""Batches of tasks: their order, the chunks that a task is cut into, and the results that wait to be collected."""

import asyncio
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from trinity_lightning.common.experience import Experience
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import Status, summarize

TIMES = ("time_per_task", "task_run_time")  # metrics of a chunk, in seconds
Work = asyncio.Task[tuple[Status, list[Experience], int]]  # the run of a chunk by a runner
_STEP = re.compile(r"[0-9]+")


@dataclass
class Chunk:
    """Some runs of a task, for one runner: `repeat_times` of them, numbered from `run_id_base`."""

    task: Task
    batch_id: int | str
    run_id_base: int = 0
    repeat_times: int = 1


@dataclass(eq=False)
class ScheduledTask:
    """A task of a batch.

    Attributes:
        batch: the batch.
        task: the task.
        chunks: all chunks of the task.
        on_done: called when the task is finished.
        results: status and experiences of each finished chunk, by its first run.
        running: the chunks under way.
    """

    batch: "Batch"
    task: Task
    chunks: list[Chunk]
    on_done: Callable[[], None]
    results: dict[int, tuple[Status, list[Experience]]] = field(default_factory=dict)
    running: set[Work] = field(default_factory=set)

    @property
    def is_train(self) -> bool:
        """True for a task to train on, False for one to evaluate on."""
        return not (self.task.is_eval or self.batch.is_eval)

    @property
    def is_unfinished(self) -> bool:
        """True while the result is awaited: False once the task is finished, or given up."""
        return self in self.batch.unfinished

    def take(self, chunk: Chunk, status: Status, experiences: list[Experience]) -> None:
        """Take the result of a chunk; with the last one the task is finished, and waits to be collected."""
        self.results[chunk.run_id_base] = status, experiences
        if len(self.results) == len(self.chunks):
            self.batch.unfinished.discard(self)
            self.batch.finished.append(self)

    def merged(self) -> tuple[Status, list[Experience]]:
        """One result of all chunks: experiences in the order of runs, metrics over all of them, the longest times."""
        results = [self.results[chunk.run_id_base] for chunk in self.chunks]
        statuses = [status for status, _ in results]
        return summarize(
            self.task,
            [experience for status, experiences in results for experience in experiences or status.eval_experiences],
            [error for status in statuses for error in status.errors],
            sum(status.num_runs for status in statuses),
            {name: max(status.metric[name] for status in statuses) for name in TIMES},
        )


@dataclass(eq=False)
class Batch:
    """The tasks of one batch id that are unfinished, or finished and not yet collected."""

    name: str
    is_eval: bool
    unfinished: set[ScheduledTask] = field(default_factory=set)
    finished: list[ScheduledTask] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.unfinished) + len(self.finished)

    def collect(self) -> tuple[list[Status], list[Experience]]:
        """Hand over the results of finished tasks, in the order of the tasks."""
        finished = sorted(self.finished, key=lambda scheduled: int(scheduled.task.task_id))
        self.finished.clear()
        results = [scheduled.merged() for scheduled in finished]
        experiences = [experience for _, experiences in results for experience in experiences]
        return [status for status, _ in results], experiences


def order_of(batch_id: int | str) -> tuple[int, bool]:
    """The sort key of a batch: its step, and True for an evaluation, which comes last within a step.

    Raises:
        ValueError: neither an int nor a string that starts with one ("123/my_task").
    """
    if isinstance(batch_id, int) and not isinstance(batch_id, bool):
        return batch_id, False
    if isinstance(batch_id, str) and (match := _STEP.match(batch_id)):
        return int(match.group()), match.group() != batch_id
    raise ValueError(
        f"batch_id must be an int or a string that starts with one, such as '123/my_task', not {batch_id!r}."
    )


def enough_of(size: int, ratio: float) -> int:
    """Number of tasks, of `size`, that finish a step that over-rolls by `ratio`: ceil((1 - ratio) * size)."""
    return math.ceil((1 - ratio) * size - 1e-9)  # 0.3 * 10 is a little more than 3
