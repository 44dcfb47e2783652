"""The protocol of environments, and their names."""

import inspect
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

from trinity_lightning.common.threads import run_in_thread
from trinity_lightning.config.registry import Registry
from trinity_lightning.errors import ConfigError, RolloutError
from trinity_lightning.explorer.rewards import resolve_rewards, score
from trinity_lightning.explorer.rewards.answers import find_last_number
from trinity_lightning.explorer.tasks.task import Task, messages_of

T = TypeVar("T")

# What the environment says: messages of a conversation, one of them, or the text of a user message.
Observation = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
# Observation, reward of the step, whether the episode is over, and anything else.
StepResult = tuple[Observation, float, bool, Mapping[str, Any]]


class Environment(Protocol):
    """What a policy plays against, one instance an episode. Methods may be `async def` or plain; plain ones run in a
    thread, never two of an instance at once.

    Known entries of a step's info: "state", what distinguishes the new state from others (text, numbers, lists or
    dicts; without it the observation does) for add strategies that compare states, and "metrics", numbers of the
    episode so far.

    An environment may also have `close()`, called at the end of an episode, also of one that failed, and
    `final_text(text)`: what of the last response reward functions are to judge.
    """

    def reset(self, task: Task) -> Observation | Awaitable[Observation]:
        """Begin an episode: the messages that the policy answers first. All runs of a task should begin alike."""
        ...

    def step(self, response: str) -> StepResult | Awaitable[StepResult]:
        """What the response leads to: (observation, reward, done, info). The last step's observation is not shown."""
        ...


ENVIRONMENTS: Registry[Callable[..., Environment]] = Registry("environment")


def resolve_environment(environment: Any) -> Callable[..., Environment]:
    """The class or function that makes the environment: a registered name, a dotted path, or itself.

    Raises:
        ConfigError: an unknown name, or something that cannot be called.
    """
    made_by = ENVIRONMENTS.resolve(environment)
    if not callable(made_by):
        raise ConfigError(f"environment {environment!r} cannot be called: give a class, or a function that makes one.")
    return cast("Callable[..., Environment]", made_by)


async def call(method: Callable[..., T | Awaitable[T]], *arguments: Any) -> T:
    """The result of an environment's method, wherever it has to run."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    result = await run_in_thread(lambda: method(*arguments))
    return await result if inspect.isawaitable(result) else result  # type: ignore[return-value]


def as_messages(observation: Any) -> list[dict[str, Any]]:
    """An observation as messages.

    Raises:
        RolloutError: it is none.
    """
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if isinstance(observation, Mapping):
        return [dict(observation)]
    if isinstance(observation, Sequence) and all(isinstance(m, Mapping) and "role" in m for m in observation):
        return [dict(message) for message in observation]
    raise RolloutError(f"the environment's observation is {type(observation).__name__}: expected text or messages.")


# -- a guessing game --------------------------------------------------------------------------------------------------


class GuessNumber:
    """Find a number; after each guess the game says whether it is higher or lower.

    Finding it at guess t (from 1) is worth decay**(t - 1), not finding it 0. The number is `raw_task["secret"]`, or
    else drawn from the seed and the task's place in its taskset, so that all runs of a task look for the same one.

    Args:
        low, high: the range of the number.
        decay: worth of a later guess, relative to the guess before it.
        seed: of the numbers.
    """

    def __init__(self, low: int = 0, high: int = 20, decay: float = 0.9, seed: int = 0) -> None:
        if low >= high:
            raise ConfigError(f"guess_number: low is {low} and high is {high}; low must be less.")
        self._low, self._high = low, high
        self._decay = decay
        self._seed = seed
        self._guesses = 0
        self._known = [low, high]
        self._secret = low

    def reset(self, task: Task) -> list[dict[str, Any]]:
        """The rules of the game."""
        self._guesses, self._known = 0, [self._low, self._high]
        place = task.raw_task.get("task_index", task.raw_task)
        drawn = random.Random(f"{self._seed}/{place!r}").randint(self._low, self._high)
        self._secret = int(task.raw_task.get("secret", drawn))
        rules = f"I think of a whole number from {self._low} to {self._high}. Guess it. Reply with only the number."
        return [{"role": "user", "content": rules}]

    def step(self, response: str) -> StepResult:
        """Judge a guess: the last number of the response."""
        self._guesses += 1
        guess = find_last_number(response)
        if guess is None or guess != int(guess):
            return "Reply with a whole number.", 0.0, False, {"state": list(self._known)}
        if guess == self._secret:
            return "Right.", self._decay ** (self._guesses - 1), True, {"state": list(self._known)}
        if guess < self._secret:
            self._known[0] = max(self._known[0], int(guess) + 1)
            return "Higher.", 0.0, False, {"state": list(self._known)}
        self._known[1] = min(self._known[1], int(guess) - 1)
        return "Lower.", 0.0, False, {"state": list(self._known)}


# -- a question that may be answered again ----------------------------------------------------------------------------


class Retry:
    """Asks the task's question; after a wrong answer, says so and lets the policy try again.

    An answer at turn t (from 1) counts its score times decay**(t - 1), and an episode is worth its best answer: what a
    step adds to that is its reward.

    Args:
        verifier: reward functions that score an answer, as `Task.reward_fn`; None: reasoning-gym's own verifier if
            the task is one of reasoning-gym, else `math`.
        decay: worth of a later answer, relative to the answer before it.
        pass_at: score from which an answer is right.
        feedback: what is said after a wrong answer.
    """

    def __init__(
        self,
        verifier: Any = None,
        decay: float = 0.5,
        pass_at: float = 1.0,
        feedback: str = "That is wrong. Try again.",
    ) -> None:
        self._verifier = resolve_rewards(verifier)
        self._decay = decay
        self._pass_at = pass_at
        self._feedback = feedback

    def reset(self, task: Task) -> list[dict[str, Any]]:
        """The task's own conversation."""
        self._task = task
        self._turn = 0
        self._best = 0.0
        if not self._verifier:
            self._verifier = resolve_rewards("reasoning_gym" if task.raw_task.get("reasoning_gym") else "math")
        return messages_of(task)

    async def step(self, response: str) -> StepResult:
        """Score an answer."""
        value = cast("float", (await score(self._verifier, response, self._task))[0])  # None: without a verifier
        worth = value * self._decay**self._turn
        gained = max(worth - self._best, 0.0)
        self._best += gained
        self._turn += 1
        metrics = {"first_answer_score": value} if self._turn == 1 else {}
        return self._feedback, gained, value >= self._pass_at, {"metrics": metrics}
