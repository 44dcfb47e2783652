"""Explore steps, evaluations and weight syncs of a training run, as its main thread asks for them."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.pictures.families import untested_means
from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.common.ranks import ALONE, Alone
from trinity_lightning.config.engines import SENT, SynchronizerConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.driver import Driver, LoopTask
from trinity_lightning.explorer.explorer import Explorer, Sink, Watcher
from trinity_lightning.explorer.groups import GroupBuffer
from trinity_lightning.explorer.interruption import CtrlC, keep_sigterm
from trinity_lightning.sync.policy_engines import shares_weights
from trinity_lightning.sync.proof import PROBE_TEXT, Synchronizer, Tolerance, not_in_time, perturbed, probe_picture
from trinity_lightning.sync.stream import WeightStream, changing_stream, parameter_stream, weight_stream
from trinity_lightning.trainer.host import HostMemory
from trinity_lightning.trainer.policy import PolicyModule

logger = logging.getLogger(__name__)

# Extra seconds for engines if several ranks train, so that a rank that hangs is reported before the engines time out.
GRACE_SECONDS = 6.0
STOP_SECONDS = 20.0  # limit for rollouts in flight if a run ends early: clusters kill a job 30 s after SIGTERM
_OLDER = -1  # stands for the global_step of restored weights, which are older than the trainer's

# -- weight syncs -----------------------------------------------------------------------------------------------------


@dataclass
class WeightVersions:
    """Versions of the trainer's weights: the part of the weight syncs' state that checkpoints hold.

    A version is the number of explore steps that changed the weights. A step without an optimizer step does not count;
    a step that only warms up a critic does.
    """

    counted: int = 0  # steps that changed the weights
    counted_at: int = 0  # the global_step when they were counted
    synced_for: int | None = None  # explore steps done when the last sync was decided on
    drill_scale: float | None = None  # the scale of the drill's noise that was enough; None before the drill

    def begin_step(self, global_step: int) -> None:
        """Count the previous explore step if it changed the weights; called when training on the next step begins."""
        self.counted, self.counted_at = self.at(global_step), global_step

    def at(self, global_step: int) -> int:
        """Version of the trainer's weights at `global_step`, between two explore steps."""
        return self.counted + (global_step > self.counted_at)


@dataclass(eq=False)
class SyncPolicy:
    """Decides when weights are sent to the engines, by state alone: the engines' weights, and the present step.

    Attributes:
        explorer: has the engines, and says when a sync is due.
        policy: the policy that is trained.
        config: settings of the weight syncs and their checks.
        versions: versions of the trainer's weights.
        run: runs a coroutine to its end, see `Driver.run`.
    """

    explorer: Explorer
    policy: PolicyModule
    config: SynchronizerConfig
    versions: WeightVersions
    run: Callable[[Coroutine[Any, Any, Any], bool, bool], Any]
    _synced_at: int | None = field(default=None, init=False)  # global_step of the engines' weights; None: fresh engines
    _sending: int = field(default=0, init=False)  # version of the weights that are being sent
    _has_refilled: bool = field(default=False, init=False)  # true once engines had given up their weights

    def weights(self) -> WeightStream:
        """The trainer's present weights, under the engines' names; without frozen ones that the engines have."""
        engines, model = self.explorer.engines, self.policy.policy
        if self.config.lora == "adapter":
            return model.adapter.alone()
        if shares_weights(engines.models):
            return parameter_stream(model)
        # Until the first sync has ended they may have a drill's, and in its sleep an engine may give up all of them.
        have_all = self._synced_at is not None and not engines.lack_weights
        keep_them = all(engine.capabilities.keeps_unsent for engine in engines.models)
        return changing_stream(model) if have_all and keep_them else weight_stream(model)

    def join(self) -> None:
        """Connect the trainer with the engines, which are up, if weights are sent without a file."""
        if self.config.method in SENT:
            self._run_in_time(self.explorer.setup_weight_sync_group())

    @property
    def follows(self) -> bool:
        """True if weights will be sent before the engines' next request, once the trainer has trained this step."""
        groups = self.explorer.groups  # those under way may have requests at any time
        return self.explorer.need_sync() and (groups is None or groups.waits)

    def sync_if_due(self, global_step: int) -> dict[str, float]:
        """Sync before the rollouts of a step, if a sync is due, and return its metrics.

        - A sync is due by `explorer.sync_interval`, once a step. Rollouts that were cut short and are repeated need the
          weights of their first time.
        - Engines that were just loaded are synced in any case, to prove that weights arrive; and so are engines that
          gave up their weights in their sleep.
        - Engines of a resumed run are then given the weights that they had before the run stopped, unless a sync is
          due.
        """
        step, engines = self.explorer.step, self.explorer.engines
        decided_before = self.versions.synced_for == step
        just_loaded = self._synced_at is None
        is_due = self.explorer.need_sync() and not decided_before
        metrics = self.sync(global_step) if is_due or just_loaded or engines.lack_weights else {}
        if is_due:
            engines.forget_restored()
        elif (just_loaded or decided_before) and self._run_in_time(engines.restore(), resting=True):
            self._synced_at = _OLDER
        self.versions.synced_for = step
        return metrics

    def sync(self, global_step: int) -> dict[str, float]:
        """Send the weights, and return metrics.

        Nothing is sent if no optimizer step was taken since the last sync, and the engines have their weights.
        """
        if self._synced_at == global_step and not self.explorer.engines.lack_weights:
            return {}
        self._sending = self.versions.at(global_step)
        if self.explorer.engines.lack_weights and not self._has_refilled:
            self._synchronizer.probes_next = self._has_refilled = True  # a sync must fill all that was given up
        try:
            # Bounds the noise and the trainer's log-probabilities; the parts of engines are bounded by `_run_in_time`.
            with self._ranks.within(self.config.sync_timeout):
                metrics = self._synchronizer.sync()
        finally:
            self.versions.drill_scale = self._synchronizer.drill_scale
        self._synced_at = global_step
        return metrics

    @cached_property
    def _synchronizer(self) -> Synchronizer:
        policy, model, engines = self.policy, self.policy.policy, self.explorer.engines.models
        token_ids = policy.tokenizer.encode(PROBE_TEXT)
        text = policy.tokenizer.decode(token_ids)
        if any(engine.tokenizer and engine.tokenizer.decode(token_ids) != text for engine in engines):
            message = f"an engine's tokenizer is not that of '{policy.model_name}'"
            raise ConfigError(message, key="engine", fix="give it that model, too")
        token_ids = self._with_picture(token_ids)
        return Synchronizer(
            model.adapter.perturbed_alone if self.config.lora == "adapter" else partial(perturbed, model),
            send=lambda: self._run_in_time(self.explorer.sync_weight(self._sending), resting=True),
            trainer_logprobs=partial(policy.sequence_logprobs, token_ids),
            engine_logprobs=lambda: [self._run_in_time(engine.logprobs(token_ids)) for engine in engines],
            tolerance=Tolerance.of(
                model.dtype,
                *[engine.dtype for engine in engines],
                quantized=any(engine.quantized for engine in engines),
                on_gpu=policy.device.type == "cuda" and any(engine.capabilities.is_vllm for engine in engines),
            ),
            check_interval=self.config.check_interval,
            with_drill=self.config.drill and not shares_weights(engines),
            drill_scale=self.versions.drill_scale,
            has_pictures=isinstance(token_ids, PicturePrompt),
        )

    def _with_picture(self, token_ids: list[int]) -> Sequence[int]:
        """The probe's tokens, behind a picture if policy and engines read any; no more than engines have room for."""
        engines = self.explorer.engines.models
        room = min(engine.max_model_len for engine in engines) - 1
        processors = [engine.processor for engine in engines if engine.processor is not None]
        if len(processors) < len(engines) or untested_means(self.policy.policy.config) is not None:
            return token_ids[:room]  # the policy of a refused family is trained on text alone
        picture = probe_picture(processors[0])
        if (left := room - len(picture.token_ids)) > 0:  # cut short, it would lack tokens
            return PicturePrompt.joined(picture, token_ids[:left])
        logger.warning(
            "a picture of %d tokens does not fit into engine.max_model_len: the probe of synced weights "
            "has none, and does not look at the tower.",
            len(picture.token_ids),
        )
        return token_ids[:room]

    def _run_in_time(self, coroutine: Coroutine[Any, Any, Any], resting: bool = False) -> Any:
        """Run a part of a weight sync within `sync_timeout`; Ctrl-C waits, lest servers have half of the weights.

        While weights are sent, requests under way rest: with the old ones, all of them would be computed in vain.
        """
        limit = self.config.sync_timeout
        try:
            with self._ranks.within(limit):
                coroutine = asyncio.wait_for(coroutine, limit + GRACE_SECONDS * (self._ranks.size > 1))
                return self.run(coroutine, False, resting)
        except TimeoutError as error:
            raise not_in_time(limit) from error

    @property
    def _ranks(self) -> Alone:
        """The ranks that have shares of the weights, or whose engines are given weights."""
        shards = getattr(self.policy.policy, "shards", None)
        return getattr(shards or self.explorer.engines.group, "ranks", ALONE)


# -- rollouts ---------------------------------------------------------------------------------------------------------


@dataclass
class PendingSteps:
    """Explore steps that were asked for and not trained on yet: the part of the rollouts that checkpoints hold."""

    target: int = 0  # the last step that was asked for
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)  # by step, of steps that are rolled out


@dataclass(eq=False)
class TrainingRollouts(Watcher):
    """Rolls out for one `Trainer.fit`: a step when the trainer needs it, or `sync_offset` steps before.

    The watcher is called by the main thread.

    Attributes:
        explorer: rolls out.
        pending: explore steps under way, kept from one `Trainer.fit` to the next.
        synchronizer: settings of the weight syncs and their checks.
        policy: the policy that is trained.
        versions: versions of its weights, kept from one `Trainer.fit` to the next.
        host_memory: masters and moments that leave the device while engines generate; None: they stay.
        interrupted: asked while rollouts are waited for; an exception that it returns ends them.
        watcher: is shown the run.
    """

    explorer: Explorer
    pending: PendingSteps
    synchronizer: SynchronizerConfig
    policy: PolicyModule
    versions: WeightVersions
    host_memory: HostMemory | None
    interrupted: Callable[[], BaseException | None]
    watcher: Watcher
    # Start, and task, of rollouts that were begun ahead and not waited for yet.
    _begun: tuple[float, LoopTask[tuple[float, float]]] | None = field(default=None, init=False)
    _last: float = field(default=math.inf, init=False)  # the last step that is rolled out
    _error: Exception | None = field(default=None, init=False)  # error of rollouts that were begun ahead and have ended

    def __post_init__(self) -> None:
        self.driver = Driver(self.explorer.engines.models, self.interrupted)
        self.sync = SyncPolicy(self.explorer, self.policy, self.synchronizer, self.versions, self.driver.run)

    def prepare(self, sink: Sink | GroupBuffer) -> None:
        """Load the engines, start the runners, and connect engines and trainer."""
        self._engines_turn()
        self.driver.run(self.explorer.prepare(sink, self.sync.weights, self))
        keep_sigterm()  # at once: engines may take a while to connect
        self.driver.limit_blocking(self.explorer.config.max_timeout)
        self.sync.join()

    def close(self) -> None:
        """Give up rollouts under way, and free everything; an error that nobody has waited for is logged."""
        if self._begun is not None:
            self.driver.cancel(self._begun[1])
        if self._error is not None:
            logger.warning("the rollouts that were begun ahead failed: %s: %s", type(self._error).__name__, self._error)
        try:
            self.driver.end(self.explorer.shutdown())
        finally:
            self.driver.close()

    def obtain(self, step: int, global_step: int, is_ready: Callable[[int], bool]) -> dict[str, float]:
        """Wait for the rollouts of a step if they were begun ahead, else roll out now; returns metrics of the wait."""
        start = time.perf_counter()
        self.wait()
        if is_ready(step) and step in self.pending.metrics:  # a step without metrics is not whole, and is repeated
            return {"time/wait_for_rollout": time.perf_counter() - start}
        self.explorer.step = step - 1
        self._roll_out(step, global_step)
        return {}

    def evaluate(self, step: int, global_step: int) -> dict[str, float]:
        """Evaluate the weights that were trained for `step` steps, and return metrics."""
        self.wait()  # before the sync: rollouts that were repeated after it would have other weights
        self._engines_turn()
        if self.explorer.step >= self.pending.target:  # no rollouts will be repeated with their old weights
            self.explorer.engines.forget_restored()
        return self.sync.sync(global_step) | self.driver.run(self.explorer.eval(step))

    def trainers_turn(self) -> None:
        """Give the trainer the memory that it shares with the engines, before it computes."""
        self.driver.run(self.explorer.engines.sleep(until_sync=self.sync.follows))
        if self.host_memory is not None:
            self.host_memory.come_back()

    def _engines_turn(self) -> None:
        """Give the engines the memory that they share with the trainer, before they compute."""
        if self.host_memory is not None:
            self.host_memory.leave()
        self.driver.run(self.explorer.engines.wake_up())

    def _roll_out(self, target: int, global_step: int) -> None:
        """Explore all steps up to `target` now; the metrics of the sync before them are added to the first step's."""
        self._engines_turn()
        self.driver.run(self._explore(target, self.sync.sync_if_due(global_step)))

    async def _explore(self, target: int, metrics: dict[str, float] | None = None) -> None:
        """Explore all steps up to `target`; `metrics` are added to the first one's. ConfigError: no task is left.

        Metrics are kept as soon as a step is done, because a signal may end the run.
        """
        explorer, first = self.explorer, metrics or {}
        self.pending.target = target
        while explorer.step < target:
            if not await explorer.explore_step():
                done = f"the taskset is exhausted after {explorer.step} explore steps"
                raise ConfigError(done, key="steps", fix="lower `steps`, or let it repeat")
            self.pending.metrics[explorer.step], first = first | explorer.metrics, {}

    def keep_completions(self, experiences: list[Experience], step: int, taskset: str | None) -> None:
        """Show experiences later: the trainer uses the same loggers, and may be logging now."""
        self.driver.call_later(partial(self.watcher.keep_completions, experiences, step, taskset))

    def keep_thumbnails(self, thumbnails: Mapping[str, bytes]) -> None:
        """Keep small copies of pictures later, in the order of these calls."""
        self.driver.call_later(partial(self.watcher.keep_thumbnails, thumbnails))

    def show_tasks(self, batch: int | str, done: int, total: int) -> None:
        """Show the number of finished tasks, unless the main thread trains and draws its own progress bar."""
        self.watcher.count_tasks(batch, done, total)
        if not self.under_way:
            self.watcher.show_tasks(batch, done, total)

    def limit_steps(self, last: float) -> None:
        """Begin no rollouts that would be trained after step `last`."""
        self._last = last

    def state(self, with_weights: bool) -> dict[str, Any]:
        """The explorer's state for a checkpoint; see `Explorer.state_dict`."""
        return self.explorer.state_dict(with_weights)

    # -- rollouts while the trainer trains (explorer.sync_offset) ------------------------------------------------------

    @property
    def under_way(self) -> bool:
        """True if rollouts were begun ahead and not waited for yet."""
        return self._begun is not None

    def explore_ahead(self, step: int, global_step: int) -> dict[str, float]:
        """Begin the rollouts that go on while `step` is trained on, and return metrics of a sync before them.

        Nothing happens if they were begun already, or if there are none: with `sync_offset` 0, as for engines that take
        turns with the trainer, or after the last step.
        """
        offset, last = self.explorer.config.sync_offset, self._last
        target = min(step + offset, last)
        if self.explorer.step >= target or self.under_way:
            return {}
        if self.explorer.step < (previous := min(step - 1 + offset, last)):
            self._roll_out(int(previous), global_step)  # earlier steps, which are rolled out with earlier weights
        metrics = self.sync.sync_if_due(global_step)
        self._begin(int(target))
        return metrics

    def _begin(self, target: int) -> None:
        start = time.perf_counter()  # before the task, which begins at once
        self._begun = start, self.driver.start(self._timed(target))

    async def _timed(self, target: int) -> tuple[float, float]:
        start = time.perf_counter()
        await self._explore(target)
        return start, time.perf_counter()

    def wait(self) -> None:
        """Wait for rollouts under way, and raise their error, if any.

        Ctrl-C and SIGTERM cancel the rollouts and are raised; a resumed run repeats the rollouts.
        """
        self.settle()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self, limit: float = math.inf) -> None:
        """Wait, for at most `limit` seconds, for the end of rollouts under way; their error is raised by `wait`.

        Without a limit, Ctrl-C and SIGTERM end the wait as in `wait`. With a limit the run is ending already, and only
        a second Ctrl-C ends the wait early.
        """
        if self._begun is None:
            return
        (start, task), self._begun = self._begun, None
        training = start, time.perf_counter()
        try:
            rollouts = self.driver.wait(task, interruptible=limit == math.inf, limit=limit)
        except Exception as error:
            self._error = error
        else:
            self.pending.metrics[self.explorer.step]["rollout/overlap"] = overlap(rollouts, training)

    def settle_shortly(self, ctrl_c: CtrlC) -> None:
        """Wait for rollouts under way for `STOP_SECONDS`, because the run is ending.

        Finished steps are saved in the checkpoint; a resumed run repeats the others.
        """
        if not self.under_way:
            return
        ctrl_c.stopping()
        logger.warning("waiting %g s for the rollouts in flight; Ctrl-C stops without a checkpoint.", STOP_SECONDS)
        self.driver.hurry()
        self.settle(STOP_SECONDS)
        if self.explorer.step < self.pending.target:
            logger.warning("the next step's rollouts are not in the checkpoint: a resumed run does them again.")


def overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Time that two intervals (begin, end) have in common, as a share of the shorter one."""
    common = min(one[1], other[1]) - max(one[0], other[0])
    shorter = min(one[1] - one[0], other[1] - other[0])
    return max(common, 0.0) / shorter if shorter > 0 else 0.0
