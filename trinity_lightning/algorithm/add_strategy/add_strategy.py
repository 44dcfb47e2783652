"""What an experience is worth: the base classes of the add strategies, and the best known of them.

An add strategy receives all experiences of one explore step (groups must be complete), sets their advantages and
writes those worth training on to the buffer. The mathematics is in `functional.py`.
"""

import inspect
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.algorithm.add_strategy import functional
from trinity_lightning.algorithm.add_strategy.arguments import not_negative
from trinity_lightning.algorithm.add_strategy.groups import (
    Groups,
    Metrics,
    gather_metrics,
    informative_groups,
    reject_dpo,
    set_advantages,
    split_valid,
)
from trinity_lightning.common.errors import ConfigError
from trinity_lightning.common.experience import Experience, ExperienceError, group_by
from trinity_lightning.common.registry import Registry
from trinity_lightning.common.suggest import unknown_name
from trinity_lightning.common.writer import BufferWriter

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
    """Groups by task, and gives every experience one score, a function of the rewards of the explore step.

    All groups are scored in one tensor operation, unless a subclass defines `calculate_group_advantage` itself.
    """

    def group_experiences(self, exps: list[Experience]) -> Groups:
        """The experiences of each task."""
        return group_by(exps, "task")

    @abstractmethod
    def score(self, rewards: Tensor, groups: Tensor, exps: Sequence[Experience]) -> tuple[Tensor, dict[str, Tensor]]:
        """Scores [B] and, by metric name, a value for each of the G groups [G].

        Args:
            rewards: float64 [B].
            groups: position of each experience's group, int64 [B], ascending.
            exps: the experiences, for strategies that need more than their rewards.
        """

    def kept_groups(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Which groups to write, bool [G]: all of them, unless a strategy says otherwise."""
        return torch.ones(int(groups[-1]) + 1, dtype=torch.bool)

    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> tuple[list[Experience], Metrics]:
        """Weigh one group as if it were the whole explore step.

        Raises:
            ExperienceError: a reward is no finite number.
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
        exps = [exp for group in groups.values() for exp in group]
        if not exps:
            return [], []
        rewards = torch.tensor([exp.reward for exp in exps], dtype=torch.float64)
        index = torch.repeat_interleave(torch.tensor([len(group) for group in groups.values()]))
        scores, group_metrics = self.score(rewards, index, exps)
        set_advantages(exps, scores.tolist())
        columns = {name: values.tolist() for name, values in group_metrics.items()}
        kept = self.kept_groups(rewards, index).tolist()
        weighed = [group if keep else [] for group, keep in zip(groups.values(), kept, strict=True)]
        return weighed, [{name: values[g] for name, values in columns.items()} for g in range(len(groups))]


@ADD_STRATEGY.register("grpo")
class GRPOAddStrategy(TaskAdvantageStrategy):
    """GRPO: (r - mean) / (std + epsilon) within a task (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    The standard deviation is unbiased; a group of one has mean 0 and standard deviation 1; a group of equal rewards
    has advantages of exactly 0.

    Args:
        writer: where the experiences go.
        epsilon: added to the standard deviation.
        std_level: "group", or "batch": divide by the standard deviation of all valid rewards of the step.
        std_threshold: leave out groups whose standard deviation is not above this, and groups of one, which have none;
            what was not written is then counted, in experiences, in `filtered_count`. None: write all groups.
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
        if std_level not in functional.STD_LEVELS:
            raise ConfigError(unknown_name("std_level", std_level, functional.STD_LEVELS))
        self.epsilon = not_negative("epsilon", epsilon)
        self.std_level = std_level
        self.std_threshold = None if std_threshold is None else not_negative("std_threshold", std_threshold)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"epsilon": 1e-6}

    def score(self, rewards: Tensor, groups: Tensor, exps: Sequence[Experience]) -> tuple[Tensor, dict[str, Tensor]]:
        stats = functional.group_stats(rewards, groups)
        lone = stats.size == 1
        metrics = {"reward_mean": stats.mean.masked_fill(lone, 0.0), "reward_std": stats.std.masked_fill(lone, 1.0)}
        return functional.grpo_advantages(rewards, groups, self.epsilon, self.std_level), metrics

    def kept_groups(self, rewards: Tensor, groups: Tensor) -> Tensor:
        if self.std_threshold is None:
            return super().kept_groups(rewards, groups)
        stats = functional.group_stats(rewards, groups)
        return (stats.size > 1) & (stats.std > self.std_threshold)

    async def add(self, exps: list[Experience], step: int) -> tuple[int, Metrics]:
        """Weigh and write the experiences, one write a group; see `GroupAdvantageStrategy.add`."""
        written, metrics = await super().add(exps, step)
        if exps and self.std_threshold is not None:
            metrics["filtered_count"] = float(len(exps) - written)
        return written, metrics


@ADD_STRATEGY.register("opmd")
class OPMDAddStrategy(TaskAdvantageStrategy):
    """OPMD: r - b within a task (Trinity-RFT, arXiv 2505.17826); a group of one has b = 0.

    Args:
        writer: where the experiences go.
        opmd_baseline: "mean": b = mean(r); "logavgexp": b = tau * (logsumexp(r / tau) - log n).
        tau: temperature of "logavgexp", above 0.
    """

    def __init__(self, writer: BufferWriter, opmd_baseline: str = "mean", tau: float = 1.0, **unknown: Any) -> None:
        super().__init__(writer, **unknown)
        if opmd_baseline not in functional.OPMD_BASELINES:
            raise ConfigError(unknown_name("opmd_baseline", opmd_baseline, functional.OPMD_BASELINES))
        if not (tau > 0 and math.isfinite(tau)):
            raise ConfigError(f"tau must be a finite number above 0, not {tau}.")
        self.opmd_baseline = opmd_baseline
        self.tau = tau

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"opmd_baseline": "mean", "tau": 1.0}

    def score(self, rewards: Tensor, groups: Tensor, exps: Sequence[Experience]) -> tuple[Tensor, dict[str, Tensor]]:
        baseline = functional.opmd_baseline(rewards, groups, self.opmd_baseline, self.tau)
        metrics = {"reward_mean": functional.group_stats(rewards, groups).mean, "group_baseline": baseline}
        return functional.opmd_advantages(rewards, groups, self.opmd_baseline, self.tau), metrics


@ADD_STRATEGY.register("reward_variance")
class RewardVarianceAddStrategy(AddStrategy):
    """Writes the groups whose rewards differ, and sets no advantages: a filter to put before another strategy.

    A group is written when it has at least two experiences and its rewards' population variance is above the
    threshold. `filtered_count` counts the experiences that were not written, `add_strategy_time` is in seconds.
    """

    def __init__(self, writer: BufferWriter, variance_threshold: float = 0.0, **unknown: Any) -> None:
        super().__init__(writer, **unknown)
        self.variance_threshold = not_negative("variance_threshold", variance_threshold)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {"variance_threshold": 0.0}

    async def add(self, experiences: list[Experience], step: int) -> tuple[int, Metrics]:
        """Write the groups with a signal, one write a group; see `AddStrategy.add`."""
        if not experiences:
            return 0, {}
        start = time.perf_counter()
        reject_dpo(experiences)
        _, invalid = split_valid(group_by(experiences, "task"))
        kept = self.survivors(experiences)
        for group in kept.values():
            await self.writer.write_async(group)
        written = sum(map(len, kept.values()))
        return written, {
            "filtered_count": float(len(experiences) - written),
            INVALID_GROUP_COUNT: float(invalid),
            "add_strategy_time": time.perf_counter() - start,
        }

    def survivors(self, experiences: list[Experience]) -> Groups:
        """The groups with a signal; see `AddStrategy.survivors`."""
        return informative_groups(split_valid(group_by(experiences, "task"))[0], self.variance_threshold)


@ADD_STRATEGY.register("dapo")
class DAPOAddStrategy(RewardVarianceAddStrategy):
    """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): `reward_variance`, by the name its users look for.

    Groups that all failed or all succeeded are left out, and the explorer is asked for new tasks in their place, up to
    explorer.max_refills times.
    """

    refills = True
