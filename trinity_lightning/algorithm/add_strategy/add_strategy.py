"""Base classes of the add strategies, which give experiences their advantages; and GRPO, OPMD and the filters."""

import inspect
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor

from trinity_lightning.algorithm.add_strategy import functional
from trinity_lightning.common.experience import Experience, ExperienceError, group_by
from trinity_lightning.common.runs import (
    Criterion,
    Run,
    is_valid_reward,
    last_step,
    mark_untrained,
    raw_reward,
    run_reward,
    runs_of,
    spread_of_each,
)
from trinity_lightning.config.registry import Registry
from trinity_lightning.config.signatures import is_of_the_library, parameters_beside
from trinity_lightning.config.values import number, one_of, unknown_name
from trinity_lightning.errors import ArgumentError, ConfigError

logger = logging.getLogger(__name__)

Groups = dict[str, list[Experience]]
Metrics = dict[str, float]
INVALID_GROUP_COUNT = "group_advantages/invalid_group_count"

# -- Groups: validate, set advantages, gather metrics ------------------------------------------------------------------


def reject_dpo(exps: Sequence[Experience]) -> None:
    """Refuse preference pairs, which have no response to weigh. ExperienceError: names the first of them."""
    if pairs := [exp.eid for exp in exps if exp.experience_type == "dpo"]:
        why = "is a DPO pair, which has no advantages: train on it without an add strategy."
        raise ExperienceError(f"experience {pairs[0]} {why}")


def have_valid_rewards(exps: Sequence[Experience]) -> bool:
    """True if all rewards are finite numbers."""
    return all(is_valid_reward(exp.reward) for exp in exps)


def split_valid(
    groups: Groups, is_valid: Callable[[list[Experience]], bool] = have_valid_rewards, numbers: str = "reward"
) -> tuple[Groups, int]:
    """The valid groups, and the number of invalid ones, which are logged and marked as untrained.

    Args:
        groups: groups by id.
        is_valid: True for a group that can be weighed.
        numbers: the numbers that `is_valid` looks at, in words, for the log.
    """
    valid = {id_: exps for id_, exps in groups.items() if is_valid(exps)}
    invalid = [id_ for id_ in groups if id_ not in valid]
    for exp in (exp for id_ in invalid for exp in groups[id_]):
        mark_untrained(exp, f"invalid {numbers}")
    if invalid:
        text = "left out %d groups with a %s that is no finite number: %s"
        logger.warning(text, len(invalid), numbers, ", ".join(invalid))
    return valid, len(invalid)


def action_mask(exp: Experience) -> Tensor:
    """The experience's action mask [response]. ExperienceError: it has none."""
    if exp.action_mask is None:
        raise ExperienceError(f"experience {exp.eid} has no action_mask: there is no response to weigh.")
    return exp.action_mask


def response_values(exp: Experience, name: str, use: str) -> Tensor:
    """The experience's `logprobs` or `teacher_logprobs` [response].

    Args:
        exp: the experience.
        name: name of the field.
        use: the use of the values in words, for the message: "which on_policy_distill compares".

    Raises:
        ExperienceError: the field is None, or has another number of values than there are response tokens.
    """
    values = getattr(exp, name)
    if values is None:
        raise ExperienceError(f"experience {exp.eid} has no {name}, {use}.")
    length = len(action_mask(exp))
    if values.shape != (length,):
        raise ExperienceError(f"experience {exp.eid}: {name} has {len(values)} values for {length} response tokens.")
    return values


def set_advantages(exps: Sequence[Experience], scores: Sequence[float]) -> None:
    """Give each experience its score on its trained tokens: `advantages` and a copy, `returns`, float32 [response]."""
    if not exps:
        return
    masks = [action_mask(exp) for exp in exps]
    lengths = [len(mask) for mask in masks]
    # All experiences at once: three small operations for each would take most of a strategy's time.
    per_token = torch.tensor(scores, dtype=torch.float32).repeat_interleave(torch.tensor(lengths))
    rows = (torch.cat(masks).float() * per_token).split(lengths)
    for exp, row in zip(exps, rows, strict=True):
        # Copies: the row itself would keep the whole step's memory alive.
        exp.advantages, exp.returns = row.clone(), row.clone()


def reward_metrics(rewards: Tensor, groups: Tensor) -> dict[str, Tensor]:
    """reward_mean and reward_std of each group, [G]: 0 and 1 for a group of one."""
    stats = functional.group_stats(rewards, groups)
    lone = stats.size == 1
    return {"reward_mean": stats.mean.masked_fill(lone, 0.0), "reward_std": stats.std.masked_fill(lone, 1.0)}


def index_of(groups: Iterable[Sized]) -> Tensor:
    """Position of the group of each member, over the members of all groups in order, int64 [B]."""
    return torch.repeat_interleave(torch.tensor([len(group) for group in groups]))


def by_group(metrics: Mapping[str, Tensor], count: int) -> list[Metrics]:
    """The metrics of each of `count` groups, from one tensor [G] per metric."""
    columns = {name: values.tolist() for name, values in metrics.items()}
    return [{name: values[group] for name, values in columns.items()} for group in range(count)]


# -- Where experiences are written -------------------------------------------------------------------------------------


class BufferWriter(ABC):
    """Stores finished experiences."""

    @abstractmethod
    def write(self, experiences: list[Experience]) -> None:
        """Store the experiences, in order, all or none."""

    async def write_async(self, experiences: list[Experience]) -> None:
        """Awaitable `write`, for storages that wait for a disk or a network."""
        self.write(experiences)


class ListWriter(BufferWriter):
    """Stores everything in memory.

    Attributes:
        calls: the experiences of each write, in order.
    """

    def __init__(self) -> None:
        self.calls: list[list[Experience]] = []

    def write(self, experiences: list[Experience]) -> None:
        self.calls.append(list(experiences))

    @property
    def experiences(self) -> list[Experience]:
        """The experiences of all writes."""
        return [experience for call in self.calls for experience in call]


# -- The base classes --------------------------------------------------------------------------------------------------

WRITER = "writer"  # parameter of constructors that is no argument of the configuration
ADD_STRATEGY: Registry[type["AddStrategy"]] = Registry("add strategy")


class AddStrategy(ABC):
    """Sets the advantages of an explore step's experiences (its groups are complete), and writes those to train on.

    The mathematics is in `functional.py`; experiences go to the `writer`. The constructor of a subclass takes the
    strategy's arguments. It may take the writer, too, but need not: the instance has it already.

    Raises:
        ArgumentError: the strategy has no such argument; the message lists those it has.
    """

    writer: BufferWriter
    # True: if `survivors` leaves too few groups, new tasks fill up the step.
    refills = False
    # Groups whose rewards have a standard deviation not above this are not written; None: all are.
    std_threshold: float | None = None

    def __init__(self, writer: BufferWriter | None = None, **unknown: Any) -> None:
        self._refuse(unknown)
        if writer is not None:
            self.writer = writer

    def _refuse(self, unknown: dict[str, Any]) -> None:
        if unknown:
            name, known = next(iter(unknown)), parameters_beside(type(self), (WRITER,))
            raise ArgumentError(unknown_name(f"argument of {type(self).__name__}", name, known), key=name)

    @abstractmethod
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, Metrics]:
        """Weigh and write the experiences of explore step `step`; returns the number written, and metrics.

        Raises:
            ExperienceError: an experience that the strategy cannot weigh.
        """

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """The arguments that have a default, by name: those of the constructor, unless a subclass overrides this."""
        parameters = inspect.signature(cls).parameters
        return {
            name: parameters[name].default
            for name in parameters_beside(cls, (WRITER,))
            if parameters[name].default is not inspect.Parameter.empty
        }

    def kept_groups(self, groups: Sequence[Sequence[Run]]) -> list[bool]:
        """For each group of runs, True if its rewards, before operators, have a std above `std_threshold`."""
        if self.std_threshold is None or not groups:
            return [True] * len(groups)
        rewards = torch.tensor([raw_reward(last_step(run)) for runs in groups for run in runs], dtype=torch.float64)
        stats = functional.group_stats(rewards, index_of(groups))
        return ((stats.size > 1) & (stats.std > self.std_threshold)).tolist()

    async def write_groups(
        self, groups: Iterable[list[Experience]], received: int, invalid: int
    ) -> tuple[int, Metrics]:
        """Write each group by itself; returns the number of experiences written, and metrics of those left out.

        Args:
            groups: the groups to write; empty ones are skipped.
            received: number of experiences that the strategy was given.
            invalid: number of groups that could not be weighed.
        """
        written = 0
        for group in filter(None, groups):
            await self.writer.write_async(group)
            written += len(group)
        filtered = {} if self.std_threshold is None else {"filtered_count": float(received - written)}
        return written, {INVALID_GROUP_COUNT: float(invalid), **filtered}

    def survivors(self, experiences: list[Experience]) -> Groups:
        """The groups of these experiences that would be written, by task; for strategies with `refills`."""
        return group_by(experiences, "task")


def check_returned(strategy: AddStrategy, method: str, returned: Any, first: type, meaning: str) -> None:
    """Refuse a result of the user's strategy that is no pair of the right types.

    Args:
        strategy: the strategy; one of this package is not checked.
        method: name of the method that returned.
        returned: the result.
        first: type of the first member; the second is a mapping.
        meaning: the two members in words, for the message.

    Raises:
        ConfigError: names the strategy and the method.
    """
    if is_of_the_library(type(strategy)):
        return
    pair = returned if isinstance(returned, tuple) and len(returned) == 2 else (None, None)
    if not (isinstance(pair[0], first) and isinstance(pair[1], Mapping)):
        types = type(returned).__name__ if pair == (None, None) else ", ".join(type(part).__name__ for part in pair)
        message = f"{type(strategy).__name__}.{method} must return ({meaning}), not {types}."
        raise ConfigError(message, key="add_strategy")


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
        """Set `advantages` and `returns` [response] of one group; returns the experiences to write, and its metrics."""

    def split_valid(self, groups: Groups) -> tuple[Groups, int]:
        """The groups that can be weighed, and the number of those with a reward that is no finite number."""
        return split_valid(groups)

    def weigh_groups(self, groups: Groups) -> tuple[list[list[Experience]], list[Metrics]]:
        """Call `calculate_group_advantage` for every group; returns each one's experiences to write, and metrics."""
        weighed = [self.calculate_group_advantage(group_id, exps) for group_id, exps in groups.items()]
        for returned in weighed:
            check_returned(self, "calculate_group_advantage", returned, list, "list of experiences, metrics by name")
        return [exps for exps, _ in weighed], [metrics for _, metrics in weighed]

    async def add(  # pyright: ignore[reportIncompatibleMethodOverride]  # `exps` is the name its users know
        self, exps: list[Experience], step: int
    ) -> tuple[int, Metrics]:
        if not exps:
            return 0, {}
        reject_dpo(exps)
        groups, invalid = self.split_valid(self.group_experiences(exps))
        weighed, group_metrics = self.weigh_groups(groups)
        written, counts = await self.write_groups(weighed, len(exps), invalid)
        return written, spread_of_each(group_metrics, "group_advantages") | counts


class TaskAdvantageStrategy(GroupAdvantageStrategy):
    """Groups by task, and gives every run one score, a function of the rewards of the explore step.

    A run of several steps counts once: all of its experiences have the same reward, and get the same score. A run whose
    steps have different rewards is refused; `step_wise_grpo` and `gigpo` take it. All groups are scored in one tensor
    operation, unless a subclass defines `calculate_group_advantage` itself.
    """

    def group_experiences(self, exps: list[Experience]) -> Groups:
        return group_by(exps, "task")

    @abstractmethod
    def score(self, rewards: Tensor, groups: Tensor, runs: Sequence[Run]) -> tuple[Tensor, dict[str, Tensor]]:
        """Scores [B] of B runs and, by metric name, a value for each of the G groups [G].

        Args:
            rewards: float64 [B].
            groups: position of each run's group, int64 [B], ascending.
            runs: the experiences of each run, for strategies that need more than its reward.
        """

    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> tuple[list[Experience], Metrics]:
        """Weigh one group as if it were the whole explore step.

        Raises:
            ExperienceError: a reward is no finite number, or the rewards of a run's steps differ.
        """
        weighed, metrics = self._weigh({group_id: exps})
        return weighed[0], metrics[0]

    def weigh_groups(self, groups: Groups) -> tuple[list[list[Experience]], list[Metrics]]:
        if type(self).calculate_group_advantage is not TaskAdvantageStrategy.calculate_group_advantage:
            return super().weigh_groups(groups)
        return self._weigh(groups)

    def _weigh(self, groups: Groups) -> tuple[list[list[Experience]], list[Metrics]]:
        runs_by_group = [runs_of(group) for group in groups.values()]
        runs = [run for group in runs_by_group for run in group]
        if not runs:
            return [], []
        rewards = torch.tensor([run_reward(run) for run in runs], dtype=torch.float64)
        returned = self.score(rewards, index_of(runs_by_group), runs)
        check_returned(self, "score", returned, Tensor, "tensor of scores, metrics by name")
        scores, group_metrics = returned
        self._check_lengths({"scores": scores}, len(runs))
        self._check_lengths(group_metrics, len(groups))
        per_step = [score for run, score in zip(runs, scores.tolist(), strict=True) for _ in run]
        set_advantages([exp for run in runs for exp in run], per_step)
        kept = self.kept_groups(runs_by_group)
        weighed = [group if keep else [] for group, keep in zip(groups.values(), kept, strict=True)]
        return weighed, by_group(group_metrics, len(groups))

    def _check_lengths(self, returned: Mapping[str, Any], count: int) -> None:
        """Refuse values that a user's `score` returned, unless they are tensors [count]; a ConfigError."""
        for name, values in returned.items() if not is_of_the_library(type(self)) else ():
            if not isinstance(values, Tensor) or values.shape != (count,):
                got = f"shape {list(values.shape)}" if isinstance(values, Tensor) else repr(values)
                raise ConfigError(
                    f"{type(self).__name__}.score must return {name} as a tensor [{count}], not {got}.",
                    key="add_strategy",
                )


# -- GRPO and OPMD -----------------------------------------------------------------------------------------------------


class GRPOAddStrategy(TaskAdvantageStrategy):
    """GRPO: (r - mean) / (std + epsilon) within a task (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    The standard deviation is unbiased; a group of one has mean 0 and standard deviation 1, equal rewards advantage 0.

    Args:
        epsilon: added to the standard deviation.
        std_level: "group", or "batch": divide by the standard deviation of all valid rewards of the step.
        std_threshold: leave out groups whose rewards have a standard deviation not above this, and groups of one, which
            have none; `filtered_count` then counts the experiences that were not written. The rewards are those before
            operators: where operators make up the reward, put `reward_variance` with its `metric` in front instead.
            None: write all groups.
    """

    def __init__(
        self,
        writer: BufferWriter | None = None,
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


class OPMDAddStrategy(TaskAdvantageStrategy):
    """OPMD: r - b within a task (Trinity-RFT, arXiv 2505.17826); a group of one has b = 0.

    Args:
        opmd_baseline: "mean": b = mean(r); "logavgexp": b = tau * (logsumexp(r / tau) - log n).
        tau: temperature of "logavgexp", above 0.
    """

    def __init__(
        self, writer: BufferWriter | None = None, opmd_baseline: str = "mean", tau: float = 1.0, **unknown: Any
    ) -> None:
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


# -- Filters of groups whose rewards do not differ, to put before a strategy that sets advantages ----------------------


class RewardVarianceAddStrategy(AddStrategy):
    """Writes the groups whose rewards differ, and sets no advantages: a filter to put before another strategy.

    A group is written when it has at least two runs and its rewards' population variance is above the threshold. The
    rewards are those before operators: a penalty for length makes no difference between two wrong answers. A group
    with a reward that is no finite number is left out, also if `metric` is given. `filtered_count` counts the
    experiences that were not written, `add_strategy_time` is in seconds.

    Args:
        variance_threshold: the variance of a group must exceed it.
        metric: judge by this in place of the reward: the name of a reward function ("accuracy"), another metric of the
            experiences, or an entry of their info ("judge_score").
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
        differing, invalid = self._differing(experiences)
        writes = self._writes(differing, experiences, step)
        written, metrics = await self.write_groups(writes, len(experiences), invalid)
        metrics["filtered_count"] = float(len(experiences) - sum(map(len, differing.values())))
        metrics["add_strategy_time"] = time.perf_counter() - start
        return written, metrics

    def _writes(self, differing: Groups, experiences: list[Experience], step: int) -> list[list[Experience]]:
        """The experiences of each write, for the groups whose rewards differ."""
        return list(differing.values())

    def survivors(self, experiences: list[Experience]) -> Groups:
        return self._differing(experiences)[0]

    def _differing(self, experiences: list[Experience]) -> tuple[Groups, int]:
        """The groups whose rewards differ, and the number of invalid groups, which are logged.

        Raises:
            ExperienceError: see `Criterion.values`.
        """
        groups = group_by(experiences, "task")
        values = self.criterion.values(groups)
        # Only the last step of a run must have a reward: the strategy behind this one may need no other. With a metric
        # no step must have one: a distillation weighs without rewards.
        last = {id_: list(map(last_step, runs_of(exps))) for id_, exps in groups.items()}
        if self.criterion.metric is not None:
            last = {id_: [exp for exp in exps if exp.reward is not None] for id_, exps in last.items()}
        rewarded, unrewarded = split_valid(groups, lambda exps: have_valid_rewards(last[exps[0].eid.tid]))
        valid, invalid = split_valid(
            rewarded, lambda exps: all(map(is_valid_reward, values[exps[0].eid.tid])), self.criterion.metric or "reward"
        )
        if not valid:
            return {}, unrewarded + invalid
        sizes = [len(values[id_]) for id_ in valid]
        numbers = torch.tensor([value for id_ in valid for value in values[id_]], dtype=torch.float64)
        index = index_of(values[id_] for id_ in valid)
        differ = functional.rewards_differ(numbers, index, self.variance_threshold).split(sizes)
        differing = {id_: exps for (id_, exps), in_group in zip(valid.items(), differ, strict=True) if in_group[0]}
        return differing, unrewarded + invalid


class DAPOAddStrategy(RewardVarianceAddStrategy):
    """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): `reward_variance`, by the name its users look for.

    Groups that all failed or all succeeded are left out, and the explorer is asked for new tasks in their place, up to
    explorer.max_refills times.
    """

    refills = True
