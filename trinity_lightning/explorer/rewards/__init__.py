"""Reward functions `(response, task) -> float | dict[str, float]`, sync or async, and their weighted sum."""

import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from trinity_lightning.common.threads import call
from trinity_lightning.config.own_code import defined_at, described, own_frames
from trinity_lightning.config.registry import Registry
from trinity_lightning.config.signatures import check_arguments, check_call, has_method, made_at_start
from trinity_lightning.config.values import FLOAT32_MOST, as_float, number, unknown_name
from trinity_lightning.errors import ConfigError, RewardError, causes, configured_at
from trinity_lightning.explorer.tasks.task import Task

if TYPE_CHECKING:
    from trinity_lightning.explorer.rewards.workers import RewardWorkers

RewardValue = float | dict[str, float]
RewardFunction = Callable[[str, Task], RewardValue | Awaitable[RewardValue]]

SHOWN = "(response, task)"
REWARDS: Registry[RewardFunction] = Registry("reward function")


@dataclass(frozen=True)
class Reward:
    """A reward function of a task.

    Attributes:
        name: the function's name in metrics.
        function: the function, with its arguments.
        weight: factor of the function's value in the reward.
        given: the function's name or path in the configuration, or the function itself. None if it can only be called
            in this process, such as a judge that asks the run's models.
        source: the class or function from which `function` is made; None: it has no arguments.
        args: the arguments with which `function` is made.
    """

    name: str
    function: RewardFunction
    weight: float = 1.0
    given: Any = None
    source: Any = None
    args: Mapping[str, Any] = field(default_factory=dict)


# The processes that call reward functions for the rollouts of this context; None: this process calls them.
SCORER: "ContextVar[RewardWorkers | None]" = ContextVar("SCORER", default=None)


def resolve_rewards(reward_fn: Any) -> list[Reward]:
    """The reward functions that `Task.reward_fn` names, in order.

    Args:
        reward_fn: None, a registered name, a dotted path, a function, a list of these (or of [function, weight] pairs),
            or a mapping from them to weights. A weight is 1 if it is left out. A function with arguments is {name,
            args, weight}, alone or in a list; in a mapping from names it is {args, weight}.

    Raises:
        ConfigError: an unknown name, an object that cannot be called as a reward, an unknown or missing argument, a
            weight that is no number, or two functions of one name.
    """
    if reward_fn is None:
        return []
    if isinstance(reward_fn, Mapping) and "name" not in reward_fn:
        rewards = [_reward(entry, weight) for entry, weight in reward_fn.items()]
    elif isinstance(reward_fn, Sequence) and not isinstance(reward_fn, str):
        rewards = [_reward(*(entry if _is_pair(entry) else (entry, 1.0))) for entry in reward_fn]
    else:
        rewards = [_reward(reward_fn, 1.0)]
    if not rewards:
        raise ConfigError(
            "the list of reward functions is empty",
            key="reward",
            fix="name one, or leave it out for the workflow's own",
        )
    names = [reward.name for reward in rewards]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"two reward functions are called {', '.join(twice)}: their metrics would be the same.", key="reward"
        )
    return rewards


async def score(rewards: Sequence[Reward], response: str, task: Task) -> tuple[float | None, dict[str, float]]:
    """The weighted sum of the rewards of a response (None without reward functions), and their metrics.

    If a function returns a dict of parts, its reward is their sum. The metrics are "reward/<name>", and for such parts
    "reward/<name>/<part>", before weighting.

    Raises:
        RewardError: a function raised, or returned no finite number of float32; the message names it.
    """
    if not rewards:
        return None, {}
    scorer = SCORER.get()
    total, metrics = 0.0, {}
    for reward in rewards:
        value, metrics_of_reward = await (worth_here if scorer is None else scorer.worth)(reward, response, task)
        metrics |= metrics_of_reward
        total += reward.weight * value
    return total, metrics


async def worth_here(reward: Reward, response: str, task: Task) -> tuple[float, dict[str, float]]:
    """The reward of a response by one function, called in this process, and its metrics; see `worth`."""
    try:  # in a thread: a slow verifier must not delay other rollouts, nor must a hanging one delay the time-out
        returned = await call(reward.function, response, task)
    except (Exception, SystemExit) as error:  # a reward that executes code may meet exit()
        raise reward_error(reward.name, error) from error
    return worth(reward, returned)


# Errors that Python raises for mistakes in code, which would repeat. Errors of servers and disks have other types.
MISTAKES = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, SyntaxError)
MISTAKES += (NotImplementedError, TypeError, ValueError)


def reward_error(name: str, error: BaseException) -> RewardError:
    """The error of a rollout whose reward function raised; its note has the traceback, which pickling would lose."""
    failure = RewardError(f"reward function '{name}' raised {described(error)}")
    failure.may_pass = not all(isinstance(cause, MISTAKES) for cause in causes(error))
    frames = own_frames(error) or traceback.extract_tb(error.__traceback__)
    failure.add_note("".join(traceback.format_list(frames)).rstrip())
    return failure


def worth(reward: Reward, returned: Any) -> tuple[float, dict[str, float]]:
    """The reward that a function returned, before weighting, and its metrics.

    Raises:
        RewardError: the result is neither a finite number nor a dict of finite numbers.
    """
    metrics = {}
    if isinstance(returned, Mapping):
        if not returned:
            where = defined_at(reward.function)
            raise RewardError(
                f"reward function '{reward.name}' returned {{}}, expected a finite number, or parts{where}."
            )
        parts = {str(part): _number(reward, f"'{part}': ", number) for part, number in returned.items()}
        metrics |= {f"reward/{reward.name}/{part}": number for part, number in parts.items()}
        returned = sum(parts.values())
    value = metrics[f"reward/{reward.name}"] = _number(reward, "", returned)
    return value, metrics


def _number(reward: Reward, part: str, value: Any) -> float:
    if (number := as_float(value)) is not None and abs(number) <= FLOAT32_MOST:
        return number
    raise RewardError(
        f"reward function '{reward.name}' returned {part}{value!r}, expected a finite number (in float32)"
        f"{defined_at(reward.function)}"
    )


def _reward(entry: Any, weight: Any) -> Reward:
    if isinstance(entry, Reward):  # resolved already
        return entry
    settings = entry if isinstance(entry, Mapping) else weight if isinstance(weight, Mapping) else {"weight": weight}
    if unknown := settings.keys() - {"name", "args", "weight"}:
        raise ConfigError(
            unknown_name("key of a reward function", min(unknown), ("name", "args", "weight")), key="reward"
        )
    entry = entry.get("name") if isinstance(entry, Mapping) else entry
    weight, args = settings.get("weight", 1.0), settings.get("args") or {}
    number("reward", weight, label=f"weight of reward function {entry!r}")
    if not isinstance(args, Mapping):
        raise ConfigError(f"reward.args is {args!r}: give {{argument: value}}.", key="reward.args")
    with configured_at("reward"):
        source = REWARDS.resolve(entry)
        function = with_arguments(entry, source, args)
    own_name = getattr(source, "__name__", type(source).__name__)
    name = entry.rpartition(".")[2] if isinstance(entry, str) else own_name
    return Reward(name, function, float(weight), entry, source if function is not source else None, dict(args))


def with_arguments(entry: Any, source: Any, args: Mapping[str, Any]) -> RewardFunction:
    """The reward function that is made from a class or a function with these arguments.

    Raises:
        ConfigError: it cannot be called as (response, task), or does not take these arguments.
    """
    label = f"reward function {entry if isinstance(entry, str) else getattr(source, '__name__', source)!r}"
    if isinstance(source, type):
        if not has_method(source, "__call__"):
            raise ConfigError(
                f"{label} is a class", fix=f"give a function {SHOWN}, or a class with a method __call__{SHOWN}"
            )
        source, args = made_at_start(label, source, args, "reward.args"), {}
    if not callable(source):
        raise ConfigError(f"{label} cannot be called", fix="give a registered name, a path, or a function")
    check_call(label, partial(source, **args) if args else source, ("response", "task"), SHOWN, "reward.args")
    function: Any = partial(source, **args) if args else source
    if args:
        check_arguments(label, partial(source, "response", "task"), args, "reward.args")
        # Keep the function's marks, such as `reads_answer`.
        vars(function).update({name: value for name, value in vars(source).items() if name != "__wrapped__"})
    return function


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2
