"""From raw tasks to tasks: a taskset together with how its tasks are tried and judged."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trinity_lightning.config.schema import SamplingConfig
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.rewards import Reward, resolve_rewards
from trinity_lightning.explorer.tasks.formatter import ANSWER
from trinity_lightning.explorer.tasks.mixture import TasksetMixture
from trinity_lightning.explorer.tasks.selection import TaskSelection
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflows import Workflow, resolve_workflow


@dataclass
class TaskSource:
    """What to try and how.

    Attributes:
        taskset: the raw tasks.
        workflow: registered name, dotted path, or class.
        reward_fn: as `Task.reward_fn`.
        sampling: how its rollouts are drawn.
        workflow_args: the workflow's settings.
        repeat_times: rollouts a task.

    Raises:
        ConfigError: an unknown workflow or reward, an argument that the workflow refuses, or entries without the answer
            that the reward compares with.
    """

    taskset: TaskSelection
    workflow: str | type[Workflow] = "math"
    reward_fn: str | Callable[..., Any] | Sequence[Any] | Mapping[Any, float] | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    workflow_args: Mapping[str, Any] = field(default_factory=dict)
    repeat_times: int = 1

    def __post_init__(self) -> None:
        workflow = resolve_workflow(self.workflow)
        workflow.check_args(self.workflow_args)
        reward_fn = getattr(workflow, "default_reward", None) if self.reward_fn is None else self.reward_fn
        rewards = resolve_rewards(reward_fn)
        if workflow.__module__.startswith(f"{__package__}."):  # one's own may find the answer elsewhere
            self._check_answers(rewards)

    def _check_answers(self, rewards: Sequence[Reward]) -> None:
        """Refuse tasksets whose first entry has no answer for a reward function that compares with it."""
        mixed = self.taskset.tasksets.values() if isinstance(self.taskset, TasksetMixture) else None
        comparing = [reward.name for reward in rewards if getattr(reward.function, "reads_answer", False)]
        for taskset in mixed or [self.taskset]:
            if comparing and ANSWER not in next(iter(taskset), {ANSWER: None}):
                raise ConfigError(
                    f"entries of taskset '{taskset.name}' have no answer, which reward function '{comparing[0]}' "
                    "compares with: set the taskset's answer_field, or choose another reward."
                )

    @property
    def name(self) -> str:
        """The taskset's name."""
        return self.taskset.name

    def next_tasks(self, n: int) -> list[Task]:
        """The next n tasks to train on; fewer when the taskset is exhausted."""
        return [self._task(raw, is_eval=False) for raw in self.taskset.next_batch(n)]

    def all_tasks(self) -> list[Task]:
        """Every task once, to evaluate on."""
        return [self._task(raw, is_eval=True) for raw in self.taskset]

    def _task(self, raw_task: dict[str, Any], is_eval: bool) -> Task:
        return Task(
            workflow=self.workflow,
            raw_task=raw_task,
            repeat_times=self.repeat_times,
            is_eval=is_eval,
            rollout_args={name: value for name, value in asdict(self.sampling).items() if value is not None},
            workflow_args=self.workflow_args,
            reward_fn=self.reward_fn,
        )
