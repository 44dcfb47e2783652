"""Filters by reward: of one experience, or by the spread or the share of right answers within its group."""

import logging
import statistics
from typing import Any

from trinity_lightning.buffer.operators.experience_operator import ExperienceOperatorV1
from trinity_lightning.common.experience import Experience, ExperienceError, group_by
from trinity_lightning.common.runs import (
    Criterion,
    Run,
    equal_rewards,
    is_valid_reward,
    last_step,
    metric_of,
    raw_reward,
    runs_of,
)
from trinity_lightning.config.values import number, text

logger = logging.getLogger(__name__)


class RewardFilter(ExperienceOperatorV1):
    """Keeps experiences whose reward is at least `threshold`, and is neither missing nor NaN."""

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = number("threshold", threshold)

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """The experiences that stay; `filtered_count` is the number of the others."""
        remaining = [exp for exp in exps if exp.reward is not None and exp.reward >= self.threshold]
        return remaining, {"filtered_count": len(exps) - len(remaining)}


class InvalidRewardFilter(ExperienceOperatorV1):
    """Drops experiences whose reward is missing, NaN or infinite."""

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """The experiences that stay; `filtered_count` is the number of the others."""
        remaining = [exp for exp in exps if is_valid_reward(exp.reward)]
        return remaining, {"filtered_count": len(exps) - len(remaining)}


class RewardSTDFilter(ExperienceOperatorV1):
    """Keeps task groups of at least two runs whose rewards, before any operator, differ enough.

    Rewards that are equal up to rounding do not differ, as for the add strategies. A group with a reward that is no
    finite number is dropped whole: its spread is not known.

    Args:
        threshold: the population standard deviation that a group must exceed.
        metric: judged in place of the reward: the name of a reward function, another metric, or an entry of info.
    """

    def __init__(self, threshold: float = 0.0, metric: str | None = None) -> None:
        self.threshold = number("threshold", threshold)
        self.criterion = Criterion(metric)

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """The experiences that stay, in their order; `filtered_count` is the number of the others.

        Raises:
            ExperienceError: no experience has such a metric, or the rewards of a run's steps differ.
        """
        values = self.criterion.values(group_by(exps, "task"))
        dropped = {tid for tid, of_runs in values.items() if not self._differ(of_runs)}
        remaining = [exp for exp in exps if exp.eid.tid not in dropped]
        return remaining, {"filtered_count": len(exps) - len(remaining)}

    def _differ(self, values: list[float | None]) -> bool:
        valid = [value for value in values if is_valid_reward(value)]
        if len(valid) < len(values) or equal_rewards(valid):
            return False
        return statistics.pstdev(valid) > self.threshold


class DAPODynamicSampling(ExperienceOperatorV1):
    """Keeps task groups with 0 < correct < G, of G runs (DAPO, arXiv 2503.14476, equation 11).

    A run is correct if its metric is above the threshold. A run without the metric is judged by its reward before any
    operator: a penalty for length makes no answer wrong. A group with a value that is no finite number is dropped whole
    and logged, and counts neither as all correct nor as all wrong.

    Args:
        metric_key: a metric of the experiences, the name of a reward function ("accuracy" is also
            `metrics["reward/accuracy"]`), or an entry of info.
        correct_threshold: the value that a correct one exceeds.
    """

    def __init__(self, metric_key: str = "accuracy", correct_threshold: float = 0.0) -> None:
        self.metric_key = text("metric_key", metric_key)
        self.correct_threshold = number("correct_threshold", correct_threshold)

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """The experiences that stay, in their order; the metrics count those that are dropped.

        Raises:
            ExperienceError: an experience has neither the metric nor a reward.
        """
        counts = {"dropped_all_correct": 0, "dropped_all_wrong": 0}
        dropped, invalid = set(), []
        for tid, group in group_by(exps, "task").items():
            values = [self._value(run) for run in runs_of(group)]
            correct = sum(value > self.correct_threshold for value in values)
            if not all(map(is_valid_reward, values)):
                invalid.append(tid)
            elif correct in (0, len(values)):
                counts["dropped_all_correct" if correct else "dropped_all_wrong"] += len(group)
                dropped.add(tid)
        if invalid:
            logger.warning("dropped groups with a value that is no finite number: %s", ", ".join(invalid))
        remaining = [exp for exp in exps if exp.eid.tid not in dropped.union(invalid)]
        return remaining, {"filtered_count": len(exps) - len(remaining), **counts}

    def _value(self, run: Run) -> float:
        metric = metric_of(run, self.metric_key)
        value = raw_reward(last_step(run)) if metric is None else metric
        if value is None:
            raise ExperienceError(
                f"experience {run[-1].eid} has neither metrics['{self.metric_key}'] nor a reward that says whether it "
                "is correct."
            )
        return value
