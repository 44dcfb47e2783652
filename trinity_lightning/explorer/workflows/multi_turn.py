"""Several turns with an environment: its protocol, episodes as experiences, the workflow, built-in environments."""

import inspect
import random
import threading
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, cast

from trinity_lightning.common.experience import EID, Experience
from trinity_lightning.common.inference import Completion, InferenceModel, Spans, joined_spans
from trinity_lightning.common.messages import Conversation
from trinity_lightning.common.pictures.parts import parts_of, pictures_in
from trinity_lightning.common.pictures.prompt import PicturePrompt
from trinity_lightning.common.pictures.thumbnails import notes_of
from trinity_lightning.common.runs import versions_entry
from trinity_lightning.common.thoughts import answer_part
from trinity_lightning.common.threads import call
from trinity_lightning.config.own_parts import ENVIRONMENT
from trinity_lightning.config.registry import Registry
from trinity_lightning.config.sections import part_config
from trinity_lightning.config.signatures import check_arguments, check_call, has_method
from trinity_lightning.config.values import one_of, whole_number
from trinity_lightning.errors import ConfigError, PromptTooLongError, RolloutError, configured_at
from trinity_lightning.explorer.rewards import resolve_rewards, score
from trinity_lightning.explorer.rewards.answers import find_last_number
from trinity_lightning.explorer.tasks.task import Task, messages_of, prompt_text_of
from trinity_lightning.explorer.workflows.workflow import ARGS, RewardedWorkflow, experience_of, token_ids_of

# -- environments ------------------------------------------------------------------------------------------------------


# A user's message as text, as a picture of Pillow's, or as a list of texts and pictures; or one message, or several.
Observation = Any
# Observation, reward of the step, True if the episode is over, and further info.
StepResult = tuple[Observation, float, bool, Mapping[str, Any]]


class Environment(Protocol):
    """The policy's opponent; each episode has its own instance.

    Methods may be `async def` or plain. Plain methods run in a thread, never two of an instance at once. An instance is
    made on the event loop, so that its constructor must be quick.

    An observation is the text of a user's message, a picture of Pillow's, or a list of texts and pictures in their
    order, whose texts are joined; or a message {role, content}, or a list of messages, whose content is a text or such
    a list. A picture's file is {"type": "image", "image": path}, and is read at once. The policy has to be a model that
    reads pictures then, and its engine has to take them.

    Two entries of a step's info are known. "state" identifies the new state, for add strategies that compare states: a
    text, number, list or dict; without it the observation is the state. "metrics" are numbers of the episode so far.

    An environment may have two further methods. `close()` is called at the end of an episode, even if it failed or was
    cut off, but never during another method. `final_text(text)` returns the part of the last response that reward
    functions judge.
    """

    def reset(self, task: Task) -> Observation | Awaitable[Observation]:
        """Begin an episode, and return the first messages for the policy, the same for all runs of a task."""
        ...

    def step(self, response: str) -> StepResult | Awaitable[StepResult]:
        """Take a response, and return (observation, reward, done, info). The last step's observation is not shown."""
        ...


ENVIRONMENTS: Registry[Callable[..., Environment]] = Registry("environment")


class Exclusively:
    """Calls an environment's methods, but never two plain ones at once: one that was cut off goes on in its thread."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._lock = threading.Lock()

    async def call(self, name: str, *arguments: Any) -> Any:
        method = getattr(self.environment, name)

        def alone() -> Any:
            with self._lock:
                return method(*arguments)

        return await (method(*arguments) if inspect.iscoroutinefunction(method) else call(alone))


def as_messages(observation: Any) -> list[dict[str, Any]]:
    """The messages of an observation; pictures are read, and are parts of them.

    Raises:
        RolloutError: it is neither text, nor pictures, nor messages; or a picture cannot be read.
    """
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if isinstance(observation, list | tuple) and observation and all(isinstance(text, str) for text in observation):
        return [{"role": "user", "content": "".join(observation)}]
    try:
        if (parts := parts_of(observation)) is not None:
            return [{"role": "user", "content": parts}]
        messages = [dict(observation)] if isinstance(observation, Mapping) else observation
        if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise RolloutError(
                f"the environment's observation is {type(observation).__name__}: expected text, pictures or messages."
            )
        return _with_pictures(messages)
    except ConfigError as error:
        raise RolloutError(f"the environment's observation: {error}") from error


def _with_pictures(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    contents = [message.get("content") for message in messages]
    parts = [parts_of(content) if isinstance(content, list | tuple) else None for content in contents]
    if not any(parts):
        return messages if isinstance(messages, Conversation) else [dict(message) for message in messages]
    pairs = zip(messages, parts, strict=True)
    shown = [{**message} if part is None else {**message, "content": part} for message, part in pairs]
    pictures_in(shown)  # refuses an empty place
    conversation = Conversation.of(messages)
    return Conversation(shown, conversation.tools, conversation.template_variables)


def state_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Text by which the states are known that these messages show."""
    return " ".join([prompt_text_of(messages), *(picture.digest for picture in pictures_in(messages))])


# -- an episode --------------------------------------------------------------------------------------------------------


Message = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """A response, and the environment's answer to it.

    Attributes:
        completion: the response.
        asked: the messages that the policy answers, without earlier turns.
        answered: the environment's messages after the response.
        reward: reward of the step.
        done: True if the environment ended the episode after the response.
        info: the environment's info of the step.
    """

    completion: Completion
    asked: list[Message]
    answered: list[Message]
    reward: float
    done: bool
    info: Mapping[str, Any]

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the conversation, up to the end of the response, with its pictures if it has any."""
        return token_ids_of(self.completion)


@dataclass
class Episode:
    """The turns of an episode, and a mark if the full context ended it."""

    tools: list[dict[str, Any]] | None = None  # functions on offer
    turns: list[Turn] = field(default_factory=list)
    overflowed: bool = False  # True if the conversation became longer than the model's context

    @property
    def total_reward(self) -> float:
        return sum(turn.reward for turn in self.turns)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of every episode, and the environment's."""
        metrics = {
            "turns": float(len(self.turns)),
            "completed": float(self.turns[-1].done),
            "context_overflow": float(self.overflowed),
        }
        for turn in self.turns:
            metrics |= turn.info.get("metrics", {})
        return metrics


async def play(
    model: InferenceModel,
    environment: Exclusively,
    task: Task,
    max_turns: int,
    tools: list[dict[str, Any]] | None = None,
) -> Episode:
    """Play an episode until the environment ends it, `max_turns` responses are made, or the context is full.

    Args:
        model: the policy.
        environment: its opponent.
        task: the task to try.
        max_turns: number of responses at most.
        tools: functions on offer; None: the tools of the first observation, if it is a `Conversation`.

    Raises:
        PromptTooLongError: the first observation alone is longer than the context.
        RolloutError: the environment returned a value of another form, or the engine aborted a request.
    """
    asked = as_messages(await environment.call("reset", task))
    tools = tools or Conversation.of(asked).tools or None
    episode = Episode(tools)
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


async def _take_turn(environment: Exclusively, completion: Completion, asked: list[Message]) -> Turn:
    if completion.finish_reason == "abort":
        raise RolloutError("the engine aborted the request before its end")
    name = f"{type(environment.environment).__name__}.step"
    result = await environment.call("step", completion.text)
    if not isinstance(result, tuple) or len(result) != 4:
        raise RolloutError(f"{name} returned {result!r}: expected (observation, reward, done, info).")
    observation, reward, done, returned_info = result
    info = dict(returned_info or {})
    reward = _number(f"{name} returned reward", reward)
    if "metrics" in info:
        metrics = info["metrics"].items()
        info["metrics"] = {str(key): _number(f"{name} returned metric '{key}'", value) for key, value in metrics}
    answered = [] if done else as_messages(observation)
    return Turn(completion, asked, answered, reward, bool(done), info)


def _number(label: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise RolloutError(f"{label} {value!r}: expected a number.") from error


def single_experience(episode: Episode) -> Experience:
    """One multi-turn Experience of an episode, whose response is everything after the first prompt.

    Only the policy's tokens in the response are trained on.

    Raises:
        RolloutError: the engine changed a prompt's tokens, so that the turns do not make up one sequence.
    """
    first, last = episode.turns[0].completion, episode.turns[-1]
    tokens, start = last.token_ids, len(first.prompt_token_ids)
    logprobs, mask = [0.0] * (len(tokens) - start), [False] * (len(tokens) - start)
    spans: list[tuple[int, Spans]] = []
    conversation: list[Message] = []  # without the environment's last answer, which the policy did not see
    for turn in episode.turns:
        if turn.token_ids != tokens[: len(turn.token_ids)]:
            raise RolloutError("the engine changed the prompt's tokens: the turns do not make up one sequence.")
        begin = len(turn.completion.prompt_token_ids) - start
        end = begin + len(turn.completion.token_ids)
        logprobs[begin:end] = turn.completion.logprobs
        mask[begin:end] = [True] * (end - begin)
        spans.append((begin, turn.completion.versions))
        conversation += [*turn.asked, {"role": "assistant", "content": str(turn.completion.text)}]
    return Experience(
        tokens=tokens,
        prompt_length=start,
        multi_modal_inputs=tokens.inputs if isinstance(tokens, PicturePrompt) else None,
        logprobs=logprobs,
        action_mask=mask,
        reward=episode.total_reward,
        truncate_status=_truncation(episode, len(episode.turns) - 1),
        info={
            "finish_reason": last.completion.finish_reason,
            **versions_entry(joined_spans(spans)),
            **notes_of(tokens),
        },
        metrics=episode.metrics,
        prompt_text=prompt_text_of(episode.turns[0].asked),
        response_text=prompt_text_of(conversation[len(episode.turns[0].asked) :]),
        messages=conversation,
        tools=episode.tools,
    )


def step_experiences(episode: Episode, own_rewards: bool) -> list[Experience]:
    """An Experience for each turn of an episode, `eid.step` 0, 1, ...; the last one has the episode's metrics.

    Args:
        episode: the episode, of at least one turn.
        own_rewards: True: each Experience has the reward of its own step; False: each has the sum of all rewards.
    """
    experiences, state = [], state_of(episode.turns[0].asked)
    last = episode.turns[-1].completion.prompt_token_ids
    pictures = last.inputs if isinstance(last, PicturePrompt) else {}
    for step, turn in enumerate(episode.turns):
        prompt = turn.completion.prompt_token_ids
        experiences.append(
            experience_of(
                turn.completion,
                turn.asked,
                {"state": state},
                eid=EID(step=step),
                multi_modal_inputs=prompt.inputs_within(pictures) if isinstance(prompt, PicturePrompt) else None,
                reward=turn.reward if own_rewards else episode.total_reward,
                truncate_status=_truncation(episode, step),
                tools=episode.tools,
            )
        )
        state = turn.info.get("state", state_of(turn.answered))
    experiences[-1].metrics |= episode.metrics
    return experiences


def _truncation(episode: Episode, step: int) -> str | None:
    """The truncate_status of a step: not None if its response was cut off, or the full context ended the episode."""
    cut = episode.turns[step].completion.finish_reason == "length"
    ended = episode.overflowed and step == len(episode.turns) - 1
    return "response_truncated" if cut or ended else None


# -- the workflows -----------------------------------------------------------------------------------------------------


MODES = ("single", "step_wise")
STEP_REWARDS = ("return", "own")


@dataclass(frozen=True)
class EpisodeArguments:
    """Settings of all workflows of several turns.

    Attributes:
        mode: `single`, one multi-turn Experience an episode, in which the policy's own tokens are trained on; or
            `step_wise`, an Experience a turn, for add strategies such as step_wise_grpo and gigpo.
        step_reward: reward of each Experience in mode step_wise: `return`, the whole episode's; or `own`, its own
            step's (the reward functions then count for the last step).
        max_turns: number of responses at most.
        system_prompt: first message, if the entry has a prompt only.
    """

    mode: str = "single"
    step_reward: str = "return"
    max_turns: int = 5
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        one_of(f"{ARGS}.mode", self.mode, MODES)
        one_of(f"{ARGS}.step_reward", self.step_reward, STEP_REWARDS)
        whole_number(f"{ARGS}.max_turns", self.max_turns, least=1)


@dataclass(frozen=True, kw_only=True)
class MultiTurnArguments(EpisodeArguments):
    """Settings of the workflow `multi_turn`.

    Attributes:
        environment: {name, args}: a registered name, or a dotted path or class of your own (see `Environment`), and its
            arguments. A name alone is short for {name: NAME}.
    """

    environment: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        with configured_at(ENVIRONMENT):
            self._check_environment()

    def _check_environment(self) -> None:
        make = self.make
        label, part = f"environment {self.environment!r}", cast("Any", make.func)
        check_arguments(label, part, make.keywords, f"{ENVIRONMENT}.args")
        for method, name in (("reset", "task"), ("step", "response")) if isinstance(part, type) else ():
            if has_method(part, method):
                is_bound = isinstance(inspect.getattr_static(part, method), staticmethod | classmethod)
                names = (name,) if is_bound else ("self", name)
                check_call(f"{label}: its {method}", getattr(part, method), names, f"{method}({name})")
            elif not has_method(part, "__getattr__"):  # by which the class may pass calls on to another environment
                message = f"{label} has no method {method}({name})"
                raise ConfigError(message, key=ENVIRONMENT, fix="see docs/architecture.md")

    @property
    def make(self) -> partial[Environment]:
        """The environment's constructor with its arguments."""
        environment = self.environment if isinstance(self.environment, Mapping) else {"name": self.environment}
        part = part_config(ENVIRONMENT, environment)
        made_by = ENVIRONMENTS.resolve(part.name)
        if not callable(made_by):
            message = f"environment {part.name!r} cannot be called"
            raise ConfigError(message, key=ENVIRONMENT, fix="give a class or a function that makes one")
        return partial(cast("Callable[..., Environment]", made_by), **part.args)


class EpisodeWorkflow(RewardedWorkflow):
    """Base of the workflows of several turns: plays an episode and makes experiences of it.

    The reward of an episode is the sum of its steps' rewards, and of the task's reward functions for the last response.
    Metrics: `reward/environment`, `turns`, `completed` (1 if the environment ended the episode), `context_overflow` (1
    if it ended because the conversation no longer fitted the context), and the environment's own.
    """

    arguments_class = EpisodeArguments
    tools: list[dict[str, Any]] | None = None

    @abstractmethod
    def make_environment(self) -> Environment:
        """The environment of one episode."""

    async def run(self) -> list[Experience]:
        """The experiences of one episode.

        Raises:
            PromptTooLongError, RolloutError: as in `play`.
            RewardError: a reward function raised, or returned no finite number.
        """
        environment = Exclusively(self.make_environment())
        try:
            episode = await play(self.model, environment, self.task, self.arguments.max_turns, self.tools)
        finally:
            if getattr(environment.environment, "close", None):
                await environment.call("close")
        text = episode.turns[-1].completion.text
        if getattr(environment.environment, "final_text", None):
            text = await environment.call("final_text", text)
        reward, metrics = await score(self.rewards, text, self.task)
        metrics["reward/environment"] = episode.total_reward
        if reward is not None:  # it judges the last response, so it is added to the last step's
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
        return self.arguments.make()


# -- an environment: a guessing game -----------------------------------------------------------------------------------


@dataclass
class GuessNumber:
    """The policy guesses a number; after each guess the game says "Higher." or "Lower.".

    The reward is decay**(t - 1) if guess t (from 1) is the number, and 0 otherwise. The number is `raw_task["secret"]`,
    or else drawn from the seed and the task's place in its taskset, so that all runs of a task guess the same number.

    Attributes:
        low, high: the range of the number.
        decay: reward of a guess, relative to the guess before it.
        seed: seed of the numbers.
    """

    low: int = 0
    high: int = 20
    decay: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        if self.low >= self.high:
            message = f"guess_number: low is {self.low} and high is {self.high}; low must be less."
            raise ConfigError(message, key=f"{ENVIRONMENT}.args.low")

    def reset(self, task: Task) -> list[dict[str, Any]]:
        self._guesses, self._known = 0, [self.low, self.high]
        place = task.raw_task.get("task_index", task.raw_task)
        number = random.Random(f"{self.seed}/{place!r}").randint(self.low, self.high)
        self._secret = int(task.raw_task.get("secret", number))
        rules = f"I think of a whole number from {self.low} to {self.high}. Guess it. Reply with only the number."
        return [{"role": "user", "content": rules}]

    def step(self, response: str) -> StepResult:
        self._guesses += 1
        guess = find_last_number(answer_part(response) or "")
        if guess is None or guess != int(guess):
            return "Reply with a whole number.", 0.0, False, {"state": list(self._known)}
        if guess == self._secret:
            return "Right.", self.decay ** (self._guesses - 1), True, {"state": list(self._known)}
        if guess < self._secret:
            self._known[0] = max(self._known[0], int(guess) + 1)
            return "Higher.", 0.0, False, {"state": list(self._known)}
        self._known[1] = min(self._known[1], int(guess) - 1)
        return "Lower.", 0.0, False, {"state": list(self._known)}


# -- an environment: a question that may be answered again -------------------------------------------------------------


@dataclass
class Retry:
    """Asks the task's question, and lets the policy try again after a wrong answer.

    An answer at turn t (from 1) counts as its score times decay**(t - 1). The best answer counts for the episode: the
    reward of a step is its gain over the best answer before.

    Attributes:
        verifier: reward functions that score an answer, as `Task.reward_fn`; None: reasoning-gym's own verifier for its
            tasks, and `math` for all others.
        decay: factor of an answer's score, relative to the answer before it.
        pass_at: score from which an answer is right.
        feedback: message after a wrong answer.
    """

    verifier: Any = None
    decay: float = 0.5
    pass_at: float = 1.0
    feedback: str = "That is wrong. Try again."

    def __post_init__(self) -> None:
        self._verifier = resolve_rewards(self.verifier)

    def reset(self, task: Task) -> list[dict[str, Any]]:
        self._task = task
        self._turn = 0
        self._best = 0.0
        if not self._verifier:
            self._verifier = resolve_rewards("reasoning_gym" if task.raw_task.get("reasoning_gym") else "math")
        return messages_of(task)

    async def step(self, response: str) -> StepResult:
        value = cast("float", (await score(self._verifier, response, self._task))[0])  # there is always a verifier
        gain = max(value * self.decay**self._turn - self._best, 0.0)
        self._best += gain
        self._turn += 1
        metrics = {"first_answer_score": value} if self._turn == 1 else {}
        return self.feedback, gain, value >= self.pass_at, {"metrics": metrics}
