"""Decides which rollouts have solved their task: components of the reward have to reach their thresholds."""

from collections.abc import Iterable

from trinity_lightning.common.criterion import WHOLE, Criterion
from trinity_lightning.common.experience import Experience
from trinity_lightning.common.runs import Run, is_valid_reward, last_step
from trinity_lightning.config.values import as_float


def values_of(criterion: Criterion, run: Run) -> dict[str, float] | None:
    """The values of a criterion's metrics in a run's last step; None if it lacks one, or one is no finite number."""
    last = last_step(run)
    thresholds = criterion.thresholds
    values = {name: last.reward if name == WHOLE else as_float(last.metrics.get(name)) for name in thresholds}
    valid = {name: value for name, value in values.items() if is_valid_reward(value)}
    return valid if len(valid) == len(values) else None


def is_solved(criterion: Criterion, run: Run) -> bool | None:
    """True if the run has solved its task; None if that is unknown."""
    values = values_of(criterion, run)
    return None if values is None else all(values[name] >= least for name, least in criterion.thresholds.items())


def metrics_of(experiences: Iterable[Experience]) -> list[str]:
    """The names of all metrics of these experiences, each once."""
    return list(dict.fromkeys(name for experience in experiences for name in experience.metrics))
