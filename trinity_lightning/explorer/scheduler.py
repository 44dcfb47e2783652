"""Distributes tasks to runners, and collects their results batch by batch."""

import asyncio
import heapq
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.inference import InferenceModel
from trinity_lightning.common.words import listed
from trinity_lightning.config.explorer import ExplorerConfig
from trinity_lightning.errors import ConfigError, PromptTooLongError
from trinity_lightning.explorer.batches import TIMES, Batch, Chunk, ScheduledTask, Work, enough_of, order_of
from trinity_lightning.explorer.clock import CLOCK, EngineClock
from trinity_lightning.explorer.models.record import CallRecords
from trinity_lightning.explorer.rewards import SCORER
from trinity_lightning.explorer.rewards.workers import RewardWorkers
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import (
    CANCEL_GRACE_SECONDS,
    ENOUGH_FAILURES,
    RUNNERS,
    Outcomes,
    Runners,
    Status,
    WorkflowRunner,
    describe,
    summarize,
)

logger = logging.getLogger(__name__)

TaskWrapper = Chunk  # its name in Trinity
_FINAL_ERRORS = (ConfigError, PromptTooLongError)  # are not retried: the task would fail in the same way again
_CHARACTERS = 4  # approximate number of characters a token
_MOST_NAMED = 10  # numbers of abandoned tasks that a message names

# -- a runner with retries ---------------------------------------------------------------------------------------------


class RunnerWrapper:
    """Runs one chunk at a time, with retries and time-outs.

    Args:
        runner_id: the runner's number.
        rollout_model: the model that its workflows try with.
        auxiliary_models: one model of each auxiliary kind.
        config: the explorer's configuration.
        outcomes: outcomes of attempts, shared by the runners of a scheduler; None: this runner shares none.
        runners: makes the runner; None: the kind that `config.runner` names.
        records: keeps the calls of unfinished runs, if they are made in this process; None: they are not kept.
    """

    def __init__(
        self,
        runner_id: int,
        rollout_model: InferenceModel,
        auxiliary_models: Sequence[InferenceModel] | None,
        config: ExplorerConfig,
        outcomes: Outcomes | None = None,
        runners: Runners | None = None,
        records: CallRecords | None = None,
    ) -> None:
        self.runner_id, self.model, self.config = runner_id, rollout_model, config
        self.outcomes = outcomes or Outcomes()
        runners = runners or RUNNERS.get(config.runner)(config, [rollout_model, *(auxiliary_models or ())])
        self.runner = runners.make(rollout_model, auxiliary_models, runner_id)
        if isinstance(self.runner, WorkflowRunner):
            self.runner.records = records

    async def run_with_retry(
        self,
        task: Chunk,
        timeout: float | None = None,  # noqa: ASYNC109 - bounds each attempt, not the call
    ) -> tuple[Status, list[Experience], int]:
        """Try the chunk's runs; failed runs are tried up to `max_retry_times` times more.

        Experiences of runs that succeeded are kept, even if other runs fail for good. Errors that would repeat are not
        retried: a prompt that is too long, a wrong configuration, an error that a reward function raises everywhere.

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
        batch_task = replace(task.task, batch_id=task.batch_id)
        runs = list(range(task.run_id_base, task.run_id_base + task.repeat_times))
        experiences: list[Experience] = []
        failed: dict[int, BaseException] = {}
        seconds = 0.0
        for number in range(1, self.config.max_retry_times + 2):
            attempt = await self.runner.attempt(batch_task, runs, limit)
            seconds = attempt.seconds
            experiences += attempt.experiences
            failed = {run: error for run, error in failed.items() if run not in runs} | attempt.errors
            runs = sorted(run for run, error in attempt.errors.items() if not isinstance(error, _FINAL_ERRORS))
            if self.outcomes.note(batch_task, number, attempt) or not runs:
                break
        experiences.sort(key=lambda experience: experience.eid.run)  # stable: the steps of a run stay in order
        times = {"time_per_task": seconds, "task_run_time": clock() - start}
        status, experiences = summarize(batch_task, experiences, describe(failed), task.repeat_times, times)
        self.outcomes.report(batch_task, status)
        return status, experiences, self.runner_id


# -- a time-out that follows the tasks' durations (explorer.dynamic_timeout) -------------------------------------------


class TaskTimes:
    """Durations of train tasks, for their time-out: min(max_timeout, ratio * average) after a warm-up."""

    def __init__(self, config: ExplorerConfig) -> None:
        self._config = config
        self._total = 0.0
        self._count = 0
        self._warm_up_steps: set[str] = set()

    def add(self, status: Status) -> None:
        """Add the duration of a task that succeeded; a failed one may have been cut short."""
        if status.ok:
            self._total += status.metric["time_per_task"]
            self._count += 1

    def end_step(self, step: str) -> None:
        """Count a step of the warm-up; a step that ends several times, because of refills, counts once."""
        if len(self._warm_up_steps) < self._config.dynamic_timeout.warmup_min_steps:
            self._warm_up_steps.add(step)

    def limit(self) -> float:
        """Seconds that an attempt at a task may take."""
        dynamic = self._config.dynamic_timeout
        in_warm_up = not self._count or len(self._warm_up_steps) < dynamic.warmup_min_steps
        if not dynamic.enable or in_warm_up:
            return self._config.max_timeout
        return min(self._config.max_timeout, dynamic.ratio * self._total / self._count)


# -- the scheduler ----------------------------------------------------------------------------------------------------


class Scheduler:
    """Runs tasks on `runner_per_model` runners a model, in the event loop that calls `start`.

    Scheduled tasks wait in one queue: lower steps first, the train tasks of a step before its evaluations, and then in
    the order of scheduling. Nothing polls: a runner takes the next chunk when one is scheduled, or when it has finished
    another.

    Args:
        config: the explorer's configuration.
        rollout_model: engines of the rollout model; runners are spread over them.
        auxiliary_models: engines of each auxiliary model; each runner gets one of each.

    Attributes:
        clock: measures the time-outs of attempts; its owner stops it while engines do not generate.
        records: the calls of unfinished runs, for a checkpoint, if weight syncs change the weights of rollouts under
            way; else None. Runs that a sync waits for give the same bits if they begin anew.

    Raises:
        ConfigError: no engine, or one that runners of this kind cannot use.
    """

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
        self._group = RUNNERS.get(config.runner)(config, [*rollout_model, *itertools.chain(*auxiliary)])
        self._outcomes, engines = Outcomes(), len(rollout_model)
        goes_on = config.max_staleness > 0 and config.in_flight == "continue"
        self.records = CallRecords() if goes_on else None
        self.runners = [
            RunnerWrapper(
                i,
                rollout_model[i % engines],
                [models[i % len(models)] for models in auxiliary],
                config,
                self._outcomes,
                self._group,
                self.records,
            )
            for i in range(config.runners * engines + config.runners_under_way)
        ]
        self._idle: dict[int, deque[tuple[int, RunnerWrapper]]] = {}  # by engine, each with a number that rises
        self._idled = itertools.count()
        for runner in self.runners:
            self._make_idle(runner)
        self._load = Counter[int]()  # tokens under way, by engine
        self._queue: list[tuple[tuple[int, bool], int, Chunk, ScheduledTask]] = []
        self._order = itertools.count()
        self._batches: dict[str, Batch] = {}
        self._task_numbers: dict[str, itertools.count[int]] = {}
        self._times = TaskTimes(config)
        self._reward_workers = (
            RewardWorkers(config.reward_workers, config.reward_timeout) if config.reward_workers else None
        )
        self.clock = EngineClock()
        self._started = False
        self._finished_at = 0.0  # time at which the last chunk finished, not counting chunks of abandoned tasks
        self._changed = asyncio.Event()

    async def prepare(self) -> None:
        """Check the requirements of the runners, and start reward workers, before engines are loaded for minutes.

        Raises the errors of `Runners.prepare` and `RewardWorkers.start`.
        """
        await self._group.prepare()
        if self._reward_workers is not None:
            await self._reward_workers.start()

    async def start(self) -> None:
        """Begin to run scheduled tasks; nothing happens if the scheduler runs already. Errors as in `prepare`."""
        await self.prepare()
        await self._group.start()
        self.clock.now = asyncio.get_running_loop().time
        self._started = True
        self._dispatch()

    async def stop(self) -> None:
        """Cancel and forget unfinished tasks, and wait for their end; finished results can still be collected."""
        self._started = False
        await self._drop(list(self._batches.values()))
        try:
            if self._reward_workers is not None:
                await self._reward_workers.stop()
        finally:
            await self._group.stop()

    def schedule(
        self, tasks: Sequence[Task], batch_id: int | str, on_task_done: Callable[[], None] = lambda: None
    ) -> None:
        """Queue tasks as part of a batch; returns at once.

        If a batch is scheduled again, its task numbers continue, also after it was collected, but not after `drop`.

        Args:
            tasks: the tasks to run.
            batch_id: the batch.
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

    async def run_group(self, task: Task) -> tuple[Status, list[Experience]]:
        """Run a training task under its own batch and number, and return its result.

        It begins as soon as a runner is free, and is cancelled with its caller. Unlike the tasks of `schedule`, it is
        part of no batch that is collected.

        Raises:
            RuntimeError: the scheduler is not started.
        """
        self._check_started()
        done = asyncio.Event()
        batch = Batch(str(task.batch_id), is_eval=False)
        scheduled = ScheduledTask(batch, task, self._split(task), done.set)
        batch.unfinished.add(scheduled)
        for chunk in scheduled.chunks:
            heapq.heappush(self._queue, (order_of(task.batch_id), next(self._order), chunk, scheduled))
        self._dispatch()
        try:
            await done.wait()
        except asyncio.CancelledError:
            await self._drop([batch])
            raise
        self._times.end_step(batch.name)
        return scheduled.merged()

    @property
    def idle(self) -> int:
        """Number of runners that run nothing."""
        return sum(map(len, self._idle.values()))

    def has_step(self, batch_id: int | str) -> bool:
        """True if a task of the batch is queued, running, or finished and not yet collected."""
        return self._batch(batch_id) is not None

    async def get_results(
        self,
        batch_id: int | str,
        min_num: int | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - no error is raised then, the results so far are returned
        clear_timeout_tasks: bool = True,
    ) -> tuple[list[Status], list[Experience]]:
        """Wait for a batch and take its results: a Status a task, in the order of the tasks, and all experiences.

        Two events end the wait early; unfinished tasks are then treated as after a time-out:

        - With over-rollout, a share 1 - ratio of a train batch's tasks is finished, and `wait_after_min` more seconds
          have passed.
        - At least 16 tasks are finished, all of them failed in their reward functions, and no task of this scheduler
          has given an experience yet.

        Args:
            batch_id: the batch; an unknown one gives ([], []) at once.
            min_num: number of finished tasks to wait for. All results up to then are returned, and the other tasks go
                on. None: all tasks.
            timeout: seconds after which the results so far are returned; None: max_timeout * (max_retry_times + 1).
                Tasks that were running at the call have then had all of their attempts, and their results count too.
            clear_timeout_tasks: True: a time-out cancels unfinished tasks; False: they can be collected later.

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
            lost = listed(sorted(int(scheduled.task.task_id) for scheduled in batch.unfinished), _MOST_NAMED)
            logger.warning("batch %s: %d tasks ended, given up: %s.", batch_id, len(statuses), lost)
            await self._drop([batch])
        else:
            self._forget_empty([batch])
        return statuses, experiences

    async def drop(self, batch_id: int | str) -> None:
        """Cancel the unfinished tasks of a batch, forget the finished ones, and wait until its runners are free.

        Its task numbers are forgotten, too: the same tasks, scheduled again, get the same numbers and the same seeds.
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
        """Wait until all tasks of all batches are finished; their results can still be collected.

        Args:
            timeout: seconds within which the next chunk must finish; None: max_timeout * (max_retry_times + 1).
            clear_timeout_tasks: True: a time-out cancels unfinished tasks.

        Raises:
            TimeoutError: nothing finished for that long; the message counts pending and running chunks.
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
                running = len(self.runners) - self.idle
                why = f"nothing finished within {limit:g} s: {pending} pending, {running} running"
                if clear_timeout_tasks:
                    await self._drop(list(self._batches.values()))
                raise TimeoutError(why) from None

    def _batch(self, batch_id: int | str) -> Batch | None:
        order_of(batch_id)  # raises for anything that is no batch id
        return self._batches.get(str(batch_id))

    def _split(self, task: Task) -> list[Chunk]:
        runs = task.repeat_times
        size = self.config.max_repeat_times_per_runner or runs
        return [Chunk(task, task.batch_id, first, min(size, runs - first)) for first in range(0, runs, size)]

    def _dispatch(self) -> None:
        """Give queued chunks to idle runners, first to those whose engine has the fewest tokens under way."""
        while self._started and self._idle and self._queue:
            *_, chunk, scheduled = heapq.heappop(self._queue)
            if not scheduled.is_unfinished:
                continue
            engine = min(self._idle, key=lambda engine: (self._load[engine], self._idle[engine][0][0]))
            _, runner = self._idle[engine].popleft()  # idle the longest
            if not self._idle[engine]:
                del self._idle[engine]
            tokens = _tokens(chunk, runner.model)
            self._load[id(runner.model)] += tokens
            limit = self._times.limit() if scheduled.is_train else self.config.max_timeout
            work = asyncio.create_task(self._run(runner, chunk, limit))
            scheduled.running.add(work)
            # A callback, not a finally: it is called even for a task that is cancelled before its first step.
            work.add_done_callback(partial(self._finish, runner, tokens, chunk, scheduled))

    def _make_idle(self, runner: RunnerWrapper) -> None:
        self._idle.setdefault(id(runner.model), deque()).append((next(self._idled), runner))

    async def _run(self, runner: RunnerWrapper, chunk: Chunk, limit: float) -> tuple[Status, list[Experience], int]:
        SCORER.set(self._reward_workers)  # in the context of this asyncio task, and of all tasks that it starts
        CLOCK.set(self.clock)
        return await runner.run_with_retry(chunk, limit)

    def _finish(self, runner: RunnerWrapper, tokens: int, chunk: Chunk, scheduled: ScheduledTask, work: Work) -> None:
        scheduled.running.discard(work)
        self._make_idle(runner)
        self._load[id(runner.model)] -= tokens
        wanted = scheduled.is_unfinished
        if wanted:
            status, experiences = _result_of(chunk, work)
            if scheduled.is_train:
                self._times.add(status)
            scheduled.take(chunk, status, experiences)
            self._finished_at = asyncio.get_running_loop().time()
        self._notify()
        self._dispatch()
        if wanted and not scheduled.is_unfinished:
            scheduled.on_done()

    async def _until_enough(self, batch: Batch, min_num: int | None) -> None:
        over = self.config.over_rollout
        over_rolls = min_num is None and over.ratio > 0 and not batch.is_eval
        if over_rolls:
            await self._until(batch, lambda: enough_of(len(batch), over.ratio))
        async with asyncio.timeout(over.wait_after_min if over_rolls else None):
            await self._until(batch, lambda: len(batch) if min_num is None else min_num)

    async def _last_attempts(self, batch: Batch, running: set[Work], min_num: int | None) -> None:
        """Wait for chunks in their last attempt, which may overrun its limit a little.

        The wait ends when all of them, or `min_num` tasks of the batch, are finished.
        """
        clock = asyncio.get_running_loop().time
        overrun = max(wrapper.runner.overrun for wrapper in self.runners)
        end = clock() + overrun * (self.config.max_retry_times + 1) + CANCEL_GRACE_SECONDS
        while running and clock() < end and (min_num is None or len(batch.finished) < min_num):
            _, running = await asyncio.wait(running, timeout=end - clock(), return_when=asyncio.FIRST_COMPLETED)

    async def _until(self, batch: Batch, needed: Callable[[], int]) -> None:
        """Wait until `needed()` tasks of a batch are finished, or so many rewards fail that the others would too."""
        while batch.unfinished and len(batch.finished) < needed() and not self._rewards_fail(batch):
            await self._changed.wait()

    def _rewards_fail(self, batch: Batch) -> bool:
        """True if so many tasks failed, all of them in reward functions, that the others are given up."""
        enough = len(batch.finished) >= ENOUGH_FAILURES and not self._outcomes.succeeded
        return enough and all(scheduled.merged()[0].fails_by_reward for scheduled in batch.finished)

    async def _drop(self, batches: Sequence[Batch]) -> None:
        """Give up the unfinished tasks of these batches, and wait until their runners are free."""
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
                if not batch.is_eval:
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
    """Estimate of the tokens of a chunk's runs: their prompts, by the length of the text, and their longest answers.

    Wrong values in the task are accepted here: the workflow and the engine refuse them.
    """
    raw_task, response, context = chunk.task.raw_task, chunk.task.rollout_args.get("max_tokens"), model.max_model_len
    prompt = next((raw_task[name] for name in ("messages", "prompt") if raw_task.get(name) is not None), "")
    response = response if isinstance(response, int) else context
    return chunk.repeat_times * min(len(str(prompt)) // _CHARACTERS + response, context)


def _result_of(chunk: Chunk, work: Work) -> tuple[Status, list[Experience]]:
    """The runner's result; if it raised, a failure of all runs of the chunk."""
    error = asyncio.CancelledError("cancelled from outside the scheduler") if work.cancelled() else work.exception()
    if error is None:
        return work.result()[:2]
    errors = describe({chunk.run_id_base + i: error for i in range(chunk.repeat_times)})
    return summarize(chunk.task, [], errors, chunk.repeat_times, dict.fromkeys(TIMES, 0.0))
