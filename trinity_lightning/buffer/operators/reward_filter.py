"""Filters by reward: of an experience, and of the spread within its group."""

import statistics
from typing import Any

from trinity_lightning.buffer.operators.experience_operator import ExperienceOperatorV1
from trinity_lightning.common.experience import Experience, group_by
from trinity_lightning.common.rewards import equal_rewards, is_valid_reward
from trinity_lightning.common.runs import Criterion
from trinity_lightning.config.values import number


class RewardFilter(ExperienceOperatorV1):
    """Keeps experiences whose reward reaches a threshold; a missing reward or NaN does not.

    Args:
        threshold: the least reward kept.
    """

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = number("threshold", threshold)

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """What is kept; `filtered_count` is the number of the others."""
        kept = [exp for exp in exps if exp.reward is not None and exp.reward >= self.threshold]
        return kept, {"filtered_count": len(exps) - len(kept)}


class InvalidRewardFilter(ExperienceOperatorV1):
    """Drops experiences whose reward is missing, NaN or infinite."""

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """What is kept; `filtered_count` is the number of the others."""
        kept = [exp for exp in exps if is_valid_reward(exp.reward)]
        return kept, {"filtered_count": len(exps) - len(kept)}


class RewardSTDFilter(ExperienceOperatorV1):
    """Keeps task groups of at least two runs whose rewards, as they were before operators, differ enough.

    Rewards that are equal up to rounding do not differ, by the rule that the add strategies share. A group with a
    reward that is no finite number is dropped whole: its spread is not known.

    Args:
        threshold: the population standard deviation that a group must exceed.
        metric: what to judge by in place of the reward: the name of a reward function, another metric, or an entry of
            info.
    """

    def __init__(self, threshold: float = 0.0, metric: str | None = None) -> None:
        self.threshold = number("threshold", threshold)
        self.criterion = Criterion(metric)

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        """What is kept, in its order; `filtered_count` is the number of the other experiences.

        Raises:
            ExperienceError: no experience has such a metric, or the rewards of a run's steps differ.
        """
        values = self.criterion.values(group_by(exps, "task"))
        dropped = {tid for tid, of_runs in values.items() if not self._differ(of_runs)}
        kept = [exp for exp in exps if exp.eid.tid not in dropped]
        return kept, {"filtered_count": len(exps) - len(kept)}

    def _differ(self, values: list[float | None]) -> bool:
        valid = [value for value in values if value is not None and is_valid_reward(value)]
        if len(valid) < len(values) or equal_rewards(valid):
            return False
        return statistics.pstdev(valid) > self.threshold
