"""Runs explore steps, evaluations and weight syncs, asynchronously and without Lightning."""

import asyncio
import copy
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from trinity_lightning.common.criterion import components, criterion_of, why_no_criterion
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.inference import HeldModel
from trinity_lightning.common.pictures.thumbnails import taken_from
from trinity_lightning.common.solved import metrics_of
from trinity_lightning.config.algorithm import check_older_weights
from trinity_lightning.config.explorer import ExplorerConfig, check_trained_sampling
from trinity_lightning.config.sections import section_of
from trinity_lightning.config.staleness import check_groups_under_way
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.clock import EngineClock
from trinity_lightning.explorer.groups import GroupBuffer, GroupRollouts
from trinity_lightning.explorer.metrics import evaluation_metrics, pass_rates, rollout_metrics
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.explorer.reports import report_tasks
from trinity_lightning.explorer.rewards.workers import check_all_importable
from trinity_lightning.explorer.scheduler import Scheduler
from trinity_lightning.explorer.staleness import StalenessController, check_resumed_groups
from trinity_lightning.explorer.task_source import TaskSource
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import Status
from trinity_lightning.sync.policy_engines import PolicyEngines
from trinity_lightning.sync.stream import WeightStream

logger = logging.getLogger(__name__)

EVALUATIONS = 10  # number of evaluations of a run if eval_interval is null

# Takes the experiences of a step into the buffer, may ask for more of them, and returns metrics.
Sink = Callable[[list[Experience], int, "StepRollouts"], Awaitable[dict[str, float]]]


class Watcher(Protocol):
    """Observes a run while it goes on; every method is optional, and does nothing by default."""

    def keep_completions(self, experiences: list[Experience], step: int, taskset: str | None) -> None:
        """Take the experiences of a step, or of an evaluation on the named taskset."""

    def keep_thumbnails(self, thumbnails: Mapping[str, bytes]) -> None:
        """Take small copies of pictures, by the names of their files, before the completions that name them."""

    def count_tasks(self, batch: int | str, done: int, total: int) -> None:
        """Take the number of tasks of a batch that have ended, from any thread."""

    def show_tasks(self, batch: int | str, done: int, total: int) -> None:
        """Show the number of tasks of a batch that have ended."""

    def keep_metrics(self, metrics: dict[str, float]) -> None:
        """Take the metrics of the present step so far."""

    def show_evaluation(self, metrics: Mapping[str, float], step: int, solved: Mapping[str, str]) -> None:
        """Show the metrics of an evaluation of a step's weights, and the criterion of pass@k by taskset."""


class _Nobody(Watcher):
    """Leaves every method as it is."""


NOBODY = _Nobody()

# -- an explore step ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class StepRollouts:
    """Runs the tasks of a step and keeps all experiences; a `MoreRollouts` for the buffer.

    Attributes:
        step: the step's number.
        config: the explorer's configuration.
        source: gives the tasks.
        run: runs tasks of a step.
        reward_solved: the source's criterion of a solved task.
        experiences: experiences of all tasks so far.
    """

    step: int
    config: ExplorerConfig
    source: TaskSource
    run: Callable[[list[Task], int], Awaitable[tuple[list[Status], list[Experience]]]]
    reward_solved: Mapping[str, float] | None = None
    experiences: list[Experience] = field(default_factory=list, init=False)
    _statuses: list[Status] = field(default_factory=list, init=False)
    _unshaped: list[Experience] = field(default_factory=list, init=False)  # copies, which operators do not change
    _refills: int = field(default=0, init=False)
    _tried: int = field(default=0, init=False)  # number of tasks run so far
    _seconds: float = field(default=0.0, init=False)

    @property
    def tasks(self) -> int:
        """Number of tasks that the step should have."""
        return self.config.batch_size

    async def begin(self) -> list[Experience] | None:
        """Run the first tasks of the step, and return their experiences; None: the taskset is exhausted.

        Raises:
            RolloutError: no task succeeded.
        """
        tasks = self.source.next_tasks(self.tasks, self.config.repeat_times)
        if not tasks:
            return None
        experiences = await self._try(tasks)
        report_tasks(f"explore step {self.step}", self._statuses, len(tasks), not experiences)
        return experiences

    async def __call__(self, tasks: int) -> list[Experience]:
        """Run further tasks, and return their experiences; none if the limit is reached or the taskset exhausted.

        If all tasks of a refill failed, it counts towards the limit, and the next refill begins.
        """
        while self._refills < self.config.max_refills:
            self._refills += 1
            more = self.source.next_tasks(tasks, self.config.repeat_times)
            if not more:
                break
            tried = len(self._statuses)
            experiences = await self._try(more)
            report_tasks(f"explore step {self.step}, refill", self._statuses[tried:], len(more))
            if experiences:
                return experiences
        return []

    def metrics(self) -> dict[str, float]:
        """Metrics of the step, refills included; see `rollout_metrics`."""
        refill_tasks = {"rollout/refill_tasks": float(max(self._tried - self.tasks, 0))}
        return rollout_metrics(self._statuses, self._unshaped, self._tried, self._seconds) | refill_tasks

    async def _try(self, tasks: list[Task]) -> list[Experience]:
        start = time.perf_counter()
        statuses, experiences = await self.run(tasks, self.step)
        self._seconds += time.perf_counter() - start
        self.source.taskset.update(pass_rates(experiences, self.reward_solved))
        self.source.forget_failed(tasks, experiences)
        self._unshaped += map(copy.copy, experiences)
        self._statuses += statuses
        self._tried += len(tasks)
        self.experiences += experiences
        return experiences


# -- the explorer ------------------------------------------------------------------------------------------------------


class Explorer:
    """Runs the policy on tasks and hands the experiences to a sink.

    Args:
        config: the section `explorer`, or a mapping of its values.
        models: engines that hold the policy; tasks are spread over them.
        train: tasks to train on, `config.repeat_times` times each; None if there are only evaluations.
        evals: tasks to evaluate on.
        auxiliary_models: other models for workflows (judges, teachers).

    Attributes:
        step: explore steps done.
        engines: the engines that hold the policy.
        metrics: metrics of the last explore step, evaluation or sync.
        solved: the criterion of pass@k in words, by evaluation taskset.

    Raises:
        ConfigError: the sampling settings of training rollouts change the policy's distribution; two tasksets share a
            name; a model is no `Engine`; sync_offset asks an engine in this process to generate while the trainer
            trains; or the processes of reward_workers cannot import a reward function.
    """

    def __init__(
        self,
        config: ExplorerConfig | Mapping[str, Any],
        models: Sequence[Engine],
        train: TaskSource | None,
        evals: Sequence[TaskSource] = (),
        auxiliary_models: Sequence[Sequence[HeldModel]] | None = None,
    ) -> None:
        self.config = config = section_of("explorer", ExplorerConfig, config)
        if train is not None:
            check_trained_sampling(vars(train.sampling))
        names = [source.name for source in evals]
        if len(set(names)) < len(names):
            raise ConfigError(f"evaluation tasksets need different names, these are {names}.", key="eval_tasksets")
        for model in models:
            if not isinstance(model, Engine):
                raise ConfigError(
                    f"{type(model).__name__} is no engine that an explorer can load, send weights to and shut down",
                    key="engine.name",
                    fix=f"make it a subclass of {Engine.__module__}.Engine",
                )
            check_older_weights(config, type(model).__name__, model.capabilities)
            check_groups_under_way(config, type(model).__name__, model.capabilities)
        if config.reward_workers:
            check_all_importable(source.reward_fn for source in (train, *evals) if source is not None)
        self.engines = PolicyEngines(models, keeps_copy=config.needs_older_weights)
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.solved: dict[str, str] = {}
        self._without_criterion: list[list[str]] = []  # components of rewards whose lack of pass@k was logged
        self._train = train
        self._evals = list(evals)
        self._auxiliary = [list(engines) for engines in auxiliary_models or []]
        self._scheduler = Scheduler(config, models, self._auxiliary)
        self._restarts = self._prefilled_again = 0
        self._sink: Sink | None = None
        self._watcher: Watcher = NOBODY
        self._cursor = {} if train is None else train.taskset.state_dict()
        self.groups = self._groups() if train is not None and config.max_staleness > 0 else None

    def _groups(self) -> GroupRollouts:
        """The groups under way across steps."""
        config, engines = self.config, self.engines.models
        at_once = [engine.most_requests for engine in engines]
        all_at_once = None if None in at_once else sum(filter(None, at_once))
        controller = StalenessController(
            config.batch_size,
            config.max_staleness,
            config.steps_ahead,
            rollouts=config.repeat_times,
            max_concurrent=config.max_concurrent or all_at_once,
        )
        overlaps = all(engine.capabilities.overlaps_training for engine in engines)
        run, records = self._scheduler.run_group, self._scheduler.records
        return GroupRollouts(config, self._source, run, controller, overlaps, records)

    # -- life ---------------------------------------------------------------------------------------------------------

    async def prepare(
        self,
        sink: Sink | GroupBuffer | None = None,
        weights: Callable[[], WeightStream] | None = None,
        watcher: Watcher = NOBODY,
    ) -> None:
        """Load or start the engines, check that endpoints answer, and start the runners.

        The requirements of the runners are checked first: the check takes seconds, and an engine may take minutes.

        Args:
            sink: takes the experiences, with `max_staleness` a GroupBuffer; not needed for evaluations.
            weights: returns the trainer's present weights, for syncs.
            watcher: is shown the experiences of every step and evaluation, and the number of finished tasks.
        """
        self._sink = None if isinstance(sink, GroupBuffer) else sink
        self.engines.source, self._watcher = weights, watcher
        if self.groups is not None and isinstance(sink, GroupBuffer):
            self.groups.buffer, self.groups.on_experiences = sink, self._keep_thumbnails
            self.groups.on_progress = lambda done, total: self._watcher.show_tasks(self.step + 1, done, total)
        await self._scheduler.prepare()
        await asyncio.gather(*(model.load() for model in self._engines()))
        await self._scheduler.start()

    async def shutdown(self) -> None:
        """Stop the runners and free every engine, even if some of them raise errors.

        The first error is raised at the end, the others are logged.
        """
        if self.groups is not None:
            await self.groups.close()
        # The runners first, because they still talk to the engines.
        ended = await asyncio.gather(self._leave(), self._scheduler.stop(), return_exceptions=True)
        freed = await asyncio.gather(*(model.shutdown() for model in self._engines()), return_exceptions=True)
        errors = [error for error in [*ended, *freed] if error is not None]
        for error in errors[1:]:
            logger.warning("a further error while the run ended: %s: %s", type(error).__name__, error)
        if errors:
            raise errors[0]

    async def _leave(self) -> None:
        self.engines.leave()

    def _engines(self) -> list[HeldModel]:
        return [*self.engines.models, *(model for engines in self._auxiliary for model in engines)]

    @property
    def clock(self) -> EngineClock:
        """The clock of time-outs; to be stopped while engines cannot generate."""
        return self._scheduler.clock

    # -- explore ------------------------------------------------------------------------------------------------------

    async def explore(self) -> str:
        """Explore steps until the taskset is exhausted, with evaluations and syncs as they are due.

        Returns:
            the reason for the end.
        """
        if self.step == 0 and self.config.eval_on_startup and self.evaluates:
            await self.eval()
        self.begin_groups()
        while await self.explore_step():
            if self.need_sync():
                if self.groups is not None and self.groups.waits:
                    await self.groups.drain()
                await self.sync_weight()
                self.begin_groups()
            if self.need_eval():
                await self.eval()
        return f"the taskset '{self._source.name}' is exhausted after {self.step} explore steps"

    async def explore_step(self) -> bool:
        """Roll out the next tasks and hand their experiences to the sink; False when the taskset is exhausted.

        The step counts, and the taskset's cursor moves on, only once the sink has taken the experiences: a step that
        failed is tried again with the same tasks.

        Raises:
            RolloutError: no task succeeded.
            RuntimeError: `prepare` was given no sink.
        """
        if self.groups is not None:
            return await self._step_of_groups(self.groups)
        if self._sink is None:
            raise RuntimeError("prepare() the explorer with a sink before it explores.")
        self._source.taskset.load_state_dict(self._cursor)
        step = self.step + 1
        rollouts = StepRollouts(step, self.config, self._source, self._run, self._source.reward_solved)
        try:
            experiences = await rollouts.begin()
            if experiences is None:
                return False
            piped = await self._sink(experiences, step, rollouts)
        finally:
            await self._scheduler.drop(step)  # nobody collects the rest
        self.metrics = rollouts.metrics() | piped | self._restarted()
        self._watcher.keep_completions(rollouts.experiences, step, None)
        self.step = step
        self._cursor = self._source.taskset.state_dict()
        return True

    async def _step_of_groups(self, groups: GroupRollouts) -> bool:
        """Wait for the groups of the next step; False when the taskset is exhausted. Errors as `next_step`."""
        result = await groups.next_step(self.step + 1)
        if result is None:
            return False
        self.step += 1
        self.metrics = result.metrics | self._restarted() | self._cost_of_syncs()
        self._watcher.keep_completions(result.experiences, self.step, None)
        return True

    def begin_groups(self) -> None:
        """Let groups begin, if they may be under way across steps: the engines have the present weights."""
        if self.groups is not None:
            self.groups.synced()

    def _restarted(self) -> dict[str, float]:
        """The metric of servers that died and were started again since the last call; empty without servers."""
        counts = [model.restarts for model in self._engines() if model.restarts is not None]
        before, self._restarts = self._restarts, sum(counts)
        return {"rollout/engine_restarts": float(self._restarts - before)} if counts else {}

    def _cost_of_syncs(self) -> dict[str, float]:
        """Metrics of what the last weight sync, or a resume, cost the rollouts under way."""
        engines, before = self.engines.models, self._prefilled_again
        self._prefilled_again = sum(engine.reprefilled_tokens for engine in engines)
        metrics = {"rollout/reprefilled_tokens": float(self._prefilled_again - before)}
        pauses = [engine.pause_seconds for engine in engines if engine.pause_seconds is not None]
        metrics |= {"time/sync_pause": max(pauses)} if pauses else {}
        if (records := self._scheduler.records) is not None:
            metrics["rollout/replay_diverged"], records.diverged = float(records.diverged), 0
        return metrics

    @property
    def _source(self) -> TaskSource:
        if self._train is None:
            raise RuntimeError("this explorer only evaluates: it was given no taskset to train on.")
        return self._train

    async def _run(self, tasks: list[Task], batch: int | str) -> tuple[list[Status], list[Experience]]:
        """Schedule a batch of tasks, and wait for it without a limit: `max_timeout` bounds each attempt."""
        done = itertools.count(1)
        self._watcher.show_tasks(batch, 0, len(tasks))
        self._scheduler.schedule(tasks, batch, lambda: self._watcher.show_tasks(batch, next(done), len(tasks)))
        statuses, experiences = await self._scheduler.get_results(batch, timeout=math.inf)
        evaluated = (experience for status in statuses for experience in status.eval_experiences)
        self._keep_thumbnails((*experiences, *evaluated))
        return statuses, experiences

    def _keep_thumbnails(self, experiences: Iterable[Experience]) -> None:
        if thumbnails := taken_from(experiences):
            self._watcher.keep_thumbnails(thumbnails)

    # -- evaluate -----------------------------------------------------------------------------------------------------

    @property
    def evaluates(self) -> bool:
        """True if evaluations are due between steps; `eval` itself may be called in any case."""
        return bool(self._evals) and self.config.eval_interval != 0

    def need_eval(self, step: int | None = None, steps: int | None = None) -> bool:
        """True if an evaluation is due.

        Args:
            step: steps trained; None: the steps done.
            steps: steps of the whole run; None: unknown. The last one is evaluated, and with eval_interval=null every
                tenth of the run.
        """
        done = self.step if step is None else step
        if not self.evaluates or done <= 0:
            return False
        interval = self.config.eval_interval or math.ceil((steps or 0) / EVALUATIONS)
        return done == steps or (interval > 0 and done % interval == 0)

    async def eval(self, step: int | None = None) -> dict[str, float]:
        """Run every evaluation taskset once with the engines' weights, and return metrics `eval/<taskset>/...`.

        Args:
            step: number of steps that these weights were trained for; None: the steps done.

        Raises:
            RolloutError: no task of a taskset succeeded.
        """
        trained = self.step if step is None else step
        self.metrics = {}
        for source in self._evals:
            start = time.perf_counter()
            tasks = source.all_tasks()
            batch = f"{trained}/{source.name}"
            try:
                statuses, _ = await self._run(tasks, batch)
            finally:
                await self._scheduler.drop(batch)  # nobody collects the rest
            experiences = [experience for status in statuses for experience in status.eval_experiences]
            cure = f"If these tasks are not for this reward, leave them out: eval_tasksets.{source.name}=null"
            report_tasks(f"evaluation '{source.name}'", statuses, len(tasks), not experiences, cure)
            self.metrics |= evaluation_metrics(source.name, experiences, source.reward_solved)
            self._note_criterion(source, experiences)
            self.metrics |= {
                f"eval/{source.name}/failed_tasks": float(len(tasks) - sum(status.ok for status in statuses)),
                f"eval/{source.name}/seconds": time.perf_counter() - start,
            }
            self._watcher.keep_completions(experiences, trained, source.name)
        return self.metrics

    def _note_criterion(self, source: TaskSource, experiences: Sequence[Experience]) -> None:
        """Keep the criterion of a solved task, or log once why there is no pass@k."""
        metrics = metrics_of(experiences)
        if (criterion := criterion_of(metrics, source.reward_solved)) is not None:
            self.solved[source.name] = str(criterion)
            return
        parts = components(metrics)
        if parts not in self._without_criterion:
            self._without_criterion.append(parts)
            logger.warning("evaluation '%s' has %s", source.name, why_no_criterion(metrics, source.reward_solved))

    async def benchmark(
        self, checkpoints: Iterable[tuple[int, WeightStream]] | None = None
    ) -> dict[int, dict[str, float]]:
        """Evaluate the present weights, or those of checkpoints one after the other, and return metrics by step.

        Args:
            checkpoints: explore step and weights of each checkpoint; None for the weights that the engines have.
        """
        results = {}
        for step, weights in [(self.step, None)] if checkpoints is None else checkpoints:
            if weights is not None:
                await self.engines.send(weights, step)
            results[step] = await self.eval(step)
        return results

    # -- weights ------------------------------------------------------------------------------------------------------

    def need_sync(self) -> bool:
        """True if a sync is due: step > offset and (step - offset) % interval == 0."""
        done = self.step - self.config.sync_offset
        return done > 0 and done % self.config.sync_interval == 0

    async def sync_weight(self, version: int | None = None) -> None:
        """Give every engine the trainer's present weights.

        Args:
            version: number of explore steps that the weights were trained for; None: the steps done less sync_offset.
        """
        start = time.perf_counter()
        await self.engines.sync(max(self.step - self.config.sync_offset, 0) if version is None else version)
        self.metrics = {"time/sync_weight": time.perf_counter() - start}

    async def setup_weight_sync_group(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        state_dict_meta: Iterable[tuple[str, Any, Sequence[int]]] | None = None,
    ) -> None:
        """Connect the trainer with every server for all later syncs, by the server's method: NCCL or IPC.

        Args:
            master_address, master_port: not used. NCCL chooses them, on the interface that NCCL_SOCKET_IFNAME names,
                and IPC has none.
            state_dict_meta: name, dtype and shape of each weight that will be sent, to be checked now. The dtype is not
                used, because weights are sent in the engine's dtype.

        Raises:
            ConfigError: an engine is no server that was started with `nccl` or `ipc`, or the trainer's weights are on a
                CPU.
            WeightSyncError: the weights do not fit the servers, or a server did not join.
            RuntimeError: `prepare` was given no weights.
        """
        shapes = None if state_dict_meta is None else {name: tuple(shape) for name, _, shape in state_dict_meta}
        await self.engines.join(shapes)

    async def get_weight(self, name: str) -> Tensor:
        """The weight called `name`, as it was last sent to the engines.

        With sync_interval 1 and sync_offset 0 no copy is kept. Then the trainer's present weight is returned, which
        equals the engines' until a training step changes it.

        Raises:
            KeyError: unknown name; the message has the nearest match.
            RuntimeError: `prepare` was given no weights.
        """
        return self.engines.weight(name)

    # -- state --------------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Set the number of steps to 0, for another training; the taskset goes on from its present entry."""
        self.step = 0
        if self.groups is not None:
            self.groups = self._groups()
        if self._scheduler.records is not None:
            self._scheduler.records.keep(())
        self.engines.forget_restored()

    def state_dict(self, with_weights: bool = False) -> dict[str, Any]:
        """The number of steps done, and the taskset's cursor after them; a resumed run repeats an unfinished step.

        With sync_interval above 1 the state also holds the engines' weights. The steps until the next sync need them,
        because the trainer's weights have changed since.

        Args:
            with_weights: True if a resumed run will repeat a step with the engines' weights. The state then holds them
                for any sync_interval, if a copy is kept.
        """
        state = {"step": self.step, "taskset": self._cursor, "seed": self.config.seed}
        if self.groups is not None:
            state["groups"] = self.groups.state_dict()
        if self.config.sync_interval > 1 or with_weights:
            state["engines"] = self.engines.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.taskset.load_state_dict(state["taskset"])
        self.step, self._cursor = state["step"], state["taskset"]
        if "engines" in state:
            self.engines.load_state_dict(state["engines"])
        if self.groups is not None:
            self.groups.load_state_dict(state.get("groups") or self.groups.state_after(self.step))
        elif "groups" in state:
            self._take_over(state["groups"])

    def _take_over(self, groups: Mapping[str, Any]) -> None:
        """Go on without `max_staleness` from a checkpoint that was written with it."""
        check_resumed_groups(self.config, groups)
        self._cursor = groups["cursor"]
        self._source.taskset.load_state_dict(self._cursor)
