"""DPPO: a trust region by how far the distributions lie apart, in place of PPO's range of ratios."""

import math
from typing import Unpack

import torch
from torch import Tensor

from trinity_lightning.algorithm.policy_loss.policy_loss import (
    BatchTotals,
    aggregate,
    log_ratio,
    measured_tokens,
    peak,
    token_share,
)
from trinity_lightning.config.values import number, one_of

DIVERGENCES = ("tv", "kl")


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
    with p = exp(lp) and q = exp(old), |p - q| ("tv"), or q log(q / p) + (1 - q) log((1 - q) / (1 - p)) ("kl"). A rare
    token may so change by a large ratio, a frequent one by a small one. The paper's q is that of the engine that
    sampled: algorithm.old_logprobs=engine.

    Args:
        divergence: "tv" or "kl".
        threshold: how far the distributions may lie apart, above 0; a total variation is never above 1.
        loss_agg_mode: see `aggregate`.

    Returns:
        The loss, and pg_loss, ppo_kl as in `ppo`; pg_clipfrac: share of tokens that are left out, the sum of
        pg_clipfrac_low (A < 0) and pg_clipfrac_high (A > 0); and divergence/max: the largest D.

    Raises:
        ConfigError: an unknown divergence or mode, or a threshold out of its range.
    """
    one_of("algorithm.policy_loss.args.divergence", divergence, DIVERGENCES)
    number("algorithm.policy_loss.args.threshold", threshold, above=0, most=1 if divergence == "tv" else math.inf)
    log_r = log_ratio(logprobs, old_logprobs, action_mask)
    old = old_logprobs.masked_fill(~action_mask.bool(), 0.0)
    distance = _distance(old + log_r.detach(), old, divergence)
    far = distance > threshold
    low = far & (advantages < 0) & (log_r < 0)
    high = far & (advantages > 0) & (log_r > 0)
    loss = aggregate(-(log_r.exp() * advantages).masked_fill(low | high, 0.0), action_mask, loss_agg_mode, **totals)

    n = measured_tokens(num_computed_tokens, totals)
    below, above = token_share(low, action_mask, n), token_share(high, action_mask, n)
    return loss, {
        "pg_loss": loss.detach(),
        "ppo_kl": -aggregate(log_r.detach(), action_mask, num_tokens=n),
        "pg_clipfrac": below + above,
        "pg_clipfrac_low": below,
        "pg_clipfrac_high": above,
        "divergence/max": peak(distance),
    }


def _distance(new: Tensor, old: Tensor, divergence: str) -> Tensor:
    """Of two distributions over a token and all others, given the token's log-probabilities [b, r]."""
    p, q = new.exp().clamp(max=1.0), old.exp().clamp(max=1.0)
    if divergence == "tv":
        return (p - q).abs()
    others = torch.special.xlogy(1 - q, 1 - q) - torch.special.xlogy(1 - q, 1 - p)
    return q * (old - new) + others.nan_to_num(posinf=torch.finfo(p.dtype).max)
