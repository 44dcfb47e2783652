"""With explorer.sync_offset: explore steps that are rolled out while the trainer trains on those before."""

import logging
import math
import time
from dataclasses import dataclass

from trinity_lightning.explorer.driver import LoopTask
from trinity_lightning.explorer.rollouts import TrainingRollouts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of time in seconds of `time.perf_counter`."""

    begin: float
    end: float

    def overlap(self, other: "Interval") -> float:
        """The time that both have in common, as a share of the shorter one."""
        common = min(self.end, other.end) - max(self.begin, other.begin)
        shorter = min(self.end - self.begin, other.end - other.begin)
        return max(common, 0.0) / shorter if shorter > 0 else 0.0


class RolloutsAhead(TrainingRollouts):
    """The rollouts of one `Trainer.fit`, begun `sync_offset` steps before the trainer needs them."""

    _begun: LoopTask[Interval] | None = None
    _begun_at = 0.0
    _error: Exception | None = None  # of what was begun and has ended

    @property
    def under_way(self) -> bool:
        """See `TrainingRollouts.under_way`."""
        return self._begun is not None

    def explore_ahead(self, step: int, global_step: int, last: float) -> dict[str, float]:
        """See `TrainingRollouts.explore_ahead`; nothing is done if it is done already."""
        offset = self.explorer.config.sync_offset
        target = min(step + offset, last)
        if self.explorer.step >= target or self.under_way:
            return {}
        if self.explorer.step < (before := min(step - 1 + offset, last)):
            self._roll_out(int(before), global_step)  # those before have weights of their own
        metrics = self.sync.sync_if_due(global_step)
        self._begin(int(target))
        return metrics

    def _begin(self, target: int) -> None:
        self._begun_at = time.perf_counter()  # first: the rollouts begin within the call
        self._begun = self.driver.start(self._timed(target))

    async def _timed(self, target: int) -> Interval:
        start = time.perf_counter()
        await self._explore(target)
        return Interval(start, time.perf_counter())

    def wait(self) -> None:
        """See `TrainingRollouts.wait`. Ctrl-C and SIGTERM cancel what is under way: a resumed run does it again."""
        self.settle()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self) -> None:
        """See `TrainingRollouts.settle`; Ctrl-C and SIGTERM cancel what is under way, and are raised."""
        self._settle(math.inf)

    def settle_shortly(self, seconds: float) -> None:
        """Wait for `seconds`: rollouts finished by then go into the checkpoint, a resumed run does the others again.

        Only a second Ctrl-C ends the wait early.
        """
        logger.warning("waiting %g s for the rollouts in flight; Ctrl-C stops without a checkpoint.", seconds)
        self.driver.hurry()
        self._settle(seconds)
        if self.explorer.step < self.pending.target:
            logger.warning("the next step's rollouts are not in the checkpoint: a resumed run does them again.")

    def _settle(self, limit: float) -> None:
        begun, self._begun = self._begun, None
        if begun is None:
            return
        training = Interval(self._begun_at, time.perf_counter())
        try:
            rollouts = self.driver.wait(begun, interruptible=limit == math.inf, limit=limit)
        except Exception as error:
            self._error = error
        else:
            self.pending.metrics[self.explorer.step]["rollout/overlap"] = rollouts.overlap(training)

    def close(self) -> None:
        """Give up what is under way, and free everything; an error that nobody has waited for is logged."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self.driver.cancel(begun)
        if self._error is not None:
            logger.warning("the rollouts that were begun ahead failed: %s: %s", type(self._error).__name__, self._error)
        super().close()
