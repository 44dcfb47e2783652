"""Filters of groups whose rewards do not differ, to put before a strategy that sets advantages."""

import time
from typing import Any

import torch

from trinity_lightning.algorithm.add_strategy import functional
from trinity_lightning.algorithm.add_strategy.add_strategy import (
    AddStrategy,
    BufferWriter,
    Groups,
    Metrics,
    have_valid_rewards,
    index_of,
    reject_dpo,
    split_valid,
)
from trinity_lightning.common.experience import Experience, group_by
from trinity_lightning.common.runs import Criterion, is_valid_reward, last_step, runs_of
from trinity_lightning.config.values import number


class RewardVarianceAddStrategy(AddStrategy):
    """Writes the groups whose rewards differ, and sets no advantages: a filter to put before another strategy.

    A group is written when it has at least two runs and its rewards' population variance is above the threshold. It is
    judged by the rewards as they were before operators: a penalty for length makes no difference between two wrong
    answers. A group with a reward that is no finite number is left out, whatever it is judged by. `filtered_count`
    counts the experiences that were not written, `add_strategy_time` is in seconds.

    Args:
        variance_threshold: what the variance of a group must exceed.
        metric: what to judge by in place of the reward: the name of a reward function ("accuracy"), another metric of
            the experiences, or an entry of their info ("judge_score").
    """

    def __init__(
        self,
        writer: BufferWriter | None = None,
        variance_threshold: float = 0.0,
        metric: str | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__(writer, **unknown)
        self.variance_threshold = number("variance_threshold", variance_threshold, least=0)
        self.criterion = Criterion(metric)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"variance_threshold": 0.0}

    async def add(self, experiences: list[Experience], step: int) -> tuple[int, Metrics]:
        if not experiences:
            return 0, {}
        start = time.perf_counter()
        reject_dpo(experiences)
        kept, invalid = self._differing(experiences)
        written, metrics = await self.write_groups(self._writes(kept, experiences, step), len(experiences), invalid)
        metrics["filtered_count"] = float(len(experiences) - sum(map(len, kept.values())))
        metrics["add_strategy_time"] = time.perf_counter() - start
        return written, metrics

    def _writes(self, kept: Groups, experiences: list[Experience], step: int) -> list[list[Experience]]:
        """What each write is of, if these groups of the experiences are kept."""
        return list(kept.values())

    def survivors(self, experiences: list[Experience]) -> Groups:
        return self._differing(experiences)[0]

    def _differing(self, experiences: list[Experience]) -> tuple[Groups, int]:
        """The groups to write, and the number of the invalid ones, which are logged; errors as `Criterion.values`."""
        groups = group_by(experiences, "task")
        values = self.criterion.values(groups)
        # Of a run of several steps only the last must have a reward: what weighs them may need no other. Under another
        # metric none must: a distillation weighs without rewards.
        last = {id_: list(map(last_step, runs_of(exps))) for id_, exps in groups.items()}
        if self.criterion.metric is not None:
            last = {id_: [exp for exp in exps if exp.reward is not None] for id_, exps in last.items()}
        rewarded, without = split_valid(groups, lambda exps: have_valid_rewards(last[exps[0].eid.tid]))
        valid, invalid = split_valid(
            rewarded, lambda exps: all(map(is_valid_reward, values[exps[0].eid.tid])), self.criterion.metric or "reward"
        )
        if not valid:
            return {}, without + invalid
        sizes = [len(values[id_]) for id_ in valid]
        numbers = torch.tensor([value for id_ in valid for value in values[id_]], dtype=torch.float64)
        index = index_of(values[id_] for id_ in valid)
        differs = functional.rewards_differ(numbers, index, self.variance_threshold).split(sizes)
        kept = {id_: exps for (id_, exps), part in zip(valid.items(), differs, strict=True) if part[0]}
        return kept, without + invalid


class DAPOAddStrategy(RewardVarianceAddStrategy):
    """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): `reward_variance`, by the name its users look for.

    Groups that all failed or all succeeded are left out, and the explorer is asked for new tasks in their place, up to
    explorer.max_refills times.
    """

    refills = True
