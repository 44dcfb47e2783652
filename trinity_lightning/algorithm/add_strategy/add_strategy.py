"""What an experience is worth: the base classes of the add strategies, and the best known of them.

An add strategy receives all experiences of one explore step (groups must be complete), sets their advantages and
writes those worth training on to the buffer. The mathematics is in `functional.py`.
"""

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.algorithm.add_strategy import functional
from trinity_lightning.algorithm.add_strategy.groups import (
    Groups,
    Metrics,
    by_group,
    differing_groups,
    gather_metrics,
    reject_dpo,
    reward_metrics,
    set_advantages,
    split_valid,
)
from trinity_lightning.common.experience import Experience, ExperienceError, group_by
from trinity_lightning.common.runs import Criterion, Run, judged, run_reward, runs_of
from trinity_lightning.common.writer import BufferWriter
from trinity_lightning.config.registry import Registry
from trinity_lightning.config.values import number, one_of, unknown_name

ADD_STRATEGY: Registry[type["AddStrategy"]] = Registry("add strategy")

INVALID_GROUP_COUNT = "group_advantages/invalid_group_count"


class AddStrategy(ABC):
    """Weighs the experiences of an explore step and writes them to a buffer.

    Args:
        writer: where the experiences go.

    Raises:
        TypeError: an argument the strategy does not have; the message lists those it has.
    """

    def __init__(self, writer: BufferWriter, **unknown: Any) -> None:
        self._refuse(unknown)
        self.writer = writer

    def _refuse(self, unknown: dict[str, Any]) -> None:
        if unknown:
            raise TypeError(unknown_name(f"argument of {type(self).__name__}", next(iter(unknown)), self._arguments()))

    @classmethod
    def _arguments(cls) -> list[str]:
        parameters = inspect.signature(cls).parameters.values()
        return [p.name for p in parameters if p.name != "writer" and p.kind is not inspect.Parameter.VAR_KEYWORD]

    @abstractmethod
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, Metrics]:
        """Weigh and write the experiences of explore step `step`: the number written, and metrics.

        Raises:
            ExperienceError: an experience the strategy cannot weigh.
        """

    @classmethod
    @abstractmethod
    def default_args(cls) -> dict[str, Any]:
        """The strategy's arguments and their defaults."""

    # Whether a step that `survivors` leaves short is to be filled up with new tasks.
    refills = False

    def survivors(self, experiences: list[Experience]) -> Groups:
        """The groups of these experiences that would be written, by task; of use where `refills`."""
        return group_by(experiences, "task")


class GroupAdvantageStrategy(AddStrategy):
    """An add strategy that compares the experiences of a group with each other.

    `add` writes one group at a time, in the order of their first experience, and reports every metric of the groups as
    `group_advantages/<name>/{mean,max,min}`. A group with a reward that is no finite number is left out, logged, and
    counted in `group_advantages/invalid_group_count`.
    """

    @abstractmethod
    def group_experiences(self, exps: list[Experience]) -> Groups:
        """The groups, by id."""

    @abstractmethod
    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> tuple[list[Experience], Metrics]:
        """Set `advantages` and `returns` [response] of one group: the experiences to write, and the group's metrics."""

    def split_valid(self, groups: Groups) -> tuple[Groups, int]:
        """The groups that can be weighed, and the number of the others: a reward is missing or no finite number."""
        return split_valid(groups)

    def weigh_groups(self, groups: Groups) -> tuple[list[list[Experience]], list[Metrics]]:
        """`calculate_group_advantage` of every group: what to write of each, and their metrics."""
        weighed = [self.calculate_group_advantage(group_id, exps) for group_id, exps in groups.items()]
        return [exps for exps, _ in weighed], [metrics for _, metrics in weighed]

    async def add(  # pyright: ignore[reportIncompatibleMethodOverride]  # `exps` is the name its users know
        self, exps: list[Experience], step: int
    ) -> tuple[int, Metrics]:
        """Weigh and write the experiences, one write a group; see `AddStrategy.add`."""
        if not exps:
            return 0, {}
        reject_dpo(exps)
        groups, invalid = self.split_valid(self.group_experiences(exps))
        weighed, group_metrics = self.weigh_groups(groups)
        for group in filter(None, weighed):
            await self.writer.write_async(group)
        metrics = gather_metrics(group_metrics, "group_advantages") | {INVALID_GROUP_COUNT: float(invalid)}
        return sum(map(len, weighed)), metrics


class TaskAdvantageStrategy(GroupAdvantageStrategy):
    """Groups by task, and gives every run one score, a function of the rewards of the explore step.

    A run of several steps has one reward, that of each of its experiences, and counts once; its score goes to all of
    them. Where the rewards of its steps differ it is refused: those are for `step_wise_grpo` and `gigpo`.

    All groups are scored in one tensor operation, unless a subclass defines `calculate_group_advantage` itself.
    """

    def group_experiences(self, exps: list[Experience]) -> Groups:
        """The experiences of each task."""
        return group_by(exps, "task")

    @abstractmethod
    def score(self, rewards: Tensor, groups: Tensor, runs: Sequence[Run]) -> tuple[Tensor, dict[str, Tensor]]:
        """Scores [B] of B runs and, by metric name, a value for each of the G groups [G].

        Args:
            rewards: float64 [B].
            groups: position of each run's group, int64 [B], ascending.
            runs: the experiences of each, for strategies that need more than their rewards.
        """

    def kept_groups(self, groups: Tensor, runs: Sequence[Run]) -> Tensor:
        """Which groups to write, bool [G]: all of them, unless a strategy says otherwise. Arguments as `score`."""
        return torch.ones(int(groups[-1]) + 1, dtype=torch.bool)

    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> tuple[list[Experience], Metrics]:
        """Weigh one group as if it were the whole explore step.

        Raises:
            ExperienceError: a reward is no finite number, or the rewards of a run's steps differ.
        """
        if split_valid({group_id: exps})[1]:
            raise ExperienceError(f"group {group_id}: every reward must be a finite number.")
        weighed, metrics = self._weigh({group_id: exps})
        return weighed[0], metrics[0]

    def weigh_groups(self, groups: Groups) -> tuple[list[list[Experience]], list[Metrics]]:
        """Weigh all groups at once."""
        if type(self).calculate_group_advantage is not TaskAdvantageStrategy.calculate_group_advantage:
            return super().weigh_groups(groups)
        return self._weigh(groups)

    def _weigh(self, groups: Groups) -> tuple[list[list[Experience]], list[Metrics]]:
        runs_by_group = [runs_of(group) for group in groups.values()]
        runs = [run for group in runs_by_group for run in group]
        if not runs:
            return [], []
        rewards = torch.tensor([run_reward(run) for run in runs], dtype=torch.float64)
        index = torch.repeat_interleave(torch.tensor([len(group) for group in runs_by_group]))
        scores, group_metrics = self.score(rewards, index, runs)
        per_step = [score for run, score in zip(runs, scores.tolist(), strict=True) for _ in run]
        set_advantages([exp for run in runs for exp in run], per_step)
        kept = self.kept_groups(index, runs).tolist()
        weighed = [group if keep else [] for group, keep in zip(groups.values(), kept, strict=True)]
        return weighed, by_group(group_metrics, len(groups))


class GRPOAddStrategy(TaskAdvantageStrategy):
    """GRPO: (r - mean) / (std + epsilon) within a task (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    The standard deviation is unbiased; a group of one has mean 0 and standard deviation 1; a group of equal rewards
    has advantages of exactly 0.

    Args:
        writer: where the experiences go.
        epsilon: added to the standard deviation.
        std_level: "group", or "batch": divide by the standard deviation of all valid rewards of the step.
        std_threshold: leave out groups whose rewards, as they were before operators, have a standard deviation not
            above this, and groups of one, which have none; what was not written is then counted, in experiences, in
            `filtered_count`. None: write all groups.
    """

    def __init__(
        self,
        writer: BufferWriter,
        epsilon: float = 1e-6,
        std_level: str = "group",
        std_threshold: float | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__(writer, **unknown)
        self.epsilon = number("epsilon", epsilon, least=0)
        self.std_level = one_of("std_level", std_level, functional.STD_LEVELS)
        self.std_threshold = number("std_threshold", std_threshold, least=0, optional=True)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"epsilon": 1e-6}

    def score(self, rewards: Tensor, groups: Tensor, runs: Sequence[Run]) -> tuple[Tensor, dict[str, Tensor]]:
        scores = functional.grpo_advantages(rewards, groups, self.epsilon, self.std_level)
        return scores, reward_metrics(rewards, groups)

    def kept_groups(self, groups: Tensor, runs: Sequence[Run]) -> Tensor:
        if self.std_threshold is None:
            return super().kept_groups(groups, runs)
        raw_rewards = torch.tensor([judged(run) for run in runs], dtype=torch.float64)
        return functional.std_above(raw_rewards, groups, self.std_threshold)

    async def add(self, exps: list[Experience], step: int) -> tuple[int, Metrics]:
        """Weigh and write the experiences, one write a group; see `GroupAdvantageStrategy.add`."""
        written, metrics = await super().add(exps, step)
        if exps and self.std_threshold is not None:
            metrics["filtered_count"] = float(len(exps) - written)
        return written, metrics


class OPMDAddStrategy(TaskAdvantageStrategy):
    """OPMD: r - b within a task (Trinity-RFT, arXiv 2505.17826); a group of one has b = 0.

    Args:
        writer: where the experiences go.
        opmd_baseline: "mean": b = mean(r); "logavgexp": b = tau * (logsumexp(r / tau) - log n).
        tau: temperature of "logavgexp", above 0.
    """

    def __init__(self, writer: BufferWriter, opmd_baseline: str = "mean", tau: float = 1.0, **unknown: Any) -> None:
        super().__init__(writer, **unknown)
        self.opmd_baseline = one_of("opmd_baseline", opmd_baseline, functional.OPMD_BASELINES)
        self.tau = number("tau", tau, above=0)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"opmd_baseline": "mean", "tau": 1.0}

    def score(self, rewards: Tensor, groups: Tensor, runs: Sequence[Run]) -> tuple[Tensor, dict[str, Tensor]]:
        baseline = functional.opmd_baseline(rewards, groups, self.opmd_baseline, self.tau)
        metrics = {"reward_mean": functional.group_stats(rewards, groups).mean, "group_baseline": baseline}
        return functional.opmd_advantages(rewards, groups, self.opmd_baseline, self.tau), metrics


class RewardVarianceAddStrategy(AddStrategy):
    """Writes the groups whose rewards differ, and sets no advantages: a filter to put before another strategy.

    A group is written when it has at least two runs and its rewards' population variance is above the threshold. It is
    judged by the rewards as they were before operators: a penalty for length makes no difference between two wrong
    answers. `filtered_count` counts the experiences that were not written, `add_strategy_time` is in seconds.

    Args:
        writer: where the experiences go.
        variance_threshold: what the variance of a group must exceed.
        metric: what to judge by in place of the reward: the name of a reward function ("accuracy"), another metric of
            the experiences, or an entry of their info ("judge_score").
    """

    def __init__(
        self, writer: BufferWriter, variance_threshold: float = 0.0, metric: str | None = None, **unknown: Any
    ) -> None:
        super().__init__(writer, **unknown)
        self.variance_threshold = number("variance_threshold", variance_threshold, least=0)
        self.criterion = Criterion(metric)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"variance_threshold": 0.0}

    async def add(self, experiences: list[Experience], step: int) -> tuple[int, Metrics]:
        """Write the groups whose rewards differ, one write a group; see `AddStrategy.add`."""
        if not experiences:
            return 0, {}
        start = time.perf_counter()
        reject_dpo(experiences)
        kept, invalid = self._differing(experiences)
        written, metrics = await self._write(kept, experiences, step)
        metrics["filtered_count"] = float(len(experiences) - sum(map(len, kept.values())))
        metrics[INVALID_GROUP_COUNT] = float(invalid)
        metrics["add_strategy_time"] = time.perf_counter() - start
        return written, metrics

    async def _write(self, kept: Groups, experiences: list[Experience], step: int) -> tuple[int, Metrics]:
        """Write these groups of the experiences: the number written, and further metrics."""
        for group in kept.values():
            await self.writer.write_async(group)
        return sum(map(len, kept.values())), {}

    def survivors(self, experiences: list[Experience]) -> Groups:
        """The groups whose rewards differ; see `AddStrategy.survivors`."""
        return self._differing(experiences)[0]

    def _differing(self, experiences: list[Experience]) -> tuple[Groups, int]:
        return differing_groups(group_by(experiences, "task"), self.variance_threshold, self.criterion)


class DAPOAddStrategy(RewardVarianceAddStrategy):
    """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): `reward_variance`, by the name its users look for.

    Groups that all failed or all succeeded are left out, and the explorer is asked for new tasks in their place, up to
    explorer.max_refills times.
    """

    refills = True
