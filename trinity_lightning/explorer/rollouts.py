"""Explore steps of a training run: rolled out, evaluated and synced when its main thread asks for it."""

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from trinity_lightning.common.experience import Experience
from trinity_lightning.config.engines import SynchronizerConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.driver import Driver
from trinity_lightning.explorer.explorer import Explorer, Observer, Progress, Sink
from trinity_lightning.explorer.sync_policy import SyncedPolicy, SyncPolicy, WeightVersions
from trinity_lightning.trainer.optim import HostMemory

T = TypeVar("T")


@dataclass
class PendingSteps:
    """Explore steps that were asked for and are not trained on yet: what of rollouts is in checkpoints.

    Attributes:
        target: the last step that was asked for.
        metrics: what was measured of each that is rolled out.
    """

    target: int = 0
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Both."""
        return {"target": self.target, "metrics": {step: dict(metrics) for step, metrics in self.metrics.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.target = state["target"]
        self.metrics = {step: dict(metrics) for step, metrics in state["metrics"].items()}


class TrainingRollouts:
    """The rollouts of one `Trainer.fit`: a step is rolled out when the trainer needs it.

    Args:
        explorer: what rolls out.
        pending: its steps; they outlive this.
        synchronizer: how weights reach the engines and how that is checked.
        policy: what is trained.
        versions: of its weights; they outlive this.
        host_memory: masters and moments, which leave the device while engines generate; None: they stay.
        interrupted: asked while rollouts are waited for; an exception that it returns ends them.
        observer: shown the experiences of every step and evaluation, by the main thread.
        progress: called with how many tasks of a batch have ended, while the main thread waits for them.
    """

    def __init__(
        self,
        explorer: Explorer,
        pending: PendingSteps,
        synchronizer: SynchronizerConfig,
        policy: SyncedPolicy,
        versions: WeightVersions,
        host_memory: HostMemory | None,
        interrupted: Callable[[], BaseException | None],
        observer: Observer,
        progress: Progress,
    ) -> None:
        self._explorer = explorer
        self._pending = pending
        self._host_memory = host_memory
        self._observer = observer
        self._progress = progress
        self._driver = Driver(explorer.engines.models, interrupted)
        self._sync = SyncPolicy(explorer, policy, synchronizer, versions, self._driver.run)

    def prepare(self, sink: Sink) -> None:
        """Load the engines, start the runners, and connect engines and trainer."""
        self._engines_turn()
        self.run(self._explorer.prepare(sink, self._sync.weights, self._observe, self._show_progress))
        self._driver.limit_blocking(self._explorer.config.max_timeout)
        self._sync.join()

    def close(self) -> None:
        """Stop the runners and free the engines."""
        try:
            self._driver.end(self._explorer.shutdown())
        finally:
            self._driver.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; see `Driver.run`."""
        return self._driver.run(coroutine)

    def obtain(self, step: int, global_step: int, is_ready: Callable[[int], bool]) -> dict[str, float]:
        """Have the experiences of a step ready: wait for those begun ahead, or roll them out now; metrics."""
        start = time.perf_counter()
        self.wait()
        if is_ready(step):
            return {"time/wait_for_rollout": time.perf_counter() - start}
        self._explorer.step = step - 1
        return self._roll_out(step, global_step)

    def evaluate(self, step: int, global_step: int) -> dict[str, float]:
        """Evaluate the weights that were trained for `step` steps; metrics."""
        self.wait()  # before a sync: were they to be done again, it would be with the weights of now
        self._engines_turn()
        return self._sync.sync(global_step) | self.run(self._explorer.eval(step))

    def trainers_turn(self) -> None:
        """Before the trainer computes: give it the memory that it shares with the engines in turns, if any."""
        self.run(self._explorer.engines.sleep())
        if self._host_memory is not None:
            self._host_memory.come_back()

    def _engines_turn(self) -> None:
        """Before the engines compute: the same the other way round."""
        if self._host_memory is not None:
            self._host_memory.leave()
        self.run(self._explorer.engines.wake_up())

    def _roll_out(self, target: int, global_step: int) -> dict[str, float]:
        """Explore the steps up to and with `target` now; metrics of the sync before them."""
        self._engines_turn()
        metrics = self._sync.sync_if_due(global_step)
        self.run(self._explore(target))
        return metrics

    async def _explore(self, target: int) -> None:
        """Explore steps up to and with `target`; a ConfigError if the taskset is exhausted."""
        explorer = self._explorer
        self._pending.target = target
        while explorer.step < target:
            if not await explorer.explore_step():
                raise ConfigError(
                    f"the taskset is exhausted after {explorer.step} explore steps; lower `steps`, or let it repeat."
                )
            self._pending.metrics[explorer.step] = dict(explorer.metrics)

    def _observe(self, experiences: list[Experience], step: int, taskset: str | None) -> None:
        # Later: the observer's loggers are the trainer's too, which may be logging just now.
        self._driver.call_later(partial(self._observer, experiences, step, taskset))

    def _show_progress(self, batch: int | str, done: int, total: int) -> None:
        if not self.under_way:  # else the main thread trains, and draws a bar of its own
            self._progress(batch, done, total)

    # -- what goes on while the trainer trains: nothing, but see `RolloutsAhead` ---------------------------------------

    @property
    def under_way(self) -> bool:
        """Whether rollouts were begun and not waited for."""
        return False

    def explore_ahead(self, step: int, global_step: int, last: float) -> dict[str, float]:
        """Begin the rollouts that go on while `step` is trained on; metrics.

        Args:
            step: the step that is ready.
            global_step: the trainer's.
            last: the step that ends the run.
        """
        return {}

    def wait(self) -> None:
        """Wait for what is under way; an error of it is raised."""

    def settle(self) -> None:
        """Wait for the end of what is under way; an error of it is raised by `wait`."""

    def settle_shortly(self, seconds: float) -> None:
        """The run is ending: give up what is under way if it does not end within so many seconds."""
