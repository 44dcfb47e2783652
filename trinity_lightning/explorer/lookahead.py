"""Explore steps of a training run: rolled out now, or ahead, while the trainer trains."""

import math
import time
from dataclasses import dataclass
from typing import Any

from trinity_lightning.common.errors import ConfigError
from trinity_lightning.explorer.explorer import Explorer
from trinity_lightning.explorer.host import Host, Job


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
        self.training = Interval(0.0, 0.0)
        self._explorer = explorer
        self._metrics: dict[int, dict[str, float]] = {}
        self._job: Job[Interval] | None = None
        self._host: Host | None = None
        self._error: Exception | None = None  # of what was begun ahead

    async def explore(self, target: int) -> None:
        """Explore steps up to and with `target`.

        Raises:
            ConfigError: the taskset is exhausted.
        """
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

        Ctrl-C waits too: rolled out anew by a resumed run, the steps would be drawn from newer weights.
        """
        self.settle()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self, limit: float = math.inf) -> None:
        """Wait for the end of what was begun, well or not: an error waits for `wait`.

        Args:
            limit: seconds after which it is cancelled; the error is a TimeoutError then.
        """
        if self._job is None or self._host is None:
            return
        job, self._job = self._job, None
        try:
            rollouts = self._host.wait(job, interruptible=False, limit=limit)
        except Exception as error:
            self._error = error
        else:
            self._metrics[self._explorer.step]["rollout/overlap"] = rollouts.overlap(self.training)

    @property
    def complete(self) -> bool:
        """Whether nothing is under way, and nothing failed."""
        return self._job is None and self._error is None

    def cancel(self) -> None:
        """Give up what was begun and not waited for."""
        if self._job is not None and self._host is not None:
            job, self._job = self._job, None
            self._host.cancel(job)
        self._error = None

    def take(self, step: int) -> dict[str, float]:
        """What was measured of a step, which is trained on now."""
        return self._metrics.pop(step)

    def state_dict(self) -> dict[str, Any]:
        """What was measured of steps that are not trained on yet."""
        return {"metrics": {step: dict(metrics) for step, metrics in self._metrics.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._metrics = {step: dict(metrics) for step, metrics in state["metrics"].items()}
