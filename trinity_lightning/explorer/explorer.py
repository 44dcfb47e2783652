"""TRY IT: explore steps, evaluations and weight syncs. Asynchronous, and knows nothing of Lightning."""

import asyncio
import copy
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from torch import Tensor

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.inference import HeldModel
from trinity_lightning.common.messages import check_roles, read_template_variables, warn_of_unread
from trinity_lightning.common.solved import REWARD, USUAL, components, criterion_of, metrics_of
from trinity_lightning.config.explorer import ExplorerConfig, SamplingConfig, check_trained_sampling
from trinity_lightning.config.sections import section_of
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.metrics import evaluation_metrics, pass_rates, rollout_metrics
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.explorer.rewards import Reward, resolve_rewards
from trinity_lightning.explorer.rewards.answers import nested_answer
from trinity_lightning.explorer.scheduler import Scheduler
from trinity_lightning.explorer.tasks.task import ANSWER, MESSAGES, Task
from trinity_lightning.explorer.tasks.taskset import TaskSelection
from trinity_lightning.explorer.workflow_runner import Status
from trinity_lightning.explorer.workflows import Workflow
from trinity_lightning.explorer.workflows.workflow import check_workflow
from trinity_lightning.sync.policy_engines import PolicyEngines
from trinity_lightning.sync.stream import WeightStream

logger = logging.getLogger(__name__)

EVALUATIONS = 10  # of a run, by eval_interval=null

# Takes a step's experiences into the buffer, may ask for more of them, and returns the metrics of doing so.
Sink = Callable[[list[Experience], int, "StepRollouts"], Awaitable[dict[str, float]]]


class Watcher(Protocol):
    """Observes a run while it goes on; every method is optional, and does nothing by default."""

    def keep_completions(self, experiences: list[Experience], step: int, taskset: str | None) -> None:
        """The experiences of a step, or of an evaluation on the named taskset."""

    def show_tasks(self, batch: int | str, done: int, total: int) -> None:
        """How many tasks of a batch have ended."""

    def keep_metrics(self, metrics: dict[str, float]) -> None:
        """What was measured of the step under way so far."""

    def show_evaluation(self, metrics: Mapping[str, float], step: int, solved: Mapping[str, str]) -> None:
        """Metrics of an evaluation of a step's weights, and the criterion of pass@k by taskset."""


class _Nobody(Watcher):
    """Leaves every method as it is."""


NOBODY = _Nobody()


def _compares(reward: Reward) -> bool:
    """True if a reward function compares with the task's answer."""
    return getattr(reward.function, "reads_answer", False)


@dataclass
class TaskSource:
    """What to try and how.

    Attributes:
        taskset: the raw tasks.
        workflow: registered name, dotted path, or class.
        reward_fn: as `Task.reward_fn`.
        sampling: how its rollouts are drawn; a mapping of its values, too.
        workflow_args: the workflow's settings.
        repeat_times: rollouts a task; an `Explorer` trains with its `explorer.repeat_times` instead.
        reward_solved: as `Task.reward_solved`, for pass@k and for the order `by_difficulty`.
        chat_template_kwargs: variables of the chat template, as `Task.chat_template_kwargs`.
        chat_template: the policy's, which has to know the roles of conversations and should read the variables; None:
            that shows when they are rendered.

    Raises:
        ConfigError: no taskset, an unknown workflow or reward, an argument that the workflow refuses, or entries
            without the answer that the reward compares with.
    """

    taskset: TaskSelection
    workflow: str | type[Workflow] = "math"
    reward_fn: str | Callable[..., Any] | Sequence[Any] | Mapping[Any, float] | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    workflow_args: Mapping[str, Any] = field(default_factory=dict)
    repeat_times: int = 1
    reward_solved: Mapping[str, float] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.taskset, TaskSelection):
            raise ConfigError(
                f"the taskset of a TaskSource is a {type(self.taskset).__name__}", fix="give a TaskSelection"
            )
        self.sampling = section_of("sampling", SamplingConfig, self.sampling)
        workflow = check_workflow(self.workflow, self.workflow_args)
        reward_fn = getattr(workflow, "default_reward", None) if self.reward_fn is None else self.reward_fn
        rewards = resolve_rewards(reward_fn)
        reads_answer = workflow.__module__.startswith(f"{__package__}.")  # one's own may find the answer elsewhere
        self._check_entries(workflow, rewards, reads_answer)

    def _check_entries(self, workflow: type[Workflow], rewards: Sequence[Reward], reads_answer: bool) -> None:
        """Refuse entries that the workflow cannot try, or a reward function cannot judge by, together for each taskset.

        Either says so itself, by an attribute `check_task`: a function that raises a ConfigError for a raw task. A
        reward function that compares with the answer (an attribute `reads_answer`) needs one, unless a workflow of
        one's own may find it elsewhere.
        """
        judging = [reward for reward in rewards if reads_answer or not _compares(reward)]
        comparing = [reward.name for reward in judging if _compares(reward)]
        parts = [workflow, *(reward.function for reward in judging)]
        checks = [check for part in parts if (check := getattr(part, "check_task", None))]
        variables = set(self.chat_template_kwargs)

        def check_rendering(raw_task: dict[str, Any]) -> None:
            check_roles(f" of {MESSAGES}", raw_task.get(MESSAGES) or (), self.chat_template)
            variables.update(read_template_variables(raw_task))

        if self.chat_template is not None and reads_answer:
            checks.append(check_rendering)

        def check_entry(raw_task: dict[str, Any]) -> None:
            if comparing and ANSWER not in raw_task:
                raise ConfigError(
                    f"no answer, which reward function '{comparing[0]}' compares with",
                    fix=f"set the taskset's answer_field={nested_answer(raw_task) or 'NAME'}, or choose another reward",
                )
            for check in checks:
                check(raw_task)

        if checks or comparing:
            for taskset in self.taskset.tasksets.values():
                taskset.check_entries(check_entry)
        warn_of_unread(variables, self.chat_template)

    @property
    def name(self) -> str:
        return self.taskset.name

    def next_tasks(self, n: int, repeat_times: int | None = None) -> list[Task]:
        """The next n tasks to train on, fewer when the taskset is exhausted; None: with the source's repeat_times."""
        return [self._task(raw, repeat_times or self.repeat_times, is_eval=False) for raw in self.taskset.next_batch(n)]

    def all_tasks(self) -> list[Task]:
        """Every task once, to evaluate on."""
        return [self._task(raw, self.repeat_times, is_eval=True) for raw in self.taskset]

    def forget_failed(self, tasks: Sequence[Task], experiences: Sequence[Experience]) -> None:
        """Let the tasksets forget tasks that gave no experience: their entries may be repaired before a resume."""
        gave = {_place(experience.info) for experience in experiences}
        for place in {_place(task.raw_task) for task in tasks} - gave:
            if place is not None:
                taskset, index = place
                self.taskset.tasksets[taskset].forget(index)

    def _task(self, raw_task: dict[str, Any], repeat_times: int, is_eval: bool) -> Task:
        return Task(
            workflow=self.workflow,
            raw_task=raw_task,
            repeat_times=repeat_times,
            is_eval=is_eval,
            rollout_args={name: value for name, value in asdict(self.sampling).items() if value is not None},
            workflow_args=self.workflow_args,
            reward_fn=self.reward_fn,
            reward_solved=self.reward_solved,
            chat_template_kwargs=self.chat_template_kwargs,
        )


def _place(info: Mapping[str, Any]) -> tuple[str, int] | None:
    """Taskset and index of the task that a raw task or an experience is of; None if that is not known."""
    origin = info.get("task_index")
    return None if origin is None else (origin["taskset_id"], origin["index"])


@dataclass(eq=False)
class StepRollouts:
    """Runs tasks of a step and keeps what all of them gave; a `MoreRollouts` for the buffer."""

    step: int
    config: ExplorerConfig
    source: TaskSource
    run: Callable[[list[Task], int], Awaitable[tuple[list[Status], list[Experience]]]]
    reward_solved: Mapping[str, float] | None = None  # of the source
    experiences: list[Experience] = field(default_factory=list, init=False)  # of all tasks so far
    _statuses: list[Status] = field(default_factory=list, init=False)
    _unshaped: list[Experience] = field(default_factory=list, init=False)  # operators shape the others' rewards
    _refills: int = field(default=0, init=False)
    _tried: int = field(default=0, init=False)
    _seconds: float = field(default=0.0, init=False)

    @property
    def tasks(self) -> int:
        """How many the step is meant to have."""
        return self.config.batch_size

    async def begin(self) -> list[Experience] | None:
        """The experiences of the step's own tasks; None: the taskset is exhausted. RolloutError: no task succeeded."""
        tasks = self.source.next_tasks(self.tasks, self.config.repeat_times)
        if not tasks:
            return None
        experiences = await self._try(tasks)
        _report_failures(f"explore step {self.step}", self._statuses, len(tasks), not experiences)
        return experiences

    async def __call__(self, tasks: int) -> list[Experience]:
        """The experiences of further tasks; nothing if the limit is reached or the taskset exhausted.

        A round whose tasks all failed counts, and is followed by the next.
        """
        while self._refills < self.config.max_refills:
            self._refills += 1
            more = self.source.next_tasks(tasks, self.config.repeat_times)
            if not more:
                break
            tried = len(self._statuses)
            experiences = await self._try(more)
            _report_failures(f"explore step {self.step}, refill", self._statuses[tried:], len(more))
            if experiences:
                return experiences
        return []

    def metrics(self) -> dict[str, float]:
        """What the step scheduled, lost and got, refills included."""
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


def _report_failures(what: str, statuses: Sequence[Status], tasks: int, nothing: bool = False, cure: str = "") -> None:
    """See `report_tasks`, which few steps need."""
    if nothing or not all(status.ok for status in statuses):
        from trinity_lightning.explorer.workflow_runner import report_tasks

        report_tasks(what, statuses, tasks, nothing, cure)


class Explorer:
    """Runs the policy on tasks and hands the experiences to a sink.

    Args:
        config: how many tasks, runners, retries; when to sync and to evaluate; a mapping of its values, too.
        models: engines that hold the policy; tasks are spread over them.
        train: what to train on, `config.repeat_times` times each; None if there are only evaluations.
        evals: what to evaluate on.
        auxiliary_models: other models for workflows (judges, teachers).

    Attributes:
        step: explore steps done.
        engines: what holds the policy.
        metrics: of the last explore step, evaluation or sync.
        solved: by evaluation taskset, what its pass@k counts, in words.

    Raises:
        ConfigError: training rollouts would not be drawn from the policy's own distribution, two tasksets share a
            name, a model is no `Engine`, an engine in this process should generate while the trainer trains
            (sync_offset), or a reward function cannot be imported by other processes (reward_workers).
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
            raise ConfigError(f"evaluation tasksets need different names, these are {names}.")
        for model in models:
            if not isinstance(model, Engine):
                raise ConfigError(
                    f"{type(model).__name__} is no engine that an explorer can load, send weights to and shut down",
                    fix=f"make it a subclass of {Engine.__module__}.Engine",
                )
            if config.samples_older_weights:
                from trinity_lightning.config.algorithm import check_older_weights

                check_older_weights(config, type(model).__name__, model.capabilities)
        if config.reward_workers:
            from trinity_lightning.explorer.rewards.workers import check_all_importable

            check_all_importable(source.reward_fn for source in (train, *evals) if source is not None)
        self.engines = PolicyEngines(models, keeps_copy=config.samples_older_weights)
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.solved: dict[str, str] = {}
        self._without_criterion: list[list[str]] = []  # components of rewards for which that was said
        self._train = train
        self._evals = list(evals)
        self._auxiliary = [list(engines) for engines in auxiliary_models or []]
        self._scheduler = Scheduler(config, models, self._auxiliary)
        self._restarts = 0
        self._sink: Sink | None = None
        self._watcher: Watcher = NOBODY
        self._cursor = {} if train is None else train.taskset.state_dict()

    # -- life ---------------------------------------------------------------------------------------------------------

    async def prepare(
        self, sink: Sink | None = None, weights: Callable[[], WeightStream] | None = None, watcher: Watcher = NOBODY
    ) -> None:
        """Load or start the engines, ask whether endpoints are there, and start the runners.

        What the runners need comes first: that it is not there is known in seconds, and an engine may take minutes.

        Args:
            sink: where experiences go; not needed for evaluations.
            weights: the trainer's present ones, for syncs.
            watcher: shown the experiences of every step and evaluation, and how many tasks have ended.
        """
        self._sink, self.engines.source, self._watcher = sink, weights, watcher
        await self._scheduler.prepare()
        await asyncio.gather(*(model.load() for model in self._engines()))
        await self._scheduler.start()

    async def shutdown(self) -> None:
        """Stop the runners and free the engines: each of them, also if another one fails to.

        The first error is raised at the end, the others are logged.
        """
        # The runners first: they still talk to the engines.
        ended = await asyncio.gather(self._leave(), self._scheduler.stop(), return_exceptions=True)
        freed = await asyncio.gather(*(model.shutdown() for model in self._engines()), return_exceptions=True)
        errors = [error for error in [*ended, *freed] if error is not None]
        for error in errors[1:]:
            logger.warning("this did not end as it should either: %s: %s", type(error).__name__, error)
        if errors:
            raise errors[0]

    async def _leave(self) -> None:
        self.engines.leave()

    def _engines(self) -> list[HeldModel]:
        return [*self.engines.models, *(model for engines in self._auxiliary for model in engines)]

    # -- explore ------------------------------------------------------------------------------------------------------

    async def explore(self) -> str:
        """Explore steps until the taskset is exhausted, with evaluations and syncs as they are due; why it ended."""
        if self.step == 0 and self.config.eval_on_startup and self.evaluates:
            await self.eval()
        while await self.explore_step():
            if self.need_sync():
                await self.sync_weight()
            if self.need_eval():
                await self.eval()
        return f"the taskset '{self._source.name}' is exhausted after {self.step} explore steps"

    async def explore_step(self) -> bool:
        """Roll out the next tasks and hand their experiences to the sink; False when the taskset is exhausted.

        The step counts, and the taskset's cursor is kept, only once the sink has taken the experiences: a step that
        failed would be tried again with the same tasks.

        Raises:
            RolloutError: not one task succeeded.
            RuntimeError: `prepare` was given no sink.
        """
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
            await self._scheduler.drop(step)  # nothing will take what is left
        self.metrics = rollouts.metrics() | piped | self._restarted()
        self._watcher.keep_completions(rollouts.experiences, step, None)
        self.step = step
        self._cursor = self._source.taskset.state_dict()
        return True

    def _restarted(self) -> dict[str, float]:
        """How many servers died and were started again since this was last asked; nothing if there are none."""
        counts = [model.restarts for model in self._engines() if model.restarts is not None]
        before, self._restarts = self._restarts, sum(counts)
        return {"rollout/engine_restarts": float(self._restarts - before)} if counts else {}

    @property
    def _source(self) -> TaskSource:
        if self._train is None:
            raise RuntimeError("this explorer only evaluates: it was given no taskset to train on.")
        return self._train

    async def _run(self, tasks: list[Task], batch: int | str) -> tuple[list[Status], list[Experience]]:
        """Schedule a batch of tasks and wait for it, while progress is shown; `max_timeout` bounds each attempt."""
        done = itertools.count(1)
        self._watcher.show_tasks(batch, 0, len(tasks))
        self._scheduler.schedule(tasks, batch, lambda: self._watcher.show_tasks(batch, next(done), len(tasks)))
        return await self._scheduler.get_results(batch, timeout=math.inf)

    # -- evaluate -----------------------------------------------------------------------------------------------------

    @property
    def evaluates(self) -> bool:
        """True if evaluations are due between steps; `eval` itself may be called in any case."""
        return bool(self._evals) and self.config.eval_interval != 0

    def need_eval(self, step: int | None = None, steps: int | None = None) -> bool:
        """True if an evaluation is due after that many steps; None: after those done.

        Args:
            steps: of the whole run, whose last is evaluated, and of which eval_interval=null is a tenth; None: unknown.
        """
        done = self.step if step is None else step
        if not self.evaluates or done <= 0:
            return False
        interval = self.config.eval_interval or math.ceil((steps or 0) / EVALUATIONS)
        return done == steps or (interval > 0 and done % interval == 0)

    async def eval(self, step: int | None = None) -> dict[str, float]:
        """Run every evaluation taskset once, with the weights that the engines have; metrics are `eval/<taskset>/...`.

        Args:
            step: of which step these are the weights; None: of the steps done.

        Raises:
            RolloutError: not one task of a taskset succeeded.
        """
        of = self.step if step is None else step
        self.metrics = {}
        for source in self._evals:
            start = time.perf_counter()
            tasks = source.all_tasks()
            batch = f"{of}/{source.name}"
            try:
                statuses, _ = await self._run(tasks, batch)
            finally:
                await self._scheduler.drop(batch)  # nothing will take what is left
            experiences = [experience for status in statuses for experience in status.eval_experiences]
            cure = f"If these tasks are not for this reward, leave them out: eval_tasksets.{source.name}=null"
            _report_failures(f"evaluation '{source.name}'", statuses, len(tasks), not experiences, cure)
            self.metrics |= evaluation_metrics(source.name, experiences, source.reward_solved)
            self._note_criterion(source, experiences)
            self.metrics |= {
                f"eval/{source.name}/failed_tasks": float(len(tasks) - sum(status.ok for status in statuses)),
                f"eval/{source.name}/seconds": time.perf_counter() - start,
            }
            self._watcher.keep_completions(experiences, of, source.name)
        return self.metrics

    def _note_criterion(self, source: TaskSource, experiences: Sequence[Experience]) -> None:
        """Keep what counts as solved in an evaluation, or say once why there is no pass@k."""
        metrics = metrics_of(experiences)
        if (criterion := criterion_of(metrics, source.reward_solved)) is not None:
            self.solved[source.name] = str(criterion)
            return
        parts = [name.removeprefix(REWARD) for name in components(metrics)]
        if parts in self._without_criterion:
            return
        self._without_criterion.append(parts)
        named = source.reward_solved
        why = f"reward_solved names {', '.join(named)}" if named else f"none of them is called {' or '.join(USUAL)}"
        logger.warning(
            "evaluation '%s' has no pass@k: the components of its reward are %s, and %s. Say by which of them a task "
            "is solved, such as reward_solved={%s: 1.0}.",
            *(source.name, ", ".join(parts) or "not known", why, parts[0].rpartition("/")[2] if parts else "NAME"),
        )

    async def benchmark(
        self, checkpoints: Iterable[tuple[int, WeightStream]] | None = None
    ) -> dict[int, dict[str, float]]:
        """Evaluate the present weights or, one after the other, those of checkpoints: metrics by explore step.

        Args:
            checkpoints: explore step and weights of each; None for the weights that the engines have.
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
            version: explore steps trained in them; None: those done, less the trainer's lag.
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
        """Connect the trainer with every server by the method it was started for, NCCL or IPC, for all later syncs.

        Args:
            master_address, master_port: not needed: NCCL finds its own, on the interface that NCCL_SOCKET_IFNAME names,
                and IPC has none.
            state_dict_meta: name, dtype and shape of each weight that will be sent, to be checked now; the dtype is
                the engine's, not the one given here.

        Raises:
            ConfigError: an engine is no server that was started with `nccl` or `ipc`, or the trainer's weights are on a
                CPU.
            WeightSyncError: the weights do not fit the servers, or a server did not join.
            RuntimeError: `prepare` was given no weights.
        """
        shapes = None if state_dict_meta is None else {name: tuple(shape) for name, _, shape in state_dict_meta}
        await self.engines.join(shapes)

    async def get_weight(self, name: str) -> Tensor:
        """The weight of that name that the engines were last given.

        With sync_interval 1 and sync_offset 0 no copy is kept: it is the trainer's present one, which is the same until
        a training step changes it.

        Raises:
            KeyError: unknown name; the message has the nearest match.
            RuntimeError: `prepare` was given no weights.
        """
        return self.engines.weight(name)

    # -- state --------------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Count steps from 0 again, for another training; the taskset goes on where it stands."""
        self.step = 0
        self.engines.forget_restored()

    def state_dict(self, with_weights: bool = False) -> dict[str, Any]:
        """Steps done and the taskset's cursor after the last of them; a step under way is done again on resume.

        With sync_interval above 1 also the weights that the engines have, for the steps until the next sync: they are
        not the trainer's any more.

        Args:
            with_weights: also otherwise, if a copy of them is kept: a step is to be done again with them.
        """
        state = {"step": self.step, "taskset": self._cursor, "seed": self.config.seed}
        if self.config.sync_interval > 1 or with_weights:
            state["engines"] = self.engines.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.taskset.load_state_dict(state["taskset"])
        self.step, self._cursor = state["step"], state["taskset"]
        if "engines" in state:
            self.engines.load_state_dict(state["engines"])
