"""Reward functions by name, and what a response is worth under several of them."""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

from trinity_lightning.common.errors import ConfigError, RolloutError
from trinity_lightning.common.registry import Registry
from trinity_lightning.common.rewards import is_valid_reward
from trinity_lightning.common.threads import run_in_thread
from trinity_lightning.explorer.tasks.task import Task

RewardValue = float | dict[str, float]
RewardFunction = Callable[[str, Task], RewardValue | Awaitable[RewardValue]]

REWARDS: Registry[RewardFunction] = Registry("reward function")


@dataclass(frozen=True)
class Reward:
    """A reward function, the name that its metrics carry, and its weight in the sum."""

    name: str
    function: RewardFunction
    weight: float = 1.0


def resolve_rewards(reward_fn: Any) -> list[Reward]:
    """The reward functions that `Task.reward_fn` means, in order.

    Args:
        reward_fn: None, a registered name, a dotted path, a function, a list of these (or of [function, weight] pairs),
            or a mapping from them to weights. Without a weight it is 1.

    Raises:
        ConfigError: an unknown name, something that cannot be called, a weight that is no number, or two of one name.
    """
    if reward_fn is None:
        return []
    if isinstance(reward_fn, Mapping):
        rewards = [_reward(entry, weight) for entry, weight in reward_fn.items()]
    elif isinstance(reward_fn, Sequence) and not isinstance(reward_fn, str):
        rewards = [_reward(*(entry if _is_pair(entry) else (entry, 1.0))) for entry in reward_fn]
    else:
        rewards = [_reward(reward_fn, 1.0)]
    if not rewards:
        raise ConfigError("the list of reward functions is empty: name one, or leave it out for the workflow's own.")
    names = [reward.name for reward in rewards]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two reward functions are called {', '.join(twice)}: their metrics could not be told apart.")
    return rewards


async def score(rewards: Sequence[Reward], response: str, task: Task) -> tuple[float | None, dict[str, float]]:
    """The weighted sum of the rewards of a response (None without reward functions), and the metrics of each.

    A function that returns a dict of parts is worth their sum; the metrics are "reward/<name>" and, of such a function,
    "reward/<name>/<part>": before weighting.

    Raises:
        RolloutError: a function raised, or returned something that is not a finite number; the message names it.
    """
    if not rewards:
        return None, {}
    total, metrics = 0.0, {}
    for reward in rewards:
        value = await _call(reward, response, task)
        if isinstance(value, Mapping):
            parts = {str(part): _number(reward, f"'{part}': ", number) for part, number in value.items()}
            metrics |= {f"reward/{reward.name}/{part}": number for part, number in parts.items()}
            value = sum(parts.values())
        metrics[f"reward/{reward.name}"] = _number(reward, "", value)
        total += reward.weight * metrics[f"reward/{reward.name}"]
    return total, metrics


async def _call(reward: Reward, response: str, task: Task) -> Any:
    try:
        if inspect.iscoroutinefunction(reward.function):
            return await reward.function(response, task)
        # In a thread: a slow verifier must not hold up the other rollouts, nor one that hangs the time-out.
        value = await run_in_thread(lambda: reward.function(response, task))
        return await value if inspect.isawaitable(value) else value
    except (Exception, SystemExit) as error:  # a reward that executes code may meet exit()
        raise RolloutError(f"reward function '{reward.name}' raised {type(error).__name__}: {error}") from error


def _number(reward: Reward, part: str, value: Any) -> float:
    # Scalars of torch and NumPy; neither is imported here, so that a reward's name is checked before torch is loaded.
    number = value.item() if hasattr(value, "shape") and math.prod(value.shape) == 1 else value
    if not isinstance(number, Real) or not is_valid_reward(float(number)):
        raise RolloutError(f"reward function '{reward.name}' returned {part}{value!r}, expected a finite number")
    return float(number)


def _reward(entry: Any, weight: Any) -> Reward:
    if isinstance(entry, Reward):  # resolved already
        return entry
    function = _function(entry)
    if not isinstance(weight, Real) or not is_valid_reward(float(weight)):
        raise ConfigError(f"the weight of reward function {entry!r} must be a finite number, not {weight!r}.")
    return Reward(_name(entry, function), function, float(weight))


def _function(entry: Any) -> RewardFunction:
    try:
        function = REWARDS.resolve(entry) if isinstance(entry, str) else entry
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not callable(function):
        raise ConfigError(f"reward function {entry!r} cannot be called: give a registered name, a path, or a function.")
    return cast(RewardFunction, function)


def _name(entry: Any, function: Any) -> str:
    if isinstance(entry, str):
        return entry.rpartition(".")[2]
    return getattr(function, "__name__", type(function).__name__)


def _is_pair(entry: Any) -> bool:
    """Whether it is [function, weight]."""
    return isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2
