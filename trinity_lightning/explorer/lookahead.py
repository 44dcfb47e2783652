"""Explore steps of a training run: rolled out now, or ahead, while the trainer trains."""

import logging
import math
import time
from dataclasses import dataclass
from typing import Any

from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.explorer import Explorer
from trinity_lightning.explorer.host import Host, Job

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of time in seconds of `time.perf_counter`; without an end it goes on."""

    begin: float
    end: float = math.inf

    def overlap(self, other: "Interval") -> float:
        """The time that both have in common, as a share of the shorter one."""
        common = min(self.end, other.end) - max(self.begin, other.begin)
        shorter = min(self.end - self.begin, other.end - other.begin)
        return max(common, 0.0) / shorter if shorter > 0 else 0.0


class LookAhead:
    """Runs explore steps, and keeps what was measured of each until it is trained on.

    Attributes:
        training: when the trainer trained last.
    """

    def __init__(self, explorer: Explorer) -> None:
        self._explorer = explorer
        self._job: Job[Interval] | None = None
        self._host: Host | None = None
        self._error: Exception | None = None  # of what was begun ahead
        self.forget()

    def forget(self) -> None:
        """Know of no step, as before the first."""
        self.training = Interval(0.0, 0.0)
        self._metrics: dict[int, dict[str, float]] = {}
        self._target = 0  # the last step that was asked for

    async def explore(self, target: int) -> None:
        """Explore steps up to and with `target`.

        Raises:
            ConfigError: the taskset is exhausted.
        """
        self._target = target
        while self._explorer.step < target:
            if not await self._explorer.explore_step():
                raise ConfigError(
                    f"the taskset is exhausted after {self._explorer.step} explore steps; lower `steps`, or let it "
                    "repeat."
                )
            self._metrics[self._explorer.step] = dict(self._explorer.metrics)

    @property
    def under_way(self) -> bool:
        """Whether rollouts were begun and not waited for."""
        return self._job is not None

    def begin(self, host: Host, target: int) -> None:
        """Let the steps up to and with `target` be explored while the main thread trains."""
        self._host, self._job = host, host.start(self._timed(target))

    async def _timed(self, target: int) -> Interval:
        start = time.perf_counter()
        await self.explore(target)
        return Interval(start, time.perf_counter())

    def wait(self) -> None:
        """Wait for what was begun, if anything was; an error of it is raised here.

        Ctrl-C and SIGTERM cancel it: a resumed run does it again, with the weights that it had.
        """
        self.settle()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self, limit: float = math.inf) -> None:
        """Wait for the end of what was begun, well or not: an error waits for `wait`.

        Args:
            limit: seconds after which it is cancelled, for a run that is ending: the error is a TimeoutError then, and
                nothing else ends the wait. Without a limit Ctrl-C and SIGTERM cancel it, and are raised.
        """
        if self._job is None or self._host is None:
            return
        job, self._job = self._job, None
        try:
            rollouts = self._host.wait(job, interruptible=limit == math.inf, limit=limit)
        except Exception as error:
            self._error = error
        else:
            self._metrics[self._explorer.step]["rollout/overlap"] = rollouts.overlap(self.training)

    @property
    def complete(self) -> bool:
        """Whether every step that was asked for is rolled out."""
        return self._job is None and self._explorer.step >= self._target

    def cancel(self) -> None:
        """Give up what was begun and not waited for; an error that nobody has waited for is logged."""
        if self._job is not None and self._host is not None:
            job, self._job = self._job, None
            self._host.cancel(job)
        error, self._error = self._error, None
        if error is not None:
            logger.warning("the rollouts that were begun ahead failed: %s: %s", type(error).__name__, error)

    def take(self, step: int) -> dict[str, float]:
        """What was measured of a step, which is trained on now."""
        return self._metrics.pop(step)

    def state_dict(self) -> dict[str, Any]:
        """What was measured of steps that are not trained on yet, and up to which one they were asked for."""
        return {"target": self._target, "metrics": {step: dict(metrics) for step, metrics in self._metrics.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._target = state["target"]
        self._metrics = {step: dict(metrics) for step, metrics in state["metrics"].items()}
