"""Explore steps of a training run: rolled out now, or ahead, while the trainer trains."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from trinity_lightning.common.experience import Experience
from trinity_lightning.config.engines import SynchronizerConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.driver import Driver, Job
from trinity_lightning.explorer.explorer import Explorer, Observer, Progress, Sink
from trinity_lightning.explorer.sync_policy import SyncedPolicy, SyncPolicy, WeightVersions
from trinity_lightning.trainer.optim import HostMemory

logger = logging.getLogger(__name__)
T = TypeVar("T")


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
        self._driver: Driver | None = None
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

    def begin(self, driver: Driver, target: int) -> None:
        """Let the steps up to and with `target` be explored while the main thread trains."""
        self._driver, self._job = driver, driver.start(self._timed(target))

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
        if self._job is None or self._driver is None:
            return
        job, self._job = self._job, None
        try:
            rollouts = self._driver.wait(job, interruptible=limit == math.inf, limit=limit)
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
        if self._job is not None and self._driver is not None:
            job, self._job = self._job, None
            self._driver.cancel(job)
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


class Watchers:
    """Passes on what rollouts show: observers at the main thread's leisure, progress only while it waits for them.

    Args:
        observer: shown the experiences of every step and evaluation.
        progress: called with how many tasks of a batch have ended.
        waiting: whether the main thread waits for rollouts; while it trains the bar is the trainer's.
    """

    def __init__(self, observer: Observer | None, progress: Progress | None, waiting: Callable[[], bool]) -> None:
        self._waiting = waiting
        self._observer = observer
        self._progress = progress
        self._seen: deque[tuple[list[Experience], int, str | None]] = deque()  # of which both ends are safe in threads

    def observe(self, experiences: list[Experience], step: int, taskset: str | None) -> None:
        """Keep it for `flush`: the observer's loggers are the trainer's too, which may be logging just now."""
        self._seen.append((experiences, step, taskset))

    def flush(self) -> None:
        """Show the observer what was kept; on the main thread."""
        while self._seen:
            each = self._seen.popleft()
            if self._observer is not None:
                self._observer(*each)

    def progress(self, batch: int | str, done: int, total: int) -> None:
        """Draw the progress of a batch."""
        if self._progress is not None and self._waiting():
            self._progress(batch, done, total)


class TrainingRollouts:
    """The rollouts of one `Trainer.fit`, driven by its main thread: explore steps now or ahead, evaluations, syncs.

    Args:
        explorer: what rolls out.
        ahead: its steps, which outlive this.
        watchers: shown what rollouts show.
        synchronizer: how weights reach the engines and how that is checked.
        policy: what is trained.
        versions: of its weights, which outlive this.
        host_memory: masters and moments, which leave the device while engines generate; None: they stay.
        interrupted: asked while rollouts are waited for; an exception that it returns ends them.
    """

    def __init__(
        self,
        explorer: Explorer,
        ahead: LookAhead,
        watchers: Watchers,
        synchronizer: SynchronizerConfig,
        policy: SyncedPolicy,
        versions: WeightVersions,
        host_memory: HostMemory | None,
        interrupted: Callable[[], BaseException | None],
    ) -> None:
        self.sync = SyncPolicy(explorer, policy, synchronizer, versions, self.run)
        self._explorer = explorer
        self._ahead = ahead
        self._watchers = watchers
        self._host_memory = host_memory
        self._driver = Driver(explorer.engines.models, interrupted)

    def prepare(self, sink: Sink) -> None:
        """Load the engines and start the runners; the main thread drives them from now on."""
        self.engines_turn()
        watchers = self._watchers
        self.run(self._explorer.prepare(sink, self.sync.weights, watchers.observe, watchers.progress))
        self._driver.limit_blocking(self._explorer.config.max_timeout)

    def close(self) -> None:
        """Stop the runners and free the engines."""
        self._ahead.cancel()
        try:
            self._driver.end(self._explorer.shutdown())
        finally:
            self._driver.close()

    def run(self, coroutine: Coroutine[Any, Any, T], interruptible: bool = True) -> T:
        """The coroutine's result; see `Driver.run`."""
        try:
            return self._driver.run(coroutine, interruptible)
        finally:
            self._watchers.flush()

    def engines_turn(self) -> None:
        """Before the engines compute: give them the memory that they share with the trainer in turns, if any."""
        if self._host_memory is not None:
            self._host_memory.leave()
        self.run(self._explorer.engines.wake_up())

    def trainers_turn(self) -> None:
        """Before the trainer computes: the same the other way round."""
        self.run(self._explorer.engines.sleep())
        if self._host_memory is not None:
            self._host_memory.come_back()

    def obtain(self, step: int, global_step: int, is_ready: Callable[[int], bool]) -> dict[str, float]:
        """Have the experiences of a step ready: wait for those begun ahead, or roll them out now; metrics."""
        start = time.perf_counter()
        self._wait()
        if is_ready(step):
            return {"time/wait_for_rollout": time.perf_counter() - start}
        self._explorer.step = step - 1
        return self._roll_out(step, global_step)

    def explore_ahead(self, step: int, global_step: int, last: float) -> dict[str, float]:
        """With sync_offset, begin the rollouts that go on while `step` is trained on, unless that is done; metrics.

        Args:
            step: the step that is ready.
            global_step: the trainer's.
            last: the step that ends the run.
        """
        offset = self._explorer.config.sync_offset
        target = min(step + offset, last)
        if self._explorer.step >= target or self._ahead.under_way:
            return {}
        metrics: dict[str, float] = {}
        if self._explorer.step < (begun := min(step - 1 + offset, last)):
            metrics |= self._roll_out(int(begun), global_step)  # those before have weights of their own
        metrics |= self.sync.sync_if_due(global_step)
        self._ahead.begin(self._driver, int(target))
        return metrics

    def evaluate(self, step: int, global_step: int) -> dict[str, float]:
        """Evaluate the weights that were trained for `step` steps; metrics."""
        self._wait()  # before a sync: were they to be done again, it would be with the weights of now
        self.engines_turn()
        return self.sync.sync(global_step) | self.run(self._explorer.eval(step))

    def settle(self, limit: float) -> None:
        """The run is ending: wait for rollouts in flight, but not for long."""
        self._driver.hurry()
        self._ahead.settle(limit)

    def _roll_out(self, target: int, global_step: int) -> dict[str, float]:
        """Explore the steps up to and with `target` now; metrics of the sync before them."""
        self.engines_turn()
        metrics = self.sync.sync_if_due(global_step)
        self.run(self._ahead.explore(target))
        return metrics

    def _wait(self) -> None:
        self._ahead.wait()
        self._watchers.flush()
