"""Distributes tasks to runners, and collects what they gave batch by batch."""

import asyncio
import heapq
import itertools
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.inference import InferenceModel
from trinity_lightning.common.words import listed
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.errors import ConfigError, PromptTooLongError
from trinity_lightning.explorer.rewards import SCORER
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import (
    CANCEL_GRACE_SECONDS,
    ENOUGH_FAILURES,
    Outcomes,
    Status,
    WorkflowRunner,
    describe,
    fails_by_reward,
    summarize,
)

if TYPE_CHECKING:
    from trinity_lightning.explorer.ray import RayCluster, RayRunner
    from trinity_lightning.explorer.rewards.workers import RewardWorkers
    from trinity_lightning.explorer.task_times import TaskTimes

logger = logging.getLogger(__name__)

_Work = asyncio.Task[tuple[Status, list[Experience], int]]

# The same task would fail the same way again.
_FINAL_ERRORS = (ConfigError, PromptTooLongError)
CHARACTERS = 4  # of a token, about
_TIMES = ("time_per_task", "task_run_time")
_STEP = re.compile(r"[0-9]+")


@dataclass
class Chunk:
    """Some runs of a task, for one runner: `repeat_times` of them, numbered from `run_id_base`."""

    task: Task
    batch_id: int | str
    run_id_base: int = 0
    repeat_times: int = 1


TaskWrapper = Chunk  # its name in Trinity


class RunnerWrapper:
    """Runs one chunk at a time, with retries and time-outs.

    Args:
        runner_id: its number.
        rollout_model: the model its workflows try with.
        auxiliary_models: one model of each auxiliary kind.
        config: the explorer's configuration.
        outcomes: of attempts, which the runners of a scheduler share; None: its own.
    """

    def __init__(
        self,
        runner_id: int,
        rollout_model: InferenceModel,
        auxiliary_models: Sequence[InferenceModel] | None,
        config: ExplorerConfig,
        outcomes: Outcomes | None = None,
    ) -> None:
        self.runner_id, self.model, self.config = runner_id, rollout_model, config
        self.outcomes = outcomes or Outcomes()
        kind = WorkflowRunner
        if config.runner == "ray":
            from trinity_lightning.explorer.ray import RayRunner

            kind = RayRunner
        self.runner = kind(config, rollout_model, auxiliary_models, runner_id)

    async def run_with_retry(
        self,
        task: Chunk,
        timeout: float | None = None,  # noqa: ASYNC109 - bounds each attempt, not the call
    ) -> tuple[Status, list[Experience], int]:
        """Try the chunk's runs, and those that fail up to `max_retry_times` times more.

        Experiences of runs that succeeded are kept, also if others fail for good. Errors that would only come again
        (a prompt that is too long, a wrong configuration, what a reward function raised everywhere) are not
        retried.

        Args:
            task: the chunk.
            timeout: seconds that one attempt may take; None for `max_timeout`.

        Returns:
            the status, with the metrics `task_run_time` (all attempts) and `time_per_task` (the last one) in seconds;
            the experiences in the order of their runs; and the runner's id.
        """
        clock = asyncio.get_running_loop().time
        start = clock()
        limit = self.config.max_timeout if timeout is None else timeout
        one = replace(task.task, batch_id=task.batch_id)
        runs = list(range(task.run_id_base, task.run_id_base + task.repeat_times))
        experiences: list[Experience] = []
        failed: dict[int, BaseException] = {}
        seconds = 0.0
        for attempted in range(1, self.config.max_retry_times + 2):
            attempt = await self.runner.attempt(one, runs, limit)
            seconds = attempt.seconds
            experiences += attempt.experiences
            failed = {run: error for run, error in failed.items() if run not in runs} | attempt.errors
            runs = sorted(run for run, error in attempt.errors.items() if not isinstance(error, _FINAL_ERRORS))
            if attempt.experiences:
                self.outcomes.succeeded, self.outcomes.failed = True, {}
            if not attempt.errors:
                break
            from trinity_lightning.explorer.workflow_runner import note

            if note(one, attempted, attempt, self.outcomes) or not runs:
                break
        experiences.sort(key=lambda experience: experience.eid.run)  # stable: the steps of a run stay in order
        times = {"time_per_task": seconds, "task_run_time": clock() - start}
        status, experiences = summarize(one, experiences, describe(failed), task.repeat_times, times)
        if not status.ok:
            from trinity_lightning.explorer.workflow_runner import report

            report(one, status, self.outcomes)
        return status, experiences, self.runner_id


# -- what is scheduled ------------------------------------------------------------------------------------------------


def order_of(batch_id: int | str) -> tuple[int, bool]:
    """A batch's step, and whether it is an evaluation: lower steps come first, evaluations last within a step.

    Raises:
        ValueError: neither an int nor a string that starts with one ("123/my_task").
    """
    if isinstance(batch_id, int) and not isinstance(batch_id, bool):
        return batch_id, False
    if isinstance(batch_id, str) and (match := _STEP.match(batch_id)):
        return int(match.group()), match.group() != batch_id
    raise ValueError(
        f"batch_id must be an int or a string that starts with one, such as '123/my_task', not {batch_id!r}."
    )


@dataclass(eq=False)
class ScheduledTask:
    """A task of a batch: its chunks, those that are running, and what the others gave."""

    batch: "Batch"
    task: Task
    chunks: list[Chunk]
    on_done: Callable[[], None] | None
    results: dict[int, tuple[Status, list[Experience]]] = field(default_factory=dict)
    running: set[_Work] = field(default_factory=set)

    @property
    def is_train(self) -> bool:
        return not (self.task.is_eval or self.batch.is_eval)

    @property
    def is_unfinished(self) -> bool:
        """Whether its result is still wanted: it may have been given up."""
        return self in self.batch.unfinished

    def take(self, chunk: Chunk, status: Status, experiences: list[Experience]) -> None:
        """Take a chunk's result; with the last one the task is finished, and waits to be collected."""
        self.results[chunk.run_id_base] = status, experiences
        if len(self.results) == len(self.chunks):
            self.batch.unfinished.discard(self)
            self.batch.finished.append(self)

    def merged(self) -> tuple[Status, list[Experience]]:
        """One result of all chunks: experiences in the order of runs, metrics over all of them, the longest times."""
        results = [self.results[chunk.run_id_base] for chunk in self.chunks]
        statuses = [status for status, _ in results]
        return summarize(
            self.task,
            [experience for status, its in results for experience in its or status.eval_experiences],
            [error for status in statuses for error in status.errors],
            sum(status.num_runs for status in statuses),
            {name: max(status.metric[name] for status in statuses) for name in _TIMES},
        )


@dataclass(eq=False)
class Batch:
    """The tasks of one batch id that are unfinished, or finished and not yet collected."""

    name: str
    is_eval: bool
    unfinished: set[ScheduledTask] = field(default_factory=set)
    finished: list[ScheduledTask] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.unfinished) + len(self.finished)

    def collect(self) -> tuple[list[Status], list[Experience]]:
        """Hand over what is finished, in the order of the tasks."""
        done = sorted(self.finished, key=lambda scheduled: int(scheduled.task.task_id))
        self.finished.clear()
        results = [scheduled.merged() for scheduled in done]
        return [status for status, _ in results], [experience for _, its in results for experience in its]


def enough_of(size: int, ratio: float) -> int:
    """How many of `size` tasks finish a step that over-rolls by `ratio`: ceil((1 - ratio) * size)."""
    return math.ceil((1 - ratio) * size - 1e-9)  # 0.3 * 10 is a little more than 3


# -- the scheduler ----------------------------------------------------------------------------------------------------


class Scheduler:
    """Runs tasks on `runner_per_model` runners a model, in the event loop that calls `start`.

    What is scheduled waits in one queue: lower steps first, the train tasks of a step before its evaluations, and in
    the order of scheduling within those. Nothing polls: a runner takes the next chunk when one is scheduled or when it
    has finished another.

    Args:
        config: the explorer's configuration.
        rollout_model: engines of the rollout model; runners are spread over them.
        auxiliary_models: for each auxiliary model its engines; each runner gets one of each.

    Raises:
        ConfigError: no engine, or one that Ray runners cannot use.
    """

    _cluster: "RayCluster | None" = None  # that runs the runners, if they are Ray's
    _times: "TaskTimes | None" = None  # durations that time-outs follow; only with dynamic_timeout
    _reward_workers: "RewardWorkers | None" = None  # processes that reward functions run in, if any are asked for

    def __init__(
        self,
        config: ExplorerConfig,
        rollout_model: Sequence[InferenceModel],
        auxiliary_models: Sequence[Sequence[InferenceModel]] | None = None,
    ) -> None:
        auxiliary = auxiliary_models or []
        if not rollout_model or not all(auxiliary):
            raise ConfigError("the scheduler needs at least one engine of the rollout and of each auxiliary model.")
        self.config = config
        if config.runner == "ray":
            from trinity_lightning.explorer.ray import RayCluster

            self._cluster = RayCluster(config.ray_address, [*rollout_model, *itertools.chain(*auxiliary)])
        self._outcomes, engines = Outcomes(), len(rollout_model)
        self.runners = [
            RunnerWrapper(i, rollout_model[i % engines], [of[i % len(of)] for of in auxiliary], config, self._outcomes)
            for i in range(config.runners * engines)
        ]
        self._idle = list(self.runners)
        self._load = Counter[int]()  # tokens under way, by engine
        self._queue: list[tuple[tuple[int, bool], int, Chunk, ScheduledTask]] = []
        self._order = itertools.count()
        self._batches: dict[str, Batch] = {}
        self._task_numbers: dict[str, itertools.count[int]] = {}
        if config.dynamic_timeout.enable:
            from trinity_lightning.explorer.task_times import TaskTimes

            self._times = TaskTimes(config)
        if config.reward_workers:
            from trinity_lightning.explorer.rewards.workers import RewardWorkers

            self._reward_workers = RewardWorkers(config.reward_workers, config.reward_timeout)
        self._started = False
        self._finished_at = 0.0  # when a chunk last finished that was still wanted
        self._changed = asyncio.Event()

    async def prepare(self) -> None:
        """What takes seconds, to be done before an engine is loaded: look for the Ray cluster, start reward workers.

        Errors are those of `RayCluster` and `RewardWorkers`.
        """
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.check)
        if self._reward_workers is not None:
            await self._reward_workers.start()

    async def start(self) -> None:
        """Begin to run what is scheduled; nothing happens when it runs already.

        Errors are those of `RayCluster` and `RewardWorkers`.
        """
        await self.prepare()
        if self._cluster is not None and not self._started:
            await self._cluster.start([cast("RayRunner", each.runner) for each in self.runners])
        self._started = True
        self._dispatch()

    async def stop(self) -> None:
        """Cancel what runs, forget what waits, and wait for the end of it; finished results can still be collected."""
        self._started = False
        await self._drop(list(self._batches.values()))
        try:
            if self._reward_workers is not None:
                await self._reward_workers.stop()
        finally:
            if self._cluster is not None:
                await self._cluster.stop()

    def schedule(
        self, tasks: Sequence[Task], batch_id: int | str, on_task_done: Callable[[], None] | None = None
    ) -> None:
        """Queue tasks as part of a batch; returns at once.

        Task numbers of a batch that is scheduled again continue, also after it was collected, but not after `drop`.

        Args:
            tasks: what to run.
            batch_id: of which batch.
            on_task_done: called whenever one of these tasks is finished, to draw progress.

        Raises:
            ValueError: batch_id is neither an int nor a string that starts with one.
        """
        order, name = order_of(batch_id), str(batch_id)
        if not tasks:
            return
        batch = self._batches.setdefault(name, Batch(name, is_eval=order[1]))
        numbers = self._task_numbers.setdefault(name, itertools.count())
        for task in tasks:
            task = replace(task, batch_id=batch_id, task_id=next(numbers))
            scheduled = ScheduledTask(batch, task, self._split(task), on_task_done)
            batch.unfinished.add(scheduled)
            for chunk in scheduled.chunks:
                heapq.heappush(self._queue, (order, next(self._order), chunk, scheduled))
        self._dispatch()

    def has_step(self, batch_id: int | str) -> bool:
        """Whether anything of the batch is queued, running, or finished and not yet collected."""
        return self._batch(batch_id) is not None

    async def get_results(
        self,
        batch_id: int | str,
        min_num: int | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - what is there is returned then, not an error raised
        clear_timeout_tasks: bool = True,
    ) -> tuple[list[Status], list[Experience]]:
        """Wait for a batch and take its results: a Status a task, in the order of the tasks, and all experiences.

        With over-rollout, a train batch is finished when 1 - ratio of its tasks are and `wait_after_min` seconds more
        have passed; what is unfinished then is treated as after a time-out. So are the others if the reward functions
        failed on every answer to those that ended, at least 16, and no task has given an experience before.

        Args:
            batch_id: which batch; an unknown one gives ([], []) at once.
            min_num: return what is ready as soon as that many tasks are; the rest goes on. None: all of them.
            timeout: seconds after which to return what is there; None: max_timeout * (max_retry_times + 1). What ran
                already when this was called has then had all of its attempts, and its result counts too.
            clear_timeout_tasks: whether a time-out cancels what is unfinished; otherwise it can be collected later.

        Raises:
            ValueError: batch_id is neither an int nor a string that starts with one.
            RuntimeError: there is something to wait for, and the scheduler is not started.
        """
        batch = self._batch(batch_id)
        if batch is None:
            return [], []
        if batch.unfinished:
            self._check_started()
        running = {work for scheduled in batch.unfinished for work in scheduled.running}
        limit = asyncio.timeout(self._limit(timeout))
        with suppress(TimeoutError):
            async with limit:
                await self._until_enough(batch, min_num)
        if timeout is None and limit.expired():
            await self._last_attempts(batch, running, min_num)
        expired = batch.unfinished and (min_num is None or len(batch.finished) < min_num)
        statuses, experiences = batch.collect()
        if expired and clear_timeout_tasks:
            lost = listed(sorted(int(scheduled.task.task_id) for scheduled in batch.unfinished), 10)
            logger.warning("batch %s: %d tasks ended, given up: %s.", batch_id, len(statuses), lost)
            await self._drop([batch])
        else:
            self._forget_empty([batch])
        return statuses, experiences

    async def drop(self, batch_id: int | str) -> None:
        """Cancel what is unfinished of a batch, forget what is finished, and wait until its runners are free.

        Its task numbers are forgotten too: the same tasks scheduled again have the same numbers, and so the same seeds.
        """
        self._task_numbers.pop(str(batch_id), None)
        if (batch := self._batch(batch_id)) is not None:
            batch.finished.clear()
            await self._drop([batch])

    async def wait_all(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - of inactivity, not of the call
        clear_timeout_tasks: bool = True,
    ) -> None:
        """Wait until no task of any batch is unfinished; the results stay to be collected.

        Args:
            timeout: seconds in which something must finish; None: max_timeout * (max_retry_times + 1).
            clear_timeout_tasks: whether a time-out cancels what is unfinished.

        Raises:
            TimeoutError: nothing finished for that long; the message counts what is pending and running.
            RuntimeError: there is something to wait for, and the scheduler is not started.
        """
        limit, begun = self._limit(timeout), asyncio.get_running_loop().time()
        while any(batch.unfinished for batch in self._batches.values()):
            self._check_started()
            try:
                async with asyncio.timeout_at(max(begun, self._finished_at) + limit):
                    await self._changed.wait()
            except TimeoutError:
                pending = sum(scheduled.is_unfinished for *_, scheduled in self._queue)
                running = len(self.runners) - len(self._idle)
                why = f"nothing finished within {limit:g} s: {pending} pending, {running} running"
                if clear_timeout_tasks:
                    await self._drop(list(self._batches.values()))
                raise TimeoutError(why) from None

    def _batch(self, batch_id: int | str) -> Batch | None:
        order_of(batch_id)  # refuses what is no batch
        return self._batches.get(str(batch_id))

    def _split(self, task: Task) -> list[Chunk]:
        runs = task.repeat_times
        size = self.config.max_repeat_times_per_runner or runs
        return [Chunk(task, task.batch_id, first, min(size, runs - first)) for first in range(0, runs, size)]

    def _dispatch(self) -> None:
        """Give queued chunks to idle runners, of the engine that has the fewest tokens under way."""
        while self._started and self._idle and self._queue:
            *_, chunk, scheduled = heapq.heappop(self._queue)
            if not scheduled.is_unfinished:
                continue
            runner = min(self._idle, key=lambda idle: self._load[id(idle.model)])  # of equal ones, idle the longest
            self._idle.remove(runner)
            tokens = _tokens(chunk, runner.model)
            self._load[id(runner.model)] += tokens
            limit = self._times.limit() if self._times is not None and scheduled.is_train else self.config.max_timeout
            work = asyncio.create_task(self._run(runner, chunk, limit))
            scheduled.running.add(work)
            # A callback, not a finally: it is called even for a task that is cancelled before its first step.
            work.add_done_callback(partial(self._finish, runner, tokens, chunk, scheduled))

    async def _run(self, runner: RunnerWrapper, chunk: Chunk, limit: float) -> tuple[Status, list[Experience], int]:
        SCORER.set(self._reward_workers)  # in the context of this asyncio task, and of those that it starts
        return await runner.run_with_retry(chunk, limit)

    def _finish(self, runner: RunnerWrapper, tokens: int, chunk: Chunk, scheduled: ScheduledTask, work: _Work) -> None:
        scheduled.running.discard(work)
        self._idle.append(runner)
        self._load[id(runner.model)] -= tokens
        wanted = scheduled.is_unfinished
        if wanted:
            status, experiences = _result_of(chunk, work)
            if self._times is not None and scheduled.is_train:
                self._times.add(status)
            scheduled.take(chunk, status, experiences)
            self._finished_at = asyncio.get_running_loop().time()
        self._notify()
        self._dispatch()
        if wanted and not scheduled.is_unfinished and scheduled.on_done is not None:
            scheduled.on_done()

    async def _until_enough(self, batch: Batch, min_num: int | None) -> None:
        over = self.config.over_rollout
        over_rolls = min_num is None and over.ratio > 0 and not batch.is_eval
        if over_rolls:
            await self._until(batch, lambda: enough_of(len(batch), over.ratio))
        async with asyncio.timeout(over.wait_after_min if over_rolls else None):
            await self._until(batch, lambda: len(batch) if min_num is None else min_num)

    async def _last_attempts(self, batch: Batch, running: set[_Work], min_num: int | None) -> None:
        """Wait for runs that have all of their attempts behind them, each a little longer than it may take.

        Until all of them, or `min_num` tasks of the batch, are finished.
        """
        clock = asyncio.get_running_loop().time
        overrun = max(wrapper.runner.overrun for wrapper in self.runners)
        end = clock() + overrun * (self.config.max_retry_times + 1) + CANCEL_GRACE_SECONDS
        while running and clock() < end and (min_num is None or len(batch.finished) < min_num):
            _, running = await asyncio.wait(running, timeout=end - clock(), return_when=asyncio.FIRST_COMPLETED)

    async def _until(self, batch: Batch, needed: Callable[[], int]) -> None:
        """Wait until that many tasks of a batch are finished, or there is no use in waiting for the others."""
        while batch.unfinished and len(batch.finished) < needed() and not self._rewards_fail(batch):
            await self._changed.wait()

    def _rewards_fail(self, batch: Batch) -> bool:
        """Whether enough tasks ended, all of them by errors of reward functions, to give the others up."""
        enough = len(batch.finished) >= ENOUGH_FAILURES and not self._outcomes.succeeded
        return enough and all(fails_by_reward(scheduled.merged()[0]) for scheduled in batch.finished)

    async def _drop(self, batches: Sequence[Batch]) -> None:
        """Give up what is unfinished of these batches, and wait until its runners are free."""
        cancelled = [work for batch in batches for scheduled in batch.unfinished for work in scheduled.running]
        for batch in batches:
            batch.unfinished.clear()
        for work in cancelled:
            work.cancel()
        self._forget_empty(batches)
        self._notify()
        if cancelled:
            await asyncio.wait(cancelled)

    def _forget_empty(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            if not batch and self._batches.get(batch.name) is batch:
                del self._batches[batch.name]
                if self._times is not None and not batch.is_eval:
                    self._times.end_step(batch.name)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _limit(self, timeout: float | None) -> float:
        return self.config.max_timeout * (self.config.max_retry_times + 1) if timeout is None else timeout

    def _check_started(self) -> None:
        if not self._started:
            raise RuntimeError("the scheduler is not started, nothing would ever finish: await start() first.")


def _tokens(chunk: Chunk, model: InferenceModel) -> int:
    """About how many tokens the requests of these runs have: prompts, by their text, and what may be answered.

    Whatever a task holds there: what is wrong with it is for its workflow and the engine to say.
    """
    raw_task, response, context = chunk.task.raw_task, chunk.task.rollout_args.get("max_tokens"), model.max_model_len
    prompt = next((raw_task[name] for name in ("messages", "prompt") if raw_task.get(name) is not None), "")
    response = response if isinstance(response, int) else context
    return chunk.repeat_times * min(len(str(prompt)) // CHARACTERS + response, context)


def _result_of(chunk: Chunk, work: _Work) -> tuple[Status, list[Experience]]:
    """What the runner returned; if it raised, a failure of all the chunk's runs."""
    error = asyncio.CancelledError("cancelled from outside the scheduler") if work.cancelled() else work.exception()
    if error is None:
        return work.result()[:2]
    errors = describe({chunk.run_id_base + i: error for i in range(chunk.repeat_times)})
    return summarize(chunk.task, [], errors, chunk.repeat_times, dict.fromkeys(_TIMES, 0.0))
