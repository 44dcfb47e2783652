"""Losses for experiences of other policies than the present one: TOPR, AsymRE, REC, sPPO."""

import math
from typing import Unpack

import torch
from torch import Tensor

from trinity_lightning.algorithm.policy_loss.likelihood import reinforce
from trinity_lightning.algorithm.policy_loss.policy_loss import (
    MAX_LOG_RATIO,
    BatchTotals,
    aggregate,
    log_ratio,
    ratio_metrics,
    trained,
)
from trinity_lightning.config.values import number, one_of
from trinity_lightning.errors import ConfigError

CLIP_MODES = ("none", "one-side", "two-side", "ring")
WEIGHTS = ("none", "importance_sampling", "advantage")
REGULARIZERS = ("none", "k2", "forward-kl")
EPSILONS = (0.2, 0.2, 0.6, 2.0)  # of `rec`: low, high, low', high'


def topr(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    num_computed_tokens: int | None = None,
    advantage_threshold: float = 0.0,
    level: str = "token",
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """TOPR: -sg(a) A lp, with a = min(r, 1) where A <= threshold, else 1 (arXiv 2503.14286).

    Good tokens keep their full weight; bad ones count only as much as the policy would still produce them.

    Args:
        advantage_threshold: advantages up to this count as bad.
        level: "token": each token's ratio, as in Trinity-RFT; "sequence": the product of the ratios of its tokens, as
            in the paper.

    Returns:
        The loss, and pg_loss, ppo_kl as in `ppo`, and pg_clipfrac: share of tokens whose ratio is cut to 1.
    """
    number("algorithm.policy_loss.args.advantage_threshold", advantage_threshold)
    one_of("algorithm.policy_loss.args.level", level, ("token", "sequence"))
    log_r = log_ratio(logprobs, old_logprobs, action_mask).detach()
    log_a = log_r if level == "token" else log_r.sum(-1, keepdim=True).expand_as(log_r)
    bad = advantages <= advantage_threshold
    weight = torch.where(bad, log_a.clamp(max=0.0).exp(), 1.0)
    loss = aggregate(-weight * advantages * trained(logprobs, action_mask), action_mask, loss_agg_mode, **totals)
    return loss, ratio_metrics(loss, log_r, action_mask, num_computed_tokens, totals, pg_clipfrac=bad & (log_a > 0))


def asymre(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    baseline_shift: float = -0.1,
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """AsymRE: REINFORCE with a shifted baseline, -(A - shift) lp (arXiv 2506.20520). The only metric is pg_loss.

    It goes with an add strategy such as `dr_grpo`, whose advantages are rewards minus a baseline. The add strategy
    `asymre` shifts its baseline itself, for use with `reinforce` or `opmd`.

    Args:
        baseline_shift: added to the baseline; below 0, good responses count for more than bad ones.
    """
    number("algorithm.policy_loss.args.baseline_shift", baseline_shift)
    shifted = advantages - baseline_shift
    return reinforce(logprobs, old_logprobs, action_mask, shifted, loss_agg_mode=loss_agg_mode, **totals)


def sppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    num_computed_tokens: int | None = None,
    epsilon: float = 0.3,
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Softened PPO: -A log r where 1 / (1 + epsilon) <= r <= 1 + epsilon, else 0 (arXiv 2108.05828).

    Args:
        epsilon: bound of the ratio, the same factor up and down.

    Returns:
        The loss, and pg_loss, ppo_kl as in `ppo`, and pg_clipfrac: share of tokens whose ratio is out of the range.
    """
    number("algorithm.policy_loss.args.epsilon", epsilon, above=0)
    log_r = log_ratio(logprobs, old_logprobs, action_mask)
    ratio = log_r.detach().exp()
    inside = (ratio >= 1 / (1 + epsilon)) & (ratio <= 1 + epsilon)
    loss = aggregate(-advantages * log_r * inside, action_mask, loss_agg_mode, **totals)
    return loss, ratio_metrics(loss, log_r, action_mask, num_computed_tokens, totals, pg_clipfrac=~inside)


def rec(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    num_computed_tokens: int | None = None,
    clip_mode: str = "none",
    epsilon_low: float = EPSILONS[0],
    epsilon_high: float = EPSILONS[1],
    epsilon_low_prime: float = EPSILONS[2],
    epsilon_high_prime: float = EPSILONS[3],
    weight: str = "none",
    temp: float = 1.0,
    regularizer: str = "none",
    regularizer_coef: float = 0.0,
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Group-relative REINFORCE with a mask on the ratio: -w A lp within the range, else 0 (REC, arXiv 2509.24203).

    Args:
        clip_mode: the tokens that count. "none": all; "two-side": 1 - low <= r <= 1 + high; "one-side": r <= 1 + high
            for A >= 0 and r >= 1 - low for A <= 0, as under PPO's clip; "ring": as "two-side", and also r <= 1 - low'
            for A >= 0 and r >= 1 + high' for A <= 0.
        epsilon_low, epsilon_high: low, at most 1, and high.
        epsilon_low_prime, epsilon_high_prime: low', at most 1, and high'.
        weight: w without gradient. "none": 1; "importance_sampling": r; "advantage": exp(A / temp).
        temp: temperature of the advantages in the weight.
        regularizer: a term that is added with its coefficient: "none"; "k2": (lp - old)^2; "forward-kl": -lp.
        regularizer_coef: its coefficient.

    Returns:
        The loss, and pg_loss, ppo_kl as in `ppo`, and pg_clipfrac: share of tokens that do not count.
    """
    epsilons = (epsilon_low, epsilon_high, epsilon_low_prime, epsilon_high_prime)
    _check_rec(clip_mode, epsilons, weight, temp, regularizer, regularizer_coef)
    log_r = log_ratio(logprobs, old_logprobs, action_mask)
    ratio = log_r.detach().exp()
    counts = _counts(clip_mode, ratio, advantages, epsilons[:2], epsilons[2:])
    by_advantage = (advantages / temp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    w = {"none": 1.0, "importance_sampling": ratio, "advantage": by_advantage}[weight]
    loss_token = -w * advantages * trained(logprobs, action_mask) * counts
    loss_token = loss_token + regularizer_coef * {"none": 0.0, "k2": log_r**2, "forward-kl": -logprobs}[regularizer]
    loss = aggregate(loss_token, action_mask, loss_agg_mode, **totals)
    return loss, ratio_metrics(loss, log_r, action_mask, num_computed_tokens, totals, pg_clipfrac=~counts)


def _check_rec(
    clip_mode: str, epsilons: tuple[float, ...], weight: str, temp: float, regularizer: str, regularizer_coef: float
) -> None:
    """Refuse arguments of `rec` that are out of range, or have no effect beside the others; a ConfigError."""
    key = "algorithm.policy_loss.args"
    one_of(f"{key}.clip_mode", clip_mode, CLIP_MODES)
    one_of(f"{key}.weight", weight, WEIGHTS)
    one_of(f"{key}.regularizer", regularizer, REGULARIZERS)
    names = ("epsilon_low", "epsilon_high", "epsilon_low_prime", "epsilon_high_prime")
    for name, epsilon in zip(names, epsilons, strict=True):
        number(f"{key}.{name}", epsilon, above=0, most=1 if "low" in name else math.inf)
    number(f"{key}.temp", temp, above=0)
    number(f"{key}.regularizer_coef", regularizer_coef, least=0)

    changed = [name for name, epsilon, usual in zip(names, epsilons, EPSILONS, strict=True) if epsilon != usual]
    without_effect = [
        ("regularizer_coef", "a regularizer", "give k2 or forward-kl", regularizer == "none" and regularizer_coef > 0),
        ("regularizer", "a regularizer_coef", "give one", regularizer != "none" and regularizer_coef == 0),
        *((name, "a clip_mode", "give one-side, two-side or ring", clip_mode == "none") for name in changed),
        *((name, "clip_mode=ring", "give that", clip_mode != "ring") for name in changed if name in names[2:]),
        ("temp", "weight=advantage", "give that", weight != "advantage" and temp != 1),
    ]
    for name, needed, fix, holds in without_effect:
        if holds:
            raise ConfigError(f"{key}.{name} has no effect without {needed}", key=f"{key}.{name}", fix=fix)
    for name, inner, outer in zip(names[2:], epsilons[:2], epsilons[2:], strict=True):
        if clip_mode == "ring" and outer < inner:
            raise ConfigError(
                f"{key}.{name} would begin the ring inside the range of {name.removesuffix('_prime')}",
                key=f"{key}.{name}",
                fix="give a larger one",
            )


def _counts(
    mode: str, ratio: Tensor, advantages: Tensor, inner: tuple[float, float], outer: tuple[float, float]
) -> Tensor:
    """True for the tokens that count under a clip mode of `rec`, bool [b, r]."""
    if mode == "none":
        return torch.ones_like(ratio, dtype=torch.bool)
    good, bad = advantages >= 0, advantages <= 0
    not_below, not_above = ratio >= 1 - inner[0], ratio <= 1 + inner[1]
    if mode == "one-side":
        return (good & not_above) | (bad & not_below)
    counts = not_below & not_above
    if mode == "ring":
        counts |= (good & (ratio <= 1 - outer[0])) | (bad & (ratio >= 1 + outer[1]))
    return counts
