"""What the main thread of a training run asks for: explore steps, evaluations, and weight syncs before them."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.ranks import ALONE, Alone
from trinity_lightning.config.engine import SENT, SynchronizerConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.driver import Driver, LoopTask
from trinity_lightning.explorer.explorer import Explorer, Sink, Watcher
from trinity_lightning.explorer.interruption import keep_sigterm
from trinity_lightning.sync.policy_engines import shares_weights
from trinity_lightning.sync.proof import PROBE_TEXT, Synchronizer, Tolerance, perturbed
from trinity_lightning.sync.stream import WeightStream, parameter_stream, weight_stream

if TYPE_CHECKING:
    from trinity_lightning.trainer.host import HostMemory
    from trinity_lightning.trainer.policy import PolicyModule

logger = logging.getLogger(__name__)

# -- weight syncs -----------------------------------------------------------------------------------------------------


# Extra seconds for engines if several ranks train: a rank that hangs is reported before the engines' own time-out.
GRACE_SECONDS = 6.0
_OLDER = -1  # instead of a global_step: the engines were given weights of a step before


@dataclass
class WeightVersions:
    """The versions of the trainer's weights: the part of the weight syncs' state that checkpoints hold.

    A version is the number of explore steps that changed the weights: one without an optimizer step adds nothing, and
    one that warms up a critic alone counts.
    """

    counted: int = 0  # steps that changed the weights
    counted_at: int = 0  # the global_step when they were counted
    synced_for: int | None = None  # explore steps done when the last sync was decided on
    drill_scale: float | None = None  # the scale of the drill's noise that was enough; None before the drill

    def begin_step(self, global_step: int) -> None:
        """Another explore step is going to be trained on: count the one before, if it changed the weights."""
        self.counted, self.counted_at = self.at(global_step), global_step

    def at(self, global_step: int) -> int:
        """The version of the trainer's weights at `global_step`, between two explore steps."""
        return self.counted + (global_step > self.counted_at)


@dataclass(eq=False)
class SyncPolicy:
    """Decides when engines are sent the trainer's weights, by state alone: which they have, and for which step."""

    explorer: Explorer  # whose engines, and which says when a sync is due
    policy: "PolicyModule"
    config: SynchronizerConfig  # how weights reach the engines and how that is checked
    versions: WeightVersions
    run: Callable[[Coroutine[Any, Any, Any], bool], Any]  # a coroutine to its end; with False, Ctrl-C waits for that
    _synced_at: int | None = field(default=None, init=False)  # global_step of the engines' weights; None: fresh engines
    _sending: int = field(default=0, init=False)  # the version of what is being sent

    def weights(self) -> WeightStream:
        """The trainer's present weights, as the engines name them."""
        if self.config.lora == "adapter":
            return self.policy.policy.adapter.alone()
        stream = parameter_stream if shares_weights(self.explorer.engines.models) else weight_stream
        return stream(self.policy.policy)

    def join(self) -> None:
        """Once the engines are up: connect the trainer with them, if weights are sent without a file."""
        if self.config.method in SENT:
            self._run_in_time(self.explorer.setup_weight_sync_group())

    def sync_if_due(self, global_step: int) -> dict[str, float]:
        """Sync before the rollouts of a step, if it is due; metrics.

        - A sync is due by `explorer.sync_interval`, once for each step: rollouts that are done again, because they were
          cut short, need the weights that they had the first time.
        - Engines that were just loaded are synced in any case, for the proof that weights arrive.
        - Of a resumed run, they are then given the weights that they had, if no sync is due.
        """
        step, engines = self.explorer.step, self.explorer.engines
        decided_before = self.versions.synced_for == step
        just_loaded = self._synced_at is None
        is_due = self.explorer.need_sync() and not decided_before
        metrics = self.sync(global_step) if is_due or just_loaded else {}
        if is_due:
            engines.forget_restored()
        elif (just_loaded or decided_before) and self._run_in_time(engines.restore()):
            self._synced_at = _OLDER
        self.versions.synced_for = step
        return metrics

    def sync(self, global_step: int) -> dict[str, float]:
        """Send the weights, unless the engines have them: an item that trained nothing changed none. Metrics."""
        if self._synced_at == global_step:
            return {}
        self._sending = self.versions.at(global_step)
        try:
            with self._ranks.within(self.config.sync_timeout):  # for noise and log-probabilities: see `_run_in_time`
                metrics = self._synchronizer.sync()
        finally:
            self.versions.drill_scale = self._synchronizer.drill_scale
        self._synced_at = global_step
        return metrics

    @cached_property
    def _synchronizer(self) -> Synchronizer:
        policy, model, engines = self.policy, self.policy.policy, self.explorer.engines.models
        token_ids = policy.tokenizer.encode(PROBE_TEXT)
        said = policy.tokenizer.decode(token_ids)
        if any(each.tokenizer and each.tokenizer.decode(token_ids) != said for each in engines):
            raise ConfigError(
                f"an engine's tokenizer is not that of '{policy.model_name}'", fix="give it that model, too"
            )
        token_ids = token_ids[: min(engine.max_model_len for engine in engines) - 1]
        return Synchronizer(
            model.adapter.perturbed_alone if self.config.lora == "adapter" else partial(perturbed, model),
            send=lambda: self._run_in_time(self.explorer.sync_weight(self._sending)),
            trainer_logprobs=partial(policy.sequence_logprobs, token_ids),
            engine_logprobs=lambda: [self._run_in_time(engine.logprobs(token_ids)) for engine in engines],
            tolerance=Tolerance.of(
                model.dtype,
                *[engine.dtype for engine in engines],
                quantized=any(engine.quantized for engine in engines),
            ),
            check_interval=self.config.check_interval,
            with_drill=self.config.drill and not shares_weights(engines),
            drill_scale=self.versions.drill_scale,
        )

    def _run_in_time(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What engines do in a weight sync, within `sync_timeout`; Ctrl-C waits: servers would have half of it."""
        limit = self.config.sync_timeout
        try:
            with self._ranks.within(limit):
                return self.run(asyncio.wait_for(coroutine, limit + GRACE_SECONDS * (self._ranks.size > 1)), False)
        except TimeoutError as error:
            from trinity_lightning.sync.proof import not_in_time

            raise not_in_time(limit) from error

    @property
    def _ranks(self) -> Alone:
        """Those whose shares of the weights are gathered, or whose engines are given weights."""
        shards = getattr(self.policy.policy, "shards", None)
        return getattr(shards or self.explorer.engines.group, "ranks", ALONE)


# -- rollouts ---------------------------------------------------------------------------------------------------------


@dataclass
class PendingSteps:
    """Explore steps that were asked for and are not trained on yet: the part of the rollouts that checkpoints hold."""

    target: int = 0  # the last step that was asked for
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)  # of each step that is rolled out


@dataclass(eq=False)
class TrainingRollouts(Watcher):
    """The rollouts of one `Trainer.fit`: a step is rolled out when the trainer needs it, or `sync_offset` steps before.

    Pending steps and the versions of the weights are kept from one `Trainer.fit` to the next. The watcher is called by
    the main thread.
    """

    explorer: Explorer
    pending: PendingSteps
    synchronizer: SynchronizerConfig
    policy: "PolicyModule"
    versions: WeightVersions
    host_memory: "HostMemory | None"  # masters and moments, which leave the device while engines generate
    interrupted: Callable[[], BaseException | None]  # asked while rollouts are waited for; what it returns ends them
    watcher: Watcher
    _begun: tuple[float, LoopTask[tuple[float, float]]] | None = field(default=None, init=False)  # when, and what
    _error: Exception | None = field(default=None, init=False)  # of what was begun and has ended

    def __post_init__(self) -> None:
        self.driver = Driver(self.explorer.engines.models, self.interrupted)
        self.sync = SyncPolicy(self.explorer, self.policy, self.synchronizer, self.versions, self.driver.run)

    def prepare(self, sink: Sink) -> None:
        """Load the engines, start the runners, and connect engines and trainer."""
        self._engines_turn()
        self.driver.run(self.explorer.prepare(sink, self.sync.weights, self))
        keep_sigterm()  # at once: engines may take a while to connect
        self.driver.limit_blocking(self.explorer.config.max_timeout)
        self.sync.join()

    def close(self) -> None:
        """Give up what is under way, and free everything; an error that nobody has waited for is logged."""
        if self._begun is not None:
            self.driver.cancel(self._begun[1])
        if self._error is not None:
            logger.warning("the rollouts that were begun ahead failed: %s: %s", type(self._error).__name__, self._error)
        try:
            self.driver.end(self.explorer.shutdown())
        finally:
            self.driver.close()

    def obtain(self, step: int, global_step: int, is_ready: Callable[[int], bool]) -> dict[str, float]:
        """Have the experiences of a step ready: wait for those begun ahead, or roll them out now; metrics."""
        start = time.perf_counter()
        self.wait()
        if is_ready(step) and step in self.pending.metrics:  # without them it was not whole, and is done again
            return {"time/wait_for_rollout": time.perf_counter() - start}
        self.explorer.step = step - 1
        self._roll_out(step, global_step)
        return {}

    def evaluate(self, step: int, global_step: int) -> dict[str, float]:
        """Evaluate the weights that were trained for `step` steps; metrics."""
        self.wait()  # before a sync: were they to be done again, it would be with the weights of now
        self._engines_turn()
        if self.explorer.step >= self.pending.target:  # no rollouts are to be done again with the weights they had
            self.explorer.engines.forget_restored()
        return self.sync.sync(global_step) | self.driver.run(self.explorer.eval(step))

    def trainers_turn(self) -> None:
        """Before the trainer computes: give it the memory that it shares with the engines in turns, if any."""
        self.driver.run(self.explorer.engines.sleep())
        if self.host_memory is not None:
            self.host_memory.come_back()

    def _engines_turn(self) -> None:
        """Before the engines compute: the same the other way round."""
        if self.host_memory is not None:
            self.host_memory.leave()
        self.driver.run(self.explorer.engines.wake_up())

    def _roll_out(self, target: int, global_step: int) -> None:
        """Explore the steps up to and with `target` now; the first has the metrics of the sync before them."""
        self._engines_turn()
        self.driver.run(self._explore(target, self.sync.sync_if_due(global_step)))

    async def _explore(self, target: int, metrics: dict[str, float] | None = None) -> None:
        """Explore steps up to and with `target`, the first with these metrics; a ConfigError if no task is left.

        They are kept at once: the run may be ended by a signal when the rollouts are done.
        """
        explorer, first = self.explorer, metrics or {}
        self.pending.target = target
        while explorer.step < target:
            if not await explorer.explore_step():
                done = f"the taskset is exhausted after {explorer.step} explore steps"
                raise ConfigError(f"{done}", fix="lower `steps`, or let it repeat")
            self.pending.metrics[explorer.step], first = first | explorer.metrics, {}

    def keep_completions(self, experiences: list[Experience], step: int, taskset: str | None) -> None:
        """Show them later: the watcher's loggers are the trainer's too, which may be logging just now."""
        self.driver.call_later(partial(self.watcher.keep_completions, experiences, step, taskset))

    def show_tasks(self, batch: int | str, done: int, total: int) -> None:
        """Show them, unless the main thread trains, and draws a bar of its own."""
        if not self.under_way:
            self.watcher.show_tasks(batch, done, total)

    # -- what goes on while the trainer trains (explorer.sync_offset) --------------------------------------------------

    @property
    def under_way(self) -> bool:
        return self._begun is not None

    def explore_ahead(self, step: int, global_step: int, last: float) -> dict[str, float]:
        """Begin what is rolled out while `step` is trained on, unless it is begun, up to step `last`; metrics."""
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
        self._begun = time.perf_counter(), self.driver.start(self._timed(target))  # they begin within the call

    async def _timed(self, target: int) -> tuple[float, float]:
        start = time.perf_counter()
        await self._explore(target)
        return start, time.perf_counter()

    def wait(self) -> None:
        """Wait for what is under way; an error of it is raised.

        Ctrl-C and SIGTERM cancel it, and are raised: a resumed run does it again.
        """
        self.settle()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self, limit: float = math.inf) -> None:
        """Wait, for `limit` seconds, for the end of what is under way; an error of it is raised by `wait`.

        With a limit the run is ending: only a second Ctrl-C ends the wait early, else Ctrl-C and SIGTERM do as above.
        """
        if self._begun is None:
            return
        (start, begun), self._begun = self._begun, None
        training = start, time.perf_counter()
        try:
            rollouts = self.driver.wait(begun, interruptible=limit == math.inf, limit=limit)
        except Exception as error:
            self._error = error
        else:
            self.pending.metrics[self.explorer.step]["rollout/overlap"] = overlap(rollouts, training)


def overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    """The time that two intervals, each from its begin to its end, have in common, as a share of the shorter one."""
    common = min(one[1], other[1]) - max(one[0], other[0])
    shorter = min(one[1] - one[0], other[1] - other[0])
    return max(common, 0.0) / shorter if shorter > 0 else 0.0
