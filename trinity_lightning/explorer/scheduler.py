"""Distributes tasks to runners, and collects what comes of them, batch by batch."""

import asyncio
import heapq
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.inference import InferenceModel
from trinity_lightning.config.schema import ExplorerConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.ray_cluster import RayCluster, check_ray
from trinity_lightning.explorer.ray_runner import RayRunner
from trinity_lightning.explorer.rewards.scoring import SCORER
from trinity_lightning.explorer.rewards.workers import RewardWorkers
from trinity_lightning.explorer.runner_wrapper import RunnerWrapper as RunnerWrapper
from trinity_lightning.explorer.runner_wrapper import TaskWrapper as TaskWrapper
from trinity_lightning.explorer.scheduler_batch import Batch, BatchKey, Job
from trinity_lightning.explorer.scheduler_times import TaskTimes, enough_of
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import Status, describe, summarize

logger = logging.getLogger(__name__)

_Work = asyncio.Task[tuple[Status, list[Experience], int]]


class Scheduler:
    """Runs tasks on `runner_per_model` runners a model, in the event loop that calls `start`.

    What is scheduled waits in one queue: lower steps first, the train tasks of a step before its evaluations, and in
    the order of scheduling within those. Nothing polls: a runner takes the next chunk when one is scheduled or when it
    has finished another.

    Args:
        config: the explorer's configuration.
        rollout_model: engines of the rollout model; runners are spread over them.
        auxiliary_models: for each auxiliary model its engines; each runner gets one of each.

    Attributes:
        on_task_done: called with the batch id whenever a task is finished, to draw progress.

    Raises:
        ConfigError: no engine, or one that Ray runners cannot use.
    """

    def __init__(
        self,
        config: ExplorerConfig,
        rollout_model: Sequence[InferenceModel],
        auxiliary_models: Sequence[Sequence[InferenceModel]] | None = None,
    ) -> None:
        _check(config, rollout_model, auxiliary_models or [])
        self.config = config
        self.runners = [
            RunnerWrapper(
                runner_id,
                rollout_model[runner_id % len(rollout_model)],
                [engines[runner_id % len(engines)] for engines in auxiliary_models or []],
                config,
            )
            for runner_id in range(config.runners * len(rollout_model))
        ]
        self._idle = deque(self.runners)
        self._queue: list[tuple[BatchKey, int, TaskWrapper, Job]] = []
        self._order = itertools.count()
        self._batches: dict[str, Batch] = {}
        self._task_numbers: dict[str, itertools.count[int]] = {}
        self._running: set[_Work] = set()
        self._times = TaskTimes(config)
        self._cluster = RayCluster(config.ray_address) if config.runner == "ray" else None
        self._reward_workers = (
            RewardWorkers(config.reward_workers, config.reward_timeout) if config.reward_workers else None
        )
        self._started = False
        self._finished_at = 0.0
        self._changed = asyncio.Event()
        self.on_task_done: Callable[[int | str], None] | None = None

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
            await self._cluster.start([each.runner for each in self.runners if isinstance(each.runner, RayRunner)])
        self._started = True
        self._dispatch()

    async def stop(self) -> None:
        """Cancel what runs, forget what waits, and wait for the end of it; finished results can still be collected."""
        self._started = False
        await self._drop(list(self._batches.values()))
        if self._reward_workers is not None:
            await self._reward_workers.stop()
        if self._cluster is not None:
            await self._cluster.stop()

    def schedule(self, tasks: Sequence[Task], batch_id: int | str) -> None:
        """Queue tasks as part of a batch; returns at once.

        Task numbers of a batch that is scheduled again continue, also after it was collected.

        Raises:
            ValueError: batch_id is neither an int nor a string that starts with one.
        """
        key = BatchKey.of(batch_id)
        if not tasks:
            return
        batch = self._batches.setdefault(key.name, Batch(key))
        numbers = self._task_numbers.setdefault(key.name, itertools.count())
        for task in tasks:
            number = next(numbers)
            task = replace(task, batch_id=batch_id, task_id=number)
            job = Job(batch, number, task, self._split(task))
            batch.unfinished.add(job)
            for chunk in job.chunks:
                heapq.heappush(self._queue, (key, next(self._order), chunk, job))
        self._dispatch()

    def has_step(self, batch_id: int | str) -> bool:
        """Whether anything of the batch is queued, running, or finished and not yet collected."""
        return BatchKey.of(batch_id).name in self._batches

    async def get_results(
        self,
        batch_id: int | str,
        min_num: int | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - what is there is returned then, not an error raised
        clear_timeout_tasks: bool = True,
    ) -> tuple[list[Status], list[Experience]]:
        """Wait for a batch and take its results: a Status a task, in the order of the tasks, and all experiences.

        With over-rollout, a train batch is finished when 1 - ratio of its tasks are and `wait_after_min` seconds more
        have passed; what is unfinished then is treated as after a time-out.

        Args:
            batch_id: which batch; an unknown one gives ([], []) at once.
            min_num: return what is ready as soon as that many tasks are; the rest goes on. None: all of them.
            timeout: seconds after which to return what is there; None: max_timeout * (max_retry_times + 1).
            clear_timeout_tasks: whether a time-out cancels what is unfinished; otherwise it can be collected later.

        Raises:
            ValueError: batch_id is neither an int nor a string that starts with one.
            RuntimeError: there is something to wait for, and the scheduler is not started.
        """
        batch = self._batches.get(BatchKey.of(batch_id).name)
        if batch is None:
            return [], []
        if batch.unfinished:
            self._check_started()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limit(timeout)):
                await self._until_enough(batch, min_num)
        expired = batch.unfinished and (min_num is None or len(batch.finished) < min_num)
        statuses, experiences = batch.collect()
        if expired and clear_timeout_tasks:
            logger.warning(
                "batch %s: %d tasks are finished, %d are given up.", batch_id, len(statuses), len(batch.unfinished)
            )
            await self._drop([batch])
        else:
            self._forget_empty([batch])
        return statuses, experiences

    async def drop(self, batch_id: int | str) -> None:
        """Cancel what is unfinished of a batch, forget what is finished, and wait until its runners are free."""
        if (batch := self._batches.get(BatchKey.of(batch_id).name)) is not None:
            batch.collect()
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
        limit = self._limit(timeout)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while any(batch.unfinished for batch in self._batches.values()):
            self._check_started()
            try:
                async with asyncio.timeout_at(max(begun, self._finished_at) + limit):
                    await self._changed.wait()
            except TimeoutError:
                pending = sum(not job.dropped for *_, job in self._queue)
                running = len(self._running)
                if clear_timeout_tasks:
                    await self._drop(list(self._batches.values()))
                raise TimeoutError(
                    f"nothing finished within {limit:g} s: {pending} pending, {running} running"
                ) from None

    def _split(self, task: Task) -> list[TaskWrapper]:
        size = self.config.max_repeat_times_per_runner or task.repeat_times
        return [
            TaskWrapper(task, task.batch_id, first, min(size, task.repeat_times - first))
            for first in range(0, task.repeat_times, size)
        ]

    def _dispatch(self) -> None:
        """Give queued chunks to idle runners."""
        while self._started and self._idle and self._queue:
            *_, chunk, job = heapq.heappop(self._queue)
            if job.dropped:
                continue
            runner = self._idle.popleft()
            work = asyncio.create_task(self._run(runner, chunk, self._times.limit(job)))
            job.running.add(work)
            self._running.add(work)
            # A callback, not a finally: it is called even for a task that is cancelled before its first step.
            work.add_done_callback(partial(self._finish, runner, chunk, job))

    async def _run(
        self, runner: RunnerWrapper, chunk: TaskWrapper, limit: float
    ) -> tuple[Status, list[Experience], int]:
        SCORER.set(self._reward_workers)  # in the context of this asyncio task, and of those that it starts
        return await runner.run_with_retry(chunk, limit)

    def _finish(self, runner: RunnerWrapper, chunk: TaskWrapper, job: Job, work: _Work) -> None:
        self._running.discard(work)
        job.running.discard(work)
        self._idle.append(runner)
        done = False
        if not job.dropped:
            result = _result_of(chunk, work)
            self._times.add(job, result[0])
            done = job.finish(chunk, result)
            self._finished_at = asyncio.get_running_loop().time()
        self._notify()
        self._dispatch()
        if done and self.on_task_done is not None:
            self.on_task_done(job.task.batch_id)

    async def _until_enough(self, batch: Batch, min_num: int | None) -> None:
        over = self.config.over_rollout
        if min_num is not None:
            await batch.until(lambda: min_num)
        elif over.ratio > 0 and not batch.key.is_eval:
            await batch.until(lambda: enough_of(len(batch), over.ratio))
            async with asyncio.timeout(over.wait_after_min):
                await batch.until(lambda: len(batch))
        else:
            await batch.until(lambda: len(batch))

    async def _drop(self, batches: Sequence[Batch]) -> None:
        """Give up what is unfinished of these batches, and wait until its runners are free."""
        cancelled = [work for batch in batches for work in batch.drop()]
        self._forget_empty(batches)
        self._notify()
        if cancelled:
            await asyncio.wait(cancelled)

    def _forget_empty(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            if not batch and self._batches.get(batch.key.name) is batch:
                del self._batches[batch.key.name]
                self._times.steps += not batch.key.is_eval

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _limit(self, timeout: float | None) -> float:
        return self.config.max_timeout * (self.config.max_retry_times + 1) if timeout is None else timeout

    def _check_started(self) -> None:
        if not self._started:
            raise RuntimeError("the scheduler is not started, nothing would ever finish: await start() first.")


def _result_of(chunk: TaskWrapper, work: _Work) -> tuple[Status, list[Experience]]:
    """What the runner returned; where it did not return, a failure of all the chunk's runs."""
    error = asyncio.CancelledError("cancelled from outside the scheduler") if work.cancelled() else work.exception()
    if error is None:
        status, experiences, _ = work.result()
        return status, experiences
    errors = describe({chunk.run_id_base + i: error for i in range(chunk.repeat_times)})
    return summarize(chunk.task, [], errors, chunk.repeat_times, {"time_per_task": 0.0, "task_run_time": 0.0})


def _check(
    config: ExplorerConfig, models: Sequence[InferenceModel], auxiliary_models: Sequence[Sequence[InferenceModel]]
) -> None:
    """ConfigError for what the scheduler cannot work with."""
    if not models or not all(auxiliary_models):
        raise ConfigError("the scheduler needs at least one engine of the rollout and of each auxiliary model.")
    if config.runner == "ray":
        check_ray(config, [*models, *itertools.chain(*auxiliary_models)])
