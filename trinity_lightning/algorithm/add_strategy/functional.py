"""The mathematics of the add strategies, on tensors: rewards [B] and group ids [B] in, advantages [B] out.

All functions compute in float64 and return the rewards' own dtype (float32 for integer rewards). All rewards must be
finite. Group ids are any integers. Two rules hold everywhere:

- a group of one has baseline 0: there is nothing to compare it with, so its reward is its score;
- a group of equal rewards (up to rounding, see `trinity_lightning.common.runs`) has centred rewards of exactly 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trinity_lightning.common.runs import EQUAL_TOLERANCE
from trinity_lightning.config.values import number, one_of

STD_LEVELS = ("group", "batch")
OPMD_BASELINES = ("mean", "logavgexp")

# -- Statistics of groups ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupStats:
    """Statistics of the rewards of each of G groups, float64 unless another dtype is named.

    Attributes:
        index: position in 0..G-1 of each reward's group, in ascending order of the group ids, int64 [B].
        size: rewards in the group, int64 [G].
        mean: [G].
        variance: population variance [G].
        std: unbiased (n-1) standard deviation [G]; 0 for a group of one.
        equal: True if the rewards are equal up to rounding, as they are in a group of one, bool [G].
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


def group_sum(values: Tensor, index: Tensor, size: Tensor) -> Tensor:
    """Sum of the values [B] of each group [G]; arguments as in `GroupStats`."""
    return values.new_zeros(len(size)).index_add_(0, index, values)


def group_extreme(values: Tensor, index: Tensor, size: Tensor, which: str) -> Tensor:
    """Smallest ("amin") or largest ("amax") value of each group [G]; the other arguments as in `group_sum`."""
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


def rewards_differ(rewards: Tensor, groups: Tensor, variance_threshold: float = 0.0) -> Tensor:
    """True for rewards of a group whose rewards differ, with a population variance above the threshold, bool [B]."""
    stats = group_stats(rewards, groups)
    return (~stats.equal & (stats.variance > variance_threshold))[stats.index]


# -- Advantages by the rewards of a group ------------------------------------------------------------------------------


def grpo_advantages(rewards: Tensor, groups: Tensor, epsilon: float = 1e-6, std_level: str = "group") -> Tensor:
    """GRPO: (r - mean) / (std + epsilon), std unbiased (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    Args:
        epsilon: keeps the quotient finite.
        std_level: "group", or "batch": every group is divided by the standard deviation of all rewards (arXiv
            2508.08221), which is taken as 1 if there are fewer than two rewards, or all are equal.

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


def dr_grpo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Dr. GRPO: r - mean, without the division by the standard deviation (arXiv 2503.20783)."""
    return as_rewards(minus_baseline(rewards, group_stats(rewards, groups)), rewards)


def rloo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """RLOO: r minus the mean of the *other* rewards, which is (r - mean) n / (n - 1) (arXiv 2402.14740)."""
    stats = group_stats(rewards, groups)
    n = stats.size[stats.index]
    return as_rewards(minus_baseline(rewards, stats) * n / (n - 1).clamp(min=1), rewards)


def opmd_advantages(rewards: Tensor, groups: Tensor, baseline: str = "mean", tau: float = 1.0) -> Tensor:
    """OPMD: r - b, with the group's `opmd_baseline` b (Trinity-RFT, arXiv 2505.17826); raises as that does."""
    stats = group_stats(rewards, groups)
    score = rewards.double() - opmd_baseline(rewards, groups, baseline, tau)[stats.index]
    return as_rewards(zero_where_equal(score, stats), rewards)


def opmd_baseline(rewards: Tensor, groups: Tensor, baseline: str = "mean", tau: float = 1.0) -> Tensor:
    """Each group's baseline, float64 [G], in ascending order of the group ids; 0 for a group of one.

    "mean": b = mean(r); "logavgexp": b = tau * (logsumexp(r / tau) - log n), the mean's soft maximum.

    Raises:
        ConfigError: unknown baseline, or tau not above 0.
    """
    stats = group_stats(rewards, groups)
    one_of("opmd_baseline", baseline, OPMD_BASELINES)
    number("tau", tau, above=0)
    if baseline == "mean":
        value = stats.mean
    else:
        scaled = rewards.double() / tau
        peak = group_extreme(scaled, stats.index, stats.size, "amax")
        total = group_sum((scaled - peak[stats.index]).exp(), stats.index, stats.size)
        value = tau * (peak + total.log() - stats.size.double().log())
    return value.masked_fill(stats.size == 1, 0.0)


def asymre_advantages(rewards: Tensor, groups: Tensor, baseline_shift: float = -0.1) -> Tensor:
    """AsymRE: r - (mean + shift), where a negative shift favours good rewards over bad ones (arXiv 2506.20520).

    Equal rewards have the advantage -shift throughout; a group of one keeps its reward.
    """
    stats = group_stats(rewards, groups)
    shift = baseline_shift * (stats.size > 1)[stats.index].double()
    return as_rewards(minus_baseline(rewards, stats) - shift, rewards)


def reinforce_plus_plus_advantages(rewards: Tensor, groups: Tensor, num_tokens: Tensor) -> Tensor:
    """REINFORCE++ with group baseline: r - mean, whitened over all trained tokens (arXiv 2501.03262).

    (A - mean) / sqrt(variance + 1e-8), where each A counts as often as its experience has trained tokens, `num_tokens`
    [B], and the variance is unbiased. Fewer than two trained tokens have variance 0.
    """
    centred = minus_baseline(rewards, group_stats(rewards, groups))
    weight = num_tokens.double()
    total = weight.sum()
    deviation = centred - (weight * centred).sum() / total.clamp(min=1)
    variance = (weight * deviation.square()).sum() / (total - 1).clamp(min=1)
    return as_rewards(deviation / (variance + 1e-8).sqrt(), rewards)


def rank_penalised_rewards(rewards: Tensor, groups: Tensor, likelihoods: Tensor, rank_penalty: float = 0.25) -> Tensor:
    """Rewards that favour the unlikely: r * (1 - rank / n * penalty), float64 [B] (arXiv 2506.02355).

    The least likely response of a group of n has rank 0; equally likely ones share their average rank.

    Args:
        likelihoods: any increasing function of how likely each response was, [B].
        rank_penalty: share of its reward that the likeliest of a large group loses.
    """
    _, index, size = torch.unique(groups, return_inverse=True, return_counts=True)
    level = torch.unique(likelihoods, return_inverse=True)[1]
    # One cell for every distinct likelihood of a group, in ascending order within the group.
    _, cell, count = torch.unique(index * len(groups) + level, return_inverse=True, return_counts=True)
    below = (count.cumsum(0) - count)[cell] - (size.cumsum(0) - size)[index]
    rank = below + (count[cell] - 1).double() / 2
    return rewards.double() * (1 - rank / size[index] * rank_penalty)


# -- Advantages of steps and of tokens ---------------------------------------------------------------------------------


def gigpo_advantages(
    episode_returns: Tensor,
    tasks: Tensor,
    step_returns: Tensor,
    episodes: Tensor,
    states: Tensor,
    *,
    epsilon: float = 1e-6,
    step_weight: float = 1.0,
    std_norm: bool = True,
) -> Tensor:
    """GiGPO: A = A_episode + step_weight * A_step, one for each of S steps (arXiv 2505.10978, section 4).

    A_episode compares an episode's return with the returns of its task's other episodes, as GRPO does. A_step compares
    a step's discounted return with the returns of the other steps taken from the same state; it is 0 for a state met
    once.

    Args:
        episode_returns: [E].
        tasks: task of each episode [E].
        step_returns: discounted sum of the rewards from each step on, [S].
        episodes: position in 0..E-1 of each step's episode [S].
        states: group of steps taken from the same state of the same task [S].
        epsilon, step_weight, std_norm: see `GiGPOAddStrategy`; standard deviations are unbiased.
    """
    stats = group_stats(step_returns, states)
    step_advantages = stats.centred  # 0 for a state met once: by itself it says nothing about the action
    if std_norm:
        episode_advantages = grpo_advantages(episode_returns, tasks, epsilon)
        normed = step_advantages / (stats.std[stats.index] + epsilon)
        step_advantages = zero_where_equal(normed, stats, least=1)
    else:
        episode_advantages = dr_grpo_advantages(episode_returns, tasks)
    return as_rewards(episode_advantages.double()[episodes] + step_weight * step_advantages, step_returns)


def distillation_advantages(teacher_logprobs: Tensor, logprobs: Tensor, kl_coef: float = 1.0) -> Tensor:
    """On-policy distillation: coef * (log p_teacher - log p) of each token, float64 [T].

    Its mean estimates the negative reverse KL ("On-Policy Distillation", Thinking Machines, 2025; arXiv 2306.13649).
    """
    return kl_coef * (teacher_logprobs.double() - logprobs.double())
