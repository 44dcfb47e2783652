"""The clipped surrogate of PPO, with DAPO's asymmetric range and dual clipping; GRPO's objective is the same."""

from typing import Unpack

import torch
from torch import Tensor

from trinity_lightning.algorithm.policy_loss.policy_loss import BatchTotals, aggregate, log_ratio, ratio_metrics
from trinity_lightning.config.values import number


def ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    action_mask: Tensor,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    num_computed_tokens: int | None = None,
    clip_range_low: float = 0.2,
    clip_range_high: float = 0.2,
    dual_clip: float | None = 3.0,
    loss_agg_mode: str = "token-mean",
    **totals: Unpack[BatchTotals],
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO: -min(r A, clip(r, 1 - low, 1 + high) A) per token (arXiv 1707.06347, equation 7), with r = exp(lp - old).

    Where A < 0 the token's loss is at most -c A (dual clip, arXiv 1912.09729). DAPO raises clip_range_high to 0.28
    (arXiv 2503.14476). Tensors are [b, r]; see `PolicyLossFn` for arguments not named here.

    Args:
        clip_range_low: the ratio is bounded to 1 minus this; 1 or more: no lower bound.
        clip_range_high: the ratio is bounded to 1 plus this.
        dual_clip: c, above 1; None: no dual clip.
        loss_agg_mode: see `aggregate`.

    Returns:
        The loss, and metrics; shares are of all computed tokens of the optimizer batch:

        - pg_loss: the loss;
        - ppo_kl: mean of old - lp, the k1 estimate of KL(old || new);
        - pg_clipfrac: share of tokens whose loss the range clips, the sum of
          pg_clipfrac_low (A < 0 and r < 1 - low) and pg_clipfrac_high (A > 0 and r > 1 + high);
        - pg_clipfrac_dual: share of tokens whose loss the dual clip bounds (A < 0 and r > c).
    """
    check_clip_range(clip_range_low, clip_range_high)
    number("algorithm.policy_loss.args.dual_clip", dual_clip, above=1, optional=True)
    log_r = log_ratio(logprobs, old_logprobs, action_mask)
    ratio = log_r.exp()
    clipped = ratio.clamp(1 - clip_range_low, 1 + clip_range_high)
    loss_token = torch.maximum(-advantages * ratio, -advantages * clipped)
    negative = advantages < 0
    bounded = torch.zeros_like(negative)
    if dual_clip is not None:
        bounded = negative & (ratio > dual_clip)
        loss_token = torch.where(bounded, -advantages * dual_clip, loss_token)
    loss = aggregate(loss_token, action_mask, loss_agg_mode, **totals)
    outside = out_of_range(ratio, advantages, clip_range_low, clip_range_high) | {"pg_clipfrac_dual": bounded}
    return loss, ratio_metrics(loss, log_r, action_mask, num_computed_tokens, totals, **outside)


def check_clip_range(low: float, high: float) -> None:
    """Refuse negative clip ranges with a ConfigError. A lower one of 1 or more is allowed, and bounds nothing."""
    number("algorithm.policy_loss.args.clip_range_low", low, least=0)
    number("algorithm.policy_loss.args.clip_range_high", high, least=0)


def out_of_range(ratio: Tensor, advantages: Tensor, low: float | Tensor, high: float | Tensor) -> dict[str, Tensor]:
    """True for the tokens that pg_clipfrac, pg_clipfrac_low and pg_clipfrac_high of `ppo` count, bool [b, r]."""
    below, above = (advantages < 0) & (ratio < 1 - low), (advantages > 0) & (ratio > 1 + high)
    return {"pg_clipfrac": below | above, "pg_clipfrac_low": below, "pg_clipfrac_high": above}
