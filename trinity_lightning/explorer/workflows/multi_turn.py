"""Several turns with an environment."""

import inspect
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.inference import Completion, InferenceModel
from trinity_lightning.config.sections import part_config
from trinity_lightning.config.values import one_of, whole_number
from trinity_lightning.errors import ConfigError, PromptTooLongError, RolloutError
from trinity_lightning.explorer.rewards import score
from trinity_lightning.explorer.tasks.task import Task, prompt_text_of
from trinity_lightning.explorer.workflows.environments import Environment, as_messages, call, resolve_environment
from trinity_lightning.explorer.workflows.workflow import RewardedWorkflow, experience_of

# -- an episode -------------------------------------------------------------------------------------------------------


Message = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """A response, and what the environment made of it.

    Attributes:
        completion: the response, and the tokens it answers.
        asked: the messages it answers that were new.
        answered: the messages that follow it.
        reward: of the step.
        done: whether the environment ended the episode with it.
        info: the environment's.
    """

    completion: Completion
    asked: list[Message]
    answered: list[Message]
    reward: float
    done: bool
    info: Mapping[str, Any]

    @property
    def token_ids(self) -> list[int]:
        """The conversation up to and with the response."""
        return [*self.completion.prompt_token_ids, *self.completion.token_ids]


@dataclass
class Episode:
    """Turns, and why there are no more.

    Attributes:
        tools: functions on offer.
        turns: at least one.
        overflowed: the conversation had become longer than the model's context.
    """

    tools: list[dict[str, Any]] | None = None
    turns: list[Turn] = field(default_factory=list)
    overflowed: bool = False

    @property
    def completed(self) -> bool:
        """Whether the environment ended it."""
        return self.turns[-1].done

    @property
    def total_reward(self) -> float:
        """The sum of the steps' rewards."""
        return sum(turn.reward for turn in self.turns)

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of the episode: its own, and the environment's."""
        own = {
            "turns": float(len(self.turns)),
            "completed": float(self.completed),
            "context_overflow": float(self.overflowed),
        }
        for turn in self.turns:
            own |= {str(name): float(value) for name, value in turn.info.get("metrics", {}).items()}
        return own

    def messages(self) -> list[Message]:
        """The conversation; what the environment said to the last response was never shown and is left out."""
        conversation = []
        for turn in self.turns:
            conversation += [*turn.asked, {"role": "assistant", "content": turn.completion.text}]
        return conversation


async def play(
    model: InferenceModel,
    environment: Environment,
    task: Task,
    max_turns: int,
    tools: list[dict[str, Any]] | None = None,
) -> Episode:
    """Play an episode: until the environment ends it, `max_turns` responses are made, or the context is full.

    Raises:
        PromptTooLongError: the opening alone is longer than the context.
        RolloutError: the engine aborted a request, or the environment returned something else than it should.
    """
    episode = Episode(tools)
    asked = as_messages(await call(environment.reset, task))
    prompt = await model.render(asked, tools)
    while True:
        try:
            completion = (await model.generate(prompt))[0]
        except PromptTooLongError:
            if not episode.turns:
                raise
            episode.overflowed = True
            return episode
        turn = await _take_turn(environment, completion, asked)
        episode.turns.append(turn)
        if turn.done or len(episode.turns) == max_turns:
            return episode
        asked = turn.answered
        prompt = await model.render(asked, tools, turn.token_ids)


async def _take_turn(environment: Environment, completion: Completion, asked: list[Message]) -> Turn:
    if completion.finish_reason == "abort":
        raise RolloutError("the engine aborted the request before its end")
    result = await call(environment.step, completion.text)
    if not isinstance(result, tuple) or len(result) != 4:
        raise RolloutError(
            f"{type(environment).__name__}.step returned {result!r}: expected (observation, reward, done, info)."
        )
    observation, reward, done, info = result
    try:
        worth = float(reward)
    except (TypeError, ValueError) as error:
        raise RolloutError(
            f"{type(environment).__name__}.step returned reward {reward!r}: expected a number."
        ) from error
    answered = [] if done else as_messages(observation)
    return Turn(completion, asked, answered, worth, bool(done), dict(info or {}))


def single_experience(episode: Episode) -> Experience:
    """The episode as one multi-turn Experience: everything after the opening is its response, and of that the policy's
    own tokens are trained on.

    Raises:
        RolloutError: an engine that did not take the prompt as it was given, so that tokens would not match.
    """
    first, last = episode.turns[0].completion, episode.turns[-1]
    tokens, start = last.token_ids, len(first.prompt_token_ids)
    logprobs, mask = [0.0] * (len(tokens) - start), [False] * (len(tokens) - start)
    for turn in episode.turns:
        if turn.token_ids != tokens[: len(turn.token_ids)]:
            raise RolloutError("the engine changed the prompt's tokens: the turns do not make up one sequence.")
        begin = len(turn.completion.prompt_token_ids) - start
        end = begin + len(turn.completion.token_ids)
        logprobs[begin:end] = turn.completion.logprobs
        mask[begin:end] = [True] * (end - begin)
    conversation = episode.messages()
    return Experience(
        tokens=tokens,
        prompt_length=start,
        logprobs=logprobs,
        action_mask=mask,
        reward=episode.total_reward,
        truncate_status=_truncation(episode, len(episode.turns) - 1),
        info={"finish_reason": last.completion.finish_reason},
        metrics=episode.metrics,
        prompt_text=prompt_text_of(episode.turns[0].asked),
        response_text=prompt_text_of(conversation[len(episode.turns[0].asked) :]),
        messages=conversation,
        tools=episode.tools,
    )


def step_experiences(episode: Episode, own_rewards: bool = False) -> list[Experience]:
    """The episode as an Experience a turn, `eid.step` 0, 1, ...; the episode's metrics are those of the last.

    Args:
        own_rewards: each has the reward of its own step; else each has the sum of all.
    """
    experiences, state = [], prompt_text_of(episode.turns[0].asked)
    for step, turn in enumerate(episode.turns):
        experiences.append(
            experience_of(
                turn.completion,
                turn.asked,
                {"state": state},
                eid=EID(step=step),
                reward=turn.reward if own_rewards else episode.total_reward,
                truncate_status=_truncation(episode, step),
                tools=episode.tools,
            )
        )
        state = turn.info.get("state", prompt_text_of(turn.answered))
    experiences[-1].metrics |= episode.metrics
    return experiences


def _truncation(episode: Episode, step: int) -> str | None:
    """Whether the response of a step was cut off, or the episode after it."""
    cut = episode.turns[step].completion.finish_reason == "length"
    ended = episode.overflowed and step == len(episode.turns) - 1
    return "response_truncated" if cut or ended else None


# -- the workflows ----------------------------------------------------------------------------------------------------


MODES = ("single", "step_wise")
STEP_REWARDS = ("return", "own")


@dataclass(frozen=True)
class EpisodeArguments:
    """Settings of all workflows of several turns.

    Attributes:
        mode: `single`, one multi-turn Experience an episode, in which the policy's own tokens are trained on; or
            `step_wise`, an Experience a turn, for add strategies such as step_wise_grpo and gigpo.
        step_reward: reward of each Experience if step-wise: `return`, that of the whole episode, or `own`, that of
            its step (then the reward functions' is the last step's).
        max_turns: responses at most.
        system_prompt: first message if the entry has a prompt only.
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
        environment: {name, args}: a registered name, or a dotted path or class of your own, see `Environment`, and its
            arguments. A name alone is short for {name: it}.
    """

    environment: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        make = self.make
        try:
            inspect.signature(make.func).bind(**make.keywords)
        except TypeError as error:
            raise ConfigError(f"environment {self.environment!r}: {error}.") from error

    @property
    def make(self) -> partial[Environment]:
        """Makes an environment, without further arguments."""
        given = self.environment if isinstance(self.environment, Mapping) else {"name": self.environment}
        part = part_config("workflow.args.environment", given)
        return partial(resolve_environment(part.name), **part.args)


class EpisodeWorkflow(RewardedWorkflow):
    """Base of the workflows of several turns: plays an episode and makes experiences of it.

    An episode is worth the sum of its steps' rewards and what the task's reward functions give the last response.
    Metrics: `reward/environment`, `turns`, `completed` (the environment ended it), `context_overflow` (the conversation
    no longer fitted the context, and ended), and the environment's own.
    """

    arguments_class = EpisodeArguments
    tools: list[dict[str, Any]] | None = None

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
        metrics["reward/environment"] = episode.total_reward
        if reward is not None:  # of the last response, and so of the last step
            last = episode.turns[-1]
            episode.turns[-1] = replace(last, reward=last.reward + reward)
        if self.arguments.mode == "single":
            experiences = [single_experience(episode)]
        else:
            experiences = step_experiences(episode, own_rewards=self.arguments.step_reward == "own")
        experiences[-1].metrics |= metrics
        return experiences


class MultiTurnWorkflow(EpisodeWorkflow):
    """Plays an episode with an environment; its settings are `MultiTurnArguments`."""

    name = "multi_turn"
    arguments_class = MultiTurnArguments

    def make_environment(self) -> Environment:
        """A new instance of the configured environment."""
        return self.arguments.make()
