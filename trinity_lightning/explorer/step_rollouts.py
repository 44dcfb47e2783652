"""The rollouts of one explore step: of its tasks, and of those that take the place of tasks that filters left out."""

import copy
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from trinity_lightning.common.experience import Experience
from trinity_lightning.errors import RolloutError
from trinity_lightning.explorer.rollout_metrics import pass_rates, rollout_metrics
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import Status

logger = logging.getLogger(__name__)

Run = Callable[[list[Task], int], Awaitable[tuple[list[Status], list[Experience]]]]


class StepRollouts:
    """Runs tasks of a step, and keeps what came of all of them; a `MoreRollouts` for the buffer.

    Args:
        step: its number.
        tasks: how many it is meant to have.
        max_refills: how often more may be asked for.
        source: where tasks come from.
        run: schedules tasks as part of the step and waits for them.

    Attributes:
        experiences: of all tasks so far.
    """

    def __init__(self, step: int, tasks: int, max_refills: int, source: TaskSource, run: Run) -> None:
        self.tasks = tasks
        self.experiences: list[Experience] = []
        self._step = step
        self._left = max_refills
        self._source = source
        self._run = run
        self._statuses: list[Status] = []
        self._as_they_came: list[Experience] = []  # operators shape the rewards of the others
        self._tried = 0
        self._seconds = 0.0

    async def begin(self) -> list[Experience] | None:
        """The experiences of the step's own tasks; None when the taskset is exhausted.

        Raises:
            RolloutError: not one task succeeded.
        """
        tasks = self._source.next_tasks(self.tasks)
        if not tasks:
            return None
        experiences = await self._try(tasks)
        report_failures(f"explore step {self._step}", self._statuses, len(tasks), len(experiences))
        return experiences

    async def __call__(self, tasks: int) -> list[Experience]:
        """The experiences of further tasks; nothing where the limit is reached or the taskset exhausted.

        A round whose tasks all failed counts, and is followed by the next.
        """
        while self._left > 0:
            self._left -= 1
            more = self._source.next_tasks(tasks)
            if not more:
                break
            tried = len(self._statuses)
            experiences = await self._try(more)
            log_failures(f"explore step {self._step}, refill", self._statuses[tried:], len(more))
            if experiences:
                return experiences
        return []

    def metrics(self) -> dict[str, float]:
        """What the step scheduled, lost and got, refills included."""
        return rollout_metrics(self._statuses, self._as_they_came, self._tried, self._seconds) | {
            "rollout/refill_tasks": float(max(self._tried - self.tasks, 0))
        }

    async def _try(self, tasks: list[Task]) -> list[Experience]:
        start = time.perf_counter()
        statuses, experiences = await self._run(tasks, self._step)
        self._seconds += time.perf_counter() - start
        self._source.taskset.update(pass_rates(experiences))
        self._as_they_came += map(copy.copy, experiences)
        self._statuses += statuses
        self._tried += len(tasks)
        self.experiences += experiences
        return experiences


def log_failures(what: str, statuses: Sequence[Status], tasks: int) -> Counter[str | None]:
    """Log why tasks failed, each reason once; how many failed for it."""
    reasons = Counter(status.message for status in statuses if not status.ok)
    for reason, count in reasons.items():
        logger.warning("%s: %d of %d tasks failed: %s", what, count, tasks, reason)
    return reasons


def report_failures(what: str, statuses: Sequence[Status], tasks: int, experiences: int) -> None:
    """Log why tasks failed; RolloutError when nothing at all came of them."""
    reasons = log_failures(what, statuses, tasks)
    if experiences == 0:
        why = "; ".join(str(reason) for reason in reasons) or "No task finished in time: raise explorer.max_timeout."
        raise RolloutError(f"{what}: none of its {tasks} tasks gave an experience. {why}")
