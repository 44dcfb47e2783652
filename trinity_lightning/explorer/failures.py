"""What is said of a step, or an evaluation, of which no task gave an experience, and of what cannot roll out."""

from collections.abc import Iterable, Sequence
from typing import Never

from trinity_lightning.errors import ConfigError, RewardError, RolloutError
from trinity_lightning.explorer.models.engine import Engine
from trinity_lightning.explorer.runner import Status, fails_by_reward

_FEW = 3  # different errors of reward functions that a message shows


def refuse_nothing(what: str, statuses: Sequence[Status], tasks: int, reasons: Iterable[str | None]) -> Never:
    """RewardError: all of them failed by their reward functions; RolloutError: they failed otherwise.

    Args:
        what: the step, in words.
        statuses: how its tasks ended, those that did.
        tasks: how many there were.
        reasons: why they failed, each once.
    """
    nothing = f"{what}: none of its {tasks} tasks gave an experience"
    if statuses and all(map(fails_by_reward, statuses)):
        errors = list(dict.fromkeys(error.partition(": ")[2] for status in statuses for error in status.errors))
        more = f"; and {len(errors) - _FEW} other errors" if len(errors) > _FEW else ""
        raise RewardError(f"{nothing}: {'; '.join(errors[:_FEW])}{more}")
    why = "; ".join(str(reason) for reason in reasons) or "No task finished in time: raise explorer.max_timeout."
    raise RolloutError(f"{nothing}. {why}")


def no_engine(model: object) -> ConfigError:
    """That a model is none that holds the policy."""
    return ConfigError(
        f"{type(model).__name__} is no engine that an explorer can load, send weights to and shut down: "
        f"make it a subclass of {Engine.__module__}.Engine."
    )
