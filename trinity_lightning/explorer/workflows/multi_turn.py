"""Several turns with an environment."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trinity_lightning.common.experience import Experience
from trinity_lightning.common.inference import InferenceModel
from trinity_lightning.config.values import one_of, whole_number
from trinity_lightning.explorer.rewards import resolve_rewards, score
from trinity_lightning.explorer.tasks.task import Task
from trinity_lightning.explorer.workflows.arguments import check_call, read_arguments
from trinity_lightning.explorer.workflows.environments import Environment, resolve_environment
from trinity_lightning.explorer.workflows.environments.environment import call
from trinity_lightning.explorer.workflows.episode import Episode, play, single_experience, step_experiences
from trinity_lightning.explorer.workflows.workflow import Workflow

MODES = ("single", "step_wise")
STEP_REWARDS = ("return", "own")


@dataclass(frozen=True)
class EpisodeArguments:
    """Settings of all workflows of several turns.

    Attributes:
        mode: `single`, one multi-turn Experience an episode, in which the policy's own tokens are trained on; or
            `step_wise`, an Experience a turn, for add strategies such as step_wise_grpo and gigpo.
        step_reward: reward of each Experience where step-wise: `return`, that of the whole episode, or `own`, that of
            its step (then the reward functions' is the last step's).
        max_turns: responses at most.
        system_prompt: first message where the entry has a prompt only.
    """

    mode: str = "single"
    step_reward: str = "return"
    max_turns: int = 5
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        one_of("mode", self.mode, MODES)
        one_of("step_reward", self.step_reward, STEP_REWARDS)
        whole_number("max_turns", self.max_turns, least=1)


@dataclass(frozen=True, kw_only=True)
class MultiTurnArguments(EpisodeArguments):
    """Settings of the workflow `multi_turn`.

    Attributes:
        environment: a registered name, or a dotted path or class of your own; see `Environment`.
        environment_args: its arguments.
    """

    environment: Any
    environment_args: Mapping[str, Any] = field(default_factory=dict)


class EpisodeWorkflow(Workflow):
    """Base of the workflows of several turns: plays an episode and makes experiences of it.

    An episode is worth the sum of its steps' rewards and what the task's reward functions give the last response.
    Metrics: `reward/environment`, `turns`, `completed` (the environment ended it), `context_overflow` (the conversation
    no longer fitted the context, and ended), and the environment's own.
    """

    name: str
    arguments_class: type[EpisodeArguments] = EpisodeArguments
    default_reward: str | None = None
    tools: list[dict[str, Any]] | None = None

    def __init__(
        self,
        task: Task,
        model: InferenceModel,
        auxiliary_models: Sequence[InferenceModel] | None = None,
    ) -> None:
        super().__init__(task, model, auxiliary_models)
        self.reset(task)

    @classmethod
    def check_args(cls, workflow_args: Mapping[str, Any]) -> None:
        """Refuse wrong arguments: ConfigError."""
        read_arguments(cls.arguments_class, workflow_args, cls.name)

    def reset(self, task: Task) -> None:
        """Take another task."""
        super().reset(task)
        self.check_args(task.workflow_args)
        self.arguments: Any = read_arguments(self.arguments_class, task.workflow_args, self.name)
        self.rewards = resolve_rewards(self.default_reward if task.reward_fn is None else task.reward_fn)

    @abstractmethod
    def make_environment(self) -> Environment:
        """The environment of one episode."""

    async def run(self) -> list[Experience]:
        """The experiences of one episode.

        Raises:
            PromptTooLongError: the opening alone is longer than the context.
            RolloutError: the environment or a reward function returned something else than it should.
        """
        environment = self.make_environment()
        try:
            episode = await play(self.model, environment, self.task, self.arguments.max_turns, self.tools)
        finally:
            if close := getattr(environment, "close", None):
                await call(close)
        text = episode.turns[-1].completion.text
        final_text = getattr(environment, "final_text", None)
        reward, metrics = await score(self.rewards, final_text(text) if final_text else text, self.task)
        return self._experiences(episode, reward or 0.0, metrics)

    def _experiences(self, episode: Episode, reward: float, metrics: dict[str, float]) -> list[Experience]:
        if self.arguments.mode == "single":
            experiences = [single_experience(episode)]
        else:
            experiences = step_experiences(episode, own_rewards=self.arguments.step_reward == "own")
        last = experiences[-1]
        last.metrics |= metrics | {"reward/environment": episode.total_reward}
        everyone = self.arguments.mode == "single" or self.arguments.step_reward == "return"
        for experience in experiences if everyone else [last]:
            experience.reward = (experience.reward or 0.0) + reward
        return experiences


class MultiTurnWorkflow(EpisodeWorkflow):
    """Plays an episode with an environment; its settings are `MultiTurnArguments`."""

    name = "multi_turn"
    arguments_class = MultiTurnArguments

    @classmethod
    def check_args(cls, workflow_args: Mapping[str, Any]) -> None:
        """Refuse wrong arguments, an unknown environment and arguments it does not take: ConfigError."""
        arguments = read_arguments(MultiTurnArguments, workflow_args, cls.name)
        made_by = resolve_environment(arguments.environment)
        check_call(made_by, arguments.environment_args, f"environment {arguments.environment!r}")

    def make_environment(self) -> Environment:
        """A new instance of the configured environment."""
        return resolve_environment(self.arguments.environment)(**self.arguments.environment_args)
