"""Rollouts of a training run that go on across steps (explorer.max_staleness above 0)."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trinity_lightning.errors import WorkflowBlockedError
from trinity_lightning.explorer.groups import GroupRollouts
from trinity_lightning.explorer.rollouts import TrainingRollouts


@dataclass(eq=False)
class AsyncRollouts(TrainingRollouts):
    """Rolls out for one `Trainer.fit` without waiting for long rollouts.

    An engine in this process is driven by the main thread: while that trains, rollouts under way are suspended, because
    nobody drives it. Servers generate meanwhile. A weight sync changes the weights of rollouts under way, or with
    `explorer.in_flight=wait` waits for their end. Evaluations drive the engine too, so that rollouts go on meanwhile.
    """

    @property
    def _groups(self) -> GroupRollouts:
        assert self.explorer.groups is not None
        return self.explorer.groups

    def limit_steps(self, last: float) -> None:
        self._groups.controller.last = None if math.isinf(last) else int(last)

    def obtain(self, step: int, global_step: int, is_ready: Callable[[int], bool]) -> dict[str, float]:
        start = time.perf_counter()
        if is_ready(step) and step in self.pending.metrics:
            return {"time/wait_for_rollout": time.perf_counter() - start}
        self.explorer.step = step - 1
        metrics = self._sync(lambda: self.sync.sync_if_due(global_step))
        self.driver.run(self._explore(step, metrics))
        waited = time.perf_counter() - start - metrics.get("time/sync_weight", 0.0)
        return {"time/wait_for_rollout": waited} if self._groups.overlaps else {}  # else they take turns: time/rollout

    def evaluate(self, step: int, global_step: int) -> dict[str, float]:
        return self._sync(lambda: self.sync.sync(global_step)) | self.driver.run(self.explorer.eval(step))

    def _sync(self, send: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Give the engines their turn and the present weights; then groups begin."""
        self._engines_turn()
        if self._groups.waits:
            self.driver.run(self._groups.drain())
        metrics = send()
        self.driver.run(self._begin_groups())
        return metrics

    async def _begin_groups(self) -> None:
        self.explorer.begin_groups()

    def trainers_turn(self) -> None:
        if not self._groups.overlaps:
            self.explorer.clock.stop()
            self.driver.suspended = True  # with an empty cache, a step would compute the prompts of all requests
        super().trainers_turn()

    def _engines_turn(self) -> None:
        super()._engines_turn()
        self.driver.suspended = False
        self.explorer.clock.go()

    def explore_ahead(self, step: int, global_step: int) -> dict[str, float]:
        return {}

    def state(self, with_weights: bool) -> dict[str, Any]:
        """The explorer's state, taken between two turns of the loop on which groups go on.

        The calls under way are asked for first: a group that ends meanwhile is complete in the state, and needs none.
        If a workflow blocks the loop, which ends the run, no group goes on, and this thread takes the state.
        """
        calls = self._groups.calls()

        async def take() -> dict[str, Any]:
            return self.explorer.state_dict(with_weights)

        try:
            state = self.driver.run(take(), False)
        except WorkflowBlockedError:
            state = self.explorer.state_dict(with_weights)
        state["groups"]["calls"] = calls
        return state
