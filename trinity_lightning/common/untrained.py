"""Experiences that are not trained on: what filters judge runs by, and what helps if nothing is left."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from trinity_lightning.common.experience import Experience, ExperienceError
from trinity_lightning.common.runs import RESERVED, Run, last_step, raw_reward, runs_of
from trinity_lightning.config.values import as_float, text

# -- what filters judge runs by: the reward before operators, or another number that workflows gave --------------------


class Criterion:
    """What a filter judges runs by, in all steps.

    Args:
        metric: a metric of the experiences (`metrics[metric]`, or a reward function's `metrics["reward/<metric>"]`) or
            an entry of their info; of several steps the last that has it counts. None: the last step's reward before
            operators shaped it, as `raw_reward`. Whether the steps before may have others is up to what weighs them.

    Attributes:
        seen: whether an experience of this run had the metric.

    Raises:
        ConfigError: the metric is no text.
    """

    def __init__(self, metric: str | None = None) -> None:
        self.metric = None if metric is None else text("metric", metric)
        self.seen = False  # a later step, or the few tasks of a refill, may lack it

    def values(self, groups: Mapping[str, Sequence[Experience]]) -> dict[str, list[float | None]]:
        """The number of each run of every group; None for a run without one.

        Raises:
            ExperienceError: as `metric_of`; or no experience of this run has had the metric, these included.
        """
        values = {id_: [self._value(run) for run in runs_of(group)] for id_, group in groups.items()}
        self.seen |= any(value is not None for group in values.values() for value in group)
        if self.metric is not None and values and not self.seen:
            first = next(experience for group in groups.values() for experience in group)
            names = sorted(map(str, first.metrics.keys() | first.info.keys()))
            has = ", ".join(name for name in names if not name.startswith(RESERVED)) or "nothing"
            raise ExperienceError(
                f"no experience has '{self.metric}' to judge it by: name a reward function, another metric or an entry "
                f"of info. {first.eid} has {has}."
            )
        return values

    def _value(self, run: Run) -> float | None:
        return raw_reward(last_step(run)) if self.metric is None else metric_of(run, self.metric)


def metric_of(run: Run, metric: str) -> float | None:
    """The metric or entry of info of that name, of the run's last step that has it; see `Criterion`.

    Raises:
        ExperienceError: it is no number.
    """
    for experience in sorted(run, key=lambda each: each.eid.step, reverse=True):
        metrics, info = experience.metrics, experience.info
        for value in (metrics.get(metric), metrics.get(f"reward/{metric}"), info.get(metric)):
            if value is None:
                continue
            if (number := as_float(value)) is None:
                raise ExperienceError(
                    f"experience {experience.eid}: '{metric}' must be a number to judge by, not {value!r}."
                )
            return number
    return None


# -- why nothing of an explore step is trained on, and what helps ------------------------------------------------------


logger = logging.getLogger(__name__)

# Each reason, what it means, and what helps.
REASONS = {
    "equal rewards": (
        "All runs of the task got the same reward, and their advantages are 0.",
        "If all rewards of the step are one number, check that the reward function looks at the response, and that "
        "the model can get another reward: `completions/` shows what it writes, and whether `sampling.max_tokens` cuts "
        "it off. If tasks differ, choose tasks that are neither too easy nor too hard (`taskset.order=by_difficulty`), "
        "more rollouts per task (`explorer.repeat_times`), a reward with steps between wrong and right, or have such "
        "tasks replaced: `add_strategy=[dapo,grpo] explorer.max_refills=3`.",
    ),
    "zero advantage": (
        "The run's reward is that of the baseline, so its advantage is 0; the task's other runs are trained on.",
        "Nothing is wrong.",
    ),
    "filtered by NAME": (
        "The operator or add strategy NAME left it out.",
        "Change its arguments (a threshold, say) so that it leaves out fewer. `dapo` leaves out tasks of equal "
        "rewards: if all rewards are one number, check that the reward function looks at the response. What compares "
        "the runs of a task judges by their rewards as they were before operators: if operators make up the reward, "
        "give it another number as `metric` (`std_threshold` has none: take `reward_variance` in its place).",
    ),
    "truncated": (
        "The response was cut off, and `mask_response_truncated` masks it.",
        "A larger `sampling.max_tokens`.",
    ),
    "no trained tokens": ("The action mask is zero throughout.", "The workflow, or the operator that masks."),
    "invalid reward": (
        "A reward of the task (`invalid METRIC`: what a filter judges by) is missing, NaN or infinite: its group is "
        "left out.",
        "The reward function; `operators=invalid_reward_filter` drops the run alone.",
    ),
    "surplus": ("The step was full before this group of a refill.", "Nothing is wrong."),
}


def what_helps(reason: str) -> str:
    """What helps against one of the `REASONS`, whatever name or metric it ends with."""
    return next(helps for known, (_, helps) in REASONS.items() if known.split()[0] == reason.split()[0])


def warn_of_idle_step(step: int, received: int, reasons: Counter[str], explained: set[str]) -> None:
    """Log why no response of a step is trained on, and what helps against the most frequent reason.

    Args:
        step: the explore step.
        received: how many responses it had.
        reasons: of how many of them each is the reason.
        explained: the reasons for which it was logged what helps; the most frequent one joins them.
    """
    causes = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
    logger.warning("explore step %d: none of its %d responses is trained on: %s.", step, received, causes)
    [(reason, _)] = reasons.most_common(1)
    if reason not in explained:
        explained.add(reason)
        logger.warning("what helps against '%s': %s", reason, what_helps(reason))
