"""What it was worth: reward functions `(response, task) -> float | dict[str, float]`, sync or async, and their sum."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from trinity_lightning.common.threads import call
from trinity_lightning.config.registry import Registry
from trinity_lightning.config.values import FLOAT32_MOST, as_float, number
from trinity_lightning.errors import ConfigError, RewardError
from trinity_lightning.explorer.tasks.task import Task

if TYPE_CHECKING:
    from trinity_lightning.explorer.rewards.workers import RewardWorkers

RewardValue = float | dict[str, float]
RewardFunction = Callable[[str, Task], RewardValue | Awaitable[RewardValue]]

REWARDS: Registry[RewardFunction] = Registry("reward function")


@dataclass(frozen=True)
class Reward:
    """A reward function of a task."""

    name: str  # which its metrics carry
    function: RewardFunction
    weight: float = 1.0
    # What stands for the function in the configuration, or the function itself; None for one that belongs in this
    # process, such as a judge that asks the run's models.
    given: Any = None


# The processes that call the reward functions of the rollouts in this context; None: this one does.
SCORER: "ContextVar[RewardWorkers | None]" = ContextVar("SCORER", default=None)


def resolve_rewards(reward_fn: Any) -> list[Reward]:
    """The reward functions that `Task.reward_fn` means, in order.

    Args:
        reward_fn: None, a registered name, a dotted path, a function, a list of these (or of [function, weight] pairs),
            or a mapping from them to weights. Without a weight it is 1.

    Raises:
        ConfigError: an unknown name, what cannot be called as a reward, a weight that is no number, or two of one name.
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
        raise ConfigError(f"two reward functions are called {', '.join(twice)}: their metrics would be the same.")
    return rewards


async def score(rewards: Sequence[Reward], response: str, task: Task) -> tuple[float | None, dict[str, float]]:
    """The weighted sum of the rewards of a response (None without reward functions), and the metrics of each.

    A function that returns a dict of parts is worth their sum; the metrics are "reward/<name>" and, of such a function,
    "reward/<name>/<part>": before weighting.

    Raises:
        RewardError: a function raised, or returned what is no finite number of float32; the message names it.
    """
    if not rewards:
        return None, {}
    scorer = SCORER.get()
    total, metrics = 0.0, {}
    for reward in rewards:
        value, its_metrics = await (worth_here if scorer is None else scorer.worth)(reward, response, task)
        metrics |= its_metrics
        total += reward.weight * value
    return total, metrics


async def worth_here(reward: Reward, response: str, task: Task) -> tuple[float, dict[str, float]]:
    """What a response is worth by one reward function, called in this process; see `worth`."""
    try:  # in a thread: a slow verifier must not hold up the other rollouts, nor one that hangs the time-out
        returned = await call(reward.function, response, task)
    except (Exception, SystemExit) as error:  # a reward that executes code may meet exit()
        from trinity_lightning.common.failures import raised

        raise raised(reward.name, error) from error
    return worth(reward, returned)


def worth(reward: Reward, returned: Any) -> tuple[float, dict[str, float]]:
    """What a response is worth by what the function returned, before weighting, and its metrics.

    Raises:
        RewardError: it is no finite number, nor a dict of at least one.
    """
    metrics = {}
    if isinstance(returned, Mapping):
        if not returned:
            raise RewardError(f"reward function '{reward.name}' returned {{}}, expected a finite number, or parts.")
        parts = {str(part): _number(reward, f"'{part}': ", number) for part, number in returned.items()}
        metrics |= {f"reward/{reward.name}/{part}": number for part, number in parts.items()}
        returned = sum(parts.values())
    value = metrics[f"reward/{reward.name}"] = _number(reward, "", returned)
    return value, metrics


def _number(reward: Reward, part: str, value: Any) -> float:
    if (found := as_float(value)) is not None and abs(found) <= FLOAT32_MOST:
        return found
    raise RewardError(
        f"reward function '{reward.name}' returned {part}{value!r}, expected a finite number (in float32)"
    )


def _reward(entry: Any, weight: Any) -> Reward:
    if isinstance(entry, Reward):  # resolved already
        return entry
    function = _function(entry)
    number(f"weight of reward function {entry!r}", weight)
    own_name = getattr(function, "__name__", type(function).__name__)
    name = entry.rpartition(".")[2] if isinstance(entry, str) else own_name
    return Reward(name, function, float(weight), entry)


def _function(entry: Any) -> RewardFunction:
    function = REWARDS.resolve(entry)
    if not callable(function):
        raise ConfigError(f"reward function {entry!r} cannot be called: give a registered name, a path, or a function.")
    if isinstance(function, type):
        raise ConfigError(f"reward function {entry!r} is a class: give a function (response, task), or an object.")
    try:
        inspect.signature(function).bind("response", "task")
    except TypeError as error:
        raise ConfigError(f"reward function {entry!r} cannot be called as (response, task): {error}.") from error
    except ValueError:  # one written in C that does not say what it takes
        pass
    return cast("RewardFunction", function)


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2
