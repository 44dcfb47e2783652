"""The runs of a task, which are the members of its group, and the one number that each is worth.

A run is one experience, or one a step: what it was worth counts once, however many calls it took.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real

from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.rewards import equal_rewards, is_valid_reward
from trinity_lightning.config.values import text

Run = list[Experience]

# Metrics and entries of info whose names begin so are this package's notes; all other names belong to workflows.
RESERVED = "trinity_lightning/"
# Metric of an experience: its first valid reward, before operators shaped it.
RAW_REWARD = f"{RESERVED}raw_reward"


def runs_of(experiences: Iterable[Experience]) -> list[Run]:
    """The runs, in order of first appearance: the experiences of one `eid.rid` with different steps.

    Experiences with the same run and the same step are not one run: their ids do not say which belong together, and
    each of them counts as a run of its own.
    """
    by_id: dict[str, Run] = {}
    for experience in experiences:
        by_id.setdefault(experience.eid.rid, []).append(experience)
    runs: list[Run] = []
    for run in by_id.values():
        in_steps = len(run) == 1 or len({experience.eid.step for experience in run}) == len(run)
        runs += [run] if in_steps else [[experience] for experience in run]
    return runs


def last_step(run: Sequence[Experience]) -> Experience:
    """The experience of a run's greatest step, whatever their order."""
    return max(reversed(run), key=lambda experience: experience.eid.step)


def run_reward(run: Run) -> float:
    """The reward of a run, each of whose experiences has a valid one: the same for all steps.

    Raises:
        ExperienceError: the rewards of its steps differ.
    """
    return _common(run, [float(experience.reward or 0.0) for experience in run])


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


def raw_reward(experience: Experience) -> float | None:
    """The first valid reward, the workflow's or else an operator's (a judge's, say); without one the present one."""
    return experience.metrics.get(RAW_REWARD, experience.reward)


def keep_raw_reward(experience: Experience) -> None:
    """Note the first valid reward among the metrics. They are a new dict: experiences may share one."""
    reward = experience.reward
    if RAW_REWARD not in experience.metrics and reward is not None and is_valid_reward(reward):
        experience.metrics = experience.metrics | {RAW_REWARD: reward}


def forget_raw_reward(experience: Experience) -> None:
    """Remove such a note, which an experience that went through operators before still has."""
    if RAW_REWARD in experience.metrics:
        experience.metrics = {name: value for name, value in experience.metrics.items() if name != RAW_REWARD}


def _common(run: Run, rewards: Sequence[float]) -> float:
    if len(rewards) > 1 and not equal_rewards(rewards):
        raise ExperienceError(
            f"run {run[0].eid.rid}: the rewards of its {len(run)} steps differ ({min(rewards):g} to {max(rewards):g}), "
            "and it is compared with the task's other runs by one reward: choose add_strategy=step_wise_grpo (the last "
            "step's reward) or gigpo (their sum), or give every step the run's reward (step_reward=return)."
        )
    return rewards[0]


def _number(experience: Experience, metric: str, value: object) -> float:
    number = value.item() if hasattr(value, "item") and math.prod(value.shape) == 1 else value  # type: ignore[attr-defined]
    if not isinstance(number, Real):
        raise ExperienceError(f"experience {experience.eid}: '{metric}' must be a number to judge by, not {value!r}.")
    return float(number)
