"""Losses with another bound than PPO's on the move of a token's probability: GSPO, CISPO, SAPO and DPPO."""

import math
from typing import Unpack

import torch
from torch import Tensor

from trinity_lightning.algorithm.policy_loss.policy_loss import (
    BatchTotals,
    aggregate,
    log_ratio,
    peak,
    ratio_metrics,
    trained,
)
from trinity_lightning.algorithm.policy_loss.ppo import check_clip_range, out_of_range
from trinity_lightning.config.values import number, one_of
from trinity_lightning.errors import ConfigError

CISPO_RANGE = (1.0, 0.28)  # low, high
DIVERGENCES = ("tv", "kl")


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    num_computed_tokens: int | None = None,
    clip_range_low: float = 3e-4,
    clip_range_high: float = 4e-4,
    loss_agg_mode: str = "seq-mean-token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO, token form: PPO's objective on the sequence's ratio s = exp(mean of lp - old) (arXiv 2507.18071).

    The mean is over trained tokens. Token t of sequence i has the ratio sg(s_i) exp(lp_t - sg(lp_t)): its value is s_i,
    and its gradient is its own, so that advantages may differ between tokens.

    Returns:
        The loss, and pg_loss, ppo_kl, pg_clipfrac, pg_clipfrac_low, pg_clipfrac_high as in `ppo`.
    """
    check_clip_range(clip_range_low, clip_range_high)
    mask = action_mask.bool()
    log_r = log_ratio(logprobs, old_logprobs, mask)
    log_s = log_r.detach().sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    lp = trained(logprobs, mask)
    ratio = (log_s + lp - lp.detach()).exp()
    loss_token = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_range_low, 1 + clip_range_high) * advantages)
    loss = aggregate(loss_token, action_mask, loss_agg_mode, **totals)
    outside = out_of_range(ratio, advantages, clip_range_low, clip_range_high)
    return loss, ratio_metrics(loss, log_r, mask, num_computed_tokens, totals, **outside)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    num_computed_tokens: int | None = None,
    clip_range_low: float = CISPO_RANGE[0],
    clip_range_high: float = CISPO_RANGE[1],
    absolute_cap: float | None = None,
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO: -sg(clip(r, 1 - low, 1 + high)) A lp (MiniMax-M1, arXiv 2506.13585).

    Clipped tokens keep a gradient, unlike PPO's.

    Args:
        absolute_cap: clip the ratio to at most this instead, and not from below (ScaleRL, arXiv 2510.13786, uses 5.0).

    Returns:
        The loss, and pg_loss, ppo_kl as in `ppo`, and pg_clipfrac: share of trained tokens whose ratio is clipped.
    """
    check_clip_range(clip_range_low, clip_range_high)
    number("algorithm.policy_loss.args.absolute_cap", absolute_cap, above=0, optional=True)
    if absolute_cap is not None and (clip_range_low, clip_range_high) != CISPO_RANGE:
        raise ConfigError(
            "algorithm.policy_loss.args.absolute_cap takes the place of clip_range_low and clip_range_high",
            key="algorithm.policy_loss.args.absolute_cap",
            fix="leave them out",
        )
    log_r = log_ratio(logprobs, old_logprobs, action_mask).detach()
    ratio = log_r.exp()
    bounds = (1 - clip_range_low, 1 + clip_range_high) if absolute_cap is None else (0.0, absolute_cap)
    clipped = ratio.clamp(*bounds)
    loss = aggregate(-clipped * advantages * trained(logprobs, action_mask), action_mask, loss_agg_mode, **totals)
    return loss, ratio_metrics(loss, log_r, action_mask, num_computed_tokens, totals, pg_clipfrac=clipped != ratio)


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    num_computed_tokens: int | None = None,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    loss_agg_mode: str = "seq-mean-token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """SAPO: -4/tau sigmoid(tau (r - 1)) A, a soft gate in place of the clip (arXiv 2511.20347).

    Args:
        tau_positive: temperature of tokens with A > 0.
        tau_negative: temperature of the others; higher fades faster.

    Returns:
        The loss, and pg_loss, ppo_kl as in `ppo`.
    """
    for name, tau in (("tau_positive", tau_positive), ("tau_negative", tau_negative)):
        number(f"algorithm.policy_loss.args.{name}", tau, above=0)
    log_r = log_ratio(logprobs, old_logprobs, action_mask)
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    loss = aggregate(-4 / tau * torch.sigmoid(tau * log_r.expm1()) * advantages, action_mask, loss_agg_mode, **totals)
    return loss, ratio_metrics(loss, log_r, action_mask, num_computed_tokens, totals)


def dppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    num_computed_tokens: int | None = None,
    divergence: str = "tv",
    threshold: float = 0.2,
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """DPPO: -M r A, with M = 0 where the ratio r moves away from 1 and D > threshold (arXiv 2602.04879, equation 12).

    Away from 1 is r > 1 with A > 0, and r < 1 with A < 0. D is the divergence of two outcomes, the token or any other:
    with p = exp(lp) and q = exp(old), |p - q| ("tv"), or q log(q / p) + (1 - q) log((1 - q) / (1 - p)) ("kl"). So a
    rare token may change by a large ratio, a frequent one by a small one. In the paper q is the probability by the
    engine that sampled: algorithm.old_logprobs=engine.

    Args:
        divergence: "tv" or "kl".
        threshold: largest divergence that is allowed, above 0; a total variation is never above 1.
        loss_agg_mode: see `aggregate`.

    Returns:
        The loss, and pg_loss, ppo_kl as in `ppo`; pg_clipfrac: share of tokens whose loss is 0, the sum of
        pg_clipfrac_low (A < 0) and pg_clipfrac_high (A > 0); and divergence/max: the largest D.
    """
    one_of("algorithm.policy_loss.args.divergence", divergence, DIVERGENCES)
    number("algorithm.policy_loss.args.threshold", threshold, above=0, most=1 if divergence == "tv" else math.inf)
    log_r = log_ratio(logprobs, old_logprobs, action_mask)
    old = trained(old_logprobs, action_mask)
    distance = _distance(old + log_r.detach(), old, divergence)
    far = distance > threshold
    low = far & (advantages < 0) & (log_r < 0)
    high = far & (advantages > 0) & (log_r > 0)
    loss = aggregate(-(log_r.exp() * advantages).masked_fill(low | high, 0.0), action_mask, loss_agg_mode, **totals)
    left_out = {"pg_clipfrac": low | high, "pg_clipfrac_low": low, "pg_clipfrac_high": high}
    metrics = ratio_metrics(loss, log_r, action_mask, num_computed_tokens, totals, **left_out)
    return loss, metrics | {"divergence/max": peak(distance)}


def _distance(new: Tensor, old: Tensor, divergence: str) -> Tensor:
    """Divergence of two distributions over a token and all others, by the token's log-probabilities [b, r]."""
    p, q = new.exp().clamp(max=1.0), old.exp().clamp(max=1.0)
    if divergence == "tv":
        return (p - q).abs()
    of_others = torch.special.xlogy(1 - q, 1 - q) - torch.special.xlogy(1 - q, 1 - p)
    return q * (old - new) + of_others.nan_to_num(posinf=torch.finfo(p.dtype).max)
