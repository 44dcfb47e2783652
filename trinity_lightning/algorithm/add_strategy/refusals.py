"""What is said of strategies, and of arguments, that there are not; and of experiences that no strategy weighs."""

import inspect
from collections.abc import Iterable

from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.config.values import unknown_name
from trinity_lightning.errors import ConfigError


def no_pairs(pair: Experience) -> ExperienceError:
    """That a preference pair cannot be weighed."""
    return ExperienceError(
        f"experience {pair.eid} is a DPO pair, which has no advantages: train on it without an add strategy."
    )


def no_argument(strategy: type, name: str) -> TypeError:
    """That a strategy has no argument of this name, and which ones it has."""
    parameters = inspect.signature(strategy).parameters.values()
    known = [p.name for p in parameters if p.name != "writer" and p.kind is not inspect.Parameter.VAR_KEYWORD]
    return TypeError(unknown_name(f"argument of {strategy.__name__}", name, known))


def no_strategy(known: Iterable[str]) -> ConfigError:
    """That one has to be named."""
    return ConfigError(f"add_strategy names no strategy: give at least one of {', '.join(sorted(known))}.")
