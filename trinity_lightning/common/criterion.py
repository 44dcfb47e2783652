"""What a filter judges runs by: the reward as it was before operators, or another number that workflows gave."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real

from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.runs import RESERVED, Run, last_step, raw_reward, runs_of
from trinity_lightning.config.values import text


class Criterion:
    """What a filter judges runs by, in all steps.

    Args:
        metric: as `judged`.

    Raises:
        ConfigError: the metric is no text.
    """

    def __init__(self, metric: str | None = None) -> None:
        self.metric = None if metric is None else text("metric", metric)
        self._seen = False

    def values(self, groups: Mapping[str, Sequence[Experience]]) -> dict[str, list[float | None]]:
        """The number of each run of every group; None for a run without one.

        Raises:
            ExperienceError: as `judged`; or no experience, of these and those of earlier calls, has the metric. (What
                one step has, the few tasks of a refill may lack.)
        """
        values = {id_: [judged(run, self.metric) for run in runs_of(group)] for id_, group in groups.items()}
        self._seen |= any(value is not None for group in values.values() for value in group)
        if self.metric is not None and values and not self._seen:
            first = next(experience for group in groups.values() for experience in group)
            names = sorted(map(str, first.metrics.keys() | first.info.keys()))
            has = ", ".join(name for name in names if not name.startswith(RESERVED)) or "nothing"
            raise ExperienceError(
                f"no experience has '{self.metric}' to judge it by: name a reward function, another metric or an entry "
                f"of info. {first.eid} has {has}."
            )
        return values


def judged(run: Run, metric: str | None = None) -> float | None:
    """The number by which a filter judges a run; None without one.

    Args:
        run: its experiences.
        metric: a metric of the experiences (`metrics[metric]`, or a reward function's `metrics["reward/<metric>"]`) or
            an entry of their info; of several steps the last that has it counts. None: the last step's reward before
            operators shaped it, as `raw_reward`. Whether the steps before may have others is up to what weighs them.

    Raises:
        ExperienceError: the metric is no number.
    """
    return raw_reward(last_step(run)) if metric is None else metric_of(run, metric)


def metric_of(run: Run, metric: str) -> float | None:
    """The metric or entry of info of that name, of the run's last step that has it; see `judged`.

    Raises:
        ExperienceError: it is no number.
    """
    for experience in sorted(run, key=lambda each: each.eid.step, reverse=True):
        metrics, info = experience.metrics, experience.info
        for value in (metrics.get(metric), metrics.get(f"reward/{metric}"), info.get(metric)):
            if value is not None:
                return _number(experience, metric, value)
    return None


def _number(experience: Experience, metric: str, value: object) -> float:
    number = value.item() if hasattr(value, "item") and math.prod(value.shape) == 1 else value  # type: ignore[attr-defined]
    if not isinstance(number, Real):
        raise ExperienceError(f"experience {experience.eid}: '{metric}' must be a number to judge by, not {value!r}.")
    return float(number)
