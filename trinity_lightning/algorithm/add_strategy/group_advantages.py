"""Rewards against those of their group: statistics, and GRPO's advantages; rules as `functional` says."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trinity_lightning.common.runs import EQUAL_TOLERANCE
from trinity_lightning.config.values import one_of

STD_LEVELS = ("group", "batch")


@dataclass(frozen=True)
class GroupStats:
    """Statistics of the rewards of each of G groups, float64 unless said otherwise.

    Attributes:
        index: position in 0..G-1 of each reward's group, in ascending order of the group ids, int64 [B].
        size: rewards in the group, int64 [G].
        mean: [G].
        variance: population variance [G].
        std: unbiased (n-1) standard deviation [G]; 0 for a group of one.
        equal: whether the rewards are equal up to rounding, as they are in a group of one, bool [G].
        centred: rewards minus their group's mean, exactly 0 in a group of equal rewards, [B].
    """

    index: Tensor
    size: Tensor
    mean: Tensor
    variance: Tensor
    std: Tensor
    equal: Tensor
    centred: Tensor


def group_stats(rewards: Tensor, groups: Tensor) -> GroupStats:
    """Statistics of `rewards` [B] within the groups that `groups` [B] names. ValueError: the two differ in shape."""
    if rewards.ndim != 1 or groups.shape != rewards.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must both be of shape [B].")
    rewards = rewards.double()
    _, index, size = torch.unique(groups, return_inverse=True, return_counts=True)
    mean = group_sum(rewards, index, size) / size
    low, high = group_extreme(rewards, index, size, "amin"), group_extreme(rewards, index, size, "amax")
    equal = high - low <= EQUAL_TOLERANCE * torch.maximum(low.abs(), high.abs())
    centred = (rewards - mean[index]).masked_fill(equal[index], 0.0)
    squares = group_sum(centred.square(), index, size)
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return GroupStats(index, size, mean, squares / size, std, equal, centred)


def grpo_advantages(rewards: Tensor, groups: Tensor, epsilon: float = 1e-6, std_level: str = "group") -> Tensor:
    """GRPO: (r - mean) / (std + epsilon), std unbiased (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    Args:
        epsilon: keeps the quotient finite.
        std_level: "group", or "batch": every group is divided by the standard deviation of all rewards (arXiv
            2508.08221); that of fewer than two rewards, or of equal ones, is taken as 1.

    Raises:
        ConfigError: unknown std_level.
    """
    one_of("std_level", std_level, STD_LEVELS)
    stats = group_stats(rewards, groups)
    if std_level == "group":
        std = torch.where(stats.size == 1, 1.0, stats.std)[stats.index]
    else:
        batch = group_stats(rewards, torch.zeros_like(groups))
        std = torch.where(batch.equal, 1.0, batch.std)[batch.index]
    score = minus_baseline(rewards, stats) / (std + epsilon)
    # With epsilon = 0 equal rewards would give 0 / 0.
    return as_rewards(zero_where_equal(score, stats), rewards)


def group_sum(values: Tensor, index: Tensor, size: Tensor) -> Tensor:
    """Sum of the values [B] of each group [G]; arguments as in `GroupStats`."""
    return values.new_zeros(len(size)).index_add_(0, index, values)


def group_extreme(values: Tensor, index: Tensor, size: Tensor, which: str) -> Tensor:
    """Smallest ("amin") or largest ("amax") value of each group [G]; arguments as of `group_sum`."""
    return values.new_zeros(len(size)).scatter_reduce_(0, index, values, which, include_self=False)


def minus_baseline(rewards: Tensor, stats: GroupStats) -> Tensor:
    """Rewards minus their group's mean; the reward itself in a group of one. Float64 [B]."""
    return torch.where((stats.size == 1)[stats.index], rewards.double(), stats.centred)


def zero_where_equal(score: Tensor, stats: GroupStats, least: int = 2) -> Tensor:
    """The score, exactly 0 in groups of at least `least` equal rewards."""
    return score.masked_fill((stats.equal & (stats.size >= least))[stats.index], 0.0)


def as_rewards(advantages: Tensor, rewards: Tensor) -> Tensor:
    """Advantages in the rewards' own dtype, float32 for integer rewards."""
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.float32)
