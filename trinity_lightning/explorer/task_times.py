"""With explorer.dynamic_timeout: a time-out of train tasks that follows how long they take."""

from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.explorer.workflow_runner import Status


class TaskTimes:
    """How long train tasks take, for their time-out: min(max_timeout, ratio * average) after a warm-up."""

    def __init__(self, config: ExplorerConfig) -> None:
        self._config = config
        self._total = 0.0
        self._count = 0
        self._ended: set[str] = set()  # steps; of the warm-up only

    def add(self, status: Status) -> None:
        """Count a task that took its time to the end: a failure may have been cut short."""
        if status.ok:
            self._total += status.metric["time_per_task"]
            self._count += 1

    def end_step(self, step: str) -> None:
        """Count a step, once however often more tasks of it were asked for."""
        if len(self._ended) < self._config.dynamic_timeout.warmup_min_steps:
            self._ended.add(step)

    def limit(self) -> float:
        """Seconds that an attempt at a task may take."""
        dynamic = self._config.dynamic_timeout
        if not self._count or len(self._ended) < dynamic.warmup_min_steps:
            return self._config.max_timeout
        return min(self._config.max_timeout, dynamic.ratio * self._total / self._count)
