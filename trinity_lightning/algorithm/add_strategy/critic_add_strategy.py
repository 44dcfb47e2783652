"""Advantages are left to a critic."""

from statistics import fmean
from typing import Any

from trinity_lightning.algorithm.add_strategy.add_strategy import GroupAdvantageStrategy, Groups, Metrics
from trinity_lightning.common.experience import Experience, group_by
from trinity_lightning.common.runs import run_reward


class CriticAddStrategy(GroupAdvantageStrategy):
    """Sets no advantages: the trainer makes them of the rewards, by the values of a critic (`algorithm.critic`)."""

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {}

    def group_experiences(self, exps: list[Experience]) -> Groups:
        """The experiences of each task."""
        return group_by(exps, "task")

    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> tuple[list[Experience], Metrics]:
        """The group without the advantages that it may have had; its mean reward. Errors as of `run_reward`."""
        for experience in exps:
            experience.advantages = experience.returns = None
        return exps, {"reward_mean": fmean(run_reward([each]) for each in exps)}
