"""What the scheduler knows of a batch: its tasks, the chunks still out, and the results not yet collected."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from trinity_lightning.common.experience import Experience
from trinity_lightning.explorer.runner_wrapper import TaskWrapper
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import Status, failure_message, mean_metrics

Result = tuple[Status, list[Experience]]

_STEP = re.compile(r"[0-9]+")
_TIMES = ("time_per_task", "task_run_time")


@dataclass(frozen=True, order=True)
class BatchKey:
    """A batch's place in the order: lower steps first, and within a step what is trained on before evaluations."""

    step: int
    is_eval: bool
    name: str = field(default="", compare=False)

    @classmethod
    def of(cls, batch_id: int | str) -> "BatchKey":
        """The key of a batch id: an int, or a string that starts with one ("123/my_task").

        Raises:
            ValueError: anything else.
        """
        if isinstance(batch_id, int) and not isinstance(batch_id, bool):
            return cls(batch_id, False, str(batch_id))
        if isinstance(batch_id, str) and (match := _STEP.match(batch_id)):
            return cls(int(match.group()), match.group() != batch_id, batch_id)
        raise ValueError(
            f"batch_id must be an int or a string that starts with one, such as '123/my_task', not {batch_id!r}."
        )


@dataclass(eq=False)
class Job:
    """A scheduled task: the chunks that are out, and what the others gave."""

    batch: "Batch"
    number: int
    task: Task
    chunks: list[TaskWrapper]
    results: dict[int, Result] = field(default_factory=dict)
    running: set["asyncio.Task[tuple[Status, list[Experience], int]]"] = field(default_factory=set)
    dropped: bool = False

    @property
    def is_train(self) -> bool:
        """Whether its experiences are trained on."""
        return not (self.task.is_eval or self.batch.key.is_eval)

    def finish(self, chunk: TaskWrapper, result: Result) -> bool:
        """Take a chunk's result; whether it was the last one, and the task is done."""
        self.results[chunk.run_id_base] = result
        done = len(self.results) == len(self.chunks)
        if done:
            self.batch.finish(self)
        return done

    def merged(self) -> Result:
        """One result of all chunks: experiences in the order of runs, metrics over all of them, the longest times."""
        results = [self.results[chunk.run_id_base] for chunk in self.chunks]
        if len(results) == 1:
            return results[0]
        statuses = [status for status, _ in results]
        experiences = [experience for _, its in results for experience in its]
        evaluated = [experience for status in statuses for experience in status.eval_experiences]
        errors = [error for status in statuses for error in status.errors]
        times = {name: max(status.metric[name] for status in statuses) for name in _TIMES}
        num_runs = sum(status.num_runs for status in statuses)
        status = Status(
            ok=all(status.ok for status in statuses),
            metric=mean_metrics(experiences or evaluated) | times,
            message=failure_message(errors, num_runs),
            errors=errors,
            num_runs=num_runs,
            eval_experiences=evaluated,
        )
        return status, experiences


class Batch:
    """The tasks of one batch id that are unfinished, or finished and not yet collected."""

    def __init__(self, key: BatchKey) -> None:
        self.key = key
        self.unfinished: set[Job] = set()
        self.finished: list[tuple[int, Result]] = []
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self.unfinished) + len(self.finished)

    def finish(self, job: Job) -> None:
        """A task is done: its result waits to be collected."""
        self.unfinished.discard(job)
        self.finished.append((job.number, job.merged()))
        self.notify()

    def drop(self) -> list["asyncio.Task[tuple[Status, list[Experience], int]]"]:
        """Give up what is unfinished; the cancelled chunks, to be waited for."""
        cancelled = [work for job in self.unfinished for work in job.running]
        for job in self.unfinished:
            job.dropped = True
        self.unfinished.clear()
        for work in cancelled:
            work.cancel()
        self.notify()
        return cancelled

    def collect(self) -> tuple[list[Status], list[Experience]]:
        """Hand over what is finished, in the order of the tasks."""
        results = [result for _, result in sorted(self.finished, key=lambda item: item[0])]
        self.finished.clear()
        return [status for status, _ in results], [experience for _, its in results for experience in its]

    def notify(self) -> None:
        """Wake those who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, needed: Callable[[], int]) -> None:
        """Wait until that many tasks are finished, or nothing is unfinished."""
        while self.unfinished and len(self.finished) < needed():
            await self._changed.wait()
