"""How long the scheduler waits: the dynamic time-out of tasks, and how much of a step is enough."""

import math

from trinity_lightning.config.schema import ExplorerConfig
from trinity_lightning.explorer.scheduler_batch import Job
from trinity_lightning.explorer.workflow_runner import Status


class TaskTimes:
    """How long train tasks take, for the dynamic time-out: min(max_timeout, ratio * average) after a warm-up."""

    def __init__(self, config: ExplorerConfig) -> None:
        self._config = config
        self._total = 0.0
        self._count = 0
        self.steps = 0

    def add(self, job: Job, status: Status) -> None:
        """Count what took its time to the end: a failure may have been cut short."""
        if job.is_train and status.ok:
            self._total += status.metric["time_per_task"]
            self._count += 1

    def limit(self, job: Job) -> float:
        """Seconds that an attempt at the job may take."""
        dynamic = self._config.dynamic_timeout
        if not (dynamic.enable and job.is_train and self._count) or self.steps < dynamic.warmup_min_steps:
            return self._config.max_timeout
        return min(self._config.max_timeout, dynamic.ratio * self._total / self._count)


def enough_of(size: int, ratio: float) -> int:
    """How many of `size` tasks finish a step that over-rolls by `ratio`: ceil((1 - ratio) * size)."""
    return math.ceil((1 - ratio) * size - 1e-9)  # 0.3 * 10 is a little more than 3
