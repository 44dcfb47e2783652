"""When the engines are given the trainer's weights, and how these are counted."""

from collections.abc import Callable, Coroutine
from typing import Any

from trinity_lightning.config.values import check_version
from trinity_lightning.explorer.explorer import Explorer

_OLDER = -1  # instead of a global_step: the engines were given weights of a step before


class SyncPolicy:
    """Decides by state alone whether the engines need weights: which ones they have, and for which step.

    The version of weights is the number of explore steps that changed them: one without an optimizer step adds nothing.

    Args:
        explorer: whose engines, and which says when a sync is due.
        run: runs a coroutine of a weight sync to its end, in time.

    Attributes:
        synchronize: `Synchronizer.sync`, which sends the trainer's present weights and proves that they arrived; set
            once the engines are up.
    """

    def __init__(self, explorer: Explorer, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.synchronize: Callable[[], dict[str, float]] | None = None
        self._explorer = explorer
        self._run = run
        self._synced_at: int | None = None  # global_step of the weights that the engines have; None: fresh engines
        self._sending = 0
        self.forget()

    def forget(self) -> None:
        """Nothing is counted yet, as before the first step."""
        self._counted, self._counted_at = 0, 0  # steps that changed the weights, and global_step when it was counted
        self._synced_for: int | None = None  # explore steps done when the last sync was decided on

    def begin(self) -> None:
        """The engines are fresh ones."""
        self.synchronize, self._synced_at = None, None

    def begin_step(self, global_step: int) -> None:
        """Another explore step is going to be trained on: count the one before, if it changed the weights."""
        self._counted, self._counted_at = self.version(global_step), global_step

    def version(self, global_step: int) -> int:
        """The version of the trainer's weights at `global_step`, between two explore steps."""
        return self._counted + (global_step > self._counted_at)

    async def send(self) -> None:
        """Give every engine the trainer's present weights, with the version of the sync under way."""
        await self._explorer.sync_weight(self._sending)

    def sync_if_due(self, global_step: int) -> dict[str, float]:
        """Before rollouts; metrics. Fresh engines are always synced, which proves them, and then given what they had.

        A sync is due once for each number of explore steps: rollouts that are done again, as they were cut short, have
        the weights that they had the first time.
        """
        step, engines = self._explorer.step, self._explorer.engines
        fresh, again = self._synced_at is None, self._synced_for == step
        due = self._explorer.need_sync() and not again
        metrics = self.sync(global_step) if due or fresh else {}
        if due:
            engines.forget_restored()
        elif (fresh or again) and self._run(engines.restore()):
            self._synced_at = _OLDER
        self._synced_for = step
        return metrics

    def sync(self, global_step: int) -> dict[str, float]:
        """Send the weights, unless the engines have them: an item that trained nothing changed none. Metrics."""
        if self._synced_at == global_step:
            return {}
        if self.synchronize is None:
            raise RuntimeError("the engines are not up: weights are synced only inside Trainer.fit.")
        self._sending = self.version(global_step)
        metrics = self.synchronize()
        self._synced_at = global_step
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """What is counted, and for which step the engines have their weights."""
        return {"counted": self._counted, "counted_at": self._counted_at, "synced_for": self._synced_for}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; a ConfigError if an earlier version did."""
        check_version(state, ("counted", "counted_at", "synced_for"), "weight syncs")
        self._counted, self._counted_at = state["counted"], state["counted_at"]
        self._synced_for = state["synced_for"]
