"""A runner: tries what it is given, again where that failed, and never raises."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.inference import InferenceModel
from trinity_lightning.config.schema import ExplorerConfig
from trinity_lightning.errors import ConfigError, PromptTooLongError
from trinity_lightning.explorer.ray_runner import RayRunner
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflow_runner import Status, WorkflowRunner, describe, summarize

logger = logging.getLogger(__name__)

# The same task would fail the same way again.
_FINAL_ERRORS = (ConfigError, PromptTooLongError)


@dataclass
class TaskWrapper:
    """A chunk of a task: `repeat_times` of its runs, numbered from `run_id_base`, for one runner."""

    task: Task
    batch_id: int | str
    run_id_base: int = 0
    repeat_times: int = 1


class RunnerWrapper:
    """Runs one chunk at a time, with retries and time-outs.

    Args:
        runner_id: its number.
        rollout_model: the model its workflows try with.
        auxiliary_models: one model of each auxiliary kind.
        config: the explorer's configuration.
    """

    def __init__(
        self,
        runner_id: int,
        rollout_model: InferenceModel,
        auxiliary_models: Sequence[InferenceModel] | None,
        config: ExplorerConfig,
    ) -> None:
        self.runner_id = runner_id
        self.config = config
        runner_class = RayRunner if config.runner == "ray" else WorkflowRunner
        self.runner: RayRunner | WorkflowRunner = runner_class(config, rollout_model, auxiliary_models, runner_id)

    async def run_with_retry(
        self,
        task: TaskWrapper,
        timeout: float | None = None,  # noqa: ASYNC109 - bounds each attempt, not the call
    ) -> tuple[Status, list[Experience], int]:
        """Try the chunk's runs, and those that fail up to `max_retry_times` times more.

        Experiences of runs that succeeded are kept, whatever becomes of the others. Errors that would only come again
        (a prompt that is too long, a wrong configuration) are not retried.

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
        for attempt in range(self.config.max_retry_times + 1):
            result = await self.runner.attempt(one, runs, limit)
            seconds = result.seconds
            experiences += result.experiences
            failed = {run: error for run, error in failed.items() if run not in runs} | result.errors
            runs = sorted(run for run, error in result.errors.items() if not isinstance(error, _FINAL_ERRORS))
            if not runs:
                break
            logger.info(
                "runner %d, task %s/%s, attempt %d: %s",
                self.runner_id,
                one.batch_id,
                one.task_id,
                attempt + 1,
                "; ".join(describe(result.errors)),
            )
        experiences.sort(key=lambda experience: experience.eid.run)  # stable: the steps of a run stay in order
        times = {"time_per_task": seconds, "task_run_time": clock() - start}
        status, experiences = summarize(one, experiences, describe(failed), task.repeat_times, times)
        if not status.ok:
            logger.warning("task %s/%s: %s", one.batch_id, one.task_id, status.message)
        return status, experiences, self.runner_id
