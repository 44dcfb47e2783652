"""Makes tasks to train or to evaluate on, of a taskset, a workflow that tries them and rewards that judge them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.messages import check_roles, read_template_variables, warn_of_unread
from trinity_lightning.config.explorer import SamplingConfig
from trinity_lightning.config.sections import section_of
from trinity_lightning.errors import ConfigError
from trinity_lightning.explorer.rewards import Reward, resolve_rewards
from trinity_lightning.explorer.rewards.answers import nested_answer
from trinity_lightning.explorer.tasks.task import ANSWER, MESSAGES, Task
from trinity_lightning.explorer.tasks.taskset import TaskSelection
from trinity_lightning.explorer.workflows import Workflow
from trinity_lightning.explorer.workflows.workflow import check_workflow


@dataclass
class TaskSource:
    """Makes tasks of the entries of a taskset.

    Attributes:
        taskset: the raw tasks.
        workflow: registered name, dotted path, or class.
        reward_fn: as `Task.reward_fn`.
        sampling: sampling settings of the rollouts, or a mapping of their values.
        workflow_args: the workflow's settings.
        repeat_times: rollouts a task in evaluations; training uses `explorer.repeat_times`.
        reward_solved: as `Task.reward_solved`, for pass@k and for the order `by_difficulty`.
        chat_template_kwargs: variables of the chat template, as `Task.chat_template_kwargs`.
        chat_template: the policy's chat template. A role that it does not know is refused, and a variable that it does
            not read is warned of. None: a conversation is checked when it is rendered.

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
        reads_answer = workflow.__module__.startswith(f"{__package__}.")  # a user's own may find the answer elsewhere
        self._check_entries(workflow, rewards, reads_answer)

    def _check_entries(self, workflow: type[Workflow], rewards: Sequence[Reward], reads_answer: bool) -> None:
        """Refuse entries that the workflow cannot try, or that a reward function cannot judge, once for each taskset.

        A workflow or reward function may have an attribute `check_task`: a function that raises a ConfigError for a bad
        raw task. A reward function with the attribute `reads_answer` compares with the answer, so that an entry needs
        one. A workflow of the user's own may find the answer elsewhere; such entries are not checked for it.
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
                    key=".answer_field",
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
        """The taskset's name."""
        return self.taskset.name

    def next_tasks(self, n: int, repeat_times: int | None = None) -> list[Task]:
        """The next n tasks to train on, fewer when the taskset is exhausted.

        Args:
            n: number of tasks.
            repeat_times: rollouts a task; None: the source's.
        """
        return [self._task(raw, repeat_times or self.repeat_times, is_eval=False) for raw in self.taskset.next_batch(n)]

    def all_tasks(self) -> list[Task]:
        """Every task once, to evaluate on."""
        return [self._task(raw, self.repeat_times, is_eval=True) for raw in self.taskset]

    def forget_failed(self, tasks: Sequence[Task], experiences: Sequence[Experience]) -> None:
        """Let the tasksets forget tasks that gave no experience: their entries may be changed before a resume."""
        succeeded = {_place(experience.info) for experience in experiences}
        for place in {_place(task.raw_task) for task in tasks} - succeeded:
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


def _compares(reward: Reward) -> bool:
    """True if a reward function compares with the task's answer."""
    return getattr(reward.function, "reads_answer", False)


def _place(info: Mapping[str, Any]) -> tuple[str, int] | None:
    """Taskset and index of a task, by an experience's info or by a raw task; None if they are not known."""
    origin = info.get("task_index")
    return None if origin is None else (origin["taskset_id"], origin["index"])
