"""The protocol of environments, and their names."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

from trinity_lightning.common.threads import run_in_thread
from trinity_lightning.config.registry import Registry
from trinity_lightning.errors import ConfigError, RolloutError
from trinity_lightning.explorer.tasks.task import Task

T = TypeVar("T")

# What the environment says: messages of a conversation, one of them, or the text of a user message.
Observation = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
# Observation, reward of the step, whether the episode is over, and anything else.
StepResult = tuple[Observation, float, bool, Mapping[str, Any]]


class Environment(Protocol):
    """What a policy plays against, one instance an episode. Methods may be `async def` or plain; plain ones run in a
    thread, never two of an instance at once.

    Known entries of a step's info: "state", what tells the new state from others (text, numbers, lists or dicts;
    without it the observation does) for add strategies that compare states, and "metrics", numbers of the episode so
    far.

    An environment may also have `close()`, called at the end of the episode, whatever ended it, and `final_text(text)`:
    what of the last response reward functions are to judge.
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
    try:
        made_by = ENVIRONMENTS.resolve(environment) if isinstance(environment, str) else environment
    except ValueError as error:
        raise ConfigError(str(error)) from error
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
