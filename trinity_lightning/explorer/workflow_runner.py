"""Runs the workflows of a task, and words their failures."""

import asyncio
import inspect
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

from trinity_lightning.common.experience import EID, Experience, ExperienceError, group_by
from trinity_lightning.common.experience.experience import check_assigned
from trinity_lightning.common.inference import InferenceModel
from trinity_lightning.common.threads import run_in_thread
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.config.own_code import described, keep_place, waits_at
from trinity_lightning.config.registry import Registry
from trinity_lightning.config.values import as_float
from trinity_lightning.errors import RewardError, RolloutError
from trinity_lightning.explorer.clock import CLOCK
from trinity_lightning.explorer.models.blocking import BlockingModel
from trinity_lightning.explorer.models.bound import BoundModel
from trinity_lightning.explorer.models.record import CallRecords, RunRecord
from trinity_lightning.explorer.tasks.task import Task, template_variables_of
from trinity_lightning.explorer.workflows.workflow import PartialFailure, Workflow, resolve_workflow, workflow_of

logger = logging.getLogger(__name__)

# Time that a cancelled run has for its clean-up. A run that takes longer is left to itself, so that its runner is free.
CANCEL_GRACE_SECONDS = 1.0
_SHORTEST_WAIT = 0.01  # seconds between two looks at a clock that stands still
# After so many failures of runs or tasks in reward functions, and no success, the others are expected to fail too.
ENOUGH_FAILURES = 16
REMEMBERED = 1000  # number of messages that are remembered, so as to be logged once
_REWARD_ERROR = f"{RewardError.__name__}: "
_REWARD_FAILURE = re.compile(rf"{_REWARD_ERROR}reward function '.+?' (?:raised \w+|returned)")

# -- results -----------------------------------------------------------------------------------------------------------


@dataclass
class Status:
    """The end of a task.

    Attributes:
        ok: True if every run succeeded.
        metric: means of the experiences' metrics, and times in seconds.
        message: number of failed runs and of all runs, and the reasons; None if ok.
        errors: one text for each failed run.
        task_id: number of the task in its batch.
        num_runs: runs tried.
        eval_experiences: an evaluation task's experiences, for its metrics and the completions table; they are never
            trained on.
    """

    ok: bool
    metric: dict[str, float]
    message: str | None = None
    errors: list[str] = field(default_factory=list, kw_only=True)
    task_id: int | str = field(default="", kw_only=True)
    num_runs: int = field(default=0, kw_only=True)
    eval_experiences: list[Experience] = field(default_factory=list, kw_only=True, repr=False)

    @property
    def kind(self) -> object:
        """A value that is equal for tasks that failed alike."""
        return frozenset(map(kind_of, self.errors)) or self.message

    @property
    def fails_by_reward(self) -> bool:
        """True if every run failed, and each in a reward function."""
        in_reward = all(error.startswith(_REWARD_ERROR) for error in self.errors)
        return 0 < len(self.errors) == self.num_runs and in_reward


@dataclass
class Attempt:
    """Results of one attempt at some runs of a task: experiences, errors by run, and the seconds it took."""

    experiences: list[Experience]
    errors: dict[int, BaseException]
    seconds: float = 0.0


# -- the runner --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class WorkflowRunner:
    """Runs workflows with one model.

    Attributes:
        config: the explorer's configuration; only its seed is used here.
        model: the rollout model.
        auxiliary_models: one model of each auxiliary kind.
        runner_id: the runner's number, for messages.
        records: keeps the calls of unfinished train runs for a checkpoint; None: nothing is kept.
    """

    config: ExplorerConfig
    model: InferenceModel
    auxiliary_models: Sequence[InferenceModel] | None = None
    runner_id: int | None = None
    records: CallRecords | None = None
    overrun: ClassVar[float] = CANCEL_GRACE_SECONDS  # seconds that an attempt may take beyond its limit, at most

    def __post_init__(self) -> None:
        self.auxiliary_models = list(self.auxiliary_models or [])

    async def run_task(
        self, task: Task, repeat_times: int = 1, run_id_base: int = 0
    ) -> tuple[Status, list[Experience]]:
        """Try `repeat_times` runs of a task once each; errors of a workflow end up in the status.

        A repeatable workflow gets all runs at once; the runs of any other go on concurrently. Experiences get
        `eid.batch`, `eid.task`, `info["model_version"]` and, unless the workflow is repeatable,
        `eid.run = run_id_base + i`. Experiences of an evaluation task are in the status only.
        """
        attempt = await self.attempt(task, range(run_id_base, run_id_base + repeat_times))
        metric = {"time_per_task": attempt.seconds}
        return summarize(task, attempt.experiences, describe(attempt.errors), repeat_times, metric)

    async def attempt(self, task: Task, runs: Sequence[int], limit: float | None = None) -> Attempt:
        """Try these runs of a task once; runs not done after `limit` seconds are cancelled, the others are kept.

        The seconds are those of `CLOCK`, which may stop while engines do not generate.
        """
        clock = CLOCK.get().time
        start = clock()
        try:
            instances = self._start(task, runs)
        except (Exception, SystemExit) as error:
            keep_place(error)
            return Attempt([], dict.fromkeys(runs, error), clock() - start)
        try:
            done = await _done_within(instances, limit, clock)
            late = {instance: _too_late(task, instance, limit) for instance in instances.keys() - done}
        finally:
            await _end([instance for instance in instances if not instance.done()])
        attempt = Attempt([], {})
        for instance, its_runs in instances.items():
            if instance in late:
                attempt.errors |= dict.fromkeys(its_runs, late[instance])
            elif instance.cancelled():
                attempt.errors |= dict.fromkeys(its_runs, RolloutError("cancelled from within the workflow"))
            else:
                attempt.experiences += instance.result().experiences
                attempt.errors |= instance.result().errors
        attempt.seconds = clock() - start
        return attempt

    def _start(self, task: Task, runs: Sequence[int]) -> dict[asyncio.Task[Attempt], list[int]]:
        """Start an asyncio task for each instance of the workflow, and return them with their runs.

        An instance has one run, or consecutive runs if the workflow is repeatable.
        """
        first = _BoundWorkflow(self, task, runs[0])
        groups = _consecutive(runs) if first.workflow.repeatable else [[run] for run in runs]
        instances = {runs[0]: first}
        return {
            asyncio.create_task(self._run_instance(task, group, instances.get(group[0]))): group for group in groups
        }

    async def _run_instance(self, task: Task, runs: list[int], bound: "_BoundWorkflow | None") -> Attempt:
        try:
            bound = bound or _BoundWorkflow(self, task, runs[0])
            return await bound.attempt(runs)
        except (Exception, SystemExit) as error:
            logger.debug("run %s of task %s/%s failed", runs, task.batch_id, task.task_id, exc_info=True)
            keep_place(error)
            return Attempt([], dict.fromkeys(runs, error))


class _BoundWorkflow:
    """One instance of a task's workflow, with its own view of each model."""

    def __init__(self, runner: WorkflowRunner, task: Task, run: int) -> None:
        self.task = task
        self.run = run
        self.view = self._bind(
            runner,
            runner.model,
            sampling=task.rollout_args,
            trained=not task.is_eval,
            template_variables=template_variables_of(task),
            record=self._record(runner.records),
        )
        self.views: list[Any] = [self.view, *(self._bind(runner, model) for model in runner.auxiliary_models or ())]
        self.is_blocking = not inspect.iscoroutinefunction(resolve_workflow(task.workflow).run)
        if self.is_blocking:
            self.views = [BlockingModel(view) for view in self.views]
        self.workflow: Workflow = workflow_of(task, self.views[0], self.views[1:])

    def _record(self, records: CallRecords | None) -> RunRecord | None:
        task = self.task
        if records is None or task.is_eval or not resolve_workflow(task.workflow).replayable:
            return None
        return records.begin(task.batch_id, task.task_id, self.run)

    def _bind(self, runner: WorkflowRunner, model: InferenceModel, **settings: Any) -> BoundModel:
        identity = {"batch": self.task.batch_id, "task": self.task.task_id, "run": self.run}
        return BoundModel(model, run_seed=runner.config.seed, **identity, **settings)

    async def attempt(self, runs: list[int]) -> Attempt:
        """Run the workflow, for all of `runs` at once if it is repeatable; it may then leave some out on purpose."""
        errors: dict[int, BaseException] = {}
        try:
            experiences = await self._results(runs)
        except PartialFailure as failure:
            experiences = failure.experiences
            errors |= failure.errors
            if not errors.keys() <= set(runs):  # the workflow has numbers of its own: the failed runs are not known
                raise next(iter(errors.values())) from None
        if not experiences and not errors:
            raise RolloutError(f"{type(self.workflow).__name__}.run returned no experience")
        return Attempt(self._tagged(experiences, [run for run in runs if run not in errors]), errors)

    async def _results(self, runs: list[int]) -> list[Experience]:
        if self.workflow.repeatable:
            self.workflow.set_repeat_times(len(runs), runs[0])
        try:
            experiences = await (
                run_in_thread(cast("Any", self.workflow.run)) if self.is_blocking else self.workflow.run()
            )
        finally:
            for view in self.views:
                view.close()
        name = type(self.workflow).__name__
        if experiences is None or experiences == []:
            experiences = self.view.extract_experience_from_history() or experiences
            others = any(experience.eid.run != self.run for experience in experiences or [])
            if others and not self.workflow.repeatable:
                raise RolloutError(f"{name} asked for n > 1 responses, which are other runs' too: ask for one a run")
        if not isinstance(experiences, list) or not all(isinstance(item, Experience) for item in experiences):
            raise RolloutError(f"{name}.run returned {_type_of(experiences)}, expected a list of Experience")
        return experiences

    def _tagged(self, experiences: list[Experience], runs: Sequence[int]) -> list[Experience]:
        """The experiences of these runs, marked with their origin, and numbered as the steps of their run."""
        for experience in experiences:
            try:
                check_assigned(experience)
                self.view.check_pictures(experience)
            except ExperienceError as error:
                raise RolloutError(f"{type(self.workflow).__name__}.run: {error}") from error
            run = experience.eid.run if self.workflow.repeatable else self.run
            # A new id, because a workflow may give several experiences the same one.
            experience.eid = replace(experience.eid, batch=self.task.batch_id, task=self.task.task_id, run=run)
            if "task_index" in self.task.raw_task:
                experience.info.setdefault("task_index", self.task.raw_task["task_index"])
            experience.info["model_version"] = self.view.used_version
            # The trainer divides its logits by the temperature, so that its log-probabilities compare to the engine's.
            if "temperature" not in experience.info:
                experience.info["temperature"] = self._temperature()
        _number_steps(experiences, runs)
        _make_ids_unique(experiences)
        return experiences

    def _temperature(self) -> float:
        temperature = self.view.used_temperature
        if temperature is None:
            raise RolloutError(
                f"{type(self.workflow).__name__} sampled at several temperatures: set info['temperature'] of each "
                "Experience to that of its call."
            )
        return temperature


def _number_steps(experiences: Sequence[Experience], runs: Sequence[int]) -> None:
    """Give the experiences of a run the steps 0, 1, ... in their order, unless their steps differ already.

    Nothing is changed if a repeatable workflow gave the experiences of several runs one run id: the run of an
    experience is then unknown.
    """
    by_run = group_by(experiences, "run")
    if len(by_run) == 1 < len(runs):
        return
    for run in by_run.values():
        if len({experience.eid.step for experience in run}) < len(run):
            for step, experience in enumerate(run):
                experience.eid = replace(experience.eid, step=step)


def _make_ids_unique(experiences: Sequence[Experience]) -> None:
    """Give experiences that share run and step different suffixes: trained experiences are noted by their whole id."""
    seen: set[str] = set()
    for experience in experiences:
        if experience.eid.uid in seen:
            experience.eid = replace(experience.eid, suffix=EID().suffix)
        seen.add(experience.eid.uid)


def _type_of(result: object) -> str:
    if isinstance(result, list):
        return f"a list with {', '.join(sorted({type(item).__name__ for item in result}))}"
    return type(result).__name__


def _consecutive(runs: Sequence[int]) -> list[list[int]]:
    """The runs, ascending, cut into stretches without a gap: [0, 1, 4] -> [[0, 1], [4]]."""
    stretches = itertools.groupby(enumerate(runs), lambda placed: placed[1] - placed[0])  # the same within a stretch
    return [[run for _, run in stretch] for _, stretch in stretches]


async def _done_within(
    instances: Iterable[asyncio.Task[Attempt]], limit: float | None, clock: Callable[[], float]
) -> set[asyncio.Task[Attempt]]:
    """The instances that are done once all are, or after `limit` seconds of the clock."""
    end = math.inf if limit is None else clock() + limit
    done, pending = set[asyncio.Task[Attempt]](), set(instances)
    while pending and (left := end - clock()) > 0:
        ended, pending = await asyncio.wait(pending, timeout=None if limit is None else max(left, _SHORTEST_WAIT))
        done |= ended
    return done


def _too_late(task: Task, instance: asyncio.Task[Attempt], limit: float | None) -> TimeoutError:
    """The error of an instance that is not done within the limit, with the user's line at which it waits."""
    line = waits_at(instance.get_coro())
    waiting = f": workflow '{resolve_workflow(task.workflow).__name__}' was waiting at {line}" if line else ""
    return TimeoutError(f"not done within {limit:g} s{waiting}")


async def _end(instances: list[asyncio.Task[Attempt]]) -> None:
    """Cancel the instances and wait for their end, but give up on an instance that ignores it."""
    for instance in instances:
        instance.cancel()
    if not instances:
        return
    _, stuck = await asyncio.wait(instances, timeout=CANCEL_GRACE_SECONDS)
    if stuck:
        logger.warning("%d runs go on after they were cancelled; they are left to themselves.", len(stuck))


# -- runners of one kind (explorer.runner) -----------------------------------------------------------------------------


class Runners:
    """Makes the runners of a scheduler, and starts and stops them; base of the kinds of `explorer.runner`.

    Runners of this class run workflows in this process, and need neither start nor stop.

    Args:
        config: the explorer's configuration.
        models: all engines that the runners ask.
    """

    def __init__(self, config: ExplorerConfig, models: Sequence[InferenceModel]) -> None:
        self.config = config

    def make(
        self, model: InferenceModel, auxiliary_models: Sequence[InferenceModel] | None, runner_id: int
    ) -> WorkflowRunner:
        """Make a runner, which need not work before `start`."""
        return WorkflowRunner(self.config, model, auxiliary_models, runner_id)

    async def prepare(self) -> None:
        """Check the needs of the runners, which takes seconds, before an engine is loaded."""

    async def start(self) -> None:
        """Start the runners that were made; nothing happens if they run already."""

    async def stop(self) -> None:
        """Stop the runners; calling it twice is allowed, and so is another start."""


RUNNERS: Registry[type[Runners]] = Registry("runner")

# -- statuses, and failures in words -----------------------------------------------------------------------------------


def summarize(
    task: Task, experiences: list[Experience], errors: list[str], num_runs: int, times: Mapping[str, float]
) -> tuple[Status, list[Experience]]:
    """The status of a task's runs, and the experiences to train on: none of an evaluation task."""
    status = Status(
        ok=not errors,
        metric=mean_metrics(experiences) | dict(times),
        message=failure_message(errors, num_runs) if errors else None,
        errors=errors,
        task_id=task.task_id,
        num_runs=num_runs,
        eval_experiences=experiences if task.is_eval else [],
    )
    return status, [] if task.is_eval else experiences


def mean_metrics(experiences: Sequence[Experience]) -> dict[str, float]:
    """The mean of each metric over the experiences that have it; values that are not numbers are left out."""
    values: dict[str, list[float]] = {}
    for experience in experiences:
        for name, value in experience.metrics.items():
            if (number := as_float(value)) is not None:
                values.setdefault(name, []).append(number)
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def describe(errors: Mapping[int, BaseException]) -> list[str]:
    """Type and text of each run's error, by run, and the user's line that raised it."""
    return [described(errors[run]) for run in sorted(errors)]


def kind_of(error: str) -> str:
    """The text of an error; of a reward function's error, only the part that is the same for all answers."""
    failure = _REWARD_FAILURE.match(error)
    return error if failure is None else failure.group()


def failure_message(errors: Sequence[str], num_runs: int) -> str:
    """Sentence with the numbers of failed runs and of all runs of a task, and the reasons."""
    kinds: dict[str, list[str]] = {}
    for text in errors:
        kinds.setdefault(kind_of(text), []).append(text)
    return f"{len(errors)} of {num_runs} runs failed: {'; '.join(map(_cause, kinds.values()))}"


def _cause(texts: Sequence[str]) -> str:
    count = f"{len(texts)} x " if len(texts) > 1 else ""
    return f"{count}{texts[0]}{', and the like' if len(set(texts)) > 1 else ''}"


@dataclass
class Outcomes:
    """Outcomes of the attempts of all runners since the start, and the messages that were logged of them.

    Attributes:
        succeeded: True once any attempt has given an experience.
        failed: failures before the first success, by task and run: the error of a reward function, or None if the error
            is another one or may pass. Empty after a success.
        logged: messages that were logged lately.
    """

    succeeded: bool = False
    failed: dict[tuple[str, int], str | None] = field(default_factory=dict)
    logged: set[Any] = field(default_factory=set)

    def note(self, task: Task, number: int, attempt: Attempt) -> bool:
        """Note the outcome of an attempt at a task, and log new errors, with the traceback of the user's own code.

        Returns:
            True if further attempts would fail too: no attempt has succeeded, and a reward function has raised the same
            error for every answer to several tasks.
        """
        if attempt.experiences:
            self.succeeded, self.failed = True, {}
        name = f"{task.batch_id}/{task.task_id}"
        for run, error in attempt.errors.items():
            [text] = describe({run: error})
            if not self.succeeded:
                comes_again = isinstance(error, RewardError) and not error.may_pass
                self.failed[name, run] = kind_of(text) if comes_again else None
            own_traceback = "\n".join(getattr(error, "__notes__", []))
            if self.is_new(own_traceback or kind_of(text)):
                level, where = (logging.WARNING, ". It was raised at\n") if own_traceback else (logging.INFO, "")
                logger.log(level, "task %s, attempt %d: %s%s%s", name, number, text, where, own_traceback)
        if self.succeeded or len(self.failed) < ENOUGH_FAILURES:
            return False
        tasks, reasons = {task_name for task_name, _ in self.failed}, set(self.failed.values())
        return len(tasks) > 1 and len(reasons) == 1 and None not in reasons

    def report(self, task: Task, status: Status) -> None:
        """Log the failure of a task, if it failed; tasks of a batch that failed alike are logged once."""
        if not status.ok and self.is_new((task.batch_id, status.kind)):
            logger.warning("task %s/%s: %s", task.batch_id, task.task_id, status.message)

    def is_new(self, message: object) -> bool:
        """True if a message was not logged lately; it is noted as logged."""
        if len(self.logged) >= REMEMBERED:  # errors that name a time or an address are different each time
            self.logged.clear()
        before = len(self.logged)
        self.logged.add(message)
        return len(self.logged) > before
